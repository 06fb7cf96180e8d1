"""The bank against experts written out one by one with plain autograd, for both backends and many owned sets."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spes_p2p.errors import ConfigError
from spes_p2p.experts import megablocks_backend
from spes_p2p.experts.backends import Backend, Eager, GroupedMM
from spes_p2p.experts.bank import MATRICES, ExpertBank, Matrix
from spes_p2p.experts.choice import resolve_backend
from spes_p2p.experts.stores import PARTS, Foreign, ForeignDtype, QuantizedStore

E, D, FFN, TOP_K = 6, 8, 12, 2
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
OWNED = [(), (0,), (0, 1), (1, 4), (5,), (0, 2, 3, 5), tuple(range(E))]


def make_bank(
    owned: tuple[int, ...],
    backend: Backend,
    width: int = D,
    ffn: int = FFN,
    dtype: torch.dtype = torch.float32,
    foreign: Foreign | None = None,
) -> ExpertBank:
    """A bank with values that depend on the expert alone, not on who owns it."""
    bank = ExpertBank(E, width, ffn, owned, backend, dtype=dtype, foreign=foreign)
    generator = torch.Generator().manual_seed(1)
    for which in MATRICES:
        for expert in range(E):
            bank.load(expert, which, 0.3 * torch.randn(bank.shape_of(which), generator=generator))
    return bank


class Run(NamedTuple):
    """An output and its gradients."""

    y_TD: Tensor
    dx_TD: Tensor
    dweight_TK: Tensor
    dw: dict[Matrix, Tensor | None]


def run_bank(bank: ExpertBank, x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Run:
    x_TD, weight_TK = x_TD.clone().requires_grad_(), weight_TK.clone().requires_grad_()
    y_TD = bank(x_TD, expert_TK, weight_TK)
    (y_TD.float() * torch.linspace(-1, 1, y_TD.numel()).view_as(y_TD)).sum().backward()
    assert x_TD.grad is not None
    assert weight_TK.grad is not None
    return Run(y_TD.detach(), x_TD.grad, weight_TK.grad, {which: gradient_of(bank, which) for which in MATRICES})


def gradient_of(bank: ExpertBank, which: Matrix) -> Tensor | None:
    """[O, out, in], the gradient of one matrix's masters."""
    part, rows = bank.rows_of(which)
    master = bank.master(part)
    return None if master is None or master.grad is None else master.grad[:, rows]


def run_plain(bank: ExpertBank, x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Run:
    """The definition, token by token, every expert trained."""
    x_TD, weight_TK = x_TD.clone().requires_grad_(), weight_TK.clone().requires_grad_()
    w = {m: torch.stack([bank.read(e, m).float() for e in range(E)]).requires_grad_() for m in MATRICES}
    rows = []
    for x, experts, weights in zip(x_TD, expert_TK.tolist(), weight_TK):
        parts = [(F.silu(w["gate"][e] @ x) * (w["up"][e] @ x)) @ w["down"][e].T for e in experts]
        rows.append(sum(weight * part for weight, part in zip(weights, parts)))
    y_TD = torch.stack([torch.as_tensor(row) for row in rows])
    (y_TD * torch.linspace(-1, 1, y_TD.numel()).view_as(y_TD)).sum().backward()
    assert x_TD.grad is not None
    assert weight_TK.grad is not None
    return Run(y_TD.detach(), x_TD.grad, weight_TK.grad, {m: w[m].grad for m in MATRICES})


def assert_close(left: Tensor, right: Tensor, tolerance: float) -> None:
    assert left.shape == right.shape
    assert (left.float() - right.float()).abs().max() <= tolerance * max(float(right.float().abs().max()), 1e-3)


def routing(kind: str, tokens: int) -> Tensor:
    """Distinct experts for each token."""
    generator = torch.Generator().manual_seed(2)
    if kind == "one expert gets all":
        return torch.tensor([[4, 0]]).expand(tokens, TOP_K)
    experts = 3 if kind == "half get none" else E
    return torch.stack([torch.randperm(experts, generator=generator)[:TOP_K] for _ in range(tokens)])


@pytest.mark.parametrize("backend", [Eager(), GroupedMM()], ids=lambda backend: backend.name)
@pytest.mark.parametrize("owned", OWNED, ids=str)
@pytest.mark.parametrize(
    ("kind", "tokens"), [("all", 33), ("half get none", 7), ("one expert gets all", 5), ("one token", 1)]
)
def test_equals_experts_written_out(backend: Backend, owned: tuple[int, ...], kind: str, tokens: int) -> None:
    check(make_bank(owned, backend), kind, tokens)


@pytest.mark.parametrize("backend", [Eager(), GroupedMM()], ids=lambda backend: backend.name)
@pytest.mark.parametrize(("width", "ffn", "dtype"), [(7, 5, torch.float32), (8, 16, torch.bfloat16)])
def test_odd_widths_and_bf16(backend: Backend, width: int, ffn: int, dtype: torch.dtype) -> None:
    check(make_bank((1, 4), backend, width, ffn, dtype), "all", 33)


@pytest.mark.parametrize("foreign", ["int8", "nf4"])
@pytest.mark.parametrize("owned", OWNED, ids=str)
def test_foreign_experts_held_otherwise(owned: tuple[int, ...], foreign: ForeignDtype) -> None:
    """As with a whole bank of the values that `read` gives."""
    check(make_bank(owned, GroupedMM(), foreign=Foreign(foreign)), "all", 33)


@pytest.mark.parametrize(("foreign", "value", "block"), [("int8", 1, 128), ("nf4", Fraction(1, 2), 64)])
def test_foreign_experts_alone_are_held_in_few_bits(foreign: ForeignDtype, value: Fraction, block: int) -> None:
    width, ffn = 256, 128
    bank = make_bank((1, 4), Eager(), width, ffn, torch.bfloat16, Foreign(foreign))
    assert isinstance(bank.store, QuantizedStore)
    values = 3 * width * ffn
    assert bank.store.foreign_bytes == (E - 2) * (value * values + 4 * values // block)
    assert sum(buffer.nbytes for buffer in bank.store.buffers()) == 0


@pytest.mark.parametrize("foreign", ["int8", "nf4"])
def test_layers_share_a_workspace(foreign: ForeignDtype) -> None:
    """Three layers one after the other, forward and backward, as if each had everything for itself."""
    for_all = Foreign(foreign)
    shared = [ExpertBank(E, D, FFN, (1,), Eager(), foreign=for_all) for _ in range(3)]
    own = [ExpertBank(E, D, FFN, (1,), Eager(), foreign=Foreign(foreign)) for _ in range(3)]
    generator = torch.Generator().manual_seed(1)
    for one, other in zip(shared, own):
        for which in MATRICES:
            for expert in range(E):
                values = torch.randn(one.shape_of(which), generator=generator)
                one.load(expert, which, values)
                other.load(expert, which, values)
    inputs = torch.randn(9, D, generator=generator), routing("all", 9), torch.rand(9, TOP_K, generator=generator)
    for step in range(2):
        through = [run_layers(layers, *inputs) for layers in (shared, own)]
        for left, right in zip(*through, strict=True):
            assert torch.equal(left, right)
        for one, other in zip(shared, own):
            for bank in (one, other):
                bank.load(3, "up", torch.full((FFN, D), 0.1 * step))
                bank.load(1, "down", torch.full((D, FFN), 0.1 * step))


def run_layers(banks: list[ExpertBank], x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> list[Tensor]:
    """The output, the gradient of the input and of all masters."""
    x_TD = x_TD.clone().requires_grad_()
    y_TD = x_TD
    for bank in banks:
        bank.zero_grad()
        y_TD = y_TD + bank(y_TD, expert_TK, weight_TK)
    y_TD.square().sum().backward()
    gradients = [master.grad for bank in banks for master in bank.parameters()]
    return [tensor for tensor in (y_TD.detach(), x_TD.grad, *gradients) if tensor is not None]


def check(bank: ExpertBank, kind: str, tokens: int) -> None:
    tolerance, width = TOLERANCE[bank.dtype], bank.shape_of("gate")[1]
    torch.manual_seed(3)
    inputs = torch.randn(tokens, width), routing(kind, tokens), torch.rand(tokens, TOP_K)
    got, want = run_bank(bank, *inputs), run_plain(bank, *inputs)
    assert_close(got.y_TD, want.y_TD, tolerance)
    assert_close(got.dx_TD, want.dx_TD, tolerance)
    assert_close(got.dweight_TK, want.dweight_TK, tolerance)
    for which in MATRICES:
        gradient, expected = got.dw[which], want.dw[which]
        assert expected is not None
        if bank.owned:
            assert gradient is not None
            assert gradient.dtype == torch.float32
            assert_close(gradient, expected[list(bank.owned)], tolerance)
        else:
            assert gradient is None


def test_a_master_without_tokens_has_a_zero_gradient() -> None:
    bank = make_bank((5,), GroupedMM())
    got = run_bank(bank, torch.randn(4, D), torch.tensor([[0, 1]]).expand(4, 2), torch.rand(4, 2))
    for which in MATRICES:
        gradient = got.dw[which]
        assert gradient is not None
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_the_bank_is_no_parameter_and_not_in_the_state_dict() -> None:
    bank = make_bank((1, 4), Eager())
    assert {name: tuple(value.shape) for name, value in bank.state_dict().items()} == {
        "gate_up": (2, 2 * FFN, D),
        "down": (2, D, FFN),
    }
    assert not any(buffer.requires_grad for buffer in bank.buffers())
    assert not list(make_bank((), Eager()).parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_forward_pass_sees_what_was_done_to_the_masters(dtype: torch.dtype) -> None:
    bank = make_bank((1, 4), Eager(), dtype=dtype)
    master, before = bank.master("gate_up"), bank.matrices("gate_up").clone()
    assert master is not None
    with bank.masters_in_fp32(), torch.no_grad():
        master[1] += 1.0
    changed = (bank.matrices("gate_up") != before).flatten(1).any(1)
    assert changed.tolist() == [slot == bank.slot(4) for slot in range(E)]


@pytest.mark.parametrize("foreign", ["int8", "nf4"])
def test_owned_experts_are_read_from_their_masters(foreign: ForeignDtype) -> None:
    bank = make_bank((1, 4), Eager(), dtype=torch.bfloat16, foreign=Foreign(foreign))
    for change in (0.0, 1.0):
        for part in PARTS:
            master = bank.master(part)
            assert master is not None
            with bank.masters_in_fp32(), torch.no_grad():
                master.add_(change)
            whole = bank.matrices(part)
            assert not whole.requires_grad
            assert torch.equal(whole[:2], master.bfloat16())
            assert whole.isfinite().all()


def test_set_owned_moves_no_value() -> None:
    bank = make_bank((1, 4), Eager())
    values = {(e, which): bank.read(e, which).clone() for e in range(E) for which in MATRICES}
    for owned in [(0, 4, 5), (), (2,), tuple(range(E))]:
        bank.set_owned(owned)
        assert bank.owned == owned
        assert all(torch.equal(bank.read(e, which), value) for (e, which), value in values.items())
        assert_slots_agree(bank)


def assert_slots_agree(bank: ExpertBank) -> None:
    """The output does not depend on who is owned."""
    torch.manual_seed(3)
    inputs = torch.randn(9, D), routing("all", 9), torch.rand(9, TOP_K)
    assert torch.allclose(bank(*inputs), make_bank((), Eager())(*inputs), rtol=1e-6, atol=1e-6)
    assert bank.owned_mask().nonzero().flatten().tolist() == list(bank.owned)


def test_set_owned_keeps_a_masters_fp32_values_and_does_nothing_twice() -> None:
    bank = make_bank((1, 4), Eager(), dtype=torch.bfloat16)
    master, fine = bank.master("gate_up"), bank.read(4, "gate").clone()
    assert not torch.equal(fine, fine.bfloat16().float())
    bank.set_owned((1, 4))
    assert bank.master("gate_up") is master
    bank.set_owned((3, 4))
    assert torch.equal(bank.read(4, "gate"), fine)


@pytest.mark.parametrize("owned", [(6,), (-1,), (2, 2), (3, 1)])
def test_owned_out_of_range_or_order_is_refused(owned: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="which are not ascending numbers below num_experts"):
        make_bank(owned, Eager())


def test_values_are_nan_until_loaded() -> None:
    bank = ExpertBank(E, D, FFN, (0,), Eager())
    assert bank.read(0, "gate").isnan().all()
    assert bank.read(3, "down").isnan().all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("backend", ["grouped_mm", "triton", "megablocks"])
@pytest.mark.parametrize("foreign", ["compute", "int8", "nf4"])
def test_no_wait_for_the_device_and_the_same_values(backend: str, foreign: ForeignDtype) -> None:
    width, ffn, owned, cuda = 64, 32, (1, 4), torch.device("cuda")
    if backend == "megablocks" and (reason := megablocks_backend.why_not(cuda)):
        pytest.skip(reason)
    host = make_bank(owned, Eager(), width, ffn, torch.bfloat16, Foreign(foreign))
    found, _ = resolve_backend(backend, cuda, torch.bfloat16)
    device = ExpertBank(E, width, ffn, owned, found, cuda, torch.bfloat16, Foreign(foreign))
    for which in MATRICES:
        for expert in range(E):
            device.load(expert, which, host.read(expert, which))
    x_TD, expert_TK, weight_TK = torch.randn(40, width), routing("half get none", 40), torch.rand(40, TOP_K)
    want = run_bank(host, x_TD, expert_TK, weight_TK)
    inputs = x_TD.cuda().requires_grad_(), expert_TK.cuda(), weight_TK.cuda()
    slope = torch.linspace(-1, 1, x_TD.numel()).view_as(x_TD).cuda()
    device(*inputs).float().sum().backward()  # kernels are compiled and tuned
    device.zero_grad()
    # elsewhere torch's grouped_mm is a loop on the host, which asks the device for the groups' ends
    never_waits = backend == "triton" or torch.cuda.get_device_capability()[0] in (9, 10)
    torch.cuda.set_sync_debug_mode("error" if never_waits else "default")
    try:
        y_TD = device(*inputs)
        (y_TD.float() * slope).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_close(y_TD.detach().cpu(), want.y_TD, 2e-2)
    for which in MATRICES:
        gradient, expected = gradient_of(device, which), want.dw[which]
        assert gradient is not None
        assert expected is not None
        assert_close(gradient.cpu(), expected, 2e-2)

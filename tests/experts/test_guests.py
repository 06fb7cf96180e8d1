"""Low-rank changes of foreign experts, against dense experts with the change added to their matrices, by autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spes_p2p.experts.backends import Backend, Eager, GroupedMM
from spes_p2p.experts.bank import MATRICES, ExpertBank
from spes_p2p.experts.guests import Guests
from spes_p2p.experts.stores import Foreign

E, D, FFN, TOP_K, TOKENS, RANK = 6, 8, 12, 2, 40, 3
OWNED = (1, 4)
BACKENDS = [Eager(), GroupedMM()]


def guests_of(bank: ExpertBank) -> Guests:
    assert bank.guests is not None
    return bank.guests


def make_bank(backend: Backend, owned: tuple[int, ...] = OWNED, kind: str = "compute") -> ExpertBank:
    """With a basis and coordinates for every foreign expert but the last one."""
    bank = ExpertBank(E, D, FFN, owned, backend, foreign=Foreign(dtype=kind, guest_rank=RANK))  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(1)
    for which in MATRICES:
        for expert in range(E):
            out, width = bank.shape_of(which)
            bank.load(expert, which, 0.3 * torch.randn(out, width, generator=generator))
            basis = torch.linalg.qr(torch.randn(width, RANK, generator=generator))[0]
            coordinates = 0.2 * torch.randn(out, RANK, generator=generator)
            if expert not in (*owned, E - 1):
                guests_of(bank).begin(bank.slot(expert), which, basis)
                guests_of(bank).coordinates(which).data[bank.slot(expert)] = coordinates
    return bank


def tokens(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x_TD = torch.randn(TOKENS, D, generator=generator)
    expert_TK = torch.stack([torch.randperm(E, generator=generator)[:TOP_K] for _ in range(TOKENS)])
    return x_TD, expert_TK, torch.rand(TOKENS, TOP_K, generator=generator)


def weigh(y_TD: Tensor) -> Tensor:
    return (y_TD * torch.linspace(-1, 1, y_TD.numel()).view_as(y_TD)).sum()


def dense(bank: ExpertBank) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """(y, dx, dweight, d of every matrix, d of coordinates) with W + B Qᵀ in the place of W, token by token."""
    x_TD, expert_TK, weight_TK = tokens()
    x_TD.requires_grad_(), weight_TK.requires_grad_()
    guests, slots = guests_of(bank), [bank.slot(expert) for expert in range(E)]
    w = {m: torch.stack([bank.read(e, m).clone() for e in range(E)]).requires_grad_() for m in MATRICES}
    b = {m: guests.coordinates(m).detach()[slots].clone().requires_grad_() for m in MATRICES}
    whole = {m: w[m] + b[m] @ guests.basis(m)[slots].mT for m in MATRICES}
    rows = []
    for x, experts, weights in zip(x_TD, expert_TK.tolist(), weight_TK):
        hidden = [F.silu(whole["gate"][e] @ x) * (whole["up"][e] @ x) for e in experts]
        rows.append(sum(weight * (whole["down"][e] @ h) for weight, e, h in zip(weights, experts, hidden)))
    y_TD = torch.stack([torch.as_tensor(row) for row in rows])
    weigh(y_TD).backward()
    gradients = [{m: tensors[m].grad for m in MATRICES} for tensors in (w, b)]
    return y_TD.detach(), x_TD.grad, weight_TK.grad, *gradients  # type: ignore[return-value]


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_changed_experts_are_those_with_the_change_added(backend: Backend) -> None:
    bank = make_bank(backend)
    y_TD, dx_TD, dweight_TK, dw, db = dense(bank)
    x_TD, expert_TK, weight_TK = tokens()
    x_TD.requires_grad_(), weight_TK.requires_grad_()
    y = bank(x_TD, expert_TK, weight_TK)
    weigh(y).backward()
    torch.testing.assert_close(y, y_TD, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(x_TD.grad, dx_TD, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(weight_TK.grad, dweight_TK, atol=1e-5, rtol=1e-4)
    for which in MATRICES:
        part, rows = bank.rows_of(which)
        master, own = bank.master(part), guests_of(bank).coordinates(which)
        assert master is not None
        assert master.grad is not None
        assert own.grad is not None
        torch.testing.assert_close(master.grad[:, rows], dw[which][list(OWNED)], atol=1e-5, rtol=1e-4)
        for expert in range(E):
            found = own.grad[bank.slot(expert)]
            torch.testing.assert_close(found, db[which][expert], atol=1e-5, rtol=1e-4)
            is_guest = expert not in (*OWNED, E - 1)
            assert bool(found.any()) is is_guest


def test_no_gradient_has_the_shape_of_a_foreign_matrix() -> None:
    bank = make_bank(GroupedMM())
    x_TD, expert_TK, weight_TK = tokens()
    weigh(bank(x_TD.requires_grad_(), expert_TK, weight_TK)).backward()
    shapes = {tuple(parameter.grad.shape) for parameter in bank.parameters() if parameter.grad is not None}
    assert shapes == {(2, 2 * FFN, D), (2, D, FFN), (E, FFN, RANK), (E, D, RANK)}


def test_an_evaluation_leaves_the_changes_out() -> None:
    bank, plain = make_bank(Eager()), ExpertBank(E, D, FFN, OWNED, Eager())
    for which in MATRICES:
        for expert in range(E):
            plain.load(expert, which, bank.read(expert, which))
    given = tokens()
    assert not torch.equal(bank(*given), plain(*given))
    guests_of(bank).active = False
    assert torch.equal(bank(*given), plain(*given))


def test_another_basis_carries_on_what_lies_in_both() -> None:
    bank = make_bank(Eager())
    guests, slot = guests_of(bank), bank.slot(0)
    before, change = guests.basis("up")[slot].clone(), guests.coordinates("up").detach()[slot].clone()
    mixed = torch.linalg.qr(torch.randn(RANK, RANK, generator=torch.Generator().manual_seed(3)))[0]
    guests.begin(slot, "up", before @ mixed)  # the same subspace
    new = guests.coordinates("up").detach()[slot] @ guests.basis("up")[slot].T
    torch.testing.assert_close(new, change @ before.T)
    guests.begin(slot, "up", None)
    assert not guests.coordinates("up")[slot].any()


def test_who_becomes_owner_is_no_guest_any_more_and_the_others_go_on() -> None:
    bank = make_bank(Eager())
    guests = guests_of(bank)
    kept = {which: guests.coordinates(which).detach()[bank.slot(2)].clone() for which in MATRICES}
    bank.set_owned((0, 4))
    for which in MATRICES:
        assert torch.equal(guests.coordinates(which)[bank.slot(2)], kept[which])
        for expert in (0, 1, 4):  # 1 has no basis yet
            assert not guests.basis(which)[bank.slot(expert)].any()
            assert not guests.coordinates(which)[bank.slot(expert)].any()


def test_foreign_experts_in_one_byte_are_changed_as_they_are_held() -> None:
    bank = make_bank(GroupedMM(), kind="int8")
    y_TD = dense(bank)[0]
    torch.testing.assert_close(bank(*tokens()), y_TD, atol=1e-5, rtol=1e-4)

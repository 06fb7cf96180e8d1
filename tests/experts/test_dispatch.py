"""Gathering and summing rows by Triton's kernels as by plain torch, and rows that nobody may read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spes_p2p.experts import dispatch_kernels, swiglu
from spes_p2p.experts.backends import Backend, Eager, GroupedMM
from spes_p2p.experts.bank import MATRICES, ExpertBank
from spes_p2p.experts.dispatch import Order, gather_rows, key_dtype, sort_by_slot, sum_rows, try_kernels
from tests.kernels import DEVICE, there

E = 6


def order_of(tokens: int, top_k: int) -> Order:
    generator = torch.Generator().manual_seed(tokens)
    slots = [torch.randperm(E, generator=generator)[:top_k] for _ in range(tokens)]
    return sort_by_slot(torch.stack(slots).to(key_dtype(E)), E)


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "top_k", "width"), [(5, 2, 12), (1, 1, 7), (9, 4, 1500)])
def test_the_kernels_gather_and_sum_as_torch_does(tokens: int, top_k: int, width: int, dtype: torch.dtype) -> None:
    order = order_of(tokens, top_k)
    x_TD = torch.randn(tokens, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    for slots in (0, 2, E):
        end_1 = order.end_1(slots)
        want, end = gather_rows(x_TD, order, end_1), int(end_1)
        there_TD, order_N, there_1 = there(x_TD, order.order_N, end_1)
        got = dispatch_kernels.gather(there_TD, order_N, there_1, top_k)
        assert got.shape == want.shape
        assert torch.equal(got[:end].cpu(), want[:end])
    y_ND = torch.randn(tokens * top_k, width, generator=torch.Generator().manual_seed(1)).to(dtype)
    total = dispatch_kernels.combine(*there(y_ND, order.inverse_TK)).cpu()
    assert total.dtype == dtype
    torch.testing.assert_close(total, sum_rows(y_ND.float(), order).to(dtype))


@pytest.mark.kernels
def test_the_kernels_do_nothing_with_nothing_and_pass_their_trial() -> None:
    nothing = torch.zeros(0, 8), torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    x_TD, order_N, end_1 = there(*nothing)
    assert dispatch_kernels.gather(x_TD, order_N, end_1, 2).shape == (0, 8)
    assert dispatch_kernels.combine(*there(x_TD, torch.zeros(0, 2, dtype=torch.int64))).shape == (0, 8)
    try_kernels(DEVICE)


@pytest.mark.parametrize("experts", [1, 255, 256, 300])
def test_keys_hold_the_number_of_every_expert(experts: int) -> None:
    slot_TK = torch.arange(experts).flip(0)[:, None].to(key_dtype(experts))
    order = sort_by_slot(slot_TK, experts)
    assert order.order_N.tolist() == list(reversed(range(experts)))
    assert order.ends_E.tolist() == list(range(1, experts + 1))
    bank = ExpertBank(experts, 2, 2, tuple(range(experts)), Eager())
    assert bank.owned_mask().all()


def poison(rows: Tensor, end_1: Tensor) -> Tensor:
    rows[int(end_1) :] = torch.nan
    return rows


class Poisoned(GroupedMM):
    """Not a number in every row that a backend need not fill."""

    def gather(self, x_TD: Tensor, order: Order, end_1: Tensor) -> Tensor:
        return poison(super().gather(x_TD, order, end_1), end_1)


def gradients(backend: Backend, owned: tuple[int, ...]) -> list[Tensor]:
    bank = ExpertBank(E, 8, 12, owned, backend)
    generator = torch.Generator().manual_seed(1)
    for which in MATRICES:
        for expert in range(E):
            bank.load(expert, which, torch.randn(bank.shape_of(which), generator=generator))
    expert_TK = torch.stack([torch.randperm(E, generator=generator)[:2] for _ in range(20)])
    x_TD = torch.randn(20, 8, generator=generator).requires_grad_()
    weight_TK = torch.rand(20, 2, generator=generator).requires_grad_()
    y_TD = bank(x_TD, expert_TK, weight_TK)
    inputs = x_TD, weight_TK, *bank.parameters()
    return [y_TD, *torch.autograd.grad(y_TD.square().sum(), inputs)]


@pytest.mark.parametrize("owned", [(), (0,), (1, 4), tuple(range(E))], ids=str)
def test_rows_of_experts_without_gradients_are_read_by_nobody(
    owned: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    want, plain = gradients(GroupedMM(), owned), swiglu.backward
    ends: list[int] = []

    def backward(d_hidden_NF: Tensor, gate_up_N2F: Tensor, weight_N: Tensor, end_1: Tensor) -> swiglu.Gradients:
        found = plain(d_hidden_NF, gate_up_N2F, weight_N, end_1)
        ends.append(int(end_1))
        poison(found.hidden_NF, end_1)
        return found

    monkeypatch.setattr(swiglu, "backward", backward)
    got = gradients(Poisoned(), owned)
    assert ends[0] < 40 or len(owned) == E
    for left, right in zip(got, want, strict=True):
        assert torch.equal(left, right)

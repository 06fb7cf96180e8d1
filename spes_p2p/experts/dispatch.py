"""From tokens to rows sorted by expert and back, without a host sync.

Both ways are gathers, forward and backward: the sort is a permutation, so its backward is a gather through the inverse.
That is deterministic and needs no atomic adds, unlike index_add. Knows expert slots only, not what an expert computes.

Shapes: T tokens, K experts a token, N = T * K rows, D width, E experts.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Order(NamedTuple):
    """Rows sorted by slot: row r of the sorted order is assignment `order_N[r]` = token * K + choice."""

    order_N: Tensor
    inverse_N: Tensor
    ends_E: Tensor
    """int32, the end of each slot's rows."""


def sort_by_slot(slot_TK: Tensor, num_experts: int) -> Order:
    """The order that puts the assignments of slot 0 first, then slot 1, and so on; stable, so always the same."""
    sorted_N, order_N = torch.sort(slot_TK.flatten(), stable=True)
    positions_N = torch.arange(order_N.numel(), device=order_N.device)
    inverse_N = torch.empty_like(order_N).scatter_(0, order_N, positions_N)
    slots_E = torch.arange(num_experts, device=order_N.device)
    return Order(order_N, inverse_N, torch.searchsorted(sorted_N, slots_E, right=True, out_int32=True))


def gather_rows(x_TD: Tensor, order: Order) -> Tensor:
    """x_ND: a copy of its token for each assignment, in the sorted order."""
    return cast(Tensor, _GatherRows.apply(x_TD, order.order_N, order.inverse_N))


def return_rows(y_ND: Tensor, order: Order, top_k: int) -> Tensor:
    """y_TKD: the sorted rows back at their tokens and choices."""
    return cast(Tensor, _Permute.apply(y_ND, order.inverse_N, order.order_N)).unflatten(0, (-1, top_k))


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order_N: Tensor, inverse_N: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_N)
        ctx.top_k = order_N.numel() // x_TD.shape[0]
        return x_TD[order_N // ctx.top_k]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx_ND: Tensor) -> tuple[Tensor, None, None]:
        (inverse_N,) = ctx.saved_tensors
        return dx_ND[inverse_N].unflatten(0, (-1, ctx.top_k)).sum(1), None, None


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_ND: Tensor, order_N: Tensor, inverse_N: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_N)
        return y_ND[order_N]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_ND: Tensor) -> tuple[Tensor, None, None]:
        (inverse_N,) = ctx.saved_tensors
        return dy_ND[inverse_N], None, None

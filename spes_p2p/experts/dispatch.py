"""From tokens to rows sorted by expert, without a host sync.

Both ways are gathers, since the sort is a permutation and its inverse is kept: deterministic, and no atomic adds,
unlike index_add. On CUDA they are Triton kernels (dispatch_kernels.py), elsewhere plain torch. Knows expert slots only,
not what an expert computes; mlp.py gives the gradients.

Shapes: T tokens, K experts a token, N = T * K rows, D width, E experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from spes_p2p.experts.kernels import half_dtype, has_kernels


class Order(NamedTuple):
    """Rows sorted by slot: row r of the sorted order is assignment `order_N[r]` = token * K + choice."""

    order_N: Tensor
    inverse_TK: Tensor
    """The row of each assignment."""
    ends_E: Tensor
    """int32, the end of each slot's rows."""
    slot_N: Tensor
    """The slot of each row."""

    def end_1(self, slots: int) -> Tensor:
        """int32, the end of the rows of the first `slots` slots, on their device: nobody waits for it."""
        return self.ends_E[slots - 1 : slots] if slots else self.ends_E.new_zeros(1)


def key_dtype(num_experts: int) -> torch.dtype:
    """The smallest that counts experts: a sort by it goes over its keys once for each of its bytes."""
    return torch.uint8 if num_experts < 2**8 else torch.int16


def sort_by_slot(slot_TK: Tensor, num_experts: int) -> Order:
    """The order that puts the assignments of slot 0 first, then slot 1, and so on; stable, so always the same."""
    sorted_N, order_N = torch.sort(slot_TK.flatten(), stable=True)
    positions_N = torch.arange(order_N.numel(), device=order_N.device)
    inverse_N = torch.empty_like(order_N).scatter_(0, order_N, positions_N)
    slots_E = torch.arange(num_experts, device=order_N.device, dtype=sorted_N.dtype)
    ends_E = torch.searchsorted(sorted_N, slots_E, right=True, out_int32=True)
    return Order(order_N, inverse_N.view_as(slot_TK), ends_E, sorted_N)


def gather_rows(x_TD: Tensor, order: Order, end_1: Tensor) -> Tensor:
    """x_ND: a copy of its token for each row before `end_1`; rows from there on may hold anything."""
    top_k = order.inverse_TK.shape[1]
    if has_kernels(x_TD, try_kernels):
        from spes_p2p.experts import dispatch_kernels

        return dispatch_kernels.gather(x_TD.contiguous(), order.order_N, end_1, top_k)
    return x_TD.index_select(0, order.order_N // top_k)


def sum_rows(y_ND: Tensor, order: Order) -> Tensor:
    """y_TD: for each token the sum of its rows, without a copy of all rows in the tokens' order."""
    if has_kernels(y_ND, try_kernels):
        from spes_p2p.experts import dispatch_kernels

        return dispatch_kernels.combine(y_ND.contiguous(), order.inverse_TK.contiguous())
    return F.embedding_bag(order.inverse_TK, y_ND, mode="sum")


def try_kernels(device: torch.device) -> None:
    """Both kernels in the dtype of training."""
    from spes_p2p.experts import dispatch_kernels

    dispatch_kernels.try_kernels(device, half_dtype(device))

"""From tokens to rows sorted by expert, without a host sync.

Both ways are gathers, since the sort is a permutation and its inverse is kept: deterministic, and no atomic adds,
unlike index_add. Knows expert slots only, not what an expert computes; mlp.py gives the gradients.

Shapes: T tokens, K experts a token, N = T * K rows, D width, E experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Order(NamedTuple):
    """Rows sorted by slot: row r of the sorted order is assignment `order_N[r]` = token * K + choice."""

    order_N: Tensor
    inverse_TK: Tensor
    """The row of each assignment."""
    ends_E: Tensor
    """int32, the end of each slot's rows."""
    slot_N: Tensor
    """The slot of each row."""

    def tokens(self) -> Tensor:
        """[N], the token of each row."""
        return self.order_N // self.inverse_TK.shape[1]


def sort_by_slot(slot_TK: Tensor, num_experts: int) -> Order:
    """The order that puts the assignments of slot 0 first, then slot 1, and so on; stable, so always the same."""
    sorted_N, order_N = torch.sort(slot_TK.flatten(), stable=True)
    positions_N = torch.arange(order_N.numel(), device=order_N.device)
    inverse_N = torch.empty_like(order_N).scatter_(0, order_N, positions_N)
    slots_E = torch.arange(num_experts, device=order_N.device)
    ends_E = torch.searchsorted(sorted_N, slots_E, right=True, out_int32=True)
    return Order(order_N, inverse_N.view_as(slot_TK), ends_E, sorted_N)


def gather_rows(x_TD: Tensor, order: Order) -> Tensor:
    """x_ND: a copy of its token for each row."""
    return x_TD.index_select(0, order.tokens())


def sum_rows(y_ND: Tensor, order: Order) -> Tensor:
    """y_TD: for each token the sum of its rows, without a copy of all rows in the tokens' order."""
    return F.embedding_bag(order.inverse_TK, y_ND, mode="sum")

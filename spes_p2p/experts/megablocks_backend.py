"""MegaBlocks as a backend: its radix sort, histogram and Triton permutation kernels around a grouped product.

The product is grouped_gemm's where that package is installed (it wants the group sizes on the host, so it waits for the
device) and torch's grouped_mm otherwise: the seam that MegaBlocks has for it, `megablocks.grouped_gemm_util.ops`, is
empty then. MegaBlocks' `sparse` path is not used: its kernels refuse Triton 3.2 and newer.
"""

from __future__ import annotations

import importlib
from typing import Any, cast

import torch
from torch import Tensor

from spes_p2p.errors import first_line
from spes_p2p.experts.backends import GroupedMM
from spes_p2p.experts.dispatch import Order

INSTALL = (
    "pip install 'spes-p2p[megablocks]' builds its CUDA extension with the nvcc of torch's CUDA version; "
    "CUDA 13 needs a MegaBlocks whose histogram and sort call CUB without debug_synchronous"
)


def why_not(device: torch.device) -> str:
    """Why it cannot be used on `device`, or nothing."""
    if device.type != "cuda":
        return f"MegaBlocks runs on CUDA only, not on {device}"
    try:
        importlib.import_module("megablocks.ops")
        importlib.import_module("megablocks.backend.kernels")
    except Exception as error:  # noqa: BLE001 (a Triton or CUDA that it does not know fails in many ways)
        return f"{first_line(error)} ({INSTALL})"
    return ""


class MegaBlocks(GroupedMM):
    """Needs `why_not` to be empty."""

    name = "megablocks"

    def __init__(self) -> None:
        self._ops: Any = importlib.import_module("megablocks.ops")
        self._kernels: Any = importlib.import_module("megablocks.backend.kernels")
        self._gmm = getattr(importlib.import_module("megablocks.grouped_gemm_util").ops, "gmm", None)

    def sort(self, slot_TK: Tensor, num_experts: int) -> Order:
        slot_N = slot_TK.flatten().int()
        sorted_N, order_N = self._ops.sort(slot_N, max(1, (num_experts - 1).bit_length()))
        ends_E = self._ops.inclusive_cumsum(self._ops.histogram(slot_N, num_experts), 0)
        positions_N = torch.arange(order_N.numel(), device=order_N.device)
        inverse_N = torch.empty_like(positions_N).scatter_(0, order_N.long(), positions_N)
        return Order(order_N, inverse_N.view_as(slot_TK), ends_E.view(num_experts), sorted_N)

    def gather(self, x_TD: Tensor, order: Order, end_1: Tensor) -> Tensor:  # all rows
        top_k = order.inverse_TK.shape[1]
        return cast(
            Tensor, self._kernels.gather(x_TD.contiguous(), order.order_N, order.slot_N, None, order.ends_E, top_k)
        )

    def combine(self, y_ND: Tensor, order: Order) -> Tensor:
        top_k = order.inverse_TK.shape[1]
        return cast(
            Tensor, self._kernels.scatter(y_ND.contiguous(), order.order_N, order.slot_N, None, order.ends_E, top_k)
        )

    def rows(self, x_NK: Tensor, w_EKM: Tensor, ends_E: Tensor) -> Tensor:
        if self._gmm is None:
            return super().rows(x_NK, w_EKM, ends_E)
        transposed = not w_EKM.is_contiguous()
        sizes_E = ends_E.diff(prepend=ends_E.new_zeros(1)).long().cpu()
        return cast(Tensor, self._gmm(x_NK, w_EKM.mT if transposed else w_EKM, sizes_E, trans_b=transposed))

"""What experts need of a device, and who computes it: sorting rows by expert, and two products per group of rows.

The rows of an activation are sorted by group (one group an expert); `ends_G` holds the end of each group. A backend is
the one swap point for kernels: it knows nothing of ownership or autograd (bank.py, mlp.py).

Shapes: N rows, K and M widths, E or G groups. `ends_G` is int32, rising, on the device of the rows; rows at or after
the last end belong to no group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from spes_p2p.experts.dispatch import Order, gather_rows, sort_by_slot, sum_rows

_ALIGNMENT_BYTES = 16  # what torch's grouped_mm demands of every stride


class Backend(Protocol):
    """Dispatch and grouped matrix products; all tensors have one dtype and live on one device."""

    name: str

    def sort(self, slot_TK: Tensor, num_experts: int) -> Order:
        """See dispatch.sort_by_slot."""

    def gather(self, x_TD: Tensor, order: Order, end_1: Tensor) -> Tensor:
        """x_ND: the token of each row before `end_1`, of Order.end_1; rows from there on may hold anything."""

    def combine(self, y_ND: Tensor, order: Order) -> Tensor:
        """y_TD: for each token the sum of its rows."""

    def rows(self, x_NK: Tensor, w_EKM: Tensor, ends_E: Tensor) -> Tensor:
        """y_NM with y[n] = x[n] @ w[group of n]; every row belongs to a group. `w_EKM` may be a transposed view."""

    def outer(self, x_NM: Tensor, y_NK: Tensor, ends_G: Tensor) -> Tensor:
        """w_GMK with w[g] = sum over the rows n of group g of outer(x[n], y[n]); zeros for a group without rows.

        Rows from the last end on are not read.
        """

    def add_outer(self, w_GMK: Tensor, x_NM: Tensor, y_NK: Tensor, ends_G: Tensor) -> None:
        """Adds `outer` to `w_GMK`, fp32."""


class TorchDispatch(ABC):
    """Sorting, gathering and summing as dispatch.py has them."""

    @abstractmethod
    def outer(self, x_NM: Tensor, y_NK: Tensor, ends_G: Tensor) -> Tensor: ...

    def add_outer(self, w_GMK: Tensor, x_NM: Tensor, y_NK: Tensor, ends_G: Tensor) -> None:
        w_GMK.add_(self.outer(x_NM, y_NK, ends_G))  # without a copy in fp32

    def sort(self, slot_TK: Tensor, num_experts: int) -> Order:
        return sort_by_slot(slot_TK, num_experts)

    def gather(self, x_TD: Tensor, order: Order, end_1: Tensor) -> Tensor:
        return gather_rows(x_TD, order, end_1)

    def combine(self, y_ND: Tensor, order: Order) -> Tensor:
        return sum_rows(y_ND, order)


class Eager(TorchDispatch):
    """A plain loop over the groups: the reference. Waits for the device to learn the group sizes."""

    name = "eager"

    def rows(self, x_NK: Tensor, w_EKM: Tensor, ends_E: Tensor) -> Tensor:
        parts = [x_NK[start:end] @ w_EKM[group] for group, (start, end) in enumerate(_ranges(ends_E))]
        return torch.cat(parts)

    def outer(self, x_NM: Tensor, y_NK: Tensor, ends_G: Tensor) -> Tensor:
        return torch.stack([x_NM[start:end].T @ y_NK[start:end] for start, end in _ranges(ends_G)])


class GroupedMM(TorchDispatch):
    """torch's grouped_mm: one kernel for all groups and no wait for the device.

    So it is on CUDA in bf16 from compute capability 9.0; elsewhere torch serves the same call by a loop of its own.
    Rows that are not a multiple of 16 bytes wide are padded with zeros on the way in: right, but with copies, so keep
    d_model and expert_ffn multiples of 8.
    """

    name = "grouped_mm"

    def rows(self, x_NK: Tensor, w_EKM: Tensor, ends_E: Tensor) -> Tensor:
        width = w_EKM.shape[2]
        y_NM = F.grouped_mm(_aligned(x_NK), _aligned_matrices(w_EKM), offs=ends_E)
        return y_NM[:, :width]

    def outer(self, x_NM: Tensor, y_NK: Tensor, ends_G: Tensor) -> Tensor:
        w_GMK = F.grouped_mm(_aligned(x_NM).T, _aligned(y_NK), offs=ends_G)
        # from Blackwell on, torch's kernel writes nothing for a group without rows (pytorch issue 172439)
        if w_GMK.is_cuda and torch.cuda.get_device_capability(w_GMK.device)[0] >= 10:
            rows_G = ends_G.diff(prepend=ends_G.new_zeros(1))
            w_GMK.masked_fill_((rows_G == 0)[:, None, None], 0)
        return w_GMK[:, : x_NM.shape[1], : y_NK.shape[1]]


def _ranges(ends_G: Tensor) -> list[tuple[int, int]]:
    ends = ends_G.tolist()
    return list(zip([0, *ends[:-1]], ends))


def _missing(width: int, itemsize: int) -> int:
    """Values to add to a row of `width` values to reach a multiple of 16 bytes."""
    return -width % (_ALIGNMENT_BYTES // itemsize)


def _aligned(x_NK: Tensor) -> Tensor:
    missing = _missing(x_NK.shape[1], x_NK.itemsize)
    return F.pad(x_NK, (0, missing)) if missing else x_NK.contiguous()


def _aligned_matrices(w_EKM: Tensor) -> Tensor:
    missing_K, missing_M = (_missing(width, w_EKM.itemsize) for width in w_EKM.shape[1:])
    return F.pad(w_EKM, (0, missing_M, 0, missing_K)) if missing_K or missing_M else w_EKM

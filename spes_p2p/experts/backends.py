"""The two matrix products that experts need, per group of rows, and who computes them.

The rows of an activation are sorted by group (one group an expert); `ends_G` holds the end of each group. A backend is
the one swap point for kernels: it knows nothing of ownership or autograd (bank.py), and sorts nothing (dispatch.py).

Shapes: N rows, K and M widths, E or G groups. `ends_G` is int32, rising, on the device of the rows; rows at or after
the last end belong to no group.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from spes_p2p.errors import ConfigError

BackendName = Literal["auto", "grouped_mm", "eager"]
_ALIGNMENT_BYTES = 16  # what torch's grouped_mm demands of every stride


class Backend(Protocol):
    """Grouped matrix products; all tensors have one dtype and live on one device."""

    name: str

    def rows(self, x_NK: Tensor, w_EKM: Tensor, ends_E: Tensor) -> Tensor:
        """y_NM with y[n] = x[n] @ w[group of n]; every row belongs to a group. `w_EKM` may be a transposed view."""
        ...

    def outer(self, x_NM: Tensor, y_NK: Tensor, ends_G: Tensor) -> Tensor:
        """w_GMK with w[g] = sum over the rows n of group g of outer(x[n], y[n]); zeros for a group without rows."""
        ...


class Eager:
    """A plain loop over the groups: the reference. Waits for the device to learn the group sizes."""

    name = "eager"

    def rows(self, x_NK: Tensor, w_EKM: Tensor, ends_E: Tensor) -> Tensor:
        parts = [x_NK[start:end] @ w_EKM[group] for group, (start, end) in enumerate(_ranges(ends_E))]
        return torch.cat(parts)

    def outer(self, x_NM: Tensor, y_NK: Tensor, ends_G: Tensor) -> Tensor:
        return torch.stack([x_NM[start:end].T @ y_NK[start:end] for start, end in _ranges(ends_G)])


class GroupedMM:
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
        return w_GMK[:, : x_NM.shape[1], : y_NK.shape[1]]


def resolve_backend(name: str, device: torch.device, dtype: torch.dtype) -> tuple[Backend, str]:
    """The backend for a configured name, and why it was taken, in words for the log.

    `auto` takes grouped_mm where a small trial of it runs, else eager. Raises ConfigError for an unknown name, or for a
    backend asked for by name that does not run on `device` with `dtype`.
    """
    if name not in ("auto", "grouped_mm", "eager"):
        raise ConfigError(f"model.expert_backend is {name!r}, an unknown backend", fix="use auto, grouped_mm or eager")
    if name == "eager":
        return Eager(), "asked for"
    failure = "" if device.type == "meta" else _why_grouped_mm_fails(device, dtype)
    if not failure:
        return GroupedMM(), "asked for" if name == "grouped_mm" else f"grouped_mm runs on {device} in {dtype}"
    if name == "grouped_mm":
        raise ConfigError(
            f"model.expert_backend is grouped_mm, which fails on {device} in {dtype}: {failure}", fix="set it to auto"
        )
    return Eager(), f"grouped_mm fails on {device} in {dtype}: {failure}"


@cache
def _why_grouped_mm_fails(device: torch.device, dtype: torch.dtype) -> str:
    """The first line of the error of a small trial, or nothing."""
    x_NK = torch.ones(4, 16, device=device, dtype=dtype)
    w_EMK = torch.ones(2, 8, 16, device=device, dtype=dtype)
    ends_E = torch.tensor([1, 4], device=device, dtype=torch.int32)
    backend = GroupedMM()
    trials: tuple[Callable[[], Tensor], ...] = (
        lambda: backend.rows(x_NK, w_EMK.transpose(1, 2), ends_E),
        lambda: backend.outer(x_NK, x_NK, ends_E[:1]),
    )
    try:
        sums = [float(trial().sum()) for trial in trials]
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        return str(error).splitlines()[0]
    return "" if sums == [4 * 8 * 16, 16 * 16] else f"a trial gave {sums}"


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

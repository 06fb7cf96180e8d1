# ruff: noqa: ANN001, ANN202, PLR0913 (the arguments of kernels are pointers and numbers of Triton)
"""Grouped matrix products in Triton, for GPUs for which torch has none of its own.

Below compute capability 9.0, and on consumer cards above it, torch's grouped_mm copies the group sizes to the host and
loops. Here each product is one kernel: a program finds its group from the ends on the device. Products are summed in
fp32 (fp32 inputs too: no TF32). Imported where there is CUDA alone.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from spes_p2p.experts.backends import TorchDispatch
from spes_p2p.experts.kernels import on_device_of

_ROWS, _COLUMNS, _INNER = 128, 128, 64
_BAND = 8
"""So many tiles of rows share the columns of a matrix while those are in the L2 cache."""
_WARPS, _STAGES = 8, 3


@triton.jit
def _rows(
    x, w, y, ends, groups, inner, columns, w_group, w_inner, w_column,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    column_tiles = tl.cdiv(columns, COLUMNS)
    row_tiles = tl.num_programs(0) // column_tiles
    band = tl.program_id(0) // (BAND * column_tiles)
    height = tl.minimum(row_tiles - band * BAND, BAND)
    within = tl.program_id(0) % (BAND * column_tiles)
    row_tile, column_tile = band * BAND + within % height, within // height

    lanes = tl.arange(0, GROUPS)
    end_G = tl.load(ends + lanes, mask=lanes < groups, other=0)
    start_G = tl.load(ends + lanes - 1, mask=(lanes > 0) & (lanes < groups), other=0)
    tiles_G = tl.cdiv(end_G - start_G, ROWS)
    before_G = tl.cumsum(tiles_G, axis=0) - tiles_G
    is_own = (before_G <= row_tile) & (row_tile < before_G + tiles_G)
    if tl.sum(is_own.to(tl.int32), axis=0) == 0:
        return
    group = tl.sum(tl.where(is_own, lanes, 0), axis=0).to(tl.int64)
    start = tl.sum(tl.where(is_own, start_G + (row_tile - before_G) * ROWS, 0), axis=0)
    end = tl.sum(tl.where(is_own, end_G, 0), axis=0)

    row = (start + tl.arange(0, ROWS)).to(tl.int64)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    at = tl.arange(0, INNER)
    x_at = x + row[:, None] * inner + at[None, :]
    w_at = w + group * w_group + at[:, None].to(tl.int64) * w_inner + column[None, :].to(tl.int64) * w_column
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for done in range(0, inner, INNER):
        left = inner - done
        x_tile = tl.load(x_at, mask=(row[:, None] < end) & (at[None, :] < left), other=0.0)
        w_tile = tl.load(w_at, mask=(at[:, None] < left) & (column[None, :] < columns), other=0.0)
        total = tl.dot(x_tile, w_tile, total, input_precision="ieee")
        x_at += INNER
        w_at += INNER * w_inner
    inside = (row[:, None] < end) & (column[None, :] < columns)
    tl.store(y + row[:, None] * columns + column[None, :], total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _outer(
    x, y, w, ends, height, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
    ADDS: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1)
    end = tl.load(ends + group)
    start = tl.load(ends + group - 1, mask=group > 0, other=0)
    column_tiles = tl.cdiv(width, COLUMNS)
    row = tl.program_id(0) // column_tiles * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % column_tiles * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for done in range(start, end, INNER):
        at = (done + tl.arange(0, INNER)).to(tl.int64)
        x_at, y_at = x + at[None, :] * height + row[:, None], y + at[:, None] * width + column[None, :]
        x_tile = tl.load(x_at, mask=(at[None, :] < end) & (row[:, None] < height), other=0.0)
        y_tile = tl.load(y_at, mask=(at[:, None] < end) & (column[None, :] < width), other=0.0)
        total = tl.dot(x_tile, y_tile, total, input_precision="ieee")
    w_at = w + (group.to(tl.int64) * height + row[:, None]) * width + column[None, :]
    inside = (row[:, None] < height) & (column[None, :] < width)
    if ADDS:
        total += tl.load(w_at, mask=inside, other=0.0)
    tl.store(w_at, total.to(w.dtype.element_ty), mask=inside)


class TritonGrouped(TorchDispatch):
    """One Triton kernel for each product of all groups, and no wait for the device."""

    name = "triton"

    def rows(self, x_NK: Tensor, w_EKM: Tensor, ends_E: Tensor) -> Tensor:
        (rows, inner), (groups, _, columns) = x_NK.shape, w_EKM.shape
        y_NM = x_NK.new_empty(rows, columns)
        tiles = (triton.cdiv(rows, _ROWS) + groups) * triton.cdiv(columns, _COLUMNS)  # a group's last one is not full
        if rows:
            with on_device_of(x_NK):
                _rows[(tiles,)](
                    x_NK.contiguous(), w_EKM, y_NM, ends_E, groups, inner, columns, *w_EKM.stride(),
                    GROUPS=triton.next_power_of_2(groups), ROWS=_ROWS, COLUMNS=_COLUMNS, INNER=_INNER, BAND=_BAND,
                    num_warps=_WARPS, num_stages=_STAGES,
                )  # fmt: skip
        return y_NM

    def outer(self, x_NM: Tensor, y_NK: Tensor, ends_G: Tensor) -> Tensor:
        w_GMK = x_NM.new_empty(len(ends_G), x_NM.shape[1], y_NK.shape[1])
        self._write_outer(w_GMK, x_NM, y_NK, ends_G, adds=False)
        return w_GMK

    def add_outer(self, w_GMK: Tensor, x_NM: Tensor, y_NK: Tensor, ends_G: Tensor) -> None:
        """In the product itself, so that nothing is rounded and no value is written twice."""
        self._write_outer(w_GMK, x_NM, y_NK, ends_G, adds=True)

    def _write_outer(self, w_GMK: Tensor, x_NM: Tensor, y_NK: Tensor, ends_G: Tensor, adds: bool) -> None:
        groups, height, width = w_GMK.shape
        tiles = triton.cdiv(height, _ROWS) * triton.cdiv(width, _COLUMNS)
        if groups:
            with on_device_of(x_NM):
                _outer[(tiles, groups)](
                    x_NM.contiguous(), y_NK.contiguous(), w_GMK, ends_G, height, width,
                    ROWS=_ROWS, COLUMNS=_COLUMNS, INNER=_INNER, ADDS=adds, num_warps=_WARPS, num_stages=_STAGES,
                )  # fmt: skip

# ruff: noqa: ANN001, ANN202 (the arguments of kernels are pointers and numbers of Triton)
"""dispatch.py on a GPU: rows gathered as far as they are needed, and a token's rows summed in fp32, 16 bytes a load.

Imported where there is CUDA alone. A program takes BLOCK values of one row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spes_p2p.experts.kernels import on_device_of

_BLOCK = 1024


@triton.jit
def _gather(x, order, end, rows, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(end):
        return
    token = tl.load(order + row) // TOP_K
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    tl.store(rows + row * width + at, tl.load(x + token * width + at, mask=inside, other=0.0), mask=inside)


@triton.jit
def _combine(rows, inverse, y, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for choice in tl.static_range(TOP_K):
        row = tl.load(inverse + token * TOP_K + choice)
        total += tl.load(rows + row * width + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + token * width + at, total.to(y.dtype.element_ty), mask=inside)


def gather(x_TD: Tensor, order_N: Tensor, end_1: Tensor, top_k: int) -> Tensor:
    """See dispatch.gather_rows; `x_TD` is contiguous."""
    rows, width = len(order_N), x_TD.shape[1]
    x_ND = x_TD.new_empty(rows, width)
    if rows:
        with on_device_of(x_TD):
            _gather[(rows, triton.cdiv(width, _BLOCK))](
                x_TD, order_N, end_1, x_ND, width, TOP_K=top_k, BLOCK=_BLOCK
            )  # fmt: skip
    return x_ND


def combine(y_ND: Tensor, inverse_TK: Tensor) -> Tensor:
    """See dispatch.sum_rows; both are contiguous."""
    (tokens, top_k), width = inverse_TK.shape, y_ND.shape[1]
    y_TD = y_ND.new_empty(tokens, width)
    if tokens:
        with on_device_of(y_ND):
            _combine[(tokens, triton.cdiv(width, _BLOCK))](y_ND, inverse_TK, y_TD, width, TOP_K=top_k, BLOCK=_BLOCK)
    return y_TD


def try_kernels(device: torch.device, dtype: torch.dtype) -> None:
    """Both kernels on one token, as training launches them."""
    x_TD, row_N = torch.zeros(1, 2, device=device, dtype=dtype), torch.zeros(1, device=device, dtype=torch.int64)
    combine(gather(x_TD, row_N, torch.ones(1, device=device, dtype=torch.int32), 1), row_N[:, None])

# ruff: noqa: ANN001, ANN202 (the arguments of kernels are pointers and numbers of Triton)
"""Values of quantise.py back in the dtype of training on a GPU: each code read once, each value written once.

Imported where there is CUDA alone. A program takes GROUPS groups of codes that share a scale, of whatever rows.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from spes_p2p.experts.kernels import on_device_of
from spes_p2p.experts.quantise import nf4_levels

_CODES = 2048
"""Of a program: 16 bytes for each of 128 threads."""


@triton.jit
def _bytes(codes, scales, out, groups, WIDTH: tl.constexpr, GROUPS: tl.constexpr, LANES: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    lane = tl.arange(0, LANES)
    at, inside = group[:, None] * WIDTH + lane[None, :], (group[:, None] < groups) & (lane[None, :] < WIDTH)
    code = tl.load(codes + at, mask=inside, other=0)
    value = code.to(tl.float32)
    scale = tl.load(scales + group, mask=group < groups, other=0.0)
    tl.store(out + at, (value * scale[:, None]).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _nibbles(codes, scales, levels, out, groups, WIDTH: tl.constexpr, GROUPS: tl.constexpr, LANES: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    lane, wide = tl.arange(0, LANES), tl.arange(0, 2 * LANES)
    is_there = group[:, None] < groups
    inside = is_there & (lane[None, :] < WIDTH)
    code = tl.load(codes + group[:, None] * WIDTH + lane[None, :], mask=inside, other=0).to(tl.int32)
    value = tl.interleave(tl.load(levels + (code & 15)), tl.load(levels + (code >> 4)))
    scale = tl.load(scales + group, mask=group < groups, other=0.0)
    at, is_value = group[:, None] * (2 * WIDTH) + wide[None, :], is_there & (wide[None, :] < 2 * WIDTH)
    tl.store(out + at, (value * scale[:, None]).to(out.dtype.element_ty), mask=is_value)


@cache
def _levels(device: torch.device) -> Tensor:
    return torch.tensor(nf4_levels(), device=device)


def dequantise(codes: Tensor, scales: Tensor, out: Tensor) -> None:
    """See quantise.dequantise; all are contiguous, and of nf4 no half of a byte is left over."""
    groups = scales.numel()
    if not groups:
        return
    width = codes.numel() // groups
    lanes = triton.next_power_of_2(width)
    each = max(1, _CODES // lanes)
    grid, sizes = (triton.cdiv(groups, each),), {"WIDTH": width, "GROUPS": each, "LANES": lanes}
    with on_device_of(out):
        if codes.dtype == torch.uint8:
            _nibbles[grid](codes, scales, _levels(out.device), out, groups, **sizes)
        else:
            _bytes[grid](codes, scales, out, groups, **sizes)

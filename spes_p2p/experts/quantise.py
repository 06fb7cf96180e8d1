"""Matrices in one byte a value: int8 or fp8 (e4m3) with one fp32 scale for each block of a row.

For experts that are only read (stores.py). Symmetric, rounded to nearest: the largest value of a block is kept exactly.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Kind = Literal["int8", "fp8"]
BLOCK = 128
_DTYPES = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}


class Quantised(NamedTuple):
    """`codes` [..., out, in] of one byte each, and fp32 `scales` [..., out, in / block]."""

    codes: Tensor
    scales: Tensor


def block_of(width: int) -> int:
    """Values of a row that share a scale: BLOCK where it divides the row, else the whole row."""
    return BLOCK if width % BLOCK == 0 else width


def empty(kind: Kind, shape: tuple[int, ...], device: torch.device | None, pin: bool = False) -> Quantised:
    """Without values yet: all NaN. `pin`: in host memory that a GPU copies from without waiting."""
    codes = torch.zeros(shape, dtype=_DTYPES[kind][0], device=device, pin_memory=pin)
    scales = torch.full((*shape[:-1], shape[-1] // block_of(shape[-1])), torch.nan, device=device, pin_memory=pin)
    return Quantised(codes, scales)


def quantise(kind: Kind, values: Tensor) -> Quantised:
    """Of a float tensor [..., out, in]; NaN and infinite values make their block NaN."""
    dtype, largest = _DTYPES[kind]
    blocks = values.float().unflatten(-1, (-1, block_of(values.shape[-1])))
    scales = blocks.abs().amax(-1) / largest
    scaled = blocks / torch.where(scales > 0, scales, 1.0)[..., None]
    codes = (scaled.round() if kind == "int8" else scaled).nan_to_num().clamp(-largest, largest).to(dtype)
    return Quantised(codes.flatten(-2), scales)


def dequantise(quantised: Quantised, out: Tensor) -> Tensor:
    """Writes the values into `out` [..., out, in], and returns it."""
    codes, scales = quantised
    blocks = codes.unflatten(-1, (scales.shape[-1], -1))
    target = out.unflatten(-1, (scales.shape[-1], -1))
    target.copy_(blocks)
    target.mul_(scales[..., None].to(out.dtype))
    return out

"""Matrices in eight or four bits a value: int8 or nf4, with one fp32 scale for each block of a row.

For experts that are only read (stores.py). Rounded to nearest; the largest value of a block is kept exactly. The values
of nf4 are 16 quantiles of a normal distribution, two to a byte (Dettmers et al., arXiv 2305.14314, appendix E). Back in
the compute dtype in one pass: on CUDA by a Triton kernel (quantise_kernels.py), elsewhere by plain torch.
"""

from __future__ import annotations

from functools import cache
from statistics import NormalDist
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from spes_p2p.experts.kernels import half_dtype, has_kernels

Kind = Literal["int8", "nf4"]
BLOCKS: dict[Kind, int] = {"int8": 128, "nf4": 64}
_DTYPES: dict[Kind, torch.dtype] = {"int8": torch.int8, "nf4": torch.uint8}
_LARGEST: dict[Kind, float] = {"int8": 127.0, "nf4": 1.0}


class Quantised(NamedTuple):
    """`codes` [..., out, in] of one byte each, of nf4 [..., out, in / 2], and fp32 `scales` [..., out, in / block]."""

    codes: Tensor
    scales: Tensor


def block_of(kind: Kind, width: int) -> int:
    """Values of a row that share a scale: those of `BLOCKS` where they divide the row, else the whole row."""
    return BLOCKS[kind] if width % BLOCKS[kind] == 0 else width


def empty(kind: Kind, shape: tuple[int, ...], device: torch.device | None) -> Quantised:
    """Without values yet: all NaN."""
    *rows, width = shape
    stored = -(-width // 2) if kind == "nf4" else width
    codes = torch.zeros(*rows, stored, dtype=_DTYPES[kind], device=device)
    scales = torch.full((*rows, width // block_of(kind, width)), torch.nan, device=device)
    return Quantised(codes, scales)


def quantise(kind: Kind, values: Tensor) -> Quantised:
    """Of a float tensor [..., out, in]; NaN and infinite values make their block NaN."""
    largest = _LARGEST[kind]
    blocks = values.float().unflatten(-1, (-1, block_of(kind, values.shape[-1])))
    scales = blocks.abs().amax(-1) / largest
    scaled = (
        (blocks / torch.where(scales > 0, scales, 1.0)[..., None]).nan_to_num().clamp(-largest, largest).flatten(-2)
    )
    if kind == "nf4":
        return Quantised(_pairs(scaled), scales)
    return Quantised(scaled.round().to(torch.int8), scales)


def _pairs(scaled: Tensor) -> Tensor:
    """Numbers of the nearest levels, the first of two in the low half of a byte."""
    levels = torch.tensor(nf4_levels(), device=scaled.device)
    numbers = torch.bucketize(scaled, (levels[1:] + levels[:-1]) / 2).to(torch.uint8)
    low, high = F.pad(numbers, (0, numbers.shape[-1] % 2)).unflatten(-1, (-1, 2)).unbind(-1)
    return low | high << 4


@cache
def nf4_levels() -> tuple[float, ...]:
    """16 from -1 to 1, rising, zero among them: eight quantiles of the positive half, seven of the negative one."""
    below, above = ([0.5 + 0.4677083 * step / steps for step in range(1, steps + 1)] for steps in (7, 8))
    negative, positive = ([NormalDist().inv_cdf(share) for share in shares] for shares in (below, above))
    levels = [*(-value for value in reversed(negative)), 0.0, *positive]
    return tuple(value / positive[-1] for value in levels)


def dequantise(quantised: Quantised, out: Tensor) -> Tensor:
    """Writes the values into `out` [..., out, in], contiguous, and returns it; products are made in fp32."""
    codes, scales = quantised
    width = out.shape[-1]
    is_odd = codes.dtype == torch.uint8 and width % 2 == 1  # half a byte of each row is left over
    if has_kernels(out, try_kernels) and not is_odd:
        from spes_p2p.experts import quantise_kernels

        quantise_kernels.dequantise(codes.contiguous(), scales.contiguous(), out)
        return out
    matrices = (one.view(-1, *one.shape[-2:]) for one in (codes, scales, out))
    for code, scale, target in zip(*matrices, strict=True):
        values = _unpaired(code, width) if code.dtype == torch.uint8 else code.float()
        target.copy_((values.unflatten(-1, (scale.shape[-1], -1)) * scale[..., None]).flatten(-2))
    return out


def _unpaired(codes: Tensor, width: int) -> Tensor:
    numbers = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)[..., :width]
    return torch.tensor(nf4_levels(), device=codes.device)[numbers.int()]


def try_kernels(device: torch.device) -> None:
    """Both kernels on two values, in the dtype of training, as training launches them."""
    from spes_p2p.experts import quantise_kernels

    out, scales = torch.zeros(1, 2, device=device, dtype=half_dtype(device)), torch.zeros(1, 1, device=device)
    for kind, dtype in _DTYPES.items():
        codes = torch.zeros(1, 1 if kind == "nf4" else 2, device=device, dtype=dtype)
        quantise_kernels.dequantise(codes, scales, out)

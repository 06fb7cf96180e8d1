# ruff: noqa: ANN001, ANN202 (the arguments of kernels are pointers and numbers of Triton)
"""gradients.py on a GPU: sums in bf16, rounded at random, each value read and written once.

Imported where there is CUDA alone. A program takes eight slices of SLICE values: one call of Philox gives each lane 128
random bits, 16 for a value of each slice.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spes_p2p.experts.kernels import on_device_of

_SLICE = 1024
_SLICES = 8


@triton.jit
def _add_slice(total, term, at, count, dither):
    inside = at < count
    before = (tl.load(total + at, mask=inside, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    exact = before + tl.load(term + at, mask=inside, other=0.0).to(tl.float32)
    bits = exact.to(tl.int32, bitcast=True)
    bits = tl.where(exact == exact, bits + dither, bits)
    tl.store(total + at, (bits >> 16).to(tl.int16), mask=inside)


@triton.jit
def _add_rounded(total, term, seed, count, SLICE: tl.constexpr):
    program, lane = tl.program_id(0), tl.arange(0, SLICE)
    first, second, third, fourth = tl.randint4x(tl.load(seed), program * SLICE + lane)
    at = program.to(tl.int64) * (8 * SLICE) + lane
    _add_slice(total, term, at, count, first.to(tl.int32) & 0xFFFF)
    _add_slice(total, term, at + SLICE, count, (first >> 16).to(tl.int32) & 0xFFFF)
    _add_slice(total, term, at + 2 * SLICE, count, second.to(tl.int32) & 0xFFFF)
    _add_slice(total, term, at + 3 * SLICE, count, (second >> 16).to(tl.int32) & 0xFFFF)
    _add_slice(total, term, at + 4 * SLICE, count, third.to(tl.int32) & 0xFFFF)
    _add_slice(total, term, at + 5 * SLICE, count, (third >> 16).to(tl.int32) & 0xFFFF)
    _add_slice(total, term, at + 6 * SLICE, count, fourth.to(tl.int32) & 0xFFFF)
    _add_slice(total, term, at + 7 * SLICE, count, (fourth >> 16).to(tl.int32) & 0xFFFF)


def add_rounded(total: Tensor, term: Tensor, noise: torch.Generator) -> None:
    """See gradients.add_rounded; both are contiguous."""
    count = total.numel()
    if count:
        seed = torch.randint(2**31, (1,), generator=noise, device=total.device)
        with on_device_of(total):
            _add_rounded[(triton.cdiv(count, _SLICES * _SLICE),)](
                total.view(torch.int16), term, seed, count, SLICE=_SLICE
            )  # fmt: skip


def try_kernels(device: torch.device) -> None:
    """The kernel on one value, as training launches it."""
    total = torch.zeros(1, device=device, dtype=torch.bfloat16)
    add_rounded(total, total.clone(), torch.Generator(device))

# ruff: noqa: ANN001, ANN202 (the arguments of kernels are pointers and numbers of Triton)
"""The losses of output_loss.py on a GPU: one Triton kernel. Imported where there is CUDA alone.

A program takes one row in pieces of BLOCK logits, twice; all arithmetic is fp32. The first pass keeps a maximum and a
sum of exponentials for each lane, which are put together at the end (Milakov and Gimelshein, arXiv 1805.02867).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spes_p2p.experts.kernels import on_device_of

_BLOCK = 4096
_LOWEST = tl.constexpr(-1e38)  # finite: infinity less itself is not a number


@triton.jit
def _row_losses(logits, target, counted, losses, pitch, width, z_weight, GRADIENT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * pitch
    lanes = tl.arange(0, BLOCK)
    chosen = tl.load(target + row)
    count = tl.load(counted + row).to(tl.float32)
    target_logit = tl.load(logits + chosen).to(tl.float32)  # now: the second pass writes in its place
    tops = tl.full((BLOCK,), _LOWEST, dtype=tl.float32)
    totals = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, pitch, BLOCK):
        at = start + lanes
        x = tl.load(logits + at, mask=at < pitch, other=0.0).to(tl.float32)  # a width may be odd, a pitch loads fast
        x = tl.where(at < width, x, _LOWEST)
        higher = tl.maximum(tops, x)
        totals = totals * tl.exp(tops - higher) + tl.exp(x - higher)
        tops = higher
    top = tl.max(tops, axis=0)
    total = tl.sum(totals * tl.exp(tops - top), axis=0)
    log_total = tl.log(total) + top
    cross_entropy = log_total - target_logit
    tl.store(losses + 2 * row, cross_entropy * count)
    tl.store(losses + 2 * row + 1, log_total * log_total * count)
    if GRADIENT:
        factor = count * (1 + 2 * z_weight * log_total) / total
        for start in range(0, pitch, BLOCK):
            at = start + lanes
            x = tl.load(logits + at, mask=at < pitch, other=0.0).to(tl.float32)
            d = tl.exp(tl.where(at < width, x, _LOWEST) - top) * factor
            tl.store(logits + at, tl.where(at == chosen, d - count, d), mask=at < pitch)


def row_losses(
    logits_nV: Tensor,
    num_logits: int,
    target_n: Tensor,
    counted_n: Tensor,
    output_z_weight: float,
    with_gradient: bool,
) -> Tensor:
    """See softmax_loss.row_losses; the logits are contiguous."""
    rows, pitch = logits_nV.shape
    loss_n2 = torch.empty(rows, 2, dtype=torch.float32, device=logits_nV.device)
    if rows:
        with on_device_of(logits_nV):
            _row_losses[(rows,)](
                logits_nV,
                target_n.contiguous(),
                counted_n.contiguous(),
                loss_n2,
                pitch,
                num_logits,
                output_z_weight,
                GRADIENT=with_gradient,
                BLOCK=_BLOCK,
                num_warps=8,
            )
    return loss_n2.sum(0)

# ruff: noqa: ANN001, ANN202 (the arguments of kernels are pointers and numbers of Triton)
"""swiglu.py on a GPU: one Triton kernel forward and one backward. Imported where there is CUDA alone.

A program takes one row in pieces of BLOCK values; all arithmetic is fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spes_p2p.experts.kernels import on_device_of

_BLOCK = 1024


@triton.jit
def _forward(gate_up, weight, hidden, ffn, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < ffn
    gate = tl.load(gate_up + row * 2 * ffn + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * ffn + ffn + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + row).to(tl.float32)
    tl.store(hidden + row * ffn + at, gate * tl.sigmoid(gate) * up * scale, mask=inside)


@triton.jit
def _backward(d_hidden, gate_up, weight, end, hidden, d_gate_up, d_weight, ffn, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(weight + row).to(tl.float32)
    is_needed = row < tl.load(end)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, ffn, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < ffn
        gate = tl.load(gate_up + row * 2 * ffn + at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up + row * 2 * ffn + ffn + at, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(d_hidden + row * ffn + at, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        total += d * silu * up
        if is_needed:
            tl.store(hidden + row * ffn + at, silu * up * scale, mask=inside)
        d = d * scale
        tl.store(d_gate_up + row * 2 * ffn + at, d * up * sigmoid * (1 + gate - silu), mask=inside)
        tl.store(d_gate_up + row * 2 * ffn + ffn + at, d * silu, mask=inside)
    tl.store(d_weight + row, tl.sum(total, axis=0))


def forward(gate_up_N2F: Tensor, weight_N: Tensor) -> Tensor:
    """See swiglu.forward; inputs are contiguous."""
    rows, ffn = gate_up_N2F.shape[0], gate_up_N2F.shape[1] // 2
    hidden_NF = gate_up_N2F.new_empty(rows, ffn)
    if rows:
        with on_device_of(gate_up_N2F):
            _forward[(rows, triton.cdiv(ffn, _BLOCK))](gate_up_N2F, weight_N, hidden_NF, ffn, BLOCK=_BLOCK)
    return hidden_NF


def backward(
    d_hidden_NF: Tensor, gate_up_N2F: Tensor, weight_N: Tensor, end_1: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See swiglu.backward; inputs are contiguous."""
    rows, ffn = d_hidden_NF.shape
    hidden_NF, d_gate_up_N2F = torch.empty_like(d_hidden_NF), torch.empty_like(gate_up_N2F)
    d_weight_N = torch.empty(rows, dtype=torch.float32, device=d_hidden_NF.device)
    if rows:
        outputs = hidden_NF, d_gate_up_N2F, d_weight_N
        with on_device_of(d_hidden_NF):
            _backward[(rows,)](d_hidden_NF, gate_up_N2F, weight_N, end_1, *outputs, ffn, BLOCK=_BLOCK)
    return hidden_NF, d_gate_up_N2F, d_weight_N

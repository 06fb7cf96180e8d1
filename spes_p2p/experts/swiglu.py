"""The elementwise middle of an expert: weight * silu(gate) * up, and its gradient in one pass.

The router's weight is applied here rather than to the output: the sum over a token's experts is the same, its gradient
needs nothing but what this pass reads anyway, and the outputs of experts need not be kept for the backward pass.

On CUDA a Triton kernel each (swiglu_kernels.py), which reads and writes every value once; elsewhere plain torch in
fp32. Shapes: N rows, F expert ffn; `gate_up_N2F` holds gate in its first F values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from spes_p2p.experts.kernels import half_dtype, has_kernels


class Gradients(NamedTuple):
    """All from one pass over what the forward pass kept."""

    hidden_NF: Tensor
    """The weighted hidden values once more, for the gradient of the down projection; anything in rows without one."""
    d_gate_up_N2F: Tensor
    d_weight_N: Tensor
    """fp32."""


def forward(gate_up_N2F: Tensor, weight_N: Tensor) -> Tensor:
    """hidden_NF = weight * silu(gate) * up, computed in fp32, in the dtype of `gate_up_N2F`."""
    if has_kernels(gate_up_N2F, try_kernels):
        from spes_p2p.experts import swiglu_kernels

        return swiglu_kernels.forward(gate_up_N2F.contiguous(), weight_N)
    gate_NF, up_NF = gate_up_N2F.float().chunk(2, dim=1)
    return (gate_NF.sigmoid() * gate_NF * up_NF * weight_N[:, None]).to(gate_up_N2F.dtype)


def backward(d_hidden_NF: Tensor, gate_up_N2F: Tensor, weight_N: Tensor, end_1: Tensor) -> Gradients:
    """Gradients for `forward`, in the dtypes of its inputs; hidden values before row `end_1` (int32, [1]) alone."""
    if has_kernels(gate_up_N2F, try_kernels):
        from spes_p2p.experts import swiglu_kernels

        given = d_hidden_NF.contiguous(), gate_up_N2F.contiguous(), weight_N
        return Gradients(*swiglu_kernels.backward(*given, end_1))
    dtype = gate_up_N2F.dtype
    gate_NF, up_NF = gate_up_N2F.float().chunk(2, dim=1)
    d_NF = d_hidden_NF.float()
    gate_sigmoid_NF = gate_NF.sigmoid()
    silu_NF = gate_NF * gate_sigmoid_NF
    product_NF = silu_NF * up_NF
    d_weight_N = (d_NF * product_NF).sum(1)
    d_NF = d_NF * weight_N[:, None]
    slope_NF = gate_sigmoid_NF * (1 + gate_NF - silu_NF)
    d_gate_up_N2F = torch.cat((d_NF * up_NF * slope_NF, d_NF * silu_NF), dim=1).to(dtype)
    return Gradients((product_NF * weight_N[:, None]).to(dtype), d_gate_up_N2F, d_weight_N)


def try_kernels(device: torch.device) -> None:
    """Both kernels on one row in the dtype of training, as training launches them."""
    from spes_p2p.experts import swiglu_kernels

    row = torch.zeros(1, 2, device=device, dtype=half_dtype(device))
    weight_N = torch.zeros(1, device=device)
    swiglu_kernels.backward(swiglu_kernels.forward(row, weight_N), row, weight_N, weight_N.int())

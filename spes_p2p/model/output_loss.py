"""Cross entropy and output z-loss from the last hidden states, without ever holding all logits.

The rows go through the head a chunk at a time. Where gradients are wanted, each chunk adds its part of them at once,
while its logits are there, so that nothing is computed again in the backward pass: that only multiplies by the
gradient of the one sum that has one. Where the head's gradient is added in place (experts/gradients.py) it is there
before that, so the sum must be differentiated as it is, with a gradient of 1. This is the one way for every device and
checkpointing mode, so that no fused kernel of another library has to agree with it. Softmax in fp32,
matrix products in the compute dtype, the gradient of the head in fp32.

Legend: N rows, n rows of a chunk, D d_model, V embedding rows: logits, and zeros behind them, which stay zeros.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from spes_p2p.experts.gradients import sink
from spes_p2p.experts.kernels import half_dtype, has_kernels
from spes_p2p.model.layers import compute_dtype
from spes_p2p.model.losses import HeadSums

CHUNK_BYTES = 2**29
"""Most bytes of a chunk's logits, in the compute dtype. More of them cost memory, fewer time: each chunk reads and
writes the whole gradient of the head."""
_TILE_ROWS = 256  # what matrix products like
_ALIGNED_LOGITS = 64  # they want rows of memory that begin at multiples of 16 bytes, too: the head gets rows of zeros
_SLICE_ROWS = 8192  # of the head, where a product cannot be added to its fp32 gradient directly


class _Gradients(NamedTuple):
    """Of the weighted sum; None where it is not wanted."""

    x_ND: Tensor | None
    head_VD: Tensor | None


def chunk_rows(num_logits: int, dtype: torch.dtype) -> int:
    """Rows that go through the head at once when each has `num_logits` of them."""
    rows = CHUNK_BYTES // (dtype.itemsize * num_logits)
    return max(1, rows - rows % _TILE_ROWS if rows > _TILE_ROWS else rows)


def head_sums(x_ND: Tensor, head_VD: Tensor, target_N: Tensor, counted_N: Tensor, output_z_weight: float) -> HeadSums:
    """Cross entropy and squared logsumexp of the logits x @ head.T, summed over rows as `counted_N` weighs them.

    Differentiable in `x_ND` and `head_VD`, once, through `HeadSums.total`.
    """
    dtype = compute_dtype(x_ND)
    if not torch.is_grad_enabled():
        sums, _ = _sums(x_ND, head_VD, target_N, counted_N, output_z_weight, dtype, (False, False), None)
        return sums
    into = sink(head_VD)
    return HeadSums(*cast(Any, _HeadSums.apply(x_ND, head_VD, target_N, counted_N, output_z_weight, dtype, into)))


class _HeadSums(torch.autograd.Function):
    """Keeps the gradients from the forward pass: x_ND in its dtype and head_VD in fp32."""

    @staticmethod
    def forward(  # noqa: PLR0913 (autograd sees tensors that are arguments alone)
        ctx: Any,
        x_ND: Tensor,
        head_VD: Tensor,
        target_N: Tensor,
        counted_N: Tensor,
        output_z_weight: float,
        dtype: torch.dtype,
        into: Tensor | None,
    ) -> HeadSums:
        wanted = ctx.needs_input_grad[:2]
        sums, gradients = _sums(x_ND, head_VD, target_N, counted_N, output_z_weight, dtype, wanted, into)
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(sums.cross_entropy, sums.output_z)
        return sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_total: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        # in place: a second backward pass through the same graph is refused by torch, as the tensors have changed
        scaled = [None if gradient is None else gradient.mul_(d_total) for gradient in ctx.saved_tensors]
        return *scaled, None, None, None, None, None


def _sums(  # noqa: PLR0913 (as `head_sums`, and what is wanted of it)
    x_ND: Tensor,
    head_VD: Tensor,
    target_N: Tensor,
    counted_N: Tensor,
    output_z_weight: float,
    dtype: torch.dtype,
    wanted: tuple[bool, bool],
    into: Tensor | None,
) -> tuple[HeadSums, _Gradients]:
    """The sums, and the gradients of x_ND and head_VD where `wanted`; the head's is added to `into` if given."""
    num_logits, parts = len(head_VD), []
    matrix_VD = _aligned(head_VD, dtype)
    gradients = _Gradients(
        torch.empty_like(x_ND, dtype=dtype) if wanted[0] else None,
        torch.zeros_like(matrix_VD, dtype=torch.float32) if wanted[1] and into is None else None,
    )
    head = into if gradients.head_VD is None else gradients.head_VD
    rows = chunk_rows(len(matrix_VD), dtype)
    with torch.autocast(x_ND.device.type, enabled=False):
        for start in range(0, max(1, len(x_ND)), rows):
            chunk = slice(start, start + rows)
            x_nD = x_ND[chunk].to(dtype)
            logits_nV = F.linear(x_nD, matrix_VD)
            targets = target_N[chunk], counted_N[chunk]
            parts.append(row_losses(logits_nV, num_logits, *targets, output_z_weight, any(wanted)))
            if gradients.x_ND is not None:
                torch.mm(logits_nV, matrix_VD, out=gradients.x_ND[chunk])
            if head is not None:
                _add_product(head, logits_nV[:, : len(head)].T, x_nD)
            del logits_nV  # before the next ones are made
    cross_entropy, output_z = torch.stack(parts).sum(0).unbind()
    sums = HeadSums(cross_entropy + output_z_weight * output_z, cross_entropy.clone(), output_z.clone())
    return sums, _Gradients(gradients.x_ND, None if gradients.head_VD is None else gradients.head_VD[:num_logits])


def _aligned(head_VD: Tensor, dtype: torch.dtype) -> Tensor:
    """The head in the compute dtype, with rows of zeros at its end up to a multiple of _ALIGNED_LOGITS."""
    missing = -len(head_VD) % _ALIGNED_LOGITS
    if not missing:
        return head_VD.to(dtype)
    matrix_VD = head_VD.new_empty(len(head_VD) + missing, head_VD.shape[1], dtype=dtype)
    matrix_VD[: len(head_VD)].copy_(head_VD)
    matrix_VD[len(head_VD) :] = 0
    return matrix_VD


def _add_product(sum_VD: Tensor, left_Vn: Tensor, right_nD: Tensor) -> None:
    """Adds left @ right to an fp32 sum [V, D], without a second one of its size."""
    if left_Vn.dtype == sum_VD.dtype:
        sum_VD.addmm_(left_Vn, right_nD)
    elif _adds_into_fp32(sum_VD.device, left_Vn.dtype):
        torch.addmm(sum_VD, left_Vn, right_nD, out_dtype=torch.float32, out=sum_VD)
    else:
        for part_vD, part_vn in zip(sum_VD.split(_SLICE_ROWS), left_Vn.split(_SLICE_ROWS)):
            part_vD.add_(part_vn @ right_nD)


@cache
def _adds_into_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a small product of `dtype` can be added to fp32 by the kernel itself."""
    factor, into = torch.ones(16, 16, device=device, dtype=dtype), torch.ones(16, 16, device=device)
    try:
        torch.addmm(into, factor, factor, out_dtype=torch.float32, out=into)
    except (RuntimeError, TypeError):  # NotImplementedError among them
        return False
    return float(into[0, 0]) == 17


FP32_BYTES = 2**28
"""Most bytes that are made fp32 at once where there is no kernel."""


def row_losses(
    logits_nV: Tensor,
    num_logits: int,
    target_n: Tensor,
    counted_n: Tensor,
    output_z_weight: float,
    with_gradient: bool,
) -> Tensor:
    """(cross entropy, squared logsumexp), each summed over the rows that count (1, not 0): [2] fp32.

    The first `num_logits` of a row are logits. Uses `logits_nV` up. `with_gradient` leaves there the gradient of the
    first sum plus the weight times the second: counted * (softmax * (1 + 2 * weight * logsumexp) - one hot). On CUDA
    one Triton kernel, which reads the logits twice and makes no fp32 copy of them; elsewhere plain torch in fp32.
    """
    if has_kernels(logits_nV, try_kernels):
        from spes_p2p.model import softmax_loss_kernels

        return softmax_loss_kernels.row_losses(
            logits_nV, num_logits, target_n, counted_n, output_z_weight, with_gradient
        )
    rows = max(1, FP32_BYTES // (4 * logits_nV.shape[1]))
    parts = zip(logits_nV[:, :num_logits].split(rows), target_n.split(rows), counted_n.split(rows))
    return torch.stack([_losses_of_part(*part, output_z_weight, with_gradient) for part in parts]).sum(0)


def _losses_of_part(
    logits_nV: Tensor, target_n: Tensor, counted_n: Tensor, output_z_weight: float, with_gradient: bool
) -> Tensor:
    target_n1, counted_n1 = target_n[:, None], counted_n[:, None].float()
    top_n1 = logits_nV.amax(1, keepdim=True).float()
    chosen_n1 = logits_nV.gather(1, target_n1).float()
    in_place = logits_nV.dtype == torch.float32
    exp_nV = (logits_nV.sub_(top_n1) if in_place else logits_nV - top_n1).exp_()
    total_n1 = exp_nV.sum(1, keepdim=True)
    log_total_n1 = total_n1.log() + top_n1
    if with_gradient:
        factor_n1 = counted_n1 * (1 + 2 * output_z_weight * log_total_n1) / total_n1
        at_target_n1 = exp_nV.gather(1, target_n1) * factor_n1 - counted_n1
        torch.mul(exp_nV, factor_n1, out=logits_nV)
        logits_nV.scatter_(1, target_n1, at_target_n1.to(logits_nV.dtype))
    return (torch.cat((log_total_n1 - chosen_n1, log_total_n1.square()), 1) * counted_n1).sum(0)


def try_kernels(device: torch.device) -> None:
    """The kernel on one row in the dtype of training, with and without a gradient, as training launches it."""
    from spes_p2p.model import softmax_loss_kernels

    for with_gradient in (False, True):
        logits_nV = torch.zeros(1, 8, device=device, dtype=half_dtype(device))
        target_n, counted_n = torch.zeros(1, device=device, dtype=torch.int64), torch.ones(1, device=device)
        softmax_loss_kernels.row_losses(logits_nV, 8, target_n, counted_n, 0.0, with_gradient)

"""Cross entropy and squared logsumexp of rows of logits, and the logits' gradient in their place.

On CUDA one Triton kernel (softmax_loss_kernels.py), which reads the logits twice and makes no fp32 copy of them;
elsewhere plain torch in fp32, some rows at a time.

Legend: n rows, V logits of a row and zeros behind them, which stay zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spes_p2p.experts.kernels import half_dtype, has_kernels

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
    first sum plus the weight times the second: counted * (softmax * (1 + 2 * weight * logsumexp) - one hot).
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

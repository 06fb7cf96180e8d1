"""The smallest pieces: a linear map, RMSNorm and the embedding, all without initial values of their own.

Values are NaN until loaded from the committed state (params.py): a tensor that nobody loaded cannot go unseen, and no
time goes into random numbers that would be overwritten.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from spes_p2p.experts.gradients import sink


def unloaded(*shape: int, device: torch.device | None = None) -> nn.Parameter:
    """A fp32 parameter of NaN, to be loaded."""
    return nn.Parameter(torch.full(shape, torch.nan, device=device))


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype that matrix products on `x` run in: autocast's where it is on, else that of `x`."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else x.dtype


class Linear(nn.Module):
    """y = x @ weight.T + bias; weight [out, in], bias [out] where there is one."""

    def __init__(
        self, in_width: int, out_width: int, device: torch.device | None = None, has_bias: bool = False
    ) -> None:
        super().__init__()
        self.weight = unloaded(out_width, in_width, device=device)
        self.bias = unloaded(out_width, device=device) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        return F.linear(x, self.weight, self.bias)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in fp32, given out in the compute dtype."""

    def __init__(self, width: int, eps: float, device: torch.device | None = None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = unloaded(width, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] to the same shape."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(compute_dtype(x))


def embedded(token_BS: Tensor, weight_VD: Tensor) -> Tensor:
    """[B, S, D]: the row of each token. Where the gradient is added in place, only their rows are touched."""
    if not torch.is_grad_enabled() or sink(weight_VD) is None:
        return F.embedding(token_BS, weight_VD)
    return cast(Tensor, _Embedded.apply(token_BS, weight_VD))


class _Embedded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token_BS: Tensor, weight_VD: Tensor) -> Tensor:
        ctx.save_for_backward(token_BS)
        ctx.weight_VD = weight_VD
        return F.embedding(token_BS, weight_VD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BSD: Tensor) -> tuple[None, None]:
        (token_BS,), into_VD = ctx.saved_tensors, sink(ctx.weight_VD)
        assert into_VD is not None
        # sorted, not atomic: the same bits each time
        into_VD.index_put_((token_BS.flatten().long(),), dy_BSD.flatten(0, 1).to(into_VD.dtype), accumulate=True)
        return None, None

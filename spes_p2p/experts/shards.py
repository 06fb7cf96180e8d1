"""Values whose rows are dealt to the ranks of a peer, and how they come together (`optimizer.sharding`).

`Share` says whose row is whose. A dealt parameter keeps its shape, its gradient and its hooks, but has no memory: each
rank has its own rows beside it, in fp32, and whoever computes with it asks for the `whole`, in the dtype in which it
computes. That is a tensor like any other: autograd keeps it for as long as somebody needs it in the backward pass, and
a layer that is computed again asks again. Under autocast it takes the place of the copy that this makes of a weight.

Not torch's `fully_shard`, which does run here, with gloo on a CPU too. What belongs to the outermost module it keeps
whole from the first layer to the last and back: embedding and head, of which one is wanted for a lookup and the other
for the loss. So it took more than zero2 does where it was tried (tests/planning/test_peak.py). It gathers fp32 beside
autocast's copies, or else all in bf16, the router too, which must be fp32. And it gathers always: a rank that runs out
of memory in a trial would leave the others waiting.

All ranks must ask for the same things in the same order. Leaves out gradients and moments (train/kept_gradients.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

_OWN = "_spes_own_rows"


@dataclass(eq=False)
class Share:
    """Which rows of each tensor are a rank's: all of them where it is `of` one."""

    rank: int = 0
    of: int = 1
    group: dist.ProcessGroup | None = None
    exchanges: bool = True
    """Off in a trial for which nobody shall wait: zeros stand in for what others have."""

    def rows(self, count: int, rank: int | None = None) -> slice:
        """This rank's, or another's, of `count` rows; there may be none."""
        rank = self.rank if rank is None else rank
        return slice(count * rank // self.of, count * (rank + 1) // self.of)

    def gathered(self, own: Tensor, count: int) -> Tensor:
        """[count, ...] from the rows `own` of each rank; where there is but one, the very tensor."""
        if self.of == 1:
            return own
        whole = own.new_empty(count, *own.shape[1:])
        mine = self.rows(count)
        if not self.exchanges:
            whole.zero_()[mine] = own
            return whole
        as_bytes = whole.view(torch.uint8)  # NCCL has no int16
        if count % self.of == 0:
            # its name since torch 2.13, and before
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            gather(as_bytes, own.contiguous().view(torch.uint8), group=self.group)
            return whole
        whole[mine] = own
        parts = [as_bytes[self.rows(count, rank)] for rank in range(self.of)]
        filled = [(rank, part) for rank, part in enumerate(parts) if part.numel()]
        for work in [dist.broadcast(part, rank, group=self.group, async_op=True) for rank, part in filled]:
            work.wait()
        return whole


@dataclass(frozen=True)
class _Own:
    """A rank's rows of a dealt parameter, in fp32."""

    rows: Tensor
    share: Share


@torch.no_grad()
def deal(parameter: nn.Parameter, share: Share) -> None:
    """Keeps this rank's rows of a parameter, and frees its memory."""
    rows = parameter.detach()[share.rows(len(parameter))].clone()
    setattr(parameter, _OWN, _Own(rows, share))
    parameter.untyped_storage().resize_(0)


def own_rows(parameter: Tensor) -> Tensor | None:
    """What there is here of a dealt parameter; None where all of it is."""
    own = _own_of(parameter)
    return None if own is None else own.rows


def whole(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """A parameter to be computed with: the very one, or one that is dealt in `dtype`, whose gradient it gets."""
    return parameter if _own_of(parameter) is None else _gathered(parameter, dtype)


def read(parameter: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of a parameter without gradient, in `dtype`: the very ones where that changes nothing."""
    own = _own_of(parameter)
    if own is None:
        return parameter.detach().to(dtype)
    return own.share.gathered(own.rows.to(dtype), len(parameter))


@torch.no_grad()
def write(parameter: Tensor, values: Tensor) -> None:
    """Takes over all values of a parameter, or this rank's of them."""
    own = _own_of(parameter)
    if own is None:
        parameter.copy_(values)
    else:
        own.rows.copy_(values[own.share.rows(len(values))])


def _own_of(parameter: Tensor) -> _Own | None:
    return cast("_Own | None", getattr(parameter, _OWN, None))


def _gathered(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    return cast(Tensor, _Whole.apply(parameter, dtype))


@cache
def stay_out_of_graphs() -> None:
    """Compiled code asks for the whole of a dealt parameter outside of its graphs from now on.

    For whoever compiles: a decorator would load torch's compiler everywhere, which takes more than a second.
    """
    global _gathered
    _gathered = torch.compiler.disable(_gathered)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        return read(parameter, dtype)

    @staticmethod
    def backward(ctx: Any, d_whole: Tensor) -> tuple[Tensor, None]:
        return d_whole, None

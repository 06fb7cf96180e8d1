"""The gradient of one inner step: micro-batches, weighted so that together they equal one big batch.

Cross entropy and output z-loss weigh each micro-batch by its targets, router z-loss by its sequences. The
load-balancing loss is a product of two means over one micro-batch (design section 3), so it alone depends on how the
batch was cut. Leaves out what is done with the gradient.

Legend: B sequences, S positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from spes_p2p.data.loader import Batch
from spes_p2p.experts.kernels import half_dtype
from spes_p2p.model.losses import LossParts
from spes_p2p.train.ddp import Ranks, agreed

ShouldDrop = Callable[[float], bool]
"""Asked between two micro-batches with the share of them that is done: whether to give the step up."""


def never(share: float) -> bool:
    """The step is made whole."""
    return False


@dataclass(frozen=True)
class StepResult:
    """What one inner step did; losses are means over the whole peer's batch."""

    step: int
    """Global step after this one: the committed one plus the own steps of this round."""
    loss: float
    """Cross entropy, nats a target token."""
    load_balancing: float
    router_z: float
    output_z: float
    """`output_z`, `load_balancing` and `router_z` are without their weights."""
    tokens: int
    """Tokens of the batch, all ranks together, also where the step was skipped."""
    grad_norm: float
    """Before clipping."""
    lr: float
    seconds: float
    skipped: bool
    """Loss or gradient was not finite: no parameter was changed."""
    expert_counts: tuple[tuple[int, ...], ...]
    """(token, slot) pairs that went to each expert, of each layer."""


class MicroBatch(NamedTuple):
    """A part of the batch with its weights."""

    token_BS: Tensor
    counted_B: Tensor
    counted: int
    """Sequences whose tokens are targets."""
    weight: float
    """Of its total loss; the ranks' gradients are averaged, hence times their number."""
    head_factor: float
    """What its targets weigh beside its sequences; 1 where no sequence is masked."""


def micro_batches(batch: Batch, ranks: Ranks, sequences: int) -> Iterator[MicroBatch]:
    """This rank's share of the peer's `batch` in parts of at most `sequences`."""
    whole, counted_whole = len(batch.tokens), int(batch.loss_mask.sum())
    share = whole // ranks.world_size
    own = slice(ranks.rank * share, (ranks.rank + 1) * share)
    mask_B = batch.loss_mask[own]
    on_device = to_device(batch.tokens[own], ranks.device), to_device(mask_B, ranks.device)
    for start, (token_BS, counted_B) in zip(count(0, sequences), zip(*(part.split(sequences) for part in on_device))):
        size, counted = len(token_BS), int(mask_B[start : start + sequences].sum())
        yield MicroBatch(
            token_BS,
            counted_B,
            counted,
            weight=ranks.world_size * size / whole,
            head_factor=counted * whole / (counted_whole * size) if counted else 0.0,
        )


def accumulate_gradient(  # noqa: PLR0913 (who, what, how)
    forward: nn.Module,
    batch: Batch,
    ranks: Ranks,
    sequences: int,
    owned_balance_factor: float,
    exchange: bool = True,
    should_drop: ShouldDrop = never,
    loss_scale: float = 1.0,
) -> tuple[Tensor, Tensor] | None:
    """Adds up the gradient, times `loss_scale`, over all micro-batches.

    `forward` is the model, or what ranks have around it. Without `exchange` each rank keeps its own, whatever happens
    to the others. None, with a part of the gradient left behind, where rank 0's `should_drop` said so; then no rank has
    begun to exchange what belongs to the next micro-batch.
    Returns this rank's sums, in `sum_dtype` on the device: [4], cross entropy and output z-loss times counted
    sequences, load balancing and router z-loss times sequences; and [L, E], the assignments of each expert in each
    layer.
    """
    dtype = sum_dtype(ranks.device)
    sums, count_LE = (torch.zeros(shape, dtype=dtype, device=ranks.device) for shape in ((4,), ()))
    parts = list(micro_batches(batch, ranks, sequences))
    for index, micro in enumerate(parts):
        if exchange and index and agreed(ranks, should_drop(index / len(parts))):
            return None
        with _sync_gradients(forward, exchange and index == len(parts) - 1):
            with autocast(ranks.device):
                factors = owned_balance_factor, micro.head_factor, micro.weight * loss_scale
                losses: LossParts = forward(micro.token_BS, micro.counted_B, *factors)
            losses.total.backward()
        sums[:2] += torch.stack((losses.cross_entropy, losses.output_z)) * micro.counted
        sums[2:] += torch.stack((losses.load_balancing, losses.router_z)) * len(micro.token_BS)
        count_LE = count_LE + losses.count_LE
    return sums, count_LE


def sum_dtype(device: torch.device) -> torch.dtype:
    """What sums over a step are in: fp64, which Apple's GPUs do not have."""
    return torch.float32 if device.type == "mps" else torch.float64


def autocast(device: torch.device) -> AbstractContextManager[object]:
    """bf16 on CUDA (fp16 on older cards), fp32 elsewhere."""
    return torch.autocast("cuda", half_dtype(device)) if device.type == "cuda" else nullcontext()


def pinned(batch: Batch) -> Batch:
    """The same batch in memory that a GPU reads by itself. Must be kept until the step has ended."""
    tokens, loss_mask = (torch.from_numpy(part).pin_memory().numpy() for part in (batch.tokens, batch.loss_mask))
    return Batch(tokens, loss_mask, batch.positions)


def to_device(values: NDArray[np.generic], device: torch.device) -> Tensor:
    """A copy of `values` on the device. Nobody waits for it on a GPU: what is not pinned is pinned first."""
    if device.type != "cuda":
        return torch.from_numpy(np.array(values)).to(device)
    here = torch.from_numpy(values if values.flags.writeable else np.array(values))
    return here.pin_memory().to(device, non_blocking=True)  # pinned memory stays as it is


def _sync_gradients(forward: nn.Module, exchange: bool) -> AbstractContextManager[object]:
    """Ranks exchange gradients once a step, in the backward pass of the last micro-batch."""
    no_sync = getattr(forward, "no_sync", None)
    return nullcontext() if exchange or no_sync is None else no_sync()

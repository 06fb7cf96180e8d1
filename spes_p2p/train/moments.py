"""Optimizer moments of one column out of a rank's optimizer, and into it: what a new owner takes over.

Flat arrays are laid out like the column's block of the state, whatever the optimizer's own order is.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from spes_p2p.model.params import ExpertPlace
from spes_p2p.state.layout import Values
from spes_p2p.state.moments import NO_MOMENTS, Moments
from spes_p2p.train.ddp import broadcast_array
from spes_p2p.train.optim import MOMENTS
from spes_p2p.train.rank import RankTrainer


def read_moments(trainer: RankTrainer, column: int) -> Moments:
    """A copy; without steps and arrays for an owned column that was never trained here."""
    group = next(group for group in trainer.optimizer.groups if group.column == column)
    names = [name for name, _, _ in _pieces(trainer, column)]
    if not group.steps or any(name not in group.moments for name in names):
        return NO_MOMENTS
    mean, square = (torch.cat([group.moments[name][which].reshape(-1).cpu() for name in names]) for which in MOMENTS)
    return Moments(group.steps, mean.numpy(), square.numpy())


def take_moments(trainer: RankTrainer, column: int, steps: int, moments: Moments | None) -> None:
    """Puts moments in the place of those of an owned column; `moments` itself on rank 0 alone."""
    size = trainer.layout.blocks[1 + column].size
    flat = [
        broadcast_array(trainer.ranks, None if moments is None else values, size)
        for values in ((None, None) if moments is None else (moments.mean, moments.square))
    ]
    taken = {
        name: {which: _like(parameter, values[part]) for which, values in zip(MOMENTS, flat, strict=True)}
        for name, parameter, part in _pieces(trainer, column)
    }
    trainer.optimizer.restore(column, True, steps, taken)


def _pieces(trainer: RankTrainer, column: int) -> Iterator[tuple[str, Tensor, slice]]:
    """(name in the optimizer, parameter, part of the flat array) in the order of the block."""
    group = next(group for group in trainer.optimizer.groups if group.column == column)
    start = 0
    for place in trainer.places(1 + column):
        assert isinstance(place, ExpertPlace)
        name = f"layers.{place.layer}.{place.which}"
        parameter = group.tensors[name].detach()
        yield name, parameter, slice(start, start + parameter.numel())
        start += parameter.numel()


def _like(parameter: Tensor, values: Values) -> Tensor:
    return torch.from_numpy(np.array(values)).view(parameter.shape).to(parameter.device)

"""Optimizer moments of one column out of a rank's optimizer, and into it: what a new owner takes over.

Flat arrays are laid out like the column's block of the state and fp32, whatever the optimizer's own order and way to
keep them are.
"""

from __future__ import annotations

import numpy as np
import torch

from spes_p2p.state.moments import NO_MOMENTS, Moments, within_bounds
from spes_p2p.train.ddp import broadcast_array
from spes_p2p.train.moment_store import MOMENTS, form_of, is_packed, unpacked
from spes_p2p.train.rank import RankTrainer


def read_moments(trainer: RankTrainer, column: int) -> Moments:
    """A copy, on rank 0; without steps and arrays for an owned column never trained here, or trained by Muon."""
    group = next(group for group in trainer.optimizer.groups if group.column == column)
    pieces = list(trainer.trained.column_pieces(column))
    if not group.steps or any(name not in group.moments for name, _, _ in pieces):
        return NO_MOMENTS
    if any(form_of(group.moments[name]) == "momentum" for name, _, _ in pieces):
        return NO_MOMENTS  # it forgets within twenty steps
    whole = {name: trainer.whole_moments(group, name) for name in group.moments}
    if trainer.ranks.rank:
        return NO_MOMENTS
    flat = {which: np.empty(pieces[-1][2].stop, np.float32) for which in MOMENTS}
    for name, rows, part in pieces:
        for which, values in unpacked(whole[name]).items():
            flat[which][part] = values[rows].reshape(-1).cpu().numpy()
    moments, settings = Moments(group.steps, *flat.values()), trainer.config.optimizer
    if any(is_packed(group.moments[name]) for name, _, _ in pieces):
        return within_bounds(moments, settings.betas, settings.grad_clip)
    return moments


def take_moments(trainer: RankTrainer, column: int, steps: int, moments: Moments | None = None) -> None:
    """Puts moments in the place of those of an owned column; `moments` itself on rank 0 alone."""
    size = trainer.layout.blocks[1 + column].size
    flat = [
        broadcast_array(trainer.ranks, None if moments is None else values, size)
        for values in ((None, None) if moments is None else (moments.mean, moments.square))
    ]
    group = next(group for group in trainer.optimizer.groups if group.column == column)
    taken = {
        name: {which: torch.empty_like(parameter.detach()) for which in MOMENTS}
        for name, parameter in group.tensors.items()
    }
    for name, rows, part in trainer.trained.column_pieces(column):
        for which, values in zip(MOMENTS, flat, strict=True):
            target = taken[name][which][rows]
            target.copy_(torch.from_numpy(np.array(values[part])).view_as(target))
    kept = {name: trainer.optimizer.kept(group, name, moments) for name, moments in taken.items()}
    trainer.optimizer.restore(column, True, steps, kept)

"""The optimizer moments of one expert column as numbers that can go from peer to peer, and what they must obey.

A new owner may take them over from a former one. AdamW's moments are averages of gradients whose norm was clipped, so
that they have bounds; what keeps within them can slow a column down for some steps, but cannot spoil it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from spes_p2p.errors import RemoteProtocolError
from spes_p2p.state.layout import Values

MOST_STEPS = 2**40
_SLACK = 1.01
_SMALLEST = 1e-18
"""Below this a gradient's square has no digits left in fp32."""
_CHUNK_VALUES = 2**22


@dataclass(frozen=True)
class Moments:
    """Flat fp32, laid out like the column's block: the running mean of the gradients, and of their squares.

    `steps` is how many optimizer steps they have seen: the count of the bias correction.
    """

    steps: int
    mean: Values
    square: Values


NO_MOMENTS = Moments(0, np.empty(0, np.float32), np.empty(0, np.float32))
"""Of a column that was never trained."""


def check_moments(moments: Moments, betas: tuple[float, float], grad_clip: float) -> None:
    """Raises RemoteProtocolError for moments that no training with these settings can have.

    With m = (1 - b1) sum b1^i g_i and v = (1 - b2) sum b2^i g_i^2, Cauchy and Schwarz give
    m^2 <= v (1 - b1)^2 / ((1 - b2) (1 - b1^2 / b2)) wherever b1^2 < b2; and the sum of v over all values is at most
    the square of the norm that gradients are clipped to.
    """
    if not 0 < moments.steps <= MOST_STEPS:
        raise RemoteProtocolError(f"optimizer moments with a step count of {moments.steps}, which is not possible")
    factor, total = _mean_over_root(betas), 0.0
    for start in range(0, len(moments.mean), _CHUNK_VALUES):
        mean, square = (part[start : start + _CHUNK_VALUES] for part in (moments.mean, moments.square))
        if not (np.isfinite(mean).all() and np.isfinite(square).all()):
            raise RemoteProtocolError("optimizer moments that are not finite")
        if (square < 0).any():
            raise RemoteProtocolError("optimizer moments with a negative mean of squares")
        if (np.abs(mean) > _SLACK * factor * np.sqrt(square) + _SMALLEST).any():
            raise RemoteProtocolError("optimizer moments whose mean is larger than their mean of squares allows")
        total += float(square.sum(dtype=np.float64))
    if total > _SLACK * grad_clip**2:
        raise RemoteProtocolError(f"optimizer moments of gradients with a norm of {math.sqrt(total):.3g} or more")


def within_bounds(moments: Moments, betas: tuple[float, float], grad_clip: float) -> Moments:
    """Moments that were rounded, made to stand `check_moments`. In place."""
    factor = _mean_over_root(betas)
    excess = float(moments.square.sum(dtype=np.float64)) / grad_clip**2
    for start in range(0, len(moments.mean), _CHUNK_VALUES):
        mean, square = (part[start : start + _CHUNK_VALUES] for part in (moments.mean, moments.square))
        if excess > 1:
            square /= excess
        if math.isfinite(factor):
            largest = factor * np.sqrt(square)
            np.clip(mean, -largest, largest, out=mean)
    return moments


def _mean_over_root(betas: tuple[float, float]) -> float:
    beta1, beta2 = betas
    if beta1**2 >= beta2:  # no bound
        return math.inf
    return (1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1**2 / beta2))

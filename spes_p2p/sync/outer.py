"""The outer optimizer: what becomes of the state when a round has averaged what was trained (design section 3.6).

DiLoCo (arXiv 2311.08105) takes the averaged change of a round for a gradient, and makes a step of SGD with Nesterov
momentum, as torch.optim.SGD(nesterov=True) does, with learning rate 0.7 and momentum 0.9. Everybody makes the step on
the values that a round hands out, tile by tile, so the bits must be the same everywhere; per value, in IEEE fp32, each
operation rounded on its own (no fused multiply-add):

    d = mean - before           mean: what the round handed out, decoded; before: the committed value
    v = v * fp32(momentum)      v: the committed momentum, zero in genesis
    v = v + d                   the new momentum
    s = v * fp32(momentum)
    s = s + d
    s = s * fp32(lr)
    new = before + s

A tile that the round hands out nothing of keeps value and momentum. The merge comes after it, moves values only and is
not part of any d. Needs only numpy; knows neither rounds nor peers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spes_p2p.consensus.rules import RunRules
from spes_p2p.state.layout import Values


@dataclass(frozen=True)
class Nesterov:
    """SGD with Nesterov momentum on the averaged changes of rounds."""

    lr: float
    momentum: float

    def step(self, mean: Values, before: Values, velocity: Values) -> tuple[Values, Values]:
        """(new values, new momentum), flat fp32; the operands are left as they are."""
        momentum = np.float32(self.momentum)
        with np.errstate(invalid="ignore", over="ignore"):  # what is not finite is for others to find
            change = np.subtract(mean, before)
            kept: Values = np.multiply(velocity, momentum)
            np.add(kept, change, out=kept)
            new: Values = np.multiply(kept, momentum)
            np.add(new, change, out=new)
            np.multiply(new, np.float32(self.lr), out=new)
            np.add(new, before, out=new)
        return new, kept


def outer_of(rules: RunRules) -> Nesterov | None:
    """None in a run in which the mean is the new state."""
    return None if rules.outer is None else Nesterov(*rules.outer)

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

Rate and momentum are meant for a number of inner steps between two such steps (500 in DiLoCo). With `sync.outer_steps`
H0 they follow the n inner steps that there are in truth. AutoLoCo (arXiv 2609.36662) corrects both too; the formula
is our own:

    momentum' = momentum ** (n / H0)                    what was learnt fades as fast, by inner steps
    lr' = lr * (1 - momentum') / (1 - momentum)         a lasting change adds up to as much in the end

n is what the parent manifest says that the round has, times the rounds between two times that the tile is handed out.

A tile that the round hands out nothing of keeps value and momentum. The merge comes after it, moves values only and is
not part of any d. Needs only numpy; knows neither rounds nor peers.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Context, Decimal

import numpy as np

from spes_p2p.consensus.manifest import Manifest
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

    def over(self, steps: int, meant: int) -> Nesterov:
        """The same for `steps` inner steps, where this one is for `meant` (0: for any number)."""
        if steps == meant or not meant or not self.momentum:
            return self
        exact = Context(prec=30)  # the same digits on all machines, which libm's pow does not promise
        momentum = exact.exp(exact.ln(Decimal(self.momentum)) * steps / meant)
        lr = Decimal(self.lr) * (1 - momentum) / (1 - Decimal(self.momentum))
        return Nesterov(float(lr), float(momentum))


@dataclass(frozen=True)
class OuterSteps:
    """Those that a round makes."""

    shared: Nesterov
    columns: Nesterov

    def of(self, block: int) -> Nesterov:
        return self.columns if block else self.shared


def outer_steps(rules: RunRules, parent: Manifest) -> OuterSteps | None:
    """Those of the round on top of `parent`; None in a run in which the mean is the new state."""
    if rules.outer is None:
        return None
    lr, momentum, meant = rules.outer
    turns = rules.fragments, rules.expert_rounds
    return OuterSteps(*(Nesterov(lr, momentum).over(parent.steps_per_round * rounds, meant) for rounds in turns))

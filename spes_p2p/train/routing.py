"""How evenly the router spreads tokens over the experts, added up over inner steps: what this peer says of it.

Counts only; nothing is decided by it. The counts come with the losses of a step (`StepResult.expert_counts`).
"""

from __future__ import annotations

import numpy as np

from spes_p2p.observe.events import ExpertLoad
from spes_p2p.train.step import StepResult

_DIGITS = 4


class LoadMeter:
    """Adds up steps until they are taken."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._count_LE = np.zeros((0, 0), np.int64)
        self._tokens = self._step = 0

    def add(self, result: StepResult) -> None:
        """Skipped steps are left out: what is not finite is routed anywhere."""
        if result.skipped:
            return
        count_LE = np.array(result.expert_counts, np.int64)
        self._count_LE = self._count_LE + count_LE if self._tokens else count_LE
        self._tokens, self._step = self._tokens + result.tokens, result.step

    def take(self, round: int) -> ExpertLoad | None:
        """What was added since the last call, as work for `round`; None where that is nothing."""
        if not self._tokens:
            return None
        count_LE, tokens, step = self._count_LE, self._tokens, self._step
        self._clear()
        load_LE = (count_LE / count_LE.mean(axis=1, keepdims=True)).round(_DIGITS)
        mean, highest, lowest = load_LE.mean(axis=0).round(_DIGITS), load_LE.max(axis=0), load_LE.min(axis=0)
        return ExpertLoad(round, step, tokens, *(tuple(map(float, part.tolist())) for part in (mean, highest, lowest)))

"""Which inner steps become events: one in so many, each with what was trained since the one before."""

from __future__ import annotations

from collections.abc import Callable

from spes_p2p.observe.events import Step
from spes_p2p.train.step import StepResult


class StepLog:
    """Counts across rounds, which may be shorter than the pause between two events."""

    def __init__(self, every: int, emit: Callable[[Step], None]) -> None:
        self._every, self._emit = every, emit
        self._clear()

    def _clear(self) -> None:
        self._newest: StepResult | None = None
        self._steps = self._tokens = 0
        self._seconds = 0.0

    def add(self, result: StepResult) -> None:
        """Skipped steps are left out: they trained nothing, and their numbers are not finite."""
        if result.skipped:
            return
        self._newest = result
        self._steps += 1
        self._tokens += result.tokens
        self._seconds += result.seconds
        if self._steps >= self._every:
            self.flush()

    def flush(self) -> None:
        """Emits what has no event yet, as at the end, when no step would come that does."""
        newest, tokens, seconds = self._newest, self._tokens, self._seconds
        if newest is None:
            return
        self._clear()
        self._emit(Step(newest.step, newest.loss, tokens, tokens / max(seconds, 1e-9), newest.lr, newest.grad_norm))

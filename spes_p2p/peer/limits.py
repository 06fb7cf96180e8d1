"""When a peer's inner steps end: its round closes or is over, somebody wants the machine, or the peer is to go."""

from __future__ import annotations

import time

from spes_p2p.peer.connection import Connection
from spes_p2p.peer.pausing import PauseSwitch
from spes_p2p.train.machine import TrainerMachine

DROP_SHARE = 0.5
"""A step of which less is done is given up when its round closes."""
PAUSE_GRACE_SECONDS = 15.0
PAUSE_LOOK_SECONDS = 0.2


class StepLimits:
    """Asked by the training thread, before and within inner steps."""

    def __init__(
        self, connection: Connection, machine: TrainerMachine, pause: PauseSwitch, last_round: int | None
    ) -> None:
        """`last_round`: with which this peer is done by its own choice."""
        self._connection = connection
        self._gate = connection.gate
        self._machine = machine
        self._pause = pause
        self._last_round = last_round

    @property
    def end(self) -> int | None:
        """The round with which this peer is done: by its own choice, or because the organiser ends the run."""
        known = [last for last in (self._last_round, self._connection.last_round) if last is not None]
        return min(known, default=None)

    def is_over(self) -> bool:
        """Whether the last round is committed."""
        return self.end is not None and self._machine.newest >= self.end

    def should_stop(self) -> bool:
        """Whether to end the round after the running step."""
        return self._pause.active or self._gate.should_stop() or self.is_over()

    def should_drop(self, share: float) -> bool:
        """Whether to give up a step of which `share` is done. Raises what the peer failed with.

        Somebody who wants the machine, or wants us to leave, is not kept waiting. At the end of a round those who wait
        for us wait for less than half a step; and who has nothing else to hand in makes its step all the same, or a
        peer whose step takes longer than the others' round would never get anywhere.
        """
        if self.must_end(share):
            return True
        has_work = bool(self._machine.work.tokens or self._machine.own_steps)
        return has_work and share < DROP_SHARE and self._gate.should_stop()

    def must_end(self, share: float = 0.0) -> bool:
        """The same of a step that nobody waits for."""
        self._gate.check()
        return self._pause.active or self._gate.stopping or self.is_over()

    def has_news(self) -> bool:
        """Whether to end, after the running step, what is trained ahead."""
        return self._pause.active or self._gate.has_news() or self.is_over()

    def is_short_pause(self) -> bool:
        """Waits for a moment whether a pause is over again: once handed in, a peer trains in the next round only."""
        until = self._pause.since + PAUSE_GRACE_SECONDS
        while self._pause.active and not self._gate.should_stop() and time.monotonic() < until:
            self._pause.wait(PAUSE_LOOK_SECONDS)
        return not self._pause.active and not self._gate.should_stop()

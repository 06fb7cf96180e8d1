"""How long to wait: deadlines learnt from observed times, with floors and caps, never from a constant to guess.

Pure: time comes in as numbers of a monotonic clock. One `Pace` belongs to one peer and outlives rounds. What is learnt
are high quantiles of the last durations, so that one fault among many good messages moves nothing.
"""

from __future__ import annotations

from collections import deque

Moment = float
"""Seconds of the clock that comes in with every event. Fields that hold one are annotated so: a search shifts them."""
NEVER: Moment = float("-inf")
Seconds = float
"""A duration."""


class Window:
    """The last durations of one kind."""

    SIZE = 32

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=self.SIZE)
        self._stale = 0
        self.high = 0.0
        """A duration that only the longest eighth of the last ones exceeds, or the longest alone; 0 without two."""

    def observe(self, seconds: float) -> bool:
        """Takes one more duration in; whether `high` has changed. It is worked out for every eighth only."""
        self._last.append(seconds)
        self._stale += 1
        if self._stale < 8 and len(self._last) > 8:
            return False
        before, self._stale = self.high, 0
        ahead = max(1, len(self._last) // 8)
        self.high = sorted(self._last)[-1 - ahead] if len(self._last) > ahead else 0.0
        return self.high != before


class Pace:
    """The learnt rhythm of a run as one peer sees it."""

    SUSPECT_CAP_SECONDS = 60.0
    DEADLINE_CAP_SECONDS = 600.0
    CLOSE_SHARE = 0.8
    """The round closes when those who are ready have this share of the tokens that all have trained by now."""
    HALF = 0.5
    WAIT_SHARE = 0.1
    """It also closes if they have half, and the next peer to be ready would take over this much of the round."""

    def __init__(self, heartbeat_seconds: float) -> None:
        self.heartbeat_seconds = heartbeat_seconds
        self._gap = Window()
        self._quiet = Window()
        self._rounds: deque[float] = deque(maxlen=5)
        self.suspect_seconds = 4 * heartbeat_seconds
        """A peer that was not heard for this long is taken for lost."""
        self._deadline = 6 * heartbeat_seconds

    def observe_gap(self, seconds: float) -> None:
        """Time between two statuses of one peer; a silence for which we suspect it says little of its rhythm."""
        self._learn(self._gap, min(seconds, self.suspect_seconds))

    def observe_quiet(self, seconds: float) -> None:
        """Time between two signs of progress inside a sync."""
        self._learn(self._quiet, min(seconds, self._deadline))

    def _learn(self, window: Window, seconds: float) -> None:
        """Updates the cached deadlines, which are needed with every message and change rarely."""
        if window.observe(seconds):
            self.suspect_seconds = min(max(4 * self.heartbeat_seconds, 3 * self._gap.high), self.SUSPECT_CAP_SECONDS)
            self._deadline = max(6 * self.heartbeat_seconds, 1.5 * self.suspect_seconds, 3 * self._quiet.high)

    def observe_round(self, seconds: float) -> None:
        """Training time of a round: from commit to close, or more where it began before the commit."""
        self._rounds.append(seconds)

    @property
    def round_seconds(self) -> float:
        """Learnt training time of a round (the median of the last); 0 while nothing is learnt."""
        return sorted(self._rounds)[len(self._rounds) // 2] if self._rounds else 0.0

    def deadline_seconds(self, ballot: int) -> float:
        """Without progress for this long the next leader takes over; doubles with each ballot."""
        return min(self._deadline * 2.0 ** min(ballot, 8), self.DEADLINE_CAP_SECONDS)

    def slice_seconds(self, rank: int) -> float:
        """A reducer that shows no progress for this long loses its slices to the next in order; doubles by rank.

        Half of a leader's deadline, so that one stuck reducer does not cost the leader its ballot.
        """
        return 0.5 * self.deadline_seconds(rank)

    def arrival_seconds(self) -> float:
        """For this many seconds after a commit, members that have not received it yet count as training on it."""
        return max(2 * self.heartbeat_seconds, self.WAIT_SHARE * self.round_seconds)

    def last_step_seconds(self, trained_seconds: float) -> float:
        """Longest wait for running steps after the close of a round that was trained for `trained_seconds`.

        Four rounds: a step may well take longer than a round, but peers that say so may be wrong.
        """
        return 4 * max(trained_seconds, self.round_seconds, self.deadline_seconds(0))

    def stranger_seconds(self) -> float:
        """The longest step of a stranger that a round waits for (twice as long): it may say so in every round."""
        return self.WAIT_SHARE * self.round_seconds

    def close_after_seconds(self, ready_seconds: list[float], most: bool = False) -> float:
        """Training time after which the round closes without those who are late.

        The learnt time and a quarter; 1.5 medians of those who are ready while nothing is learnt. Where `most` of the
        members are ready their median is enough: the learnt time may have been that of a slow peer.
        """
        median = sorted(ready_seconds)[len(ready_seconds) // 2] if ready_seconds else 0.0
        learnt = self.round_seconds or 1.5 * median
        return 1.25 * (min(learnt, median) if most else learnt) + 2 * self.heartbeat_seconds

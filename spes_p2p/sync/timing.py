"""How long to wait: deadlines learnt from observed times, with floors and caps, never from a constant to guess.

Pure: time comes in as numbers of a monotonic clock. One `Pace` belongs to one peer and outlives rounds. What is learnt
are high quantiles of the last durations, so that one fault among many good messages moves nothing.
"""

from __future__ import annotations

from collections import deque


class Window:
    """The last durations of one kind, and one that is exceeded by an eighth of them."""

    SIZE = 32

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=self.SIZE)
        self._high = 0.0
        self._stale = 0

    def observe(self, seconds: float) -> None:
        self._last.append(seconds)
        self._stale += 1

    @property
    def high(self) -> float:
        """A duration that only the longest eighth of the last ones exceeds, or the longest alone; 0 without two."""
        if self._stale >= 8 or (self._stale and len(self._last) <= 8):  # sorting at each message would cost more
            ahead = max(1, len(self._last) // 8)
            self._high = sorted(self._last)[-1 - ahead] if len(self._last) > ahead else 0.0
            self._stale = 0
        return self._high


class Pace:
    """The learnt rhythm of a run as one peer sees it."""

    SUSPECT_CAP_SECONDS = 60.0
    DEADLINE_CAP_SECONDS = 600.0
    CLOSE_SHARE = 0.8
    """The round closes when those who are ready trained this share of what the members train in a round."""

    def __init__(self, heartbeat_seconds: float) -> None:
        self.heartbeat_seconds = heartbeat_seconds
        self._gap = Window()
        self._quiet = Window()
        self._rounds: deque[float] = deque(maxlen=5)

    def observe_gap(self, seconds: float) -> None:
        """Time between two statuses of one peer; a silence for which we suspect it says little of its rhythm."""
        self._gap.observe(min(seconds, self.suspect_seconds))

    def observe_quiet(self, seconds: float) -> None:
        """Time between two signs of progress inside a sync."""
        self._quiet.observe(min(seconds, self.deadline_seconds(0)))

    def observe_round(self, seconds: float) -> None:
        """Training time of a round, from commit to close."""
        self._rounds.append(seconds)

    @property
    def round_seconds(self) -> float:
        """Learnt training time of a round (the median of the last); 0 while nothing is learnt."""
        return sorted(self._rounds)[len(self._rounds) // 2] if self._rounds else 0.0

    @property
    def suspect_seconds(self) -> float:
        """A peer that was not heard for this long is taken for lost."""
        return min(max(4 * self.heartbeat_seconds, 3 * self._gap.high), self.SUSPECT_CAP_SECONDS)

    def deadline_seconds(self, ballot: int) -> float:
        """Without progress for this long the next leader takes over; doubles with each ballot."""
        floor = max(6 * self.heartbeat_seconds, 1.5 * self.suspect_seconds)
        return min(max(floor, 3 * self._quiet.high) * 2.0 ** min(ballot, 8), self.DEADLINE_CAP_SECONDS)

    def slice_seconds(self, rank: int) -> float:
        """A reducer that shows no progress for this long loses its slices to the next in order; doubles by rank.

        Half of a leader's deadline, so that one stuck reducer does not cost the leader its ballot.
        """
        return 0.5 * self.deadline_seconds(rank)

    def degraded_wait_seconds(self, all_refused: bool) -> float:
        """How long a majority must be unheard before a minority goes on without it (design section 4)."""
        deadline = self.deadline_seconds(0)
        return deadline if all_refused else max(10 * deadline, self.round_seconds)

    def close_after_seconds(self, ready_seconds: list[float]) -> float:
        """Training time after which the round closes without those who are late: the learnt one, else 1.5 medians."""
        learnt = self.round_seconds or 1.5 * sorted(ready_seconds)[len(ready_seconds) // 2]
        return 1.25 * learnt + 2 * self.heartbeat_seconds

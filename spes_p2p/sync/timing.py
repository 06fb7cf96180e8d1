"""How long to wait: deadlines learnt from observed times, with floors and caps, never from a constant to guess.

Pure: time comes in as numbers of a monotonic clock. One `Pace` belongs to one peer and outlives rounds.
"""

from __future__ import annotations

from dataclasses import dataclass

_GAIN = 0.125
_DEVIATION_GAIN = 0.25


@dataclass
class Estimate:
    """Smoothed mean and mean deviation of observed durations, as TCP keeps its round trip time (RFC 6298)."""

    mean: float = 0.0
    deviation: float = 0.0
    count: int = 0

    def observe(self, seconds: float) -> None:
        if self.count == 0:
            self.mean, self.deviation = seconds, seconds / 2
        else:
            self.deviation += _DEVIATION_GAIN * (abs(seconds - self.mean) - self.deviation)
            self.mean += _GAIN * (seconds - self.mean)
        self.count += 1

    @property
    def high(self) -> float:
        """A duration that is rarely exceeded."""
        return self.mean + 4 * self.deviation


class Pace:
    """The learnt rhythm of a run as one peer sees it."""

    SUSPECT_CAP_SECONDS = 60.0
    DEADLINE_CAP_SECONDS = 600.0
    CLOSE_SHARE = 0.8
    """The round closes when those who are ready trained this share of what the members train in a round."""

    def __init__(self, heartbeat_seconds: float) -> None:
        self.heartbeat_seconds = heartbeat_seconds
        self._gap = Estimate()
        self._quiet = Estimate()
        self._round = Estimate()

    def observe_gap(self, seconds: float) -> None:
        """Time between two statuses of one peer."""
        self._gap.observe(min(seconds, self.SUSPECT_CAP_SECONDS))

    def observe_quiet(self, seconds: float) -> None:
        """Time between two signs of progress inside a sync."""
        self._quiet.observe(min(seconds, self.DEADLINE_CAP_SECONDS))

    def observe_round(self, seconds: float) -> None:
        """Training time of a round, from commit to close."""
        self._round.observe(seconds)

    @property
    def round_seconds(self) -> float:
        """Learnt training time of a round; 0 while nothing is learnt."""
        return self._round.mean

    @property
    def suspect_seconds(self) -> float:
        """A peer that was not heard for this long is taken for lost."""
        floor = 4 * self.heartbeat_seconds
        return min(max(floor, 3 * self._gap.high), self.SUSPECT_CAP_SECONDS)

    def deadline_seconds(self, ballot: int) -> float:
        """Without progress for this long the next leader takes over; doubles with each ballot."""
        floor = max(6 * self.heartbeat_seconds, 1.5 * self.suspect_seconds)
        return min(max(floor, 3 * self._quiet.high) * 2.0 ** min(ballot, 8), self.DEADLINE_CAP_SECONDS)

    def degraded_wait_seconds(self, all_refused: bool) -> float:
        """How long a majority must be unheard before a minority goes on without it (design section 4)."""
        deadline = self.deadline_seconds(0)
        return deadline if all_refused else max(10 * deadline, self.round_seconds)

    def close_after_seconds(self, ready_seconds: list[float]) -> float:
        """Training time after which the round closes without those who are late: the learnt one, else 1.5 medians."""
        learnt = self.round_seconds or 1.5 * sorted(ready_seconds)[len(ready_seconds) // 2]
        return 1.25 * learnt + 2 * self.heartbeat_seconds

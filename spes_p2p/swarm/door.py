"""How much others may take of this peer's time: a rate for each caller, and one for all strangers together.

Members are few and known, so each has a rate of its own, far above what a round needs. Keys cost nothing, so strangers
share one beside theirs: any number of them takes no more than that, and none of it from members.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from spes_p2p.ids import PeerId
from spes_p2p.swarm.ports import Clock, LoopClock, anybody

MOST_CALLERS = 4096
"""Callers whose use is remembered; those not heard for longest are forgotten first."""


@dataclass(frozen=True)
class Rate:
    """So many units a second; up to `burst` of them at once, after a pause."""

    per_second: float
    burst: float


@dataclass(frozen=True)
class DoorLimits:
    """Of one member, of one stranger, and of all strangers together."""

    member: Rate
    stranger: Rate
    strangers: Rate


class _Bucket:
    def __init__(self, rate: Rate, now: float) -> None:
        self._rate, self.left, self._at = rate, rate.burst, now

    def fill(self, now: float) -> None:
        self.left = min(self._rate.burst, self.left + (now - self._at) * self._rate.per_second)
        self._at = now


class Door:
    """Lets callers in as long as they keep to `limits`. Used on the event loop."""

    def __init__(
        self, limits: DoorLimits, is_member: Callable[[PeerId], bool] = anybody, clock: Clock | None = None
    ) -> None:
        """`clock` None: the event loop's."""
        self._limits, self._is_member, self._clock = limits, is_member, clock or LoopClock()
        self._callers: OrderedDict[tuple[PeerId, bool], _Bucket] = OrderedDict()
        self._strangers: _Bucket | None = None

    def admits(self, caller: PeerId, amount: float = 1.0) -> bool:
        """Whether `caller` may take so much now; it is then taken. Who is in debt may not take even nothing."""
        buckets = self._buckets(caller)
        if any(amount > bucket.left for bucket in buckets):
            return False
        for bucket in buckets:
            bucket.left -= amount
        return True

    def charge(self, caller: PeerId, amount: float) -> None:
        """Takes what was admitted before its size was known; who has less left is in debt."""
        for bucket in self._buckets(caller):
            bucket.left -= amount

    def _buckets(self, caller: PeerId) -> list[_Bucket]:
        now, is_member = self._clock.now(), self._is_member(caller)
        limits = self._limits
        key = caller, is_member
        own = self._callers.pop(key, None) or _Bucket(limits.member if is_member else limits.stranger, now)
        self._callers[key] = own  # the newest last
        if len(self._callers) > MOST_CALLERS:
            self._callers.popitem(last=False)
        buckets = [own]
        if not is_member:
            self._strangers = self._strangers or _Bucket(limits.strangers, now)
            buckets.append(self._strangers)
        for bucket in buckets:
            bucket.fill(now)
        return buckets

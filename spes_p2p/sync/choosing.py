"""Which transfer goes next, and whom to ask: the rarest first, from whoever will be done first. Knows no network.

A holder's rate is what came from it while it sent, all its streams together, smoothed; what it still has to send us
counts. Who was not asked yet is taken to be as fast as the best, so that everybody is tried.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from spes_p2p.errors import NetworkError
from spes_p2p.ids import PeerId

SMOOTHING = 0.3
"""What the newest observation counts."""
FAILURE = 0.25
"""Of the bytes that a fetch which broke off was for: so many might have come in that time."""
LEAST_FAILURE_SECONDS = 1.0
MOST_REMEMBERED = 1024
Rarity = Callable[[], int]
"""How many peers have what a transfer is about, asked when a place is free."""


@dataclass
class _Holder:
    """`rate` in bytes a second, 0 while unknown; `streams` and `due_bytes` of what is under way."""

    rate: float = 0.0
    streams: int = 0
    due_bytes: int = 0


class Rates:
    """How fast each holder was. `now` is a monotonic clock."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._holders: dict[PeerId, _Holder] = {}

    @contextmanager
    def asking(self, peer: PeerId, size: int) -> Iterator[Callable[[int], None]]:
        """Around one fetch of at most `size` bytes; what it gives is to be called with what came.

        A small part of what might have come says nothing of the rate. One that breaks off counts as much slower than it
        was to be.
        """
        holder, began = self._known(peer), self._now()
        holder.streams += 1
        holder.due_bytes += size
        beside = holder.streams

        def came(count: int) -> None:
            if 2 * count >= size:
                self._learn(holder, 0.5 * (beside + holder.streams) * count, self._now() - began)

        try:
            yield came
        except NetworkError:
            seconds = max(self._now() - began, LEAST_FAILURE_SECONDS)
            holder.rate = min(holder.rate or math.inf, FAILURE * size / seconds)
            raise
        finally:
            holder.streams -= 1
            holder.due_bytes -= size

    def _learn(self, holder: _Holder, size: float, seconds: float) -> None:
        rate = size / max(seconds, 1e-6)
        holder.rate += SMOOTHING * (rate - holder.rate) if holder.rate else rate

    def rate(self, peer: PeerId) -> float:
        """Bytes a second, 0.0 while nothing came from it."""
        return self._holders[peer].rate if peer in self._holders else 0.0

    def fastest(self, peers: Sequence[PeerId], size: int) -> list[PeerId]:
        """`peers`, first those that will have sent `size` bytes soonest; the order given where that is the same."""
        best = max((self.rate(peer) for peer in peers), default=0.0) or 1.0

        def seconds(peer: PeerId) -> float:
            holder = self._holders.get(peer, _Holder())
            return (holder.due_bytes + size) / (holder.rate or best)

        return sorted(peers, key=seconds)

    def _known(self, peer: PeerId) -> _Holder:
        if peer not in self._holders and len(self._holders) >= MOST_REMEMBERED:
            idle = next((other for other, holder in self._holders.items() if not holder.streams), None)
            if idle is not None:
                del self._holders[idle]
        return self._holders.setdefault(peer, _Holder())


class Turns:
    """So many transfers at once; of those that wait the rarest is next, then the one that came first."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[asyncio.Future[None], Rarity]] = {}

    @asynccontextmanager
    async def turn(self, rarity: Rarity = lambda: 0) -> AsyncIterator[None]:
        """Waits for a place and holds it."""
        await self._take_place(rarity)
        try:
            yield
        finally:
            self._free += 1
            self._let_go()

    async def _take_place(self, rarity: Rarity) -> None:
        number, place = next(self._numbers), asyncio.get_running_loop().create_future()
        self._waiting[number] = (place, rarity)
        self._let_go()
        try:
            await place
        except asyncio.CancelledError:
            self._waiting.pop(number, None)
            if place.done() and not place.cancelled():  # it was ours already
                self._free += 1
                self._let_go()
            raise

    def _let_go(self) -> None:
        while self._free and self._waiting:
            chosen = min(self._waiting, key=lambda number: (self._waiting[number][1](), number))
            place, _ = self._waiting.pop(chosen)
            if not place.done():
                self._free -= 1
                place.set_result(None)

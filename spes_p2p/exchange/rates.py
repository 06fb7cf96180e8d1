"""Which transfer goes next, and whom to ask. Knows no network.

The next transfer is one that the holder with the fewest streams to us has, so that no uplink idles; among those, the
rarest. It is requested from the holder that will finish first.

A holder's rate is the smoothed rate of all its streams together while it was sending; bytes that it still owes us are
taken into account. A holder that was not asked yet is assumed to be as fast as the best, so that everybody is tried.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from spes_p2p.errors import NetworkError
from spes_p2p.ids import PeerId

SMOOTHING = 0.3
"""Weight of the newest observation in the moving average."""
FAILURE = 0.25
"""Of the bytes that a fetch which broke off was for: so many might have come in that time."""
LEAST_FAILURE_SECONDS = 1.0
MOST_REMEMBERED = 1024
MOST_PLACES = 64
"""How many of the oldest places in the queue are compared, since a large model has hundreds of slices."""
Place = tuple[int, int]
"""Where a transfer stands in the queue, smallest first: see `Rates.place`."""
FIRST: Place = (0, 0)


def at_once() -> Place:
    """Before whatever has another place."""
    return FIRST


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
        """Wraps one fetch of at most `size` bytes; yields a function to call with the number of bytes received.

        A small part of `size` says nothing about the rate. A fetch that breaks off counts as much slower than expected.
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

    def place(self, holders: Collection[PeerId]) -> Place:
        """Of what these have: streams from the one of them that sends us least, and how many they are."""
        return min((self._streams(peer) for peer in holders), default=0), len(holders)

    def _streams(self, peer: PeerId) -> int:
        return self._holders[peer].streams if peer in self._holders else 0

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
    """So many transfers at once; of those that wait the one with the smallest place is next, then who came first."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[asyncio.Future[None], Callable[[], Place]]] = {}

    @asynccontextmanager
    async def turn(self, place: Callable[[], Place] = at_once) -> AsyncIterator[None]:
        """Waits for its turn and holds it; `place()` is asked whenever one is over, once for all who share it.

        Behind many others only who is to go at once is compared with them yet: see `MOST_PLACES`.
        """
        await self._take_turn(place)
        try:
            yield
        finally:
            self._free += 1
            self._let_go()

    async def _take_turn(self, place: Callable[[], Place]) -> None:
        number, turn = next(self._numbers), asyncio.get_running_loop().create_future()
        self._waiting[number] = (turn, place)
        self._let_go()
        try:
            await turn
        except asyncio.CancelledError:
            self._waiting.pop(number, None)
            if turn.done() and not turn.cancelled():  # it was ours already
                self._free += 1
                self._let_go()
            raise

    def _first(self) -> int:
        """The number of the next one."""
        asked = dict.fromkeys(place for _, place in self._waiting.values())
        places = {place: place() for place in (at_once, *itertools.islice(asked, MOST_PLACES))}
        chosen = [(places[place], number) for number, (_, place) in self._waiting.items() if place in places]
        return min(chosen)[1]

    def _let_go(self) -> None:
        while self._free and self._waiting:
            turn, _ = self._waiting.pop(self._first())
            if not turn.done():
                self._free -= 1
                turn.set_result(None)

"""A peer's traffic: kept below the rates that a person chose, urgent things first; counted; and its uplink measured.

Bytes are booked on a line of time: each piece begins where the one before it ends, so that the rate is kept exactly
over any longer time, however late timers are. Knows no streams; belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from spes_p2p.swarm.ports import CHUNK_BYTES

LEAST_BYTES_PER_SECOND = 32_000
"""Below this a chunk takes so long that the other side must believe that we are gone."""
PIECE_SECONDS = 0.05
"""A limited stream sends pieces that take about this long, so that many streams share a slow link smoothly."""
BURST_SECONDS = 0.1
"""Seconds of idle time that may be made up for by sending faster afterwards."""
PATIENT_SHARE = 0.1
"""Share of the rate that patient traffic gets while urgent traffic waits, lest a joiner take us for dead."""
STRETCH_SECONDS = 2.0
STRETCH_BYTES = 16 * 2**20
"""The least bytes and seconds of a stretch for it to be measured."""
SMOOTHING = 0.3
"""Weight of the newest best stretch in the moving average, between 0 and 1."""


class Pacer:
    """`bytes_per_second` None: no limit, and no cost. A piece that was asked for is sent when `take` returns."""

    def __init__(self, bytes_per_second: float | None = None) -> None:
        if bytes_per_second is not None and bytes_per_second < LEAST_BYTES_PER_SECOND:
            raise ValueError(f"{bytes_per_second:g} bytes per second is below the least rate, {LEAST_BYTES_PER_SECOND}")
        self.bytes_per_second = bytes_per_second
        self._free_at = float("-inf")
        self._waiting: dict[bool, deque[tuple[asyncio.Future[None], int]]] = {True: deque(), False: deque()}
        self._owed = 0.0
        """Bytes that the patient may send before the urgent go on."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def piece_bytes(self) -> int:
        """How much to send at a time."""
        if self.bytes_per_second is None:
            return CHUNK_BYTES
        return min(max(int(self.bytes_per_second * PIECE_SECONDS), 1024), CHUNK_BYTES)

    def note(self, size: int) -> None:
        """Bytes that could not wait (calls) are booked too."""
        if self.bytes_per_second is not None:
            self._book(size, asyncio.get_running_loop().time())

    async def take(self, size: int, urgent: bool = True) -> None:
        """Waits until `size` bytes may be sent: in turn, but urgent ones first, save for PATIENT_SHARE of the rate."""
        if self.bytes_per_second is None:
            return
        loop = asyncio.get_running_loop()
        if self._timer is None and loop.time() >= self._free_at:
            self._book(size, loop.time())
            return
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting[urgent].append((turn, size))
        self._arm(loop)
        await turn

    def _book(self, size: int, now: float) -> None:
        assert self.bytes_per_second is not None
        self._free_at = max(self._free_at, now - BURST_SECONDS) + size / self.bytes_per_second

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is None:
            self._timer = loop.call_at(self._free_at, self._let_go, loop)

    def _let_go(self, loop: asyncio.AbstractEventLoop) -> None:
        """Everybody whose turn has come; then waits for the next."""
        self._timer = None
        while loop.time() >= self._free_at:
            found = self._next()
            if found is None:
                return
            turn, size = found
            self._book(size, loop.time())
            turn.set_result(None)
        if any(self._waiting.values()):
            self._arm(loop)

    def _next(self) -> tuple[asyncio.Future[None], int] | None:
        for queue in self._waiting.values():  # who gave up takes no turn
            while queue and queue[0][0].done():
                queue.popleft()
        urgent, patient = self._waiting[True], self._waiting[False]
        if urgent and not (patient and self._owed >= patient[0][1]):
            self._owed += PATIENT_SHARE * urgent[0][1] if patient else 0.0
            return urgent.popleft()
        if not patient:
            return None
        self._owed = max(0.0, self._owed - patient[0][1])
        return patient.popleft()


class Meter:
    """How fast this peer's uplink is, by what it sends anyway: bytes over the time in which streams were sending.

    What others need for the running round is measured, since somebody always waits for it, from the first byte until
    the receiver has the last one, whatever is buffered on the way. A receiver with a slow link shows less than we could
    send, never more; so the best stretch of a round stands for it. `now`: a monotonic clock in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._streams = 0
        self._since = 0.0
        self._seconds = 0.0
        self._bytes = 0
        self._best = 0.0
        self._rate = 0.0

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Around the time in which a stream sends, until the other side has everything."""
        if not self._streams:
            self._since = self._now()
        self._streams += 1
        try:
            yield
        finally:
            self._count(0)
            self._streams -= 1

    def sent(self, size: int) -> None:
        """Counts `size` bytes that a stream has sent; bytes of other streams in the same time count as well."""
        if self._streams:
            self._count(size)

    def _count(self, size: int) -> None:
        now = self._now()
        self._seconds, self._since = self._seconds + now - self._since, now
        self._bytes += size
        if self._seconds >= STRETCH_SECONDS and self._bytes >= STRETCH_BYTES:
            self._best = max(self._best, self._bytes / self._seconds)
            self._seconds, self._bytes = 0.0, 0

    def rate(self) -> float:
        """Bytes a second, smoothed over the calls of this; 0.0 while nothing is known."""
        if self._best:
            self._rate += SMOOTHING * (self._best - self._rate) if self._rate else self._best
            self._best = 0.0
        return self._rate


@dataclass
class Traffic:
    """Bytes of calls and streams so far, without the overhead of encryption, and what paces them."""

    upload: Pacer = field(default_factory=Pacer)
    download: Pacer = field(default_factory=Pacer)
    sent: int = 0
    received: int = 0
    patient_received: int = 0
    """Of `received`, those of `patient` fetches."""
    meter: Meter = field(default_factory=lambda: Meter(lambda: asyncio.get_running_loop().time()))

    def count_sent(self, size: int) -> None:
        """A message that could not wait for its turn."""
        self.sent += size
        self.upload.note(size)

    def count_received(self, size: int) -> None:
        self.received += size
        self.download.note(size)

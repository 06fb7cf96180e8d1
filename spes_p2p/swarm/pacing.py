"""Keeps one direction of a peer's traffic below a rate that a person chose, and lets what is urgent go first.

Bytes are booked on a line of time: each piece begins where the one before it ends, so that the rate is kept exactly
over any longer time, however late timers are. Knows no streams; belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque

from spes_p2p.swarm.ports import CHUNK_BYTES

LEAST_BYTES_PER_SECOND = 32_000
"""Below this a chunk takes so long that the other side must believe that we are gone."""
PIECE_SECONDS = 0.05
"""A limited stream sends pieces that take about this long, so that many streams share a slow link smoothly."""
BURST_SECONDS = 0.1
"""Seconds of idle time that may be made up for by sending faster afterwards."""
PATIENT_SHARE = 0.1
"""Share of the rate that patient traffic gets while urgent traffic waits, lest a joiner take us for dead."""


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

"""How fast this peer's uplink is, from what it sends anyway: bytes over the time in which streams were sending.

What others need for the running round is measured, since somebody always waits for it, from the first byte until the
receiver has the last one, whatever is buffered on the way. A receiver with a slow link shows less than we could send,
never more; so the best stretch of a round stands for it. Knows no streams; belongs to one event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

STRETCH_SECONDS = 2.0
STRETCH_BYTES = 16 * 2**20
"""The least bytes and seconds of a stretch for it to be measured."""
SMOOTHING = 0.3
"""Weight of the newest best stretch in the moving average, between 0 and 1."""


class Meter:
    """`now`: a monotonic clock in seconds."""

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

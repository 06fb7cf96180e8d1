"""Notices that the ranks of a peer do not move any more: a command takes far longer than it ever took.

A rank that ends is seen at once by its process (`Child`); one that is frozen, or hangs on its device, keeps the others
waiting in the middle of a collective operation. Counts this process's own running time, so that a machine that slept,
or a peer that was stopped as a whole, finds nobody late.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

FIRST_SECONDS = 600.0
"""Longest time without progress for a command that has never been run before."""
FLOOR_SECONDS = 60.0
TIMES = 20.0
"""A command takes too long if it exceeds this many times the longest that it ever took (or that its longest part
between two signs of progress took), but never below the floor."""
_TICK_SECONDS = 0.25


class Watchdog:
    """`frozen(command, seconds, longest)` is called, in a thread, when a command has taken too long; once."""

    def __init__(self, frozen: Callable[[str, float, float], None]) -> None:
        self._frozen = frozen
        self._longest: dict[str, float] = {}
        self._running: tuple[str, int] | None = None
        self._count = 0
        self._began = self._longest_part = 0.0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    @contextmanager
    def watching(self, command: str) -> Iterator[None]:
        """Around a command that all ranks carry out."""
        self._begin(command)
        self._longest_part = 0.0
        try:
            yield
            self.progress()
            self._longest[command] = max(self._longest.get(command, 0.0), self._longest_part)
        finally:
            self._running = None

    def progress(self) -> None:
        """All ranks have come this far in the command that is watched: its time begins anew."""
        if self._running is not None:
            self._longest_part = max(self._longest_part, time.monotonic() - self._began)
            self._begin(self._running[0])

    def _begin(self, command: str) -> None:
        self._count += 1
        self._began = time.monotonic()
        self._running = (command, self._count)

    def limit_seconds(self, command: str) -> float:
        """How long a command may take, from how long it took."""
        longest = self._longest.get(command)
        return FIRST_SECONDS if longest is None else max(FLOOR_SECONDS, TIMES * longest)

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        seen, spent, before = None, 0.0, time.monotonic()
        while not self._closed.wait(_TICK_SECONDS):
            now, running = time.monotonic(), self._running
            spent = spent + min(now - before, 2 * _TICK_SECONDS) if running == seen else 0.0
            seen, before = running, now
            if running is not None and spent > self.limit_seconds(running[0]):
                self._frozen(running[0], spent, self._longest.get(running[0], 0.0))
                return

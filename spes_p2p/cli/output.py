"""Standard output for processes that run for weeks: whoever writes a line never waits for who should read it.

A terminal in which text is selected or that Ctrl-S has stopped, a pager, a hanging connection: all of them take nothing
for a while, and the network's loop, which says most of what there is to say, would stand still with them.
"""

from __future__ import annotations

import errno
import os
import queue
import sys
import threading
from typing import Self, TextIO

from spes_p2p.peer import stopping

MOST_WAITING = 1000
"""Lines that wait for a reader; more are lost."""


class BackgroundOutput:
    """Writes lines to `stream` (default: standard output) in a thread of its own; leaving the block waits for it as
    long as lines are taken, the end of the process by a second signal a moment."""

    def __init__(self, stream: TextIO | None = None) -> None:
        # `>&-`: nobody reads
        self._stream = stream or sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (for good)
        self._waiting: queue.Queue[str] = queue.Queue(MOST_WAITING)
        self._failed: OSError | None = None
        """What the newest line failed with."""
        threading.Thread(target=self._run, name="output", daemon=True).start()

    def say(self, line: str) -> None:
        """Raises as `write`."""
        self.write(f"{line}\n")

    def write(self, text: str) -> None:
        """Whole lines. Raises OSError where they cannot be written, or those before them could not."""
        try:
            self._waiting.put_nowait(text)
        except queue.Full:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from None
        if self._failed is not None:
            raise self._failed

    def flush(self) -> None:
        """Nobody waits."""

    def drain(self) -> None:
        """Waits until all is written, but not for long."""
        with self._waiting.all_tasks_done:
            self._waiting.all_tasks_done.wait_for(lambda: not self._waiting.unfinished_tasks, stopping.SAY_SECONDS)

    def __enter__(self) -> Self:
        stopping.before_hard_end.append(self.drain)
        return self

    def __exit__(self, *_: object) -> None:
        before = MOST_WAITING + 2  # with the line that is being written
        while 0 < (left := self._waiting.unfinished_tasks) < before:  # a slow reader is to have them all
            before = left
            self.drain()
        stopping.before_hard_end.remove(self.drain)

    def _run(self) -> None:
        while True:
            text = self._waiting.get()
            try:
                self._stream.write(text)
                self._stream.flush()
                self._failed = None
            except (OSError, ValueError) as error:  # the latter where it is closed
                self._failed = error if isinstance(error, OSError) else OSError(str(error))
            finally:
                self._waiting.task_done()

"""SIGINT and SIGTERM of a node: the first asks it to leave, a second one ends it at once, and so does its time.

`until_stopped` breaks off what is under way on the network's loop.

What is on disk is whole at every moment, and the kernel ends daemon and ranks with us; so ending hard is safe, only
less polite.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")
EXIT_SECONDS = 9.5
"""From the first signal to the end of the process, whatever it is doing (an inner step may take longer)."""
INTERRUPTED = 130
"""Exit code after a second signal, as shells have it (128 + SIGINT)."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SHOW_CURSOR = b"\x1b[?25h\n"


class Stopped(Exception):
    """The node was asked to end before its work was done."""


async def until_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. Raises Stopped once `stop` is set; `work` has been cancelled and has cleaned up then."""
    loop = asyncio.get_running_loop()
    working, stopping = loop.create_task(work), loop.create_task(stop.wait())
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise Stopped
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.wait((working, stopping))


@contextlib.contextmanager
def leaving_on_signals(leave: Callable[[], object], say: Callable[[str], None]) -> Iterator[None]:
    """`leave` is called in the main thread and must be quick; `say` from another one. No effect off the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if asked.is_set():
            _end(INTERRUPTED)
        asked.set()
        # Not from here: the main thread may be in the middle of writing a line.
        threading.Thread(target=_end_in_time, args=(say,), daemon=True).start()
        leave()

    before = {number: signal.signal(number, on_signal) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if not asked.is_set() else _end_on_signal)


def _end_in_time(say: Callable[[str], None]) -> None:
    say("leaving (Ctrl-C again: at once)")
    threading.Event().wait(EXIT_SECONDS)
    say("what was running did not end in time: leaving without it")
    _end(0)


def _end_on_signal(number: int, frame: FrameType | None) -> None:
    _end(INTERRUPTED)


def _end(code: int) -> None:
    """Without any cleaning up, but for the terminal."""
    with contextlib.suppress(OSError, ValueError):
        if sys.stdout.isatty():
            os.write(1, _SHOW_CURSOR)
    os._exit(code)

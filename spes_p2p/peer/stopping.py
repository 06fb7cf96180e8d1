"""SIGINT, SIGTERM and SIGHUP (its terminal is closed): the first asks the node to leave; another SIGINT or SIGTERM, or
EXIT_SECONDS, ends it at once.

`until_stopped` breaks off what is under way on the network's loop.

What is on disk is whole at every moment, and the kernel ends daemon and ranks with us; so ending hard is safe, only
less polite.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

from spes_p2p.errors import Stopped
from spes_p2p.observe.sinks import unfailing

T = TypeVar("T")
EXIT_SECONDS = 9.5
"""From the first signal to the end of the process, whatever it is doing (an inner step may take longer)."""
SAY_SECONDS = 0.5
"""Longest wait for a last message to be written."""
INTERRUPTED = 130
"""Exit code after a second signal, as shells have it (128 + SIGINT)."""
NOTHING_LOST = "nothing is lost"
_URGENT = (signal.SIGINT, signal.SIGTERM)
_SHOW_CURSOR = b"\x1b[?25h\n"
before_hard_end: list[Callable[[], object]] = []
"""Functions to call before the process is ended at once, such as one that restores the terminal."""


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
def leaving_on_signals(
    leave: Callable[[], object], say: Callable[[str], None], lost: str = NOTHING_LOST
) -> Iterator[None]:
    """`leave` and `say` are called in another thread, so that they are even while the main one computes.
    `lost` says what it costs where the process must be ended before it has left by itself.

    No effect off the main thread. Once asked to leave, the process ends in time also after the block.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    read, write = os.pipe()
    os.set_blocking(write, False)
    asked, has_left = threading.Event(), threading.Event()
    watching = (read, asked, has_left, leave, say, lost)
    threading.Thread(target=_watch, args=watching, name="signals", daemon=True).start()
    before = {number: signal.signal(number, lambda number, frame: None) for number in _heeded()}
    fd_before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)  # written to when the signal comes
    try:
        yield
    finally:
        has_left.set()
        if not asked.is_set():
            signal.set_wakeup_fd(fd_before)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(write)


@contextlib.contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt in the block, as Ctrl-C does: what is temporary is removed then, too.

    No effect off the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = {*_heeded()} - {signal.SIGINT}  # it does so already, but for who is in the background of a script
    before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _heeded() -> tuple[signal.Signals, ...]:
    outlives_terminal = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # so says nohup
    return _URGENT if outlives_terminal else (*_URGENT, signal.SIGHUP)


def _watch(
    read: int,
    asked: threading.Event,
    has_left: threading.Event,
    leave: Callable[[], object],
    say: Callable[[str], None],
    lost: str,
) -> None:
    if not _heard(read, (*_URGENT, signal.SIGHUP), None):
        os.close(read)
        return
    asked.set()
    leave()
    _try_to_say(say, "leaving (press Ctrl-C again to exit at once)")
    if _heard(read, _URGENT, EXIT_SECONDS):  # who closes a terminal sends SIGHUP twice: the shell does, too
        _end(INTERRUPTED)
    if not has_left.is_set():  # else a slow reader of its last words is left alone, say
        _try_to_say(say, f"ended after {EXIT_SECONDS:g} s, without having left by itself: {lost}")
    _end(0)


def _try_to_say(say: Callable[[str], None], text: str) -> None:
    """Calls `say` in its own thread, since the output may be closed (`| tee` also ends with Ctrl-C) or blocked."""
    saying = threading.Thread(target=unfailing(say), args=(text,), name="last words", daemon=True)
    saying.start()
    saying.join(SAY_SECONDS)


def _heard(read: int, signals: Sequence[signal.Signals], timeout_seconds: float | None) -> bool:
    """Whether one of these signals came; False at the end of time or of the pipe."""
    until = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    while True:
        ready, _, _ = select.select([read], [], [], None if until is None else max(0.0, until - time.monotonic()))
        data = os.read(read, 1) if ready else b""
        if not data or data[0] in signals:
            return bool(data)


def _end(code: int) -> None:
    """Without any cleaning up, but for the terminal."""
    try:
        for call in before_hard_end:
            call()
        with contextlib.suppress(OSError, ValueError):
            if sys.stdout.isatty():
                os.write(1, _SHOW_CURSOR)
    finally:
        os._exit(code)

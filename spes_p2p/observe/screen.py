"""The terminal of a running peer: the full screen, the keys, and everything put back as it was at the end.

What is drawn is decided in `live.py`. Keys are read only from a terminal in whose foreground we run.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import sys
import termios
import threading
import tty
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.live import Live

from spes_p2p.observe.events import Event
from spes_p2p.observe.live import LiveModel, render_live

REFRESHES_A_SECOND = 2
_LEAVE_SCREEN = b"\x1b[?1049l\x1b[?25h"


class Keys:
    """Calls `actions[key]` for each key pressed, from a thread of its own, until closed. Ctrl-C stays a signal."""

    def __init__(self, file: int, actions: Mapping[str, Callable[[], object]]) -> None:
        self._file, self._actions = file, actions
        self._before: list[Any] = termios.tcgetattr(file)
        self._end_read, self._end_write = os.pipe()
        tty.setcbreak(file, termios.TCSANOW)
        self._thread = threading.Thread(target=self._listen, name="keys", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Gives the terminal back; no action is called any more."""
        os.write(self._end_write, b"x")
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self.restore()

    def restore(self) -> None:
        """The terminal as it was: line by line, and what is typed is shown."""
        with contextlib.suppress(termios.error):
            termios.tcsetattr(self._file, termios.TCSANOW, self._before)

    def _listen(self) -> None:
        while True:
            ready, _, _ = select.select([self._file, self._end_read], [], [])
            if self._end_read in ready:
                return
            try:
                typed = os.read(self._file, 32).decode(errors="ignore")
            except OSError:
                typed = ""
            if not typed:  # the terminal is gone
                return
            for key in typed.lower() if typed.isprintable() else ():  # no arrows and other sequences
                self._actions.get(key, _nothing)()


def can_hear_keys() -> bool:
    """Whether standard input is a terminal and this process is in its foreground."""
    try:
        return sys.stdin.isatty() and os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError, AttributeError):
        return False


class LiveScreen:
    """A sink that shows a model on the whole terminal while it is open; warnings and last numbers stay afterwards."""

    def __init__(
        self, model: LiveModel, console: Console, actions: Mapping[str, Callable[[], object]], keys_from: int | None
    ) -> None:
        """`keys_from`: the file of the terminal to hear keys from, None for no keys."""
        self._model, self._console = model, console
        self._keys = None if keys_from is None else Keys(keys_from, actions)
        self._log = _LogLines(model.say)
        self._log.begin()
        self._live = Live(
            console=console,
            screen=True,
            get_renderable=lambda: render_live(model.state()),
            refresh_per_second=REFRESHES_A_SECOND,
        )
        self._live.start()

    def write(self, time: float, event: Event) -> None:
        self._model.write(time, event)

    def say(self, text: str) -> None:
        """A line of text among the messages."""
        self._model.say(text)

    def close(self) -> None:
        self._live.stop()
        self._log.end()
        if self._keys is not None:
            self._keys.close()
        for message in self._model.messages:
            self._console.print(message, style="dim", markup=False, highlight=False, soft_wrap=True)
        self._console.print(self._model.last_words(), markup=False, highlight=False, soft_wrap=True)

    def abandon(self) -> None:
        """Restores only the terminal, for a process that is about to be ended at once."""
        if self._keys is not None:
            self._keys.restore()
        with contextlib.suppress(OSError, ValueError):
            os.write(self._console.file.fileno(), _LEAVE_SCREEN)


class _LogLines(logging.Handler):
    """Shows the package's log records on the screen while it is up; printed, they would garble it."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        self._say = say
        self._logger = logging.getLogger("spes_p2p")
        self._others: list[logging.Handler] = []

    def begin(self) -> None:
        self._others, self._logger.handlers = self._logger.handlers, [self]

    def end(self) -> None:
        self._logger.handlers = self._others

    def emit(self, record: logging.LogRecord) -> None:
        self._say(f"{record.levelname.lower()}: {record.getMessage()}")


def _nothing() -> None:
    """A key that means nothing."""

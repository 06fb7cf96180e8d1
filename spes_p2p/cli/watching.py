"""What the user of a running peer sees: the full screen on a terminal, lines of text elsewhere, or JSON lines."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, Self

from rich.console import Console

from spes_p2p import __version__
from spes_p2p.cli.output import BackgroundOutput
from spes_p2p.ids import short
from spes_p2p.observe.events import EventBus
from spes_p2p.observe.live import LiveModel, LiveState
from spes_p2p.observe.screen import LiveScreen, can_hear_keys
from spes_p2p.observe.sinks import JsonStream, PlainLines, unfailing
from spes_p2p.observe.text import to_type
from spes_p2p.peer import stopping
from spes_p2p.peer.pausing import PauseSwitch

if TYPE_CHECKING:
    from spes_p2p.peer.run import Running


class Watching:
    """The `bus`, `say`, `show` and `pause` arguments of `run_peer`. A context manager: leaving it closes them."""

    def __init__(self, log_format: str) -> None:
        self.bus = EventBus()
        self.pause = PauseSwitch()
        self.last_words = ""
        """To be said when the screen is gone."""
        self._format = log_format
        self._output = BackgroundOutput()
        self._screen: LiveScreen | None = None
        self._json: JsonStream | None = None
        if log_format == "json":
            self._json = JsonStream(self._output)
            self.bus.add(self._json)

    def say(self, text: str) -> None:
        """A line for a person: among the messages while there is a screen."""
        if self._json is not None:
            self._json.say(text)
        elif self._screen is not None:
            self._screen.say(to_type(text))
        else:
            self._output.say(to_type(text))

    def show(self, running: Running) -> None:
        """The peer is in: from now on it is worth looking at."""
        if self._json is not None:
            return
        console = Console()
        if self._format == "text" or not console.is_terminal or console.is_dumb_terminal:
            self.bus.add(PlainLines(self._output), with_early=True)
            return
        self._output.drain()  # what was said so far stays above the screen
        hears = can_hear_keys()
        invite = to_type(f"spes-p2p invite --folder {running.output}")
        base = LiveState(__version__, running.run_id, short(running.peer), keys=hears, invite=invite)
        model = LiveModel(base, running.steps_per_round, running.facts)
        actions = {"p": self.pause.toggle, "q": _leave}
        self._screen = LiveScreen(model, console, actions, sys.stdin.fileno() if hears else None)
        stopping.before_hard_end.append(self._screen.abandon)
        self.bus.add(self._screen, with_early=True)

    def __enter__(self) -> Self:
        self._output.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        screen, self._screen = self._screen, None
        self.bus.close()
        if screen is not None:
            stopping.before_hard_end.remove(screen.abandon)
        if self.last_words:
            unfailing(self.say)(self.last_words)
        self._output.__exit__(*error)


def _leave() -> None:
    """Leaves as Ctrl-C does; a second call ends the process at once."""
    os.kill(os.getpid(), signal.SIGINT)

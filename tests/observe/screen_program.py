"""A live screen without a peer behind it, for `test_screen`: leaves on q or Ctrl-C, in the way that is asked for."""

from __future__ import annotations

import logging
import os
import signal
import sys
import termios
import threading

from rich.console import Console

from spes_p2p.observe.events import Pause
from spes_p2p.observe.live import TRAINING, Facts, LiveModel, LiveState
from spes_p2p.observe.screen import LiveScreen, can_hear_keys
from spes_p2p.peer.pausing import PauseSwitch


def main(how: str) -> int:
    asked, switch = threading.Event(), PauseSwitch()
    signal.signal(signal.SIGINT, lambda number, frame: asked.set())
    before = termios.tcgetattr(sys.stdin.fileno())
    hears = can_hear_keys() and how != "deaf"
    model = LiveModel(LiveState("0.1.0", "tiny", "6P9UKN", keys=hears), lambda step: 10, lambda: Facts(TRAINING))
    actions = {"p": switch.toggle, "q": lambda: os.kill(os.getpid(), signal.SIGINT)}
    screen = LiveScreen(model, Console(), actions, sys.stdin.fileno() if hears else None)
    switch.on_change(lambda why: screen.write(0.0, _pause(why)))
    logging.getLogger("spes_p2p").warning("from a log")
    try:
        asked.wait()
        if how == "error":
            return 1
        if how == "hard":
            screen.abandon()
            os._exit(130)
        return 0
    finally:
        screen.close()
        sys.stdout.write(f"bye: {termios.tcgetattr(sys.stdin.fileno()) == before}\n")


def _pause(why: str) -> Pause:
    return Pause(bool(why), why)


if __name__ == "__main__":
    sys.exit(main("".join(sys.argv[1:])))

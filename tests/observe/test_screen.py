"""The full screen on a real (pseudo-)terminal: keys are heard, and the terminal is put back however it ends."""

from __future__ import annotations

import sys
import termios
import time
from pathlib import Path

import pexpect
import pyte
import pytest

PROGRAM = Path(__file__).with_name("screen_program.py")
ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 60


class Terminal:
    """A program on a pseudo-terminal, and the screen that a person would see."""

    def __init__(self, *arguments: str) -> None:
        command = [str(PROGRAM), *arguments]
        self.child = pexpect.spawn(sys.executable, command, dimensions=(30, 100), encoding="utf-8", cwd=str(ROOT))
        self.modes = self.local_modes()
        self._screen = pyte.Screen(100, 30)
        self._stream = pyte.Stream(self._screen)
        self.raw = ""

    def local_modes(self) -> int:
        modes: int = termios.tcgetattr(self.child.child_fd)[3]
        return modes & (termios.ICANON | termios.ECHO)

    def until(self, words: str) -> str:
        """The screen, once it shows `words`."""
        end = time.monotonic() + TIMEOUT_SECONDS
        while words not in (text := "\n".join(self._screen.display)):
            assert time.monotonic() < end, text
            self._read()
        return text

    def end(self) -> int:
        """Reads until the program has ended; its exit code, or minus the signal."""
        end = time.monotonic() + TIMEOUT_SECONDS
        while self._read():
            assert time.monotonic() < end, self.raw[-2000:]
        self.child.close()
        return self.child.exitstatus if self.child.exitstatus is not None else -self.child.signalstatus

    def _read(self) -> bool:
        try:
            text = self.child.read_nonblocking(65536, 0.5)
        except pexpect.TIMEOUT:
            return True
        except pexpect.EOF:
            return False
        self.raw += text
        self._stream.feed(text)
        return True


def test_keys_are_heard_and_the_terminal_is_as_before() -> None:
    terminal = Terminal()
    shown = terminal.until("p: pause training")
    assert "run tiny   peer 6P9UKN" in shown
    assert not terminal.local_modes()
    terminal.child.send("\x1b[A")  # an arrow
    terminal.child.send("x")
    terminal.child.send("p")
    assert "paused: by key" in terminal.until("p: resume training")
    terminal.child.send("P")
    terminal.until("p: pause training")
    terminal.child.send("q")
    assert terminal.end() == 0
    assert "\x1b[?1049l" in terminal.raw
    after = terminal.raw.rpartition("\x1b[?1049l")[2]
    assert "paused: by key" in after, "what was said stays on the terminal"
    assert "warning: from a log" in after
    assert "bye: True" in after, "keys work line by line again"


@pytest.mark.parametrize("how", ["error", "hard"])
def test_the_terminal_is_put_back_whatever_happens(how: str) -> None:
    terminal = Terminal(how)
    terminal.until("q: leave")
    terminal.child.send("q")
    assert terminal.end() == {"error": 1, "hard": 130}[how]
    assert "\x1b[?1049l" in terminal.raw
    assert "\x1b[?25h" in terminal.raw
    if how == "error":
        assert "bye: True" in terminal.raw


def test_ctrl_c_is_still_a_signal() -> None:
    terminal = Terminal()
    terminal.until("q: leave")
    terminal.child.sendintr()
    assert terminal.end() == 0
    assert "bye: True" in terminal.raw


def test_a_process_in_the_background_hears_no_keys() -> None:
    terminal = Terminal("deaf")
    assert "run tiny" in terminal.until("Ctrl-C: leave")  # the last line that is drawn
    assert terminal.local_modes() == terminal.modes
    terminal.child.sendintr()
    assert terminal.end() == 0

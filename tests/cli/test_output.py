"""Nobody waits for a terminal or pipe that takes nothing."""

from __future__ import annotations

import io
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spes_p2p.cli.bootstrap import bootstrap
from spes_p2p.cli.output import MOST_WAITING, BackgroundOutput
from spes_p2p.cli.watching import Watching
from spes_p2p.observe.events import Note
from spes_p2p.peer import stopping

WAIT_SECONDS = 30.0


class Stopped(io.StringIO):
    """A terminal in which somebody has selected text, until `goes_on` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on, self.is_written = threading.Event(), threading.Event()

    def write(self, text: str) -> int:
        self.is_written.set()
        self.goes_on.wait()
        return super().write(text)


class Slow(io.StringIO):
    """A reader who takes one line for each permission."""

    def __init__(self) -> None:
        super().__init__()
        self.permitted = threading.Semaphore(0)

    def write(self, text: str) -> int:
        self.permitted.acquire()
        return super().write(text)


def is_soon_done(work: Callable[[], object]) -> bool:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(WAIT_SECONDS)
    return not thread.is_alive()


def test_lines_wait_for_a_reader_and_are_all_there_in_the_end() -> None:
    stream = Stopped()
    with BackgroundOutput(stream) as output:
        output.say("first")
        assert stream.is_written.wait(WAIT_SECONDS)
        for number in range(MOST_WAITING):
            output.say(f"line {number}")
        with pytest.raises(BlockingIOError):  # so that memory is bounded
            output.say("lost")
        stream.goes_on.set()
        output._waiting.join()
        output.say("last")
    assert stream.getvalue().splitlines() == ["first", *(f"line {number}" for number in range(MOST_WAITING)), "last"]


def test_at_the_end_a_slow_reader_gets_all_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Slow()
    output = BackgroundOutput(stream)

    def drain() -> None:
        left, until = output._waiting.unfinished_tasks, time.monotonic() + WAIT_SECONDS
        stream.permitted.release()
        while output._waiting.unfinished_tasks == left and time.monotonic() < until:
            time.sleep(0.001)

    monkeypatch.setattr(output, "drain", drain)
    with output:
        for number in range(5):
            output.say(f"line {number}")
    assert stream.getvalue().splitlines() == [f"line {number}" for number in range(5)]


def test_what_cannot_be_written_is_said_to_who_writes_next() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w", closefd=False) as stream:
        output = BackgroundOutput(stream)
        output.say("nobody reads this")
        output._waiting.join()
        with pytest.raises(BrokenPipeError):
            output.say("nor this")
        output._waiting.join()
        os.dup2(os.open(os.devnull, os.O_WRONLY), write)
    os.close(write)


def test_without_standard_output_lines_go_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    with BackgroundOutput() as output:
        for number in range(3):
            output.say(f"line {number}")
            output.drain()
        assert not output._waiting.unfinished_tasks


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_peer_goes_on_while_its_terminal_stands_still(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stopped()
    monkeypatch.setattr(sys, "stdout", stream)
    watching = Watching(form)

    def run() -> None:
        with watching:
            watching.show(None)  # type: ignore[arg-type]
            watching.say("round 1")
            watching.bus.emit(Note("round 2"))
            watching.last_words = "good-bye"

    assert is_soon_done(run)
    stream.goes_on.set()
    watching._output._waiting.join()
    assert [one for one in ("round 1", "round 2", "good-bye") if one not in stream.getvalue()] == []
    assert stopping.before_hard_end == []


def test_what_was_said_before_stays_above_the_screen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, above = Stopped(), list[str]()

    def drain(output: BackgroundOutput) -> None:
        stream.goes_on.set()
        output._waiting.join()

    def screen(*arguments: Any) -> Any:
        above.append(stream.getvalue())
        return SimpleNamespace(abandon=None, write=lambda *event: None, close=lambda: None)

    terminal = SimpleNamespace(is_terminal=True, is_dumb_terminal=False)
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(BackgroundOutput, "drain", drain)
    monkeypatch.setattr("spes_p2p.cli.watching.Console", lambda: terminal)
    monkeypatch.setattr("spes_p2p.cli.watching.LiveScreen", screen)
    monkeypatch.setattr("spes_p2p.cli.watching.can_hear_keys", lambda: False)
    with Watching("auto") as watching:
        watching.say("loading PyTorch")
        watching.show(
            SimpleNamespace(run_id="run", peer="peer", output=tmp_path, steps_per_round=None, facts=None)  # type: ignore[arg-type]
        )
    assert above == ["loading PyTorch\n"]


def test_a_node_goes_on_while_its_terminal_stands_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stopped()

    def run(options: Any, say: Callable[[str], None], ready: Callable[[str], None]) -> None:
        say("round 1")
        ready("join")

    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr("spes_p2p.peer.bootstrap.run_bootstrap", run)
    assert is_soon_done(lambda: bootstrap(output=tmp_path, max_data_disk="20GB"))
    stream.goes_on.set()

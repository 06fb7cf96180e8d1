"""Sinks write what they are given: real files, a really full one, a file cut by a crash, and missing extras."""

from __future__ import annotations

import dataclasses
import io
import json
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from spes_p2p.errors import ConfigError, StorageFull
from spes_p2p.observe.events import Event, EventBus, LastError, Warning
from spes_p2p.observe.sinks import (
    EventReader,
    JsonLines,
    JsonStream,
    PlainLines,
    TensorBoard,
    Wandb,
    file_sinks,
    unfailing,
)
from spes_p2p.observe.text import line, scalars
from tests.observe.test_events import EVENTS, ROUND, STEP


def test_metrics_file_has_one_event_a_line_with_event_and_time(tmp_path: Path) -> None:
    bus = EventBus(*file_sinks(tmp_path / "new" / "folder"), clock=lambda: 7.5)
    for event in EVENTS:
        bus.emit(event)
    lines = [json.loads(text) for text in (tmp_path / "new/folder/metrics.jsonl").read_text().splitlines()]
    assert [(one["event"], one["time"]) for one in lines] == [(event.event, 7.5) for event in EVENTS]
    bus.close()


def test_reader_follows_a_file_that_is_still_written(tmp_path: Path) -> None:
    reader = EventReader(tmp_path / "metrics.jsonl")
    assert reader.read() == []
    sink = JsonLines(tmp_path / "metrics.jsonl")
    sink.write(1.0, STEP)
    assert reader.read() == [(1.0, STEP)]
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"event": "from the future"}\n{"event": "st')
    assert reader.read() == []
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'ep"}\n')
    assert reader.read() == [], "the whole line is no event either"
    sink.close()


def test_half_a_line_left_by_a_crash_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = json.dumps({"event": "warning", "time": 1.0, "message": "before"}) + "\n"
    for left, kept in [(whole + '{"event": "st', whole), ("x" * 70_000, ""), (whole, whole), ("", "")]:
        path.write_text(left)
        sink = JsonLines(path)
        assert path.read_text() == kept
        sink.write(2.0, Warning("after"))
        sink.close()
        assert EventReader(path).read()[-1] == (2.0, Warning("after"))


@contextmanager
def small_files() -> Iterator[None]:
    """No file of this process may grow beyond 300 bytes: around the test alone, since pytest's output may be a file."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@small_files()
def test_no_space_left_keeps_whole_lines_and_goes_on_later(tmp_path: Path) -> None:
    text = io.StringIO()
    bus = EventBus(JsonLines(tmp_path / "metrics.jsonl"), PlainLines(text))
    for _ in range(4):
        bus.emit(STEP)
    assert [event for _, event in EventReader(tmp_path / "metrics.jsonl").read()] == [STEP, STEP]
    assert (tmp_path / "metrics.jsonl").read_bytes().endswith(b"\n")
    assert text.getvalue().count("no room for") == 1
    resource.setrlimit(resource.RLIMIT_FSIZE, resource.getrlimit(resource.RLIMIT_FSIZE)[1:] * 2)
    bus.emit(STEP)
    events = [event for _, event in EventReader(tmp_path / "metrics.jsonl").read()]
    assert events == [STEP, STEP, STEP, Warning("JsonLines is working again")]
    bus.close()


@small_files()
def test_no_space_left_does_not_cut_what_others_appended(tmp_path: Path) -> None:
    ours, theirs = JsonLines(tmp_path / "metrics.jsonl"), JsonLines(tmp_path / "metrics.jsonl")
    ours.write(1.0, Warning("ours"))
    theirs.write(2.0, Warning("theirs"))
    with pytest.raises(StorageFull):
        ours.write(3.0, Warning("x" * 300))
    events = [event for _, event in EventReader(tmp_path / "metrics.jsonl").read()]
    assert events == [Warning("ours"), Warning("theirs")]
    assert (tmp_path / "metrics.jsonl").read_bytes().endswith(b"}\n")
    for sink in (ours, theirs):
        sink.close()


@small_files()
def test_lines_of_text_go_on_when_there_is_room_again(tmp_path: Path) -> None:
    with open(tmp_path / "log", "w") as log, open(tmp_path / "json", "w") as json_log:
        bus = EventBus(PlainLines(log), JsonStream(json_log))
        for _ in range(6):
            bus.emit(STEP)
        resource.setrlimit(resource.RLIMIT_FSIZE, resource.getrlimit(resource.RLIMIT_FSIZE)[1:] * 2)
        bus.emit(ROUND)
        bus.close()
    assert f"{line(ROUND)}\n" in (tmp_path / "log").read_text()
    assert json.loads((tmp_path / "json").read_text().splitlines()[-1])["message"] == "JsonStream is working again"


def test_words_that_cannot_be_written_end_nothing() -> None:
    def say(text: str) -> None:
        said.append(text)
        raise BrokenPipeError(32, "Broken pipe")

    said: list[str] = []
    unfailing(say)("round 3")
    assert said == ["round 3"]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.event)
def test_text_of_every_event_is_one_line(event: Event) -> None:
    stream = io.StringIO()
    PlainLines(stream).write(0.0, event)
    assert stream.getvalue() == f"{line(event)}\n"
    assert "\n" not in line(event)


def test_the_error_that_a_command_ends_with_is_left_to_the_command() -> None:
    text, kept = io.StringIO(), io.StringIO()
    bus = EventBus(PlainLines(text), JsonStream(kept))
    bus.emit(LastError.of(ConfigError("the organiser has banned this peer", fix="ask the organiser")))
    assert text.getvalue() == ""
    event = json.loads(kept.getvalue())
    del event["time"]
    assert event == {"event": "error", "message": "the organiser has banned this peer", "fix": "ask the organiser"}


def test_lines_say_what_matters() -> None:
    assert line(STEP) == "step 3  loss 2.5000  100 tokens/s  lr 1.00e-03  grad norm 0.70"
    assert "stale columns 1, 5" in line(ROUND)
    assert "10 B sent" in line(ROUND)
    assert "deadline 6.5 s" in line(dataclasses.replace(ROUND, deadline_seconds=6.5))
    assert line(EVENTS[-1]) == "error: x is 3 / fix: make it 2"


def test_tensorboard_files_hold_the_scalars(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    bus = EventBus(*file_sinks(tmp_path, tensorboard=True))
    bus.emit(STEP)
    bus.emit(ROUND)
    bus.close()
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    expected = {**scalars(STEP)[1], **scalars(ROUND)[1]}
    assert set(board.Tags()["scalars"]) == set(expected)
    (loss,) = board.Scalars("train/loss")
    assert (loss.step, loss.value) == (3, 2.5)


def test_missing_extras_are_named_with_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"output\.wandb is true") as error:
        Wandb(tmp_path, "run", "peer")
    assert "scripts/venv.sh wandb" in error.value.fix
    with pytest.raises(ConfigError, match=r"output\.tensorboard is true") as error:
        TensorBoard(tmp_path)
    assert "output.tensorboard=false" in error.value.fix


class FakeRun:
    def __init__(self, said: dict[str, Any]) -> None:
        self.said: dict[str, Any] = said
        self.logged: list[dict[str, float]] = []
        self.axes: list[tuple[Any, ...]] = []
        self.finished = False

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes.append((name, step_metric))

    def log(self, numbers: dict[str, float]) -> None:
        self.logged.append(numbers)

    def finish(self) -> None:
        self.finished = True


def test_wandb_gets_the_scalars_over_the_global_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package itself is an extra: this is what it is asked for."""
    runs: list[FakeRun] = []

    def start(**said: Any) -> FakeRun:
        runs.append(FakeRun(said))
        return runs[-1]

    module = ModuleType("wandb")
    module.errors = SimpleNamespace(Error=RuntimeError)  # type: ignore[attr-defined]
    module.Settings = lambda **said: said  # type: ignore[attr-defined]
    module.init = start  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    bus = EventBus(*file_sinks(tmp_path, wandb=True, run_id="tiny", peer="peer-0", settings={"lr": 1.0}))
    for event in (STEP, ROUND, Warning("no number")):
        bus.emit(event)
    bus.close()
    (run,) = runs
    assert (run.said["group"], run.said["name"], run.said["config"]) == ("tiny", "peer-0", {"lr": 1.0})
    assert run.axes == [("step", None), ("*", "step")]
    assert run.logged == [{"step": step, **numbers} for step, numbers in (scalars(STEP), scalars(ROUND))]
    assert run.finished


def test_wandb_that_does_not_start_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**said: Any) -> None:
        raise RuntimeError("api_key not configured")

    module = ModuleType("wandb")
    module.errors = SimpleNamespace(Error=RuntimeError)  # type: ignore[attr-defined]
    module.Settings = lambda **said: said  # type: ignore[attr-defined]
    module.init = refuse  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    with pytest.raises(ConfigError, match="could not be started: api_key not configured") as caught:
        Wandb(tmp_path, "tiny", "peer-0")
    assert "WANDB_MODE=offline" in caught.value.fix

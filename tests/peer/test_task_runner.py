"""An evaluation beside the training that is ended hard. What evaluations give is in `test_evaluation`."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import pytest

from spes_p2p.config.schema import EvalConfig
from spes_p2p.observe.events import Event
from spes_p2p.peer import task_runner
from spes_p2p.peer.task_runner import TaskRunner

WAIT_SECONDS = 60.0


def test_an_evaluation_that_is_killed_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)  # which is read once
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(task_runner, "PROGRAM", "tests.peer.endless_program")
    events: list[Event] = []
    runner = TaskRunner(tmp_path / "checkpoints", EvalConfig(tasks="parity:0"), events.append)
    runner.start()
    until = time.monotonic() + WAIT_SECONDS
    while not list(tmp_path.rglob("model")) and not events and time.monotonic() < until:
        time.sleep(0.01)
    assert list(tmp_path.rglob("model")), events
    runner.close()
    assert list(tmp_path.iterdir()) == []

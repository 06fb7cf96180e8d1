"""A past run, drawn from the metrics.jsonl of its peers."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from pathlib import Path

import pytest

from spes_p2p.dashboard.history import History
from spes_p2p.dashboard.replay import replay
from spes_p2p.dashboard.web import page_state
from spes_p2p.errors import ConfigError
from spes_p2p.observe.events import Columns, Eval, Event, ExpertLoad, Peer, Round, Warning
from spes_p2p.observe.sinks import JsonLines
from tests.dashboard.made_run import NOW, load_at, loss_at
from tests.observe.test_events import ROUND, STEP

ROUNDS, STEPS = 12, 4


def write_run(folder: Path, late_seconds: float = 0.0) -> Path:
    """The metrics of one peer: a few steps a round, held-out losses, a word here and there."""
    sink = JsonLines(folder / "metrics.jsonl")

    def tell(at: float, event: Event) -> None:
        sink.write(NOW + at + late_seconds, event)

    for round in range(1, ROUNDS + 1):
        start = 30.0 * round
        for step in range(STEPS):
            tell(start + 5.0 * step, replace(STEP, step=STEPS * round + step, loss=loss_at(round), tokens=1000))
        seconds = {"train": 20.0 + late_seconds, "close": 0.2, "reduce": 3.0, "vote": 0.1, "apply": 0.5}
        committed: Round = replace(ROUND, round=round, step=STEPS * round, seconds=seconds, tokens=8000)
        mean = tuple(load_at(expert, round, 0) / 100 for expert in range(16))
        highest, lowest = tuple(2 * load for load in mean), tuple(load / 2 for load in mean)
        tell(start + 24.0, ExpertLoad(round, STEPS * round, 1000 * (1 + (late_seconds > 0)), mean, highest, lowest))
        tell(start + 25.0, committed)
        tell(start + 26.0, Eval(round, STEPS * round, loss_at(round) + 0.1, 4096))
    tell(400.0, Peer("lost", "QmBen", ROUNDS))
    tell(401.0, Columns(ROUNDS, (1, 2)))
    tell(402.0, Warning("look at that"))
    sink.close()
    return folder


def test_a_run_is_drawn_from_its_files(tmp_path: Path) -> None:
    history = History()
    replay([write_run(tmp_path / "anna"), write_run(tmp_path / "ben", 9.0) / "metrics.jsonl"], history)
    state = page_state(history, NOW)
    assert state["replay"]["peers"] == ["anna", "ben"]
    assert state["rounds"]["round"] == list(range(1, ROUNDS + 1))
    assert state["rounds"]["tokens"] == [8000 * round for round in range(1, ROUNDS + 1)]
    assert state["rounds"]["loss"] == pytest.approx([loss_at(round) for round in range(1, ROUNDS + 1)])
    assert state["held_out"]["loss"][0] == pytest.approx(loss_at(1) + 0.1)
    assert state["peers"]["anna"]["tokens"] == ROUNDS * STEPS * 1000
    assert state["peers"]["ben"]["sent"] == ROUNDS * 10
    assert len(state["timeline"]) == 2 * ROUNDS
    assert [(row["round"], row["peers"]) for row in state["loads"]] == [(at, 2) for at in range(1, ROUNDS + 1)]
    assert state["loads"][-1]["mean"] == pytest.approx([load_at(at, ROUNDS, 0) / 100 for at in range(16)])
    assert (state["head"]["round"], state["head"]["step"]) == (ROUNDS, ROUNDS * STEPS)
    assert [event["kind"] for event in state["events"]][:3] == ["warning", "experts", "lost"]
    assert all(series["at"] for series in state["samples"].values())


def test_peers_of_one_folder_name_are_told_apart(tmp_path: Path) -> None:
    history = History()
    replay([write_run(tmp_path / "a" / "peer"), write_run(tmp_path / "b" / "peer")], history)
    assert sorted(history.peers()) == ["peer 1", "peer 2"]


def test_a_loss_that_is_not_finite_is_left_out(tmp_path: Path) -> None:
    """Older versions wrote an event of a step that was skipped, too."""
    with contextlib.closing(JsonLines(tmp_path / "metrics.jsonl")) as sink:
        for loss in (3.0, math.nan, 2.0):
            sink.write(NOW, replace(STEP, loss=loss))
        sink.write(NOW, replace(ROUND, round=1))
    history = History()
    replay([tmp_path], history)
    assert [row["loss"] for row in history.rows("SELECT loss FROM peer_rounds")] == [2.5]


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere does not exist"):
        replay([tmp_path / "nowhere"], History())
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="contains no events"):
        replay([tmp_path], History())

"""The live view is a pure function: states go in, the very screens in `screens/` come out, at any width.

`python -m tests.observe.test_live` writes these screens anew; look at them before they are committed.
"""

from __future__ import annotations

import dataclasses
import io
import math
from pathlib import Path

import pytest
from rich.console import Console

from spes_p2p.observe.events import Eval, ExpertLoad, Pause, Step, Warning
from spes_p2p.observe.live import (
    EXCHANGING,
    READY,
    TRAINING,
    VOTING,
    WAITING,
    Facts,
    LiveModel,
    LiveState,
    render_live,
    sparkline,
)
from spes_p2p.observe.screen import LiveScreen
from tests.observe.test_events import ROUND, STEP

SCREENS = Path(__file__).parent / "screens"
FACTS = Facts(
    phase=TRAINING, members=5, heard=4, columns=8, covered=8, owned=(2, 3, 5), counted_rounds=12, rank=2,
    contributors=6, swarm_tokens=41_300_000, swarm_tokens_per_second=18_400.0,
)  # fmt: skip
STATE = LiveState(
    "0.1.0", "home", "6P9UKN", 3723.0, "", FACTS, step=1463, round=14, round_steps=63, steps_per_round=100,
    tokens=1_240_000, tokens_per_second=3450.0, loss=2.3412, eval_loss=2.4101, eval_round=12,
    losses=tuple(4 - 0.01 * n for n in range(100)),
    bytes_sent=1_100_000_000, bytes_received=1_240_000_000, seconds_to_sync=42.0, keys=True,
    invite="spes-p2p invite --folder peer",
    messages=(
        "10:32:01 warning: peer abc123: its values for slice 3 were left out: lost",
        "10:33:40 peer xyz987 joined (round 14)",
    ),
)  # fmt: skip


def at(phase: str, **changes: object) -> LiveState:
    return dataclasses.replace(STATE, facts=dataclasses.replace(FACTS, phase=phase, **changes))  # type: ignore[arg-type]


CASES = {
    "training": STATE,
    "exchanging": at(EXCHANGING, done=7, total=16),
    "voting": at(VOTING, done=16, total=16),
    "paused": dataclasses.replace(at(READY, owned=()), paused="until 22:00 (--schedule)"),
    "leaving": at(READY, leaving=True),
    "stranger": at(TRAINING, shares=(0.0, 0.25)),
    "gone": at(WAITING, leaving=True, owned=()),
    "new": LiveState("0.1.0", "tiny", "6P9UKN", facts=Facts(phase=WAITING)),
    "back": dataclasses.replace(
        at(WAITING, round=13, step=1300, owned=()),
        tokens=0,
        tokens_per_second=None,
        loss=None,
        losses=(),
        eval_loss=None,
        round=0,
        step=0,
        messages=(),
        seconds_to_sync=None,
    ),
    "uncovered": at(TRAINING, covered=6, rank=0, counted_rounds=0),
}


def drawn(state: LiveState, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, height=40, color_system=None, force_terminal=False)
    console.print(render_live(state))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.rstrip().splitlines()) + "\n"


@pytest.mark.parametrize("name", CASES)
def test_the_screen_is_the_one_that_was_looked_at(name: str) -> None:
    assert drawn(CASES[name]) == (SCREENS / f"{name}.txt").read_text()


@pytest.mark.parametrize("width", [60, 70, 80, 200])
@pytest.mark.parametrize("name", CASES)
def test_nothing_is_wider_than_the_terminal_nor_higher_than_a_small_one(name: str, width: int) -> None:
    lines = drawn(CASES[name], width).splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) <= 24


def test_a_curve_goes_from_its_highest_to_its_lowest() -> None:
    assert sparkline([]) == ""
    assert sparkline([1.0]) == "▁"
    assert sparkline([5, 4, 3, 2, 1], 5) == "█▆▅▃▁"
    assert len(sparkline([1.0, 2.0] * 500, 24)) == 24


def test_the_model_folds_events_and_asks_for_the_rest() -> None:
    clock = iter([0.0, 90.0, 91.0]).__next__
    model = LiveModel(LiveState("1", "tiny", "me"), lambda step: 10, lambda: FACTS, clock)
    model.write(0.0, dataclasses.replace(STEP, step=1, tokens=100, loss=3.0))
    model.write(1.0, dataclasses.replace(STEP, step=2, tokens=100, loss=2.0))
    model.write(2.0, Eval(1, 20, 3.5, 10))
    model.write(2.0, Warning("look out"))
    model.say("said")
    model.write(3.0, Pause(True, "by key"))
    state = model.state()
    assert (state.tokens, state.losses, state.eval_loss, state.round_steps) == (200, (3.0, 2.0), 3.5, 2)
    assert (state.paused, state.uptime_seconds, state.facts) == ("by key", 90.0, FACTS)
    assert [message.split(" ", 1)[1] for message in state.messages] == ["warning: look out", "said", "paused: by key"]
    model.write(4.0, Pause(False, ""))
    model.write(5.0, dataclasses.replace(ROUND, step=40, round=4))
    assert "round 4, step 40: 200 tokens" in model.last_words()
    assert model.messages[-1].endswith("training resumes")  # a round that says nothing of this peer is no message


def test_each_round_that_counts_tells_so_in_one_line_and_the_load_of_experts_is_left_to_the_metrics() -> None:
    model = LiveModel(LiveState("1", "tiny", "me"), lambda step: 10, lambda: FACTS)
    model.write(1.0, dataclasses.replace(ROUND, round=4, own_tokens=20_480))
    model.write(1.0, ExpertLoad(4, 40, 100, (1.0,), (1.0,), (1.0,)))
    model.write(2.0, dataclasses.replace(ROUND, round=5, own_tokens=1024))
    assert [message.split(" ", 1)[1] for message in model.messages] == ["round 5 committed, your 1.0k tokens counted"]
    model.write(3.0, Warning("look out"))
    model.write(4.0, dataclasses.replace(ROUND, round=6, own_tokens=1024))
    assert [message.split(" ", 1)[1][:8] for message in model.messages] == ["round 5 ", "warning:", "round 6 "]


def test_only_the_newest_messages_are_kept() -> None:
    model = LiveModel(LiveState("1", "tiny", "me"), lambda step: 10, lambda: FACTS)
    for number in range(20):
        model.write(0.0, Step(number, 1.0, 1, 1.0, 1.0, 1.0))
        model.say(f"message {number}")
    assert [message.split()[-1] for message in model.state().messages] == ["14", "15", "16", "17", "18", "19"]


def test_a_step_that_is_not_finite_leaves_the_screen_as_it_was() -> None:
    model = LiveModel(LiveState("1", "tiny", "me"), lambda step: 10, lambda: FACTS)
    console = Console(file=io.StringIO(), width=100, height=40, force_terminal=True)
    screen = LiveScreen(model, console, {}, None)
    try:
        for number, loss in enumerate((3.0, math.nan, math.inf, 2.0)):
            screen.write(0.0, dataclasses.replace(STEP, step=number, loss=loss))
            screen._live.refresh()  # as its thread does, which would end by an error
    finally:
        screen.close()
    assert "2.9000 █▁" in console.file.getvalue()  # type: ignore[attr-defined]


if __name__ == "__main__":
    for case, state in CASES.items():
        (SCREENS / f"{case}.txt").write_text(drawn(state))

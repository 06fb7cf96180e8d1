"""What is shown of peers is folded from their events alone."""

from __future__ import annotations

import dataclasses
import io
import math

import pytest
from rich.console import Console

from spes_p2p.observe.events import Eval, Peer, Step
from spes_p2p.observe.metrics import Ema, bytes_text, bytes_texts, count_text, seconds_text
from spes_p2p.observe.progress import render
from spes_p2p.observe.view import PeerView
from tests.observe.test_events import ROUND, STEP


def step(number: int) -> Step:
    return dataclasses.replace(STEP, step=number, loss=2.0)


def test_time_to_the_next_sync_follows_speed_and_schedule() -> None:
    view = PeerView(steps_per_round=lambda at: 10 if at < 40 else 20)
    view.apply(0.0, step(1))
    assert view.seconds_to_sync() is None
    view.apply(2.0, step(2))
    assert view.seconds_to_sync() == pytest.approx(8 * 2.0)
    view.apply(100.0, dataclasses.replace(ROUND, step=40))
    view.apply(130.0, step(41))
    assert view.seconds_to_sync() == pytest.approx(19 * 2.0)
    view.apply(132.0, step(70))
    assert view.seconds_to_sync() == 0


def test_view_keeps_the_last_and_adds_up() -> None:
    view = PeerView()
    for _ in range(2):
        view.apply(9.0, ROUND)
    view.apply(9.5, Eval(1, 20, 3.5, 10))
    view.apply(9.5, Eval(2, 40, 3.0, 10))
    assert (view.eval_loss, view.bytes_sent, view.bytes_received) == (3.0, 20, 40)


def test_display_shows_numbers_and_newest_messages() -> None:
    view = PeerView()
    console = Console(file=io.StringIO(), width=140)
    console.print(render({"anna": view}))
    view.apply(0.0, step(3))
    view.apply(1.0, dataclasses.replace(ROUND, commit="renewal", deadline_seconds=6.5))
    for number in range(9):
        view.apply(2.0, Peer("lost", f"peer-{number}", 2))
    console.print(render({"anna": view}))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "2 (renewal)" in text
    assert "6.5 s" in text
    assert "2.0000" in text
    assert "peer peer-8 lost" in text
    assert "peer peer-0 lost" not in text


def test_average_starts_exact_and_follows() -> None:
    average = Ema(0.5)
    assert [average.add(value) for value in (4.0, 2.0, 2.0)] == [4.0, 3.0, 2.5]


def test_average_leaves_out_what_is_not_finite() -> None:
    average = Ema(0.5)
    assert [average.add(value) for value in (math.nan, 4.0, math.inf, 2.0)] == [None, 4.0, 4.0, 3.0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (count_text(999), "999"),
        (count_text(12_345), "12.3k"),
        (count_text(999_999), "1.0M"),
        (count_text(5e15), "5000.0T"),
        (count_text(float("nan")), "nan"),
        (bytes_text(12_345_678), "12.3 MB"),
        (bytes_text(0), "0 B"),
        (" ".join(bytes_texts(20_200, 4_700_000)), "0.02 MB 4.7 MB"),
        (" ".join(bytes_texts(0, 999)), "0 B 999 B"),
        (seconds_text(4.2), "4.2 s"),
        (seconds_text(59), "59 s"),
        (seconds_text(75), "1:15"),
        (seconds_text(3700), "1:01:40"),
    ],
)
def test_numbers_for_people(text: str, expected: str) -> None:
    assert text == expected

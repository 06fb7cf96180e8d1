"""Events survive JSON, and no sink can stop the training, whatever happens to it."""

from __future__ import annotations

import dataclasses
import math
import threading

import pytest

from spes_p2p.errors import ConfigError, StorageFull
from spes_p2p.observe.events import (
    Error,
    Eval,
    Event,
    EventBus,
    ExpertLoad,
    Note,
    Peer,
    Round,
    Step,
    Warning,
    from_json,
    to_json,
)
from spes_p2p.observe.text import line

STEP = Step(step=3, loss=2.5, tokens=1024, tokens_per_second=99.5, lr=1e-3, grad_norm=0.7)
ROUND = Round(
    round=2,
    step=40,
    roster_size=3,
    commit="committed",
    tokens=3072,
    bytes_sent=10,
    bytes_received=20,
    seconds={"reduce": 0.5, "vote": 0.1},
    model_hash="ab" * 32,
    merge_alpha=0.04,
    stale_columns=(1, 5),
)
LOAD = ExpertLoad(2, 40, 4096, (1.5, 0.5, 1.0, 1.0), (2.5, 0.8, 1.0, 1.0), (0.5, 0.2, 1.0, 1.0))
EVENTS: list[Event] = [
    STEP,
    LOAD,
    ROUND,
    Peer("joined", "12D3KooWx", 4),
    Eval(2, 40, 1.25, 4096),
    Note("the organiser vouches for this peer: it is trusted now"),
    Warning("a sink is slow"),
    Error.of(ConfigError("x is 3", fix="make it 2")),
]


class Recorder:
    """A sink that keeps what it gets; fails while `trouble` is set."""

    def __init__(self, trouble: Exception | None = None) -> None:
        self.events: list[Event] = []
        self.trouble = trouble
        self.closed = False

    def write(self, time: float, event: Event) -> None:
        if self.trouble is not None:
            raise self.trouble
        self.events.append(event)

    def close(self) -> None:
        self.closed = True
        if self.trouble is not None:
            raise self.trouble


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.event)
def test_event_survives_json(event: Event) -> None:
    assert from_json(to_json(12.5, event)) == (12.5, event)


def test_numbers_that_are_not_finite_become_null_and_nan_again() -> None:
    text = to_json(0.0, Step(1, math.inf, 1, 1.0, 1.0, math.nan))
    assert '"loss": null' in text
    _, event = from_json(text)
    assert isinstance(event, Step)
    assert math.isnan(event.loss)


@pytest.mark.parametrize("text", ["", "3", "{}", '{"event": "step", "time": 1}', '{"event": "dance", "time": 1}', "[1"])
def test_what_is_no_event_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        from_json(text)


@pytest.mark.parametrize("text", ["[" * 100_000, f'{{"event": "warning", "time": 1{"0" * 400}, "message": ""}}'])
def test_deep_lists_and_long_numbers_are_no_event(text: str) -> None:
    with pytest.raises(ValueError, match="not an event"):
        from_json(text)


def test_a_failing_sink_is_reported_once_and_dropped() -> None:
    good, bad = Recorder(), Recorder(RuntimeError("cable cut"))
    bus = EventBus(bad, good)
    bus.emit(STEP)
    bad.trouble = None
    bus.emit(ROUND)
    assert good.events == [STEP, Warning("Recorder failed and has been turned off: RuntimeError: cable cut"), ROUND]
    assert bad.events == []


def test_a_full_disk_is_reported_once_and_writing_goes_on_when_there_is_room() -> None:
    good, full = Recorder(), Recorder(StorageFull("no space", fix="free some"))
    bus = EventBus(good, full)
    bus.emit(STEP)
    bus.emit(STEP)
    full.trouble = None
    bus.emit(ROUND)
    report = Error("Recorder is losing events: no space", "free some")
    assert good.events == [STEP, report, STEP, ROUND, Warning("Recorder is working again")]
    assert full.events == [ROUND, Warning("Recorder is working again")]


def test_a_stream_that_fails_for_a_moment_is_written_to_again() -> None:
    good, bad = Recorder(), Recorder(OSError(11, "try again"))
    bus = EventBus(good, bad)
    bus.emit(STEP)
    bus.emit(STEP)
    bad.trouble = None
    bus.emit(ROUND)
    report = Error("Recorder is losing events: [Errno 11] try again")
    assert good.events == [STEP, report, STEP, ROUND, Warning("Recorder is working again")]
    assert bad.events == [ROUND, Warning("Recorder is working again")]


def test_all_sinks_failing_at_once_does_not_raise() -> None:
    bus = EventBus(Recorder(RuntimeError("a")), Recorder(RuntimeError("b")))
    bus.emit(STEP)
    bus.emit(STEP)


def test_close_closes_every_sink_even_after_one_fails() -> None:
    bad, good = Recorder(RuntimeError("stuck")), Recorder()
    bus = EventBus(bad, good)
    bus.close()
    assert bad.closed
    assert good.closed
    bus.emit(STEP)
    assert good.events == []


def test_events_of_many_threads_reach_all_sinks_in_one_order() -> None:
    first, second = Recorder(), Recorder()
    bus = EventBus(first)
    bus.add(second)

    def work(name: int) -> None:
        for number in range(100):
            bus.emit(Warning(f"{name} {number}"))

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert first.events == second.events
    assert len(first.events) == 400


def test_what_happens_to_this_peer_is_told_as_such() -> None:
    own = Peer("lost", "12D3KooWx", 21, own=True)
    assert line(own) == "this peer was dropped (round 21)"
    assert line(dataclasses.replace(own, change="joined")) == "this peer joined (round 21)"
    assert line(dataclasses.replace(own, own=False)) == "peer 3KooWx lost (round 21)"


def test_a_screen_that_comes_late_shows_what_was_said_before() -> None:
    """A peer hears of things while it joins, before there is anything to look at."""
    file, screen, other = Recorder(), Recorder(), Recorder()
    bus = EventBus(file)
    bus.emit(Warning("early"))
    bus.add(screen, with_early=True)
    bus.emit(Warning("late"))
    bus.add(other, with_early=True)
    assert file.events == screen.events == [Warning("early"), Warning("late")]
    assert other.events == []


def test_a_round_without_this_peer_says_so_instead_of_a_training_that_was_none() -> None:
    missed = dataclasses.replace(ROUND, own_tokens=0, seconds={"reduce": 2.0})
    assert "(without this peer)" in line(missed)
    assert "trained for" not in line(missed)
    assert "synced in 2.0 s" in line(missed)
    assert "without this peer" not in line(dataclasses.replace(missed, own_tokens=5))
    assert "without this peer" not in line(dataclasses.replace(missed, own_tokens=-1))  # of an older version

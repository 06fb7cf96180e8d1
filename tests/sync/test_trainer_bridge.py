"""The meeting place of the network's thread and the training thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from spes_p2p.consensus.messages import Work
from spes_p2p.errors import NetworkError
from spes_p2p.ids import Hash
from spes_p2p.sync.trainer_bridge import TrainerBridge

HEAD, OTHER = Hash(b"h" * 32), Hash(b"o" * 32)


def applied(round: int) -> Any:
    """A commit, as far as a gate looks into it."""
    return SimpleNamespace(commit=SimpleNamespace(manifest=SimpleNamespace(round=round)))


EVENT = applied(1)


class Recorder:
    """In the place of a driver: notes what reaches it, on a loop that a test turns by hand."""

    def __init__(self, gate: TrainerBridge) -> None:
        self.round = SimpleNamespace(close_asked=False)
        state = SimpleNamespace(round=self.round)
        self.core = SimpleNamespace(tip_hash=HEAD, tip=SimpleNamespace(round=7), state=state)
        self.heard: list[tuple[str, Any]] = []
        self._waiting: list[Callable[[], None]] = []
        loop: Any = SimpleNamespace(call_soon_threadsafe=self._waiting.append)
        gate.attach(self, loop)  # type: ignore[arg-type]

    def progressed(self, work: Work) -> None:
        self.heard.append(("ready" if work.ready else "training", work))

    def wish(self, intent: Any) -> None:
        raise ValueError("a bug")

    def turn(self) -> None:
        while self._waiting:
            self._waiting.pop(0)()


def test_commits_come_in_order_and_once() -> None:
    gate = TrainerBridge()
    gate.applied(EVENT)
    gate.applied(EVENT)
    assert len(gate.wait()) == 2
    assert gate.wait(until=0.0) == ()


def test_a_round_that_closes_before_the_last_commit_is_taken_ends_too() -> None:
    """A slow machine's step may outlast the others' round, and nobody asks twice to end one."""
    gate = TrainerBridge()
    gate.close_training()
    gate.applied(applied(7))
    gate.close_training()
    gate.wait()
    assert gate.should_stop()
    gate.applied(applied(8))
    gate.wait()
    assert not gate.should_stop()


def test_a_round_that_closes_in_the_step_that_begins_it_ends_too() -> None:
    """Who has just caught up may be told of the close first, then of the commit."""
    gate = TrainerBridge()
    recorder = Recorder(gate)
    recorder.round.close_asked = True
    gate.close_training()
    gate.applied(applied(7))
    gate.wait()
    assert gate.should_stop()
    recorder.round.close_asked = False
    gate.applied(applied(8))
    gate.wait()
    assert not gate.should_stop()


def test_states_that_training_still_reads_are_in_use() -> None:
    gate = TrainerBridge()
    Recorder(gate)
    assert gate.rounds_in_use() == {7}
    for round in (8, 9, 10):
        gate.applied(applied(round))
    assert gate.rounds_in_use() == {7, 8}
    gate.wait()
    assert gate.rounds_in_use() == {7, 8, 10}
    gate.use(10)
    assert gate.rounds_in_use() == {10}


def test_a_waiting_thread_is_woken_by_a_commit_and_by_the_wish_to_stop() -> None:
    for wake in (lambda gate: gate.applied(EVENT), lambda gate: gate.stop()):
        gate = TrainerBridge()
        threading.Timer(0.01, wake, (gate,)).start()
        assert len(gate.wait()) == (0 if gate.stopping else 1)


def test_training_ends_when_the_round_closes_and_goes_on_after_the_commit() -> None:
    gate = TrainerBridge()
    assert not gate.should_stop()
    gate.close_training()
    assert gate.should_stop()
    gate.applied(EVENT)
    assert gate.should_stop()
    gate.wait()
    assert not gate.should_stop()


def test_a_leaver_still_hears_of_commits() -> None:
    gate = TrainerBridge()
    gate.stop()
    assert gate.wait() == ()
    gate.applied(EVENT)
    assert len(gate.wait(heed_stop=False)) == 1


def test_what_breaks_on_the_network_reaches_the_training_thread() -> None:
    gate = TrainerBridge()
    recorder = Recorder(gate)
    gate.wish(None)  # type: ignore[arg-type]
    recorder.turn()
    with pytest.raises(ValueError, match="a bug"):
        gate.wait()


def test_ready_for_a_round_that_was_decided_meanwhile_is_dropped() -> None:
    gate = TrainerBridge()
    recorder, early, late = Recorder(gate), Work(ready=True, tokens=1), Work(ready=True, tokens=2)
    gate.report(early, HEAD)
    recorder.turn()
    gate.report(late, HEAD)
    gate.report(late, HEAD)
    recorder.core.tip_hash = OTHER  # the commit comes before the network's thread gets to them
    recorder.turn()
    assert recorder.heard == [("ready", early)]


def test_the_wish_to_stop_is_passed_on_at_once_also_when_it_came_before() -> None:
    gate, calls = TrainerBridge(), []
    with gate.on_stop(lambda: calls.append("first")):
        gate.stop()
    with gate.on_stop(lambda: calls.append("late")):
        pass
    gate.stop()
    assert calls == ["first", "late"]


def test_a_failure_breaks_off_what_waits_for_the_run_to_begin() -> None:
    gate, calls = TrainerBridge(), []
    gate.check()
    with gate.on_stop(lambda: calls.append("first")):
        gate.failed(NetworkError("a rank ended"))
    with gate.on_stop(lambda: calls.append("late")):
        pass
    assert calls == ["first", "late"]
    with pytest.raises(NetworkError, match="a rank ended"):
        gate.check()

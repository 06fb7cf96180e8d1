"""How long the ranks of a peer may take, learnt from how long they took."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from spes_p2p.train import watchdog
from spes_p2p.train.watchdog import FIRST_SECONDS, Watchdog


def test_what_never_finished_is_given_long_what_did_a_multiple_of_its_time() -> None:
    dog = Watchdog(lambda command, seconds, longest: None)
    assert dog.limit_seconds("step") == FIRST_SECONDS
    with dog.watching("step"):
        pass
    assert dog.limit_seconds("step") == watchdog.FLOOR_SECONDS
    dog._longest["step"] = 10.0
    assert dog.limit_seconds("step") == watchdog.TIMES * 10.0
    with pytest.raises(ValueError, match="broken"), dog.watching("adopt"):
        raise ValueError("broken")
    assert dog.limit_seconds("adopt") == FIRST_SECONDS
    dog.close()


def test_it_tells_once_of_a_command_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "FIRST_SECONDS", 0.1)
    told, heard = threading.Event(), list[str]()

    def frozen(command: str, seconds: float, longest: float) -> None:
        heard.append(command)
        told.set()

    dog = Watchdog(frozen)
    with dog.watching("step"):
        assert told.wait(30.0)
    dog.close()
    assert heard == ["step"]


def test_what_counts_is_the_longest_part_between_two_signs_of_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of minutes that moves is not frozen, and one of minutes does not allow silence of hours."""
    now = [0.0]
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now[0]))
    dog = Watchdog(lambda command, seconds, longest: None)
    with dog.watching("step"):
        for seconds in (3.0, 8.0, 4.0):
            now[0] += seconds
            dog.progress()
        assert dog.limit_seconds("step") == FIRST_SECONDS  # its end may be slower
    assert dog.limit_seconds("step") == watchdog.TIMES * 8.0
    dog.progress()  # between commands it means nothing
    dog.close()


def test_progress_begins_the_time_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "FIRST_SECONDS", 1.0)
    told = threading.Event()
    dog = Watchdog(lambda command, seconds, longest: told.set())
    seen = []
    with dog.watching("step"):
        for _ in range(3):
            seen.append(dog._running)
            dog.progress()
    dog.close()
    assert len(set(seen)) == 3  # what the watching thread starts its time again for
    assert not told.is_set()

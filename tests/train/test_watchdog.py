"""How long the ranks of a peer may take, learnt from how long they took."""

from __future__ import annotations

import threading

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

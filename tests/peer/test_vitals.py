"""What a peer's record tells of how it fares: folded from events, always fit for the wire."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spes_p2p.errors import RemoteProtocolError
from spes_p2p.observe.events import Error, Eval, Event, Warning
from spes_p2p.peer.presence import VitalsKeeper
from spes_p2p.swarm.vitals import MAX_EXPERTS, MAX_LOAD_PERCENT, MAX_LOSS, PeerWarning, Vitals
from spes_p2p.wire import pack, unpack
from tests.observe.test_events import LOAD, ROUND, STEP

LOADS = ("load_percent", "highest_load_percent", "lowest_load_percent")


def test_events_are_folded_into_vitals() -> None:
    keeper = VitalsKeeper()
    keeper.set_device("NVIDIA H100\x1b[2J" + "x" * 99)
    for loss in (4.0, 2.0):
        keeper.write(1.0, replace(STEP, loss=loss))
    keeper.write(9.5, ROUND)
    keeper.write(9.6, replace(ROUND, round=3, data_bytes_sent=5))
    keeper.write(9.7, Eval(2, 40, 1.25, 4096))
    found = keeper.now("training")
    assert (found.timed_round, found.applied_at_seconds, found.phase_seconds) == (3, 9.6, (0.0, 0.0, 0.5, 0.1, 0.0))
    assert (found.bytes_sent, found.bytes_received) == (25, 40)
    assert (found.held_out_round, found.held_out_loss, found.round_loss) == (2, 1.25, 0.0)
    assert found.device.startswith("NVIDIA H100[2J")
    assert unpack(Vitals, pack(found)) == found


def test_the_loss_of_a_round_is_the_mean_of_its_steps() -> None:
    keeper = VitalsKeeper()
    for loss in (4.0, 2.0):
        keeper.write(1.0, replace(STEP, loss=loss))
    keeper.write(2.0, ROUND)
    assert keeper.now("").round_loss == 3.0


def test_what_is_not_finite_is_seen_and_can_be_sent() -> None:
    keeper = VitalsKeeper()
    keeper.write(1.0, replace(STEP, loss=math.nan))
    keeper.write(2.0, replace(ROUND, seconds={"train": math.inf}))
    found = keeper.now("")
    assert found.round_loss == MAX_LOSS
    assert unpack(Vitals, pack(found)) == found


def test_the_load_of_experts_is_that_of_the_round_it_was_trained_for() -> None:
    keeper = VitalsKeeper()
    keeper.write(1.0, LOAD)
    assert keeper.now("").load_percent == ()
    keeper.write(2.0, ROUND)
    found = keeper.now("")
    assert (found.load_percent, found.highest_load_percent) == ((150, 50, 100, 100), (250, 80, 100, 100))
    assert found.lowest_load_percent == (50, 20, 100, 100)
    assert unpack(Vitals, pack(found)) == found
    keeper.write(3.0, replace(ROUND, round=3))
    assert keeper.now("").load_percent == ()


def test_the_newest_warnings_are_told_in_short_and_without_what_is_private() -> None:
    keeper = VitalsKeeper()
    said = [Warning(f"number {at}") for at in range(9)]
    home = Warning(f"no space left for {Path.home()}/secret plan/runs/metrics.jsonl, see http://a.org/b/c")
    long = Error("line\none \u202eright to left" + "x" * 999, "a fix")
    events: tuple[Event, ...] = (*said, said[-1], home, long)
    for at, event in enumerate(events):
        keeper.write(float(at), event)
    found = keeper.now("")
    assert [(one.at_seconds, one.kind) for one in found.warnings] == [
        (9.0, "warning"),
        (10.0, "warning"),
        (11.0, "error"),
    ]
    assert found.warnings[1].message.endswith("plan/runs/metrics.jsonl, see http://a.org/b/c")
    assert str(Path.home()) not in found.warnings[1].message
    assert found.warnings[2].message.startswith("line one right to leftxxx")
    assert unpack(Vitals, pack(found)) == found


@pytest.mark.parametrize(
    "lie",
    [
        {"load_percent": (100,) * 4, "highest_load_percent": (100,) * 4, "lowest_load_percent": (100,) * 3},
        dict.fromkeys(LOADS, (100,) * (MAX_EXPERTS + 1)),
        dict.fromkeys(LOADS, (-1,)),
        dict.fromkeys(LOADS, (MAX_LOAD_PERCENT + 1,)),
        {"warnings": (PeerWarning(1.0, "warning", "x"),) * 4},
    ],
)
def test_what_is_out_of_bounds_is_no_record(lie: dict[str, Any]) -> None:
    good = Vitals()
    for name, value in lie.items():
        object.__setattr__(good, name, value)
    with pytest.raises(RemoteProtocolError):
        unpack(Vitals, pack(good))


@pytest.mark.parametrize("lie", [("", 1.0, "warning"), ("x" * 161, 1.0, "warning"), ("a\nb", 1.0, "warning"),
                                 ("\u202ex", 1.0, "warning"), ("x", -1.0, "warning"), ("x", 1.0, "joke")])  # fmt: skip
def test_a_notice_out_of_bounds_is_no_record(lie: tuple[str, float, str]) -> None:
    message, at, kind = lie
    good = PeerWarning(1.0, "warning", "x")
    for name, value in (("message", message), ("at_seconds", at), ("kind", kind)):
        object.__setattr__(good, name, value)
    with pytest.raises(RemoteProtocolError):
        unpack(PeerWarning, pack(good))

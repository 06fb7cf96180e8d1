"""What a peer's record tells of how it fares: folded from events, always fit for the wire."""

from __future__ import annotations

import math
from dataclasses import replace

from spes_p2p.observe.events import Eval
from spes_p2p.peer.vitals import VitalsKeeper
from spes_p2p.swarm.vitals import MAX_LOSS, Vitals
from spes_p2p.wire import pack, unpack
from tests.observe.test_events import ROUND, STEP


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

"""A peer that is interrupted and resumed makes the very steps that it would have made."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from spes_p2p.failpoints import INNER_STEP
from tests.fork_server import ForkedSwarm
from tests.peer.real import ALONE, WAIT_SECONDS, alone, config_of, losses, make_tokens, state_hash
from tests.simulation.faults import FREEZE, KILL, Fault

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(600)]
ROUNDS = ("--until-round", "3")
STRUCK = Fault(INNER_STEP, KILL, skip=19)
"""After 20 steps, 4 of them in round 2."""
TERMINATED = Fault(INNER_STEP, FREEZE, skip=7)
"""It stands still for the signal, after 8 steps: where it goes on with round 2, at step 24."""


def test_killed_and_terminated_it_goes_on_bit_for_bit(tmp_path: Path) -> None:
    data, config = make_tokens(tmp_path), config_of(ALONE)
    whole = alone(tmp_path / "whole", data, *ROUNDS)
    with ForkedSwarm(tmp_path / "cut") as swarm:
        swarm.bootstrap("tiny", data, ALONE)
        for fault in (STRUCK, TERMINATED):
            swarm.armed_faults.arm(fault)
        codes = [swarm.peer("peer", data, faults=[STRUCK]).wait(WAIT_SECONDS)]
        second = swarm.peer("peer", data, faults=[TERMINATED])
        stands = psutil.Process(second.pid)
        swarm.wait_until(lambda: stands.status() == psutil.STATUS_STOPPED, "its 8th step", ["peer"])
        second.send(signal.SIGTERM)
        second.thaw()
        codes += [second.wait(WAIT_SECONDS), swarm.peer("peer", data, ROUNDS).wait(WAIT_SECONDS)]
    assert codes == [-signal.SIGKILL, 0, 0]
    assert whole.exit_code == 0
    assert losses(tmp_path / "cut" / "peer") == losses(whole.folder)
    assert set(losses(whole.folder)) == set(range(1, 49))
    assert state_hash(tmp_path / "cut" / "peer", config) == state_hash(whole.folder, config)

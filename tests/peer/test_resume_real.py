"""A peer that is interrupted and resumed makes the very steps that it would have made."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.fork_server import ForkedSwarm
from tests.peer.real import ALONE, WAIT_SECONDS, alone, config_of, end_at_step, losses, make_tokens, state_hash

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(600)]
ROUNDS = ("--until-round", "3")


def test_killed_and_terminated_it_goes_on_bit_for_bit(tmp_path: Path) -> None:
    data, config = make_tokens(tmp_path), config_of(ALONE)
    whole = alone(tmp_path / "whole", data, *ROUNDS)
    with ForkedSwarm(tmp_path / "cut") as swarm:
        swarm.bootstrap("tiny", data, ALONE)
        codes = [
            end_at_step(swarm.peer("peer", data), 20, signal.SIGKILL),
            end_at_step(swarm.peer("peer", data, []), 24, signal.SIGTERM),
            swarm.peer("peer", data, ROUNDS).wait(WAIT_SECONDS),
        ]
    assert codes == [-signal.SIGKILL, 0, 0]
    assert whole.exit_code == 0
    assert losses(tmp_path / "cut" / "peer") == losses(whole.folder)
    assert set(losses(whole.folder)) == set(range(1, 49))
    assert state_hash(tmp_path / "cut" / "peer", config) == state_hash(whole.folder, config)

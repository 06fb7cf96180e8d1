"""Planned faults: they happen where they should, as often as they should, and the same again from their seed."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from spes_p2p import failpoints
from spes_p2p.errors import ConfigError, StorageFull
from spes_p2p.exchange.requests import RunRequest, TilesRequest, pack_request
from spes_p2p.failpoints import reached
from spes_p2p.ids import NO_HASH
from tests.simulation.faults import (
    FREEZE,
    FULL,
    KILL,
    ArmedFaults,
    Fault,
    Faults,
    MemoryFaults,
    from_text,
    raise_planted,
    schedule,
    to_text,
)
from tests.simulation.memory_swarm import MemorySwarm
from tests.sync.swarm_cases import in_swarm


def passed(planned: list[Fault], **facts: Any) -> list[tuple[str, int]]:
    """(peer, round) of each fault while peers a and b pass READY in rounds 1 to 4."""
    happened: list[tuple[str, int]] = []

    def act(fault: Fault, peer: str, facts: Mapping[str, Any]) -> None:
        happened.append((peer, facts["round"]))

    with Faults(planned, act):
        for round in range(1, 5):
            for peer in "ab":
                reached(failpoints.READY, peer=peer, round=round, **facts)
    reached(failpoints.READY, peer="a", round=1)  # nobody listens any more
    return happened


def test_a_fault_happens_once_to_whom_it_should() -> None:
    assert passed([Fault(failpoints.READY, peer="b", round=2)]) == [("b", 2)]
    assert passed([Fault(failpoints.READY, round=3)]) == [("a", 3)]
    assert passed([Fault(failpoints.STAGED)]) == []


def test_it_can_come_later_and_more_often() -> None:
    assert passed([Fault(failpoints.READY, peer="a", skip=2)]) == [("a", 3)]
    assert passed([Fault(failpoints.READY, peer="a", times=2)]) == [("a", 1), ("a", 2)]
    assert len(passed([Fault(failpoints.READY, times=0)])) == 8


def test_streams_are_told_apart_by_what_they_carry() -> None:
    hit: list[str] = []
    request = pack_request(TilesRequest((NO_HASH,)))
    with Faults([Fault(failpoints.STREAM + " tiles")], lambda fault, peer, facts: hit.append(peer)):
        reached(failpoints.STREAM, peer="a", request=pack_request(RunRequest()))
        reached(failpoints.STREAM, peer="b", request=request)
    assert hit == ["b"]


def test_who_serves_somebody_else_is_not_hit() -> None:
    hit: list[str] = []
    planned = [Fault(failpoints.STREAM + " tiles", to="d"), Fault(failpoints.SERVE + "chain", to="d")]
    with Faults(planned, lambda fault, peer, facts: hit.append(f"{peer} at {fault.step}")):
        for peer, other in (("a", "b"), ("b", "d"), ("c", "d")):
            reached(failpoints.STREAM, peer=peer, to=other, request=pack_request(TilesRequest((NO_HASH,))))
        for peer, other in (("a", "c"), ("c", "d")):
            reached(failpoints.SERVE + "chain", peer=peer, caller=other)
    assert hit == ["b at stream tiles", "c at serve chain"]


def test_a_fault_after_another_step_is_for_who_has_passed_it_in_that_round() -> None:
    hit: list[tuple[str, int]] = []
    planned = [Fault(failpoints.COLLECTED, after="plan", round=2, times=0)]
    with Faults(planned, lambda fault, peer, facts: hit.append((peer, facts["round"]))):
        for round, leader in ((1, "a"), (2, "b"), (3, "a"), (4, "c")):
            reached("plan", peer=leader, round=round)
            for peer in "ab":
                reached(failpoints.COLLECTED, peer=peer, round=round)
    assert hit == [("b", 2), ("a", 3)]


def test_a_schedule_is_the_same_again_and_survives_the_environment() -> None:
    planned = schedule(7, "abc", range(3, 9), (KILL, FREEZE))
    assert planned == schedule(7, "abc", range(3, 9), (KILL, FREEZE))
    assert planned != schedule(8, "abc", range(3, 9), (KILL, FREEZE))
    assert [fault.round for fault in planned] == list(range(3, 9))
    assert from_text(to_text(planned)) == planned


@pytest.mark.parametrize("text", ["", "[1]", '[{"stop": "plan"}]'])
def test_what_are_no_faults_is_said(text: str) -> None:
    with pytest.raises(ConfigError):
        from_text(text)


def test_an_unknown_kind_is_said() -> None:
    with pytest.raises(ConfigError, match="'explode'"):
        Fault(failpoints.READY, "explode")


def test_a_full_disk_is_an_error_of_storage() -> None:
    with pytest.raises(StorageFull):
        raise_planted(Fault(failpoints.STAGE, FULL))


def test_an_armed_fault_hits_one_process(tmp_path: Path) -> None:
    armed_faults, fault = ArmedFaults(tmp_path), Fault("plan")
    assert not armed_faults.claim(fault, "p1")
    armed_faults.arm(fault)
    assert armed_faults.victim(fault) is None
    assert armed_faults.claim(fault, "p2")
    assert not armed_faults.claim(fault, "p1")
    assert armed_faults.victim(fault) == "p2"
    assert armed_faults.struck_at(fault) > 0


def play_schedule(folder: Path, seed: int) -> list[tuple[str, str, int]]:
    """(step, victim, round of the others by then) of each fault of a schedule, each victim coming back."""

    async def play(swarm: MemorySwarm) -> list[tuple[str, str, int]]:
        told = []
        await swarm.start("abc")
        for fault in schedule(seed, "abc", range(2, 4)):
            with MemoryFaults(swarm, [fault]) as faults:
                await asyncio.wait_for(faults.struck.wait(), 120)
                await faults.settled()
                newest = max(life.round for life in swarm.up)
                told.append((fault.step, faults.done[0][1], newest))
                await swarm.until_round(newest + 1)
            await swarm.add(faults.done[0][1])
            await swarm.until_round(newest + 2)
        return told

    with tempfile.TemporaryDirectory(dir=folder) as name:
        return in_swarm(Path(name), play)


def test_a_schedule_in_memory_plays_the_same_again(tmp_path: Path) -> None:
    assert play_schedule(tmp_path, 3) == play_schedule(tmp_path, 3)

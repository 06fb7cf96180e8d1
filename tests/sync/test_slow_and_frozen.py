"""Slow peers, frozen ones, links that get worse: the others go on in time, and what was trained counts once."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from spes_p2p import failpoints
from spes_p2p.consensus.messages import QUORUM
from spes_p2p.ids import PeerId
from spes_p2p.swarm.memory_links import LinkShape
from tests.simulation.faults import FREEZE, Fault, MemoryFaults
from tests.simulation.memory_swarm import MemorySwarm, PretendWork
from tests.sync.swarm_cases import (
    Recorder,
    check_agreement,
    check_leases,
    commits,
    counts,
    in_swarm,
    small_config,
    until,
)

STEP_SECONDS = 0.2
ROUNDS = 3
"""That are measured, after as many that are not."""


async def start(swarm: MemorySwarm, seconds: dict[str, float]) -> None:
    """Peers by name, each with the time of its inner steps, which no closing round breaks off."""
    await swarm.start_organiser()
    works = {name: PretendWork(step_seconds=one, finishes_steps=True) for name, one in seconds.items()}
    await asyncio.gather(*(swarm.add(name, work) for name, work in works.items()))


def tokens_per_second(folder: Path, seconds: dict[str, float], steps_per_round: int) -> float:
    async def play(swarm: MemorySwarm) -> float:
        await start(swarm, seconds)
        await swarm.until_round(ROUNDS)
        began = swarm.clock.now()
        await swarm.until_round(2 * ROUNDS)
        rosters = [commit.manifest.roster for commit in commits(swarm)[ROUNDS + 1 : 2 * ROUNDS + 1]]
        return sum(entry.tokens for roster in rosters for entry in roster) / (swarm.clock.now() - began)

    (folder / f"{len(seconds)}").mkdir()
    config = small_config(f"sync.steps_per_round={steps_per_round}", peers=len(seconds))
    return in_swarm(folder / f"{len(seconds)}", play, config)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("others", "steps_per_round"), [(1, 20), (3, 10), (3, 20)])
def test_a_peer_four_times_slower_costs_the_others_little(folder: Path, others: int, steps_per_round: int) -> None:
    """At least nine tenths of the tokens a second that they make without it."""
    alone = dict.fromkeys("abc"[:others], STEP_SECONDS)
    together = tokens_per_second(folder, alone | {"slow": 4 * STEP_SECONDS}, steps_per_round)
    assert together >= 0.9 * tokens_per_second(folder, alone, steps_per_round)


def test_a_slow_peer_is_counted_with_what_it_trained(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        recorder = Recorder(swarm)
        await start(swarm, {"a": 0.2, "b": 0.2, "slow": 0.8})
        await swarm.until_round(6)
        for commit in commits(swarm)[3:]:
            trained = {entry.peer: entry for entry in commit.manifest.roster}
            assert trained[PeerId("a")].steps == 20
            assert 4 <= trained[PeerId("slow")].steps <= 7
            assert trained[PeerId("slow")].tokens * 20 == trained[PeerId("a")].tokens * trained[PeerId("slow")].steps
        recorder.check(commits(swarm))  # the weights of the mean
        check_leases(swarm)

    in_swarm(folder, play, small_config("sync.steps_per_round=20"))


def test_a_peer_that_was_slow_for_one_round_does_not_make_rounds_longer_for_good(folder: Path) -> None:
    """What was learnt of round times may have been its pace."""

    async def play(swarm: MemorySwarm) -> None:
        await start(swarm, {"a": 0.1, "b": 0.5})
        await swarm.until_round(4)
        began = swarm.clock.now()
        await swarm.until_round(8)
        assert swarm.clock.now() - began < 4 * (1.25 * 10 * 0.1 + 2 * swarm.config.swarm.heartbeat_seconds + 1.0)

    in_swarm(folder, play, small_config(peers=2))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "step", [failpoints.READY, failpoints.COLLECTED, failpoints.STREAM + " values", "prevote", failpoints.APPENDED]
)
def test_a_frozen_peer_notices_that_it_is_behind_and_catches_up(folder: Path, step: str) -> None:
    async def play(swarm: MemorySwarm) -> None:
        recorder = Recorder(swarm)
        await swarm.start("abcd")
        await swarm.until_round(2)
        with MemoryFaults(swarm, [Fault(step, FREEZE, seconds=25.0)]) as faults:
            await asyncio.wait_for(faults.struck.wait(), 60)
            victim = faults.done[0][1]
            others = [name for name in "abcd" if name != victim]
            stood = max(life.round for life in swarm.up)
            await swarm.until_round(stood + 3, others)
            assert swarm.clock.now() - faults.struck_at < 25.0
            assert swarm.peers[PeerId(victim)].round <= stood + 1
            await until(counts(swarm, victim))
        assert not swarm.peers[PeerId(victim)].failures
        assert all(commit.certificate.kind == QUORUM for commit in commits(swarm)[1:])
        recorder.check(commits(swarm))
        check_agreement(swarm)
        check_leases(swarm)

    in_swarm(folder, play, small_config(peers=4))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("moment", ["reduce", failpoints.STREAM + " values", failpoints.STREAM + " tiles"])
def test_a_link_that_drops_to_a_tenth_of_its_rate_half_way(folder: Path, moment: str) -> None:
    """Slow is not lost: as long as bytes move nobody is given up, and all are counted."""

    async def play(swarm: MemorySwarm) -> None:
        recorder = Recorder(swarm)
        swarm.network.set_link(None, None, LinkShape(bytes_per_second=200_000))
        await swarm.start("abc")
        await swarm.until_round(2)
        slowed: list[str] = []

        def slow_down(fault: Fault, peer: str) -> bool:
            slowed.append(peer)
            for other in "abc":
                swarm.network.set_link(peer, other, LinkShape(bytes_per_second=20_000))
            return False  # nothing else happens to it

        with MemoryFaults(swarm, [Fault(moment)], slow_down):
            await until(lambda: bool(slowed))
        await swarm.until_round(6)
        for commit in commits(swarm)[3:]:
            assert commit.certificate.kind == QUORUM
            assert len(commit.manifest.roster) == 3
        recorder.check(commits(swarm))
        check_agreement(swarm)
        check_leases(swarm)

    in_swarm(folder, play)


def test_a_wall_clock_that_jumps_after_the_start_changes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(swarm: MemorySwarm) -> None:
        recorder = Recorder(swarm)
        await swarm.start("abc")
        await swarm.until_round(2)
        real, jumps = time.time, iter((300.0, -300.0) * 10_000)
        monkeypatch.setattr(time, "time", lambda: real() + next(jumps))
        began = swarm.clock.now()
        await swarm.until_round(6)
        assert swarm.clock.now() - began < 4 * 2.0
        assert all(len(commit.manifest.roster) == 3 for commit in commits(swarm)[1:])
        recorder.check(commits(swarm))
        check_leases(swarm)

    in_swarm(folder, play)

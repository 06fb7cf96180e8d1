"""SIGKILL at every named step, to every kind of peer: the others commit in time, exactly, with equal bits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from spes_p2p import failpoints
from spes_p2p.checkpoint.load import load_latest
from spes_p2p.consensus.messages import QUORUM, RENEWAL
from spes_p2p.ids import PeerId
from spes_p2p.swarm.memory_links import LinkShape
from tests.simulation.faults import LEADER_STEPS, MEMBER_STEPS, Fault, MemoryFaults
from tests.simulation.memory_swarm import MemorySwarm, PretendPeer, PretendWork
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

HEALTHY_SECONDS = 1.4
"""What a round takes on these links when nothing happens, training included."""
FIRST = 3
"""The round in which the first peer dies."""


def bound_seconds(swarm: MemorySwarm) -> float:
    """Section 4: a silence is noticed, a leader given up, the next one has twice the time; then a round follows."""
    paces = [life.driver.core.state.pace for life in swarm.up]
    wait = max(pace.suspect_seconds + pace.deadline_seconds(0) + pace.deadline_seconds(1) for pace in paces)
    alone = swarm.rules.renew_after_seconds if len(swarm.up) == 1 else 0.0
    return wait + alone + 1.5 * HEALTHY_SECONDS


def is_leader(life: PretendPeer) -> bool:
    current = life.driver.core.state.round
    return current.order[current.vote.ballot % len(current.order)] == life.name


def is_member(life: PretendPeer, name: str) -> bool:
    """Whether `life` stands on a manifest that names this peer."""
    return name in {member.peer for member in life.driver.core.tip.members}


def owns_alone(life: PretendPeer) -> bool:
    return any(owners == (life.name,) for owners in life.driver.core.tip.ownership)


def shares(life: PretendPeer) -> bool:
    return any(life.name in owners and len(owners) == 2 for owners in life.driver.core.tip.ownership)


async def kill_one(
    swarm: MemorySwarm,
    fault: Fault,
    fits: Callable[[PretendPeer], bool] = lambda life: True,
    beside: Callable[[str], Iterable[str]] = lambda victim: (),
) -> str:
    """The victim; the others have committed in time, and nobody said more than one line of each thing."""
    said = {life.name: len(life.notices) for life in swarm.lives}
    with MemoryFaults(swarm, [fault], lambda fault, peer: fits(swarm.peers[PeerId(peer)]), beside) as faults:
        async with asyncio.timeout(60):
            await faults.struck.wait()
        await faults.settled()
        newest = max(life.round for life in swarm.up)
        await swarm.until_round(newest + 1)
        took = swarm.clock.now() - faults.struck_at
        assert took < bound_seconds(swarm), f"{fault} held the others up for {took:.2f} s"
    victim = faults.done[0][1]
    for life in swarm.up:
        words = [notice.text for notice in life.notices[said.get(life.name, 0) :] if notice.peer == victim]
        assert len(words) <= 1, words
        assert not life.failures
    return victim


async def bring_back(swarm: MemorySwarm, name: str) -> None:
    """It comes again with the disk that it left, and its work counts."""
    await swarm.add(name)
    await until(counts(swarm, name))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("step", LEADER_STEPS + MEMBER_STEPS)
def test_a_peer_is_killed_at_a_step(folder: Path, step: str) -> None:
    """First the leader, then, where others pass the step too, one that is not."""

    async def play(swarm: MemorySwarm) -> None:
        recorder = Recorder(swarm)
        await swarm.start("abcd")
        await swarm.until_round(FIRST - 1)
        victim = await kill_one(swarm, Fault(step, skip=len(step) % 3), is_leader)
        await bring_back(swarm, victim)
        if step not in LEADER_STEPS:
            await kill_one(swarm, Fault(step), lambda life: not is_leader(life))
        assert all(commit.certificate.kind == QUORUM for commit in commits(swarm)[1:])
        recorder.check(commits(swarm))
        check_agreement(swarm)
        check_leases(swarm)

    in_swarm(folder, play, small_config(peers=4), seed=len(step))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "step", [failpoints.READY, failpoints.SERVE + "values", failpoints.STREAM + " values", failpoints.STAGED]
)
@pytest.mark.parametrize("replicas", [1, 2])
def test_an_owner_is_killed(folder: Path, replicas: int, step: str) -> None:
    """A column whose only owner is gone keeps its last version, or gets the new one; with a second owner always."""

    async def play(swarm: MemorySwarm) -> None:
        recorder = Recorder(swarm)
        await swarm.start("abcd")
        await swarm.until_round(FIRST - 1)
        before = {life.name: life.driver.core.tip.ownership for life in swarm.up}
        victim = PeerId(await kill_one(swarm, Fault(step), shares if replicas == 2 else owns_alone))
        await swarm.until_round(max(life.round for life in swarm.up) + 3)
        last = commits(swarm)[-1].manifest
        owned = [column for column, owners in enumerate(before[victim]) if victim in owners]
        assert owned
        for column in owned:
            assert last.ownership[column]
            assert victim not in last.ownership[column]
            assert last.column_rounds[column] == last.round
        if replicas == 2:
            assert all(
                commit.manifest.column_rounds[column] == commit.manifest.round
                for commit in commits(swarm)[1:]
                for column in owned
            )
        recorder.check(commits(swarm))
        check_agreement(swarm)
        check_leases(swarm)

    in_swarm(folder, play, small_config(f"swarm.target_replicas={replicas}", "swarm.experts_per_peer=4", peers=4))


@pytest.mark.parametrize(
    "step", [failpoints.SERVE + "chain", failpoints.SERVE + "hashes", failpoints.STREAM + " tiles"]
)
def test_who_serves_a_joiner_is_killed(folder: Path, step: str) -> None:
    """In the middle of what it hands to the joiner, which asks another one."""

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start("abc")
        await swarm.until_round(FIRST - 1)
        joining = asyncio.create_task(swarm.add("d"))
        victim = await kill_one(swarm, Fault(step, to="d"), lambda life: not is_member(life, "d"))
        await joining
        await until(counts(swarm, "d"))
        assert victim in "abc"
        check_agreement(swarm)
        check_leases(swarm)

    in_swarm(folder, play)


@pytest.mark.parametrize("step", [failpoints.HEADERS, failpoints.CAUGHT_UP])
def test_a_peer_that_catches_up_is_killed(folder: Path, step: str) -> None:
    """It was away; killed half-way, it takes up again where it ended."""

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start("abcd")
        await swarm.until_round(FIRST - 1)
        await swarm.peers[PeerId("d")].kill()
        await swarm.until_round(FIRST + 3)
        with MemoryFaults(swarm, [Fault(step, peer="d")]) as faults:
            await swarm.add("d")
            await asyncio.wait_for(faults.struck.wait(), 60)
            await faults.settled()
        await bring_back(swarm, "d")
        check_agreement(swarm)
        check_leases(swarm)

    in_swarm(folder, play, small_config(peers=4))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "step", [failpoints.CHECKPOINT_LINKED, failpoints.CHECKPOINT_WRITTEN, failpoints.CHECKPOINT_SEALED]
)
def test_who_saves_a_checkpoint_is_killed(folder: Path, step: str) -> None:
    """The one before it is whole, and the others do not care."""

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start("abc", PretendWork(saves=True))
        await swarm.until_round(FIRST - 1)
        victim = await kill_one(swarm, Fault(step, round=FIRST))
        saved, warnings = load_latest(folder / victim / "checkpoints")
        assert saved.private() == {"round": FIRST - 1}
        assert not warnings
        await bring_back(swarm, victim)
        check_agreement(swarm)
        check_leases(swarm)

    in_swarm(folder, play)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "step", ["plan", failpoints.COLLECTED, failpoints.STREAM + " tiles", "prevote", failpoints.APPENDED]
)
def test_two_peers_are_killed_at_once(folder: Path, step: str) -> None:
    async def play(swarm: MemorySwarm) -> None:
        recorder = Recorder(swarm)
        await swarm.start("abcde")
        await swarm.until_round(FIRST - 1)
        await kill_one(swarm, Fault(step), beside=lambda victim: [next(name for name in "abcde" if name != victim)])
        assert len(swarm.up) == 3
        assert all(commit.certificate.kind == QUORUM for commit in commits(swarm)[1:])
        await swarm.until_round(swarm.up[0].round + 1)
        recorder.check(commits(swarm))
        check_agreement(swarm)
        check_leases(swarm)

    in_swarm(folder, play, small_config(peers=5))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("step", ["close", "plan", failpoints.STAGED, "prevote", failpoints.APPENDED])
def test_every_peer_but_one_is_killed_at_once(folder: Path, step: str) -> None:
    """The one that is left waits for a majority until the organiser's node renews the run."""

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start("abcd")
        await swarm.until_round(FIRST - 1)
        await kill_one(swarm, Fault(step), beside=lambda victim: [name for name in "abcd" if name != victim][:2])
        (last,) = swarm.up
        await swarm.until_round(last.round + 1)
        assert any(commit.certificate.kind == RENEWAL for commit in commits(swarm))
        check_agreement(swarm)
        check_leases(swarm)

    in_swarm(folder, play, small_config(peers=4))


@pytest.mark.parametrize("step", ["certify", failpoints.APPENDED, failpoints.PUBLISHED])
def test_the_leader_that_alone_knows_of_the_certificate_is_killed(folder: Path, step: str) -> None:
    """All have voted, only the leader has heard of enough votes. The others commit the very same without it."""

    async def play(swarm: MemorySwarm) -> None:
        recorder = Recorder(swarm)
        await swarm.start("abcde")
        await swarm.until_round(FIRST - 1)
        leader = next(life for life in swarm.up if is_leader(life))
        others = [life for life in swarm.up if life is not leader]

        def keep_apart(loss: float) -> None:
            for one in others:
                for other in others:
                    swarm.network.set_link(one.name, other.name, LinkShape(loss=loss))

        with MemoryFaults(swarm, [Fault(step, peer=leader.name, round=FIRST)]) as faults:
            async with asyncio.timeout(60):
                while not leader.driver.core.state.round.vote.heard.proposals and leader.is_up:
                    await asyncio.sleep(0.001)
                keep_apart(1.0)
                await faults.struck.wait()
            assert all(life.driver.core.state.round.decided is None for life in others)
            await faults.settled()
        keep_apart(0.0)
        await swarm.until_round(FIRST)
        assert swarm.clock.now() - faults.struck_at < bound_seconds(swarm)
        if step != "certify":
            assert leader.chain.commit(FIRST).manifest == commits(swarm)[FIRST].manifest
        await bring_back(swarm, leader.name)
        recorder.check(commits(swarm))
        check_agreement(swarm)
        check_leases(swarm)

    in_swarm(folder, play, small_config(peers=5))

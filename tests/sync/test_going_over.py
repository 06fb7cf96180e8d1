"""Who was cut off, made one round alone and goes over to the others' history keeps its work: they count it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from spes_p2p.consensus.manifest import Contribution, Manifest
from spes_p2p.consensus.messages import (
    DEGRADED,
    QUORUM,
    Commit,
)
from spes_p2p.ids import PeerId
from spes_p2p.ownership.assign import columns_of
from spes_p2p.state.layout import Values
from spes_p2p.sync.surroundings import Applied
from tests.simulation.memory_swarm import MemorySwarm, PretendPeer, PretendWork
from tests.sync.swarm_cases import check_agreement, check_leases, commits, counts, in_swarm, small_config, until

NAMES = "abcde"
QUICK = PretendWork(step_seconds=0.2)
STEP_SECONDS, LONG_STEP_SECONDS = 5.0, 9.0
"""The others' round is longer than what one that hears nobody waits before it goes on alone."""


def peer(swarm: MemorySwarm, name: str) -> PretendPeer:
    return swarm.peers[PeerId(name)]


def switch_of(life: PretendPeer) -> Applied:
    [event] = [event for event in life.applied_events if event.switched]
    return event


def entry_of(commit: Commit, name: str) -> Contribution | None:
    return next((entry for entry in commit.manifest.roster if entry.peer == name), None)


async def cut_off(
    swarm: MemorySwarm,
    name: str = "e",
    rounds: int = 1,
    after: float = 0.0,
    step_seconds: float = STEP_SECONDS,
    long_step_seconds: float = LONG_STEP_SECONDS,
    heard_again: bool = True,
) -> list[Commit]:
    """One is cut off while the others are in the middle of a long round, until it has made so many alone: these.

    `after`: so much later it is heard again; not `heard_again`: only when the others' round is over.
    """
    for life in swarm.up:
        life.work = replace(life.work, step_seconds=step_seconds if life.name == name else long_step_seconds)
    stood = await standing(swarm)
    swarm.network.partition([name])
    alone = peer(swarm, name)
    others = [life for life in swarm.up if life is not alone]
    await until(lambda: alone.round >= stood + rounds, 600.0)
    await asyncio.sleep(after)
    assert {life.round for life in others} == {stood}
    own = [alone.chain.commit(round) for round in range(stood + 1, alone.round + 1)]
    assert own[0].certificate.kind == DEGRADED
    if not heard_again:
        await until(lambda: {life.round for life in others} == {stood + 1}, 600.0)
    swarm.network.heal()
    return own


async def standing(swarm: MemorySwarm) -> int:
    """The round that all stand on, once its training has begun everywhere."""
    await until(lambda: len({life.round for life in swarm.up}) == 1)
    await asyncio.sleep(0.1)
    return swarm.up[0].round


async def back(swarm: MemorySwarm, name: str = "e") -> None:
    life = peer(swarm, name)
    await until(lambda: any(event.switched for event in life.applied_events), 600.0)


def said(life: PretendPeer) -> list[str]:
    """What became of its own work."""
    return [notice.text for notice in life.notices if notice.kind == "own"]


def owned_by(manifest: Manifest, name: str) -> set[int]:
    return set(columns_of(manifest.ownership, PeerId(name)))


def work_of(life: PretendPeer, round: int, block: int) -> Values:
    """By how much it trained a block on top of a round."""
    handed = life.handed_in[round]
    return np.asarray(handed.values[block] - handed.started[block])


def test_with_overlap_training_goes_on_through_a_round_made_alone_and_the_others_instead(folder: Path) -> None:
    """It has trained ahead of both, and hands nothing in between: what it goes on from is kept twice."""

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(NAMES, QUICK)
        await swarm.until_round(3)
        life = peer(swarm, "e")
        await cut_off(swarm, "e", 1, 1.0, 5.0, 9.0)
        await back(swarm)
        await swarm.until_round(switch_of(life).commit.manifest.round + 2)
        check_agreement(swarm)

    in_swarm(folder, play, small_config("sync.overlap=true", peers=5))


VARIANTS = [
    pytest.param(("sync.codec=int8", "sync.expert_codec=int4", "sync.expert_rounds=2"), 12.0, id="turns"),
    pytest.param((), 0.0, id="at once"),
    pytest.param((), 12.0, id="after a few steps"),
    pytest.param(("sync.overlap=true",), 12.0, id="overlap"),
    pytest.param(("sync.outer=nesterov",), 12.0, id="outer"),
    pytest.param(("sync.codec=int8", "sync.expert_codec=int4"), 12.0, id="lossy"),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("overrides", "after"), VARIANTS)
def test_a_round_made_alone_is_counted_by_the_others_next_one(
    folder: Path, overrides: tuple[str, ...], after: float
) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(NAMES, QUICK)
        await swarm.until_round(3)
        life = peer(swarm, "e")
        slow = 1.5 if swarm.config.sync.overlap else 1.0  # some steps of the round are made before it begins
        [alone] = await cut_off(swarm, "e", 1, after, slow * STEP_SECONDS, slow * LONG_STEP_SECONDS)
        own, parent = entry_of(alone, "e"), life.chain.commit(alone.manifest.round - 1).manifest
        assert own is not None
        assert own.tokens
        await back(swarm)
        switch = switch_of(life)
        newest = switch.commit.manifest
        kept = life.machine.own.uncounted.tokens
        assert switch.commit.certificate.kind == QUORUM
        assert newest.parent == alone.manifest.parent
        if own in newest.roster:  # heard again before the others' round was over, which has counted it then
            assert after == 0.0
            assert kept == 0
            return
        assert kept >= own.tokens
        assert said(life) == [f"{kept:,} of this peer's own tokens are kept for the next round to count"]
        await check_values(swarm, life, parent, alone.manifest, newest)
        await swarm.until_round(newest.round + 3)
        entries = [entry_of(commit, "e") for commit in commits(swarm)[newest.round + 1 : newest.round + 3]]
        assert sum(entry.tokens for entry in entries if entry is not None) >= kept
        check_agreement(swarm)
        check_leases(swarm)

    in_swarm(folder, play, small_config(*overrides, peers=5))


async def check_values(swarm: MemorySwarm, life: PretendPeer, parent: Manifest, alone: Manifest, new: Manifest) -> None:
    """Training goes on from the other history's state, with this peer's work in the columns that are still its own."""
    assert life._pretended is not None
    kept = owned_by(parent, "e") & owned_by(new, "e")
    assert owned_by(alone, "e") > kept  # alone it had to train them all
    masters = life.values.masters(new)
    for block, started in life._pretended.started.items():
        expected = np.array(masters.block(block))
        if block == 0 or block - 1 in kept:
            expected += work_of(life, parent.round, block) + life.went_over[block]
        np.testing.assert_allclose(started, expected, atol=1e-5)


def unsent(life: PretendPeer, tile_id: int) -> bytes:
    kept = life.residuals.unsent(tile_id)
    return b"" if kept is None else kept.tobytes()


def test_what_rounding_left_before_goes_over_too(folder: Path) -> None:
    """As for a peer that a round left out: of its own round it never was, of those before it is still to be sent."""

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(NAMES, QUICK)
        await swarm.until_round(3)
        life = peer(swarm, "e")
        await standing(swarm)
        tiles = swarm.layout.tile_ids_of(0)
        before = {tile_id: unsent(life, tile_id) for tile_id in tiles}
        assert any(before.values())
        await cut_off(swarm)
        assert any(before[tile_id] != unsent(life, tile_id) for tile_id in tiles)
        await back(swarm)
        assert before == {tile_id: unsent(life, tile_id) for tile_id in tiles}

    in_swarm(folder, play, small_config("sync.codec=int8", peers=5))


def test_two_rounds_made_alone_are_lost_and_told(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(NAMES, QUICK)
        await swarm.until_round(2)
        life = peer(swarm, "e")
        alone = await cut_off(swarm, rounds=2, step_seconds=0.5)
        assert len(alone) == 2
        await back(swarm)
        switch = switch_of(life)
        counted = [entry_of(commit, "e") for commit in alone]
        least = sum(entry.tokens for entry in counted if entry is not None)
        assert switch.own_tokens >= least
        [text] = said(life)
        assert text.endswith("of this peer's own tokens are lost with the old history")
        assert int(text.split()[0].replace(",", "")) >= switch.own_tokens
        assert life._pretended is not None
        for block, started in life._pretended.started.items():
            np.testing.assert_array_equal(started, life.store.version(switch.commit.manifest.round).block(block))
        await swarm.until_round(switch.commit.manifest.round + 2)
        check_agreement(swarm)
        check_leases(swarm)

    in_swarm(folder, play, small_config(peers=5))


def test_work_whose_data_was_leased_to_others_is_lost_and_told(folder: Path) -> None:
    """The others went on without a word from this peer: their round does not name it, and deals its data again."""

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(NAMES, QUICK)
        await swarm.until_round(2)
        life = peer(swarm, "e")
        [alone] = await cut_off(swarm, step_seconds=LONG_STEP_SECONDS, heard_again=False)
        await back(swarm)
        own, switch = entry_of(alone, "e"), switch_of(life)
        assert own is not None
        assert PeerId("e") not in {member.peer for member in switch.commit.manifest.members}
        assert said(life) == [f"{own.tokens:,} of this peer's own tokens are lost with the old history"]
        await until(counts(swarm, "e"), 900.0)
        check_agreement(swarm)
        check_leases(swarm)

    in_swarm(folder, play, small_config(peers=5))


def test_a_change_that_is_far_too_large_is_judged_when_others_are_there(folder: Path) -> None:
    """Alone nobody's change is too large; what goes over with it is, and is dropped."""

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(NAMES, QUICK)
        await swarm.until_round(2)
        life, stood = peer(swarm, "e"), await standing(swarm)
        large = replace(life.work, alter=lambda round, block, values: values * 1000 if round == stood else values)
        life.work = large
        [alone] = await cut_off(swarm)
        assert np.abs(life.store.version(alone.manifest.round).block(0)).max() > 100
        await back(swarm)
        newest = switch_of(life).commit.manifest.round
        await swarm.until_round(newest + 2)
        refused = {name for other in swarm.up for event in other.applied_events for name in event.refused}
        assert refused == {PeerId("e")}
        await until(counts(swarm, "e"), 900.0)
        assert np.abs(swarm.up[0].store.version(swarm.up[0].round).block(0)).max() < 10
        check_agreement(swarm)

    in_swarm(folder, play, small_config(peers=5))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("rounds", "damaged"), [(1, 2), (1, 1), (2, 1)])
def test_who_comes_back_with_a_damaged_state_that_only_its_lost_history_had_settles_before_it(
    folder: Path, rounds: int, damaged: int
) -> None:
    """Nobody can mend it, and nobody has a newer one on top of it. The one before it may be damaged, too."""

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(NAMES, QUICK)
        await swarm.until_round(3)
        life = peer(swarm, "e")
        for other in swarm.up:
            other.work = replace(other.work, step_seconds=STEP_SECONDS if other is life else LONG_STEP_SECONDS)
        stood = await standing(swarm)
        swarm.network.partition(["e"])
        await until(lambda: life.round >= stood + rounds, 600.0)
        await life.kill()
        for round in range(life.round + 1 - damaged, life.round + 1):
            with open(life.store.version(round).block_path(0), "r+b") as file:
                file.write(b"damaged")
        await swarm.until_round(stood + 2, "abcd")
        swarm.network.heal()
        left = list[int]()
        swarm.watch = lambda life, manifest: left.extend(life.store.version(manifest.round).damaged_tiles())
        again = await swarm.add("e")
        assert not left
        assert f"others are on another history of the run: going on from round {life.round - 1}" in again.said
        await until(counts(swarm, "e"), 600.0)
        check_agreement(swarm)

    in_swarm(folder, play, small_config(peers=5))

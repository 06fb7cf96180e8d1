"""A round spread over several syncs, each with a part of the state: exact by the oracle, agreed, nothing lost."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path

import pytest

from spes_p2p.consensus.fragments import due_tiles
from spes_p2p.consensus.manifest import Manifest
from spes_p2p.ids import PeerId
from tests.simulation.memory_swarm import MemorySwarm
from tests.sync.books import Books
from tests.sync.swarm_cases import Recorder, check_agreement, check_leases, commits, in_swarm, small_config
from tests.sync.test_overlap import MERGES, OVERLAP, slow_down

FRAGMENTS = 5


def fragmented(*overrides: str, peers: int = 3) -> object:
    return small_config(
        f"sync.fragments={FRAGMENTS}", "swarm.target_replicas=2", "swarm.experts_per_peer=3", *overrides, peers=peers
    )


def shared_tiles(manifest: Manifest) -> list[int]:
    return [tile_id for piece in manifest.slices if piece.block == 0 for tile_id in piece.tile_ids]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("overlap", [False, True])
def test_every_sync_brings_its_part_and_is_what_the_oracle_computes(folder: Path, overlap: bool) -> None:
    async def play(swarm: MemorySwarm) -> None:
        recorder = Recorder(swarm)
        slow_down(swarm)
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(3 * FRAGMENTS)
        chain = [commit.manifest for commit in commits(swarm)]
        recorder.check(commits(swarm))
        check_agreement(swarm)
        check_leases(swarm)
        tiles = swarm.rules.block_tiles[0]
        for manifest in chain[1:]:
            ((first, number),) = due_tiles(tiles, manifest.round, FRAGMENTS)
            assert shared_tiles(manifest) == list(range(first, first + number))
        assert {manifest.steps_per_round for manifest in chain} == {2}
        ages = {manifest.round - last for manifest in chain[2 * FRAGMENTS :] for last in manifest.column_rounds}
        assert max(ages) < FRAGMENTS

    in_swarm(folder, play, fragmented(*MERGES, f"sync.overlap={overlap}"))  # type: ignore[arg-type]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("codec", ["fp32", "int8", "topk"])
@pytest.mark.parametrize("overlap", [False, True])
def test_each_peer_goes_on_from_its_own_values_of_what_had_no_turn(folder: Path, codec: str, overlap: bool) -> None:
    async def play(swarm: MemorySwarm) -> None:
        books = Books(swarm)
        slow_down(swarm)
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(3 * FRAGMENTS)
        books.check()
        check_agreement(swarm)

    in_swarm(folder, play, fragmented(*MERGES, f"sync.codec={codec}", f"sync.overlap={overlap}"))  # type: ignore[arg-type]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("victim", ["a", "c", *(pytest.param(name, marks=pytest.mark.thorough) for name in "bd")])
def test_a_peer_is_killed_and_another_comes(folder: Path, victim: str) -> None:
    async def play(swarm: MemorySwarm) -> None:
        recorder = Recorder(swarm)
        await swarm.start(["a", "b", "c", "d"])
        await swarm.until_round(4)
        await asyncio.sleep(0.15)
        await swarm.peers[PeerId(victim)].kill()
        await swarm.add("late")
        await swarm.until_round(4 + 3 * FRAGMENTS)
        recorder.check(commits(swarm))
        check_agreement(swarm)
        check_leases(swarm)
        newest = commits(swarm)[-1].manifest
        assert max(newest.round - last for last in newest.column_rounds) < 2 * FRAGMENTS

    in_swarm(folder, play, fragmented(OVERLAP, peers=4))  # type: ignore[arg-type]


def test_a_part_moves_the_shared_values_no_more_than_its_tiles(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        recorder = Recorder(swarm)
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(FRAGMENTS + 1)
        for before, after in pairwise(commit.manifest for commit in commits(swarm)[1:]):
            moved = recorder.blocks[before.round][0] != recorder.blocks[after.round][0]
            done = {tile.id for tile in swarm.layout.tiles_of(0) if moved[tile.start : tile.stop].any()}
            assert done == set(shared_tiles(after))

    in_swarm(folder, play, fragmented())  # type: ignore[arg-type]

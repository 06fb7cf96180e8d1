"""Embedding and head averaged more seldom than the rest: exact by the oracle, agreed, and nothing trained is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from spes_p2p.config.schema import Config
from spes_p2p.consensus.manifest import Manifest
from spes_p2p.errors import ConfigError
from spes_p2p.ids import PeerId
from spes_p2p.interop.hf import state_layout, vocabulary_tiles
from spes_p2p.sync.node import check_sizes
from tests.simulation.memory_swarm import MemorySwarm
from tests.sync.books import Books
from tests.sync.swarm_cases import Recorder, check_agreement, check_leases, commits, in_swarm, small_config
from tests.sync.test_overlap import MERGES, OVERLAP, slow_down

ROUNDS = 3


def seldom(*overrides: str, peers: int = 3) -> Config:
    return small_config(f"sync.vocabulary_rounds={ROUNDS}", "sync.tile_values=64", *overrides, peers=peers)


def shared_tiles(manifest: Manifest) -> list[int]:
    return [tile_id for piece in manifest.slices if piece.block == 0 for tile_id in piece.tile_ids]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("turns", [(), ("sync.expert_rounds=2",)])
def test_each_round_brings_a_part_and_is_what_the_oracle_computes(
    folder: Path, turns: tuple[str, ...], overlap: bool
) -> None:
    config = seldom(*MERGES, *turns, f"sync.overlap={overlap}")

    async def play(swarm: MemorySwarm) -> None:
        recorder = Recorder(swarm)
        slow_down(swarm)
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(2 * ROUNDS + 1)
        recorder.check(commits(swarm))
        check_agreement(swarm)
        check_leases(swarm)
        vocabulary, tiles = vocabulary_tiles(swarm.layout), swarm.rules.block_tiles[0]
        assert 1 < vocabulary < tiles
        newest = [commit.manifest for commit in commits(swarm)][-ROUNDS:]
        times = Counter(tile for manifest in newest for tile in shared_tiles(manifest))
        assert times == {tile: 1 if tile < vocabulary else ROUNDS for tile in range(tiles)}
        assert all(any(tile < vocabulary for tile in shared_tiles(manifest)) for manifest in newest)

    in_swarm(folder, play, config)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("codec", ["fp32", "int8", "int4", "ternary"])
@pytest.mark.parametrize("overlap", [False, True])
def test_each_peer_goes_on_from_its_own_values_in_between(folder: Path, codec: str, overlap: bool) -> None:
    async def play(swarm: MemorySwarm) -> None:
        books = Books(swarm)
        slow_down(swarm)
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(3 * ROUNDS)
        books.check()
        check_agreement(swarm)

    in_swarm(folder, play, seldom(*MERGES, f"sync.codec={codec}", f"sync.overlap={overlap}"))


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
        await swarm.until_round(4 + 3 * ROUNDS)
        recorder.check(commits(swarm))
        check_agreement(swarm)
        check_leases(swarm)

    in_swarm(folder, play, seldom(OVERLAP, peers=4))


def test_a_part_moves_the_shared_values_no_more_than_its_tiles(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        recorder = Recorder(swarm)
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(2 * ROUNDS)
        for before, after in pairwise(commit.manifest for commit in commits(swarm)[1:]):
            moved = recorder.blocks[before.round][0] != recorder.blocks[after.round][0]
            done = {tile.id for tile in swarm.layout.tiles_of(0) if moved[tile.start : tile.stop].any()}
            assert done == set(shared_tiles(after)) < {tile.id for tile in swarm.layout.tiles_of(0)}

    in_swarm(folder, play, seldom())


def test_a_run_whose_tiles_hold_no_vocabulary_alone_is_refused() -> None:
    config = small_config("sync.vocabulary_rounds=3", "sync.tile_values=65536")
    assert vocabulary_tiles(state_layout(config)) == 0
    with pytest.raises(ConfigError, match=r"sync.vocabulary_rounds is 3, but no tile of 65,536 values"):
        check_sizes(config, state_layout(config))
    with pytest.raises(ConfigError, match=r"sync.outer is nesterov, .* but sync.vocabulary_rounds is 3"):
        seldom("sync.outer=nesterov")

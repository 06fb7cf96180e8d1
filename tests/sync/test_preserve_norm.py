"""Columns whose mean change is scaled to the size of their owners' changes: exact by the oracle, and agreed by all."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from spes_p2p.errors import ConfigError
from spes_p2p.ids import PeerId
from spes_p2p.testing.memory_swarm import MemorySwarm
from tests.sync.books import Books
from tests.sync.swarm_cases import Recorder, check_agreement, commits, in_swarm, small_config
from tests.sync.test_overlap import MERGES, slow_down

PRESERVE = "sync.preserve_norm=true", "swarm.target_replicas=2", "swarm.experts_per_peer=3"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("turns", [(), ("sync.expert_rounds=2",), ("sync.outer=nesterov",), ("sync.slice_tiles=1",)])
def test_each_round_is_what_the_oracle_computes(folder: Path, turns: tuple[str, ...], overlap: bool) -> None:
    async def play(swarm: MemorySwarm) -> None:
        recorder = Recorder(swarm)
        slow_down(swarm)
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(5)
        recorder.check(commits(swarm))
        check_agreement(swarm)
        owners = [len(piece.contributors) for commit in commits(swarm)[1:] for piece in commit.manifest.slices]
        assert max(owners[1:]) > 1

    in_swarm(folder, play, small_config(*MERGES, *PRESERVE, *turns, f"sync.overlap={overlap}"))


def test_an_owner_is_killed_and_another_comes(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        recorder = Recorder(swarm)
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(3)
        await asyncio.sleep(0.15)
        await swarm.peers[PeerId("b")].kill()
        await swarm.add("late")
        await swarm.until_round(9)
        recorder.check(commits(swarm))
        check_agreement(swarm)

    in_swarm(folder, play, small_config(*PRESERVE))


@pytest.mark.parametrize("codec", ["int4", "ternary"])
def test_with_codecs_nothing_that_was_trained_is_lost(folder: Path, codec: str) -> None:
    async def play(swarm: MemorySwarm) -> None:
        books = Books(swarm)
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(6)
        books.check()
        check_agreement(swarm)

    in_swarm(folder, play, small_config(*PRESERVE, f"sync.codec={codec}"))


def test_it_is_refused_where_contributors_may_lie() -> None:
    with pytest.raises(ConfigError, match=r"sync\.aggregate is clip"):
        small_config(*PRESERVE, "sync.aggregate=clip")

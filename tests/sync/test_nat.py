"""Peers that cannot be dialled: with one that can they train like all others, and leave the reducing to it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from spes_p2p.consensus.membership import LINK_PRIVATE
from spes_p2p.consensus.messages import Commit, Intent
from spes_p2p.ids import PeerId
from tests.simulation.memory_swarm import MemorySwarm
from tests.sync.swarm_cases import check_agreement, check_leases, in_swarm, small_config

HIDDEN = ("a", "b")
PUBLIC = PeerId("c")


async def start(swarm: MemorySwarm) -> None:
    """Two peers behind NAT, each its own, and one that can be dialled."""
    swarm.network.hide(*HIDDEN)
    await swarm.start_organiser()
    hidden = Intent(joining=True, max_columns=swarm.config.swarm.experts_per_peer, link_class=LINK_PRIVATE)
    await asyncio.gather(*(swarm.add(name, intent=hidden) for name in HIDDEN), swarm.add(PUBLIC))


def commits_of(swarm: MemorySwarm) -> list[Commit]:
    chain = swarm.peers[PUBLIC].chain
    return [chain.commit(round) for round in range(2, chain.length)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("codec", ["fp32", "int8"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_two_hidden_peers_train_with_one_that_can_be_dialled(folder: Path, replicas: int, codec: str) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await start(swarm)
        await swarm.until_round(8)
        found = commits_of(swarm)
        assert {len(commit.manifest.roster) for commit in found} == {3}
        for commit in found:
            assert {piece.block for piece in commit.manifest.slices} == set(range(1 + swarm.layout.num_columns))
            for piece in commit.manifest.slices:
                assert piece.reducer == PUBLIC or piece.contributors == (piece.reducer,), piece
        owners = set(found[-1].manifest.ownership)
        assert replicas == 1 or owners & {("a", "b")}, "the case that needs a helper did not come up"
        assert not [notice for life in swarm.up for notice in life.notices]
        check_agreement(swarm)
        check_leases(swarm)

    wanted = (
        f"sync.codec={codec}",
        f"swarm.target_replicas={replicas}",
        f"swarm.experts_per_peer={2 if replicas == 1 else 3}",
    )
    in_swarm(folder, play, small_config(*wanted))


def test_a_hidden_newcomer_gets_the_state_from_who_can_be_dialled(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await start(swarm)
        await swarm.until_round(3)
        swarm.network.hide("d")
        await swarm.add("d", intent=Intent(joining=True, max_columns=1, link_class=LINK_PRIVATE))
        await swarm.until_round(max(life.round for life in swarm.up) + 4)
        assert "d" in {entry.peer for entry in commits_of(swarm)[-1].manifest.roster}
        check_agreement(swarm)

    in_swarm(folder, play)


def test_the_helper_dies_and_comes_back(folder: Path) -> None:
    """Those behind NAT cannot reach each other: nothing is lost, and with the helper they go on."""

    async def play(swarm: MemorySwarm) -> None:
        await start(swarm)
        await swarm.until_round(3)
        await swarm.peers[PUBLIC].kill()
        await swarm.add(PUBLIC)
        await swarm.until_round(max(life.round for life in swarm.up) + 4)
        assert len(commits_of(swarm)[-1].manifest.roster) == 3
        check_agreement(swarm)
        check_leases(swarm)

    in_swarm(folder, play)

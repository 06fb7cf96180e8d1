"""Columns whose owners are gone, in swarms of real drivers: who adopts them, and how long nobody trains them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from spes_p2p.consensus.manifest import Manifest
from spes_p2p.consensus.messages import (
    Intent,
)
from spes_p2p.ids import PeerId
from spes_p2p.ownership.assign import columns_of, orphans
from tests.simulation.memory_swarm import MemorySwarm
from tests.sync.swarm_cases import in_swarm, small_config

ROOMY = Intent(joining=True, max_columns=4)
NARROW = Intent(joining=True, max_columns=1)


async def start(swarm: MemorySwarm, **intents: Intent) -> None:
    """These peers as the first of the run."""
    await swarm.start_organiser()
    await asyncio.gather(*(swarm.add(name, intent=intent) for name, intent in intents.items()))


def manifests(swarm: MemorySwarm) -> list[Manifest]:
    chain = swarm.up[0].chain
    return [chain.commit(round).manifest for round in range(chain.length)]


def stale(chain: list[Manifest]) -> Iterator[tuple[int, int]]:
    """(round, column) wherever a round brought a column nothing new."""
    for manifest in chain[1:]:
        for column, last in enumerate(manifest.column_rounds):
            if last < manifest.round:
                yield manifest.round, column


@pytest.mark.parametrize("silent", [False, True])
def test_columns_of_a_killed_owner_are_trained_again_one_round_later(folder: Path, silent: bool) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await start(swarm, a=ROOMY, b=ROOMY, c=ROOMY)
        await swarm.until_round(2)
        await swarm.peers[PeerId("c")].kill(silent)
        await swarm.until_round(7)
        chain = manifests(swarm)
        with_c = max(m.round for m in chain if any(member.peer == "c" for member in m.members))
        lost = columns_of(chain[with_c].ownership, PeerId("c"))
        assert lost
        assert orphans(chain[with_c + 1].ownership) == ()
        unnoticed = range(3, with_c + 2)  # of a silence nobody knows yet that it is an end
        assert set(stale(chain)) <= {(round, column) for round in unnoticed for column in lost}

    in_swarm(folder, play)


def test_with_two_replicas_no_single_loss_leaves_a_column_stale(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await start(swarm, a=ROOMY, b=ROOMY, c=ROOMY)
        for round, lost in ((2, "c"), (6, "b")):  # the second when the first is made good
            await swarm.until_round(round)
            await swarm.peers[PeerId(lost)].kill()
        await swarm.until_round(10)
        chain = manifests(swarm)
        # of two one is no quorum: it goes on by a renewal, in which nobody's work is counted
        assert [(round, column) for round, column in stale(chain) if chain[round].roster] == []
        assert all(len(owners) == 2 for owners in chain[5].ownership)

    in_swarm(folder, play, small_config("swarm.target_replicas=2"))


def test_columns_for_which_nobody_has_room_are_stale_until_somebody_comes(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await start(swarm, a=NARROW, b=NARROW, c=Intent(joining=True, max_columns=2))
        await swarm.until_round(2)
        await swarm.peers[PeerId("c")].kill()
        await swarm.until_round(6)
        before = manifests(swarm)[-1]
        assert len(orphans(before.ownership)) == 2
        assert {before.column_rounds[column] for column in orphans(before.ownership)} == {2}
        await swarm.add("d", intent=ROOMY)
        await swarm.until_round(before.round + 5)
        after = manifests(swarm)[-1]
        assert orphans(after.ownership) == ()
        assert min(after.column_rounds) == after.round

    in_swarm(folder, play)


def test_who_named_its_columns_adopts_others_where_it_must(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        named = Intent(joining=True, max_columns=4, claims=(0,))
        await start(swarm, a=named, b=ROOMY, c=ROOMY)
        await swarm.until_round(2)
        assert columns_of(manifests(swarm)[-1].ownership, PeerId("a")) == (0,)
        for lost in ("b", "c"):
            await swarm.peers[PeerId(lost)].kill()
            await swarm.until_round(swarm.up[0].round + 3)
        assert columns_of(manifests(swarm)[-1].ownership, PeerId("a")) == (0, 1, 2, 3)

    in_swarm(folder, play)

"""A run outlives the moment in which all of its peers are gone: the bootstrap node keeps the newest state."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from spes_p2p.config.schema import Config
from spes_p2p.ids import PeerId
from spes_p2p.state.store import StateStore
from spes_p2p.sync.messages import MAJORITY, ORGANISER, Commit
from spes_p2p.testing.memory_swarm import MemorySwarm
from tests.sync.swarm_cases import check_agreement, check_leases, commits, in_swarm, until

T = TypeVar("T")


def with_archive(
    folder: Path, play: Callable[[MemorySwarm], Awaitable[T]], config: Config | None = None, archive: bool = True
) -> T:
    return in_swarm(folder, play, config, archive=archive)


async def evening(swarm: MemorySwarm, rounds: int = 3) -> Commit:
    """Three peers train, the archive has what they have, and then all are gone at once. The newest commit."""
    await swarm.start(["a", "b", "c"])
    await swarm.until_round(rounds)
    await until(lambda: is_archived(swarm))
    newest = commits(swarm)[-1]
    for name in "abc":
        await swarm.peers[PeerId(name)].kill()
    return newest


def is_archived(swarm: MemorySwarm) -> bool:
    """Whether the archive has the state on which all stand."""
    archived = swarm.organiser.archived
    return archived is not None and all(archived == peer.driver.core.tip for peer in swarm.up)


def test_the_archive_keeps_the_newest_state_and_nothing_else(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        for round in range(1, 6):
            await swarm.until_round(round)
            await until(lambda: is_archived(swarm))
        newest = swarm.organiser.archived
        assert newest is not None
        await swarm.kill_organiser()
        store = StateStore(folder / "archive", swarm.layout)
        assert store.rounds() == (newest.round - 1, newest.round)
        store.verify(newest.round)
        assert store.version(newest.round).root == newest.state_root
        store.close()
        await swarm.start_organiser()

    with_archive(folder, play)


def test_new_peers_go_on_in_the_morning(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        newest = await evening(swarm)
        await asyncio.sleep(60.0)
        await asyncio.gather(swarm.add("d"), swarm.add("e"))
        await swarm.until_round(newest.manifest.round + 4, ["d", "e"])
        chain = commits(swarm, "d")
        assert chain[newest.manifest.round] == newest
        first = chain[newest.manifest.round + 1]
        assert first.certificate.kind == ORGANISER
        assert first.manifest.state_root == newest.manifest.state_root
        assert {member.peer for member in first.manifest.members} <= {"d", "e"}
        assert {commit.certificate.kind for commit in chain[newest.manifest.round + 2 :]} == {MAJORITY}
        assert {entry.peer for entry in chain[-1].manifest.roster} == {"d", "e"}
        check_agreement(swarm)
        check_leases(swarm)

    with_archive(folder, play)

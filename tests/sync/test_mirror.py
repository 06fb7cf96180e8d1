"""Mirrors: they serve what they have, follow whoever goes on, and have no say in it, however many there are."""

from __future__ import annotations

import asyncio
from pathlib import Path

from spes_p2p.consensus.manifest import Manifest
from spes_p2p.sync.chain import Chain
from tests.simulation.memory_swarm import MemorySwarm
from tests.sync.swarm_cases import check_agreement, counts, in_swarm, until


async def caught_up(swarm: MemorySwarm, name: str, round: int) -> None:
    """Until the archive of a mirror has the state of this round, or a later one."""
    mirror = swarm.mirrors[name]  # type: ignore[index]
    await until(lambda: mirror.seat.kept is not None and mirror.seat.kept.round >= round)


def newest(chain: Chain) -> Manifest:
    """Certificates of the same manifest may have other seals."""
    assert chain.newest is not None
    return chain.newest.manifest


def test_a_mirror_begins_no_run(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start_organiser()
        await swarm.kill_organiser()
        said: list[str] = []
        waiting = [asyncio.create_task(work) for work in (swarm.add_mirror("mirror", said), *map(swarm.add, "abc"))]
        await asyncio.sleep(300.0)
        assert not any(task.done() for task in waiting)
        assert not swarm.mirrors["mirror"].chain.length  # type: ignore[index]
        await swarm.start_organiser()  # whose key can
        await asyncio.gather(*waiting)
        await swarm.until_round(2)
        await caught_up(swarm, "mirror", 2)
        assert swarm.mirrors["mirror"].chain.commit(0) == swarm.organiser.chain.commit(0)  # type: ignore[index]

    in_swarm(folder, play)


def test_a_mirror_that_serves_is_a_member_as_any_other(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start("abc")
        await swarm.add_mirror("mirror", [], serve=True)
        await until(lambda: any(member.peer == "mirror" for member in swarm.up[0].driver.core.tip.members))
        await swarm.kill_organiser()
        await swarm.until_round(swarm.up[0].round + 3)
        assert all("mirror" in {member.peer for member in peer.driver.core.tip.members} for peer in swarm.up)
        check_agreement(swarm)
        await swarm.start_organiser()

    in_swarm(folder, play)


def test_newcomers_get_all_from_mirrors_which_renew_nothing(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        said: list[str] = []
        await swarm.start("abc")
        await asyncio.gather(*(swarm.add_mirror(name, said) for name in ("one", "two")))
        await swarm.until_round(3)
        await swarm.kill_organiser()
        last, *first = swarm.up
        for peer in first:
            await peer.kill()
        await asyncio.gather(*(caught_up(swarm, name, last.round) for name in ("one", "two")))
        await last.kill()
        heads = {name: newest(mirror.chain) for name, mirror in swarm.mirrors.items()}
        late = await asyncio.gather(*(swarm.add(name) for name in ("d", "e", "f")))
        await until(lambda: all(peer.round >= 3 for peer in late))
        await asyncio.sleep(400.0)
        assert {name: newest(mirror.chain) for name, mirror in swarm.mirrors.items()} == heads
        assert all(newest(peer.chain) == heads[name] for peer in late for name in heads)
        await asyncio.gather(*(swarm.add(name) for name in "abc"))  # who have the votes
        await until(counts(swarm, "d"))
        check_agreement(swarm)
        await swarm.start_organiser()

    in_swarm(folder, play)

"""Networks that fall apart and come together again, under real drivers: one history wins, nobody is left behind."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import pytest

from spes_p2p.consensus.manifest import manifest_hash
from spes_p2p.consensus.membership import electors
from spes_p2p.consensus.messages import (
    DEGRADED,
    QUORUM,
    Commit,
)
from spes_p2p.errors import PeerSilent
from spes_p2p.ids import PeerId
from spes_p2p.swarm.memory_links import LinkShape
from spes_p2p.sync.surroundings import Applied
from tests.simulation.memory_swarm import MemorySwarm, PretendPeer, PretendWork
from tests.sync.swarm_cases import check_agreement, check_leases, commits, counts, in_swarm, small_config

WORK = PretendWork(step_seconds=0.8)
LONG_SECONDS = 85.0
"""Longer than the wait after which a minority goes on alone, and a few of its rounds."""


def peer(swarm: MemorySwarm, name: str) -> PretendPeer:
    return swarm.peers[PeerId(name)]


def switches(swarm: MemorySwarm) -> list[tuple[str, Applied]]:
    """Who went over to another history, with the event."""
    return [(life.name, event) for life in swarm.lives for event in life.applied_events if event.switched]


def branch(life: PretendPeer) -> list[Commit]:
    return [life.chain.commit(round) for round in range(life.chain.length)]


def parted_after(one: list[Commit], other: list[Commit]) -> int:
    """The last round that both have alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return max(at for at, (a, b) in pairs if a.certificate.manifest == b.certificate.manifest)


async def together(swarm: MemorySwarm, seconds: float = 120.0) -> None:
    """Waits until all who are up stand on one chain, are members, and their work is counted."""

    def one_history() -> bool:
        longest = max(swarm.up, key=lambda life: life.round).chain
        return all(longest.has(life.driver.core.tip_hash, life.round) for life in swarm.up)

    async with asyncio.timeout(seconds):
        while not (one_history() and all(counts(swarm, life.name)() for life in swarm.up)):
            await asyncio.sleep(0.5)


def check_one_history(swarm: MemorySwarm) -> None:
    check_agreement(swarm)
    chain = commits(swarm)
    for parent, child in pairwise(chain):
        assert child.manifest.parent == manifest_hash(parent.manifest)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(2))
def test_a_minority_that_went_on_alone_comes_back(folder: Path, seed: int) -> None:
    """The majority's rounds stay; the other's are lost, and reported in tokens; it takes part again."""

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c", "d"], WORK)
        await swarm.until_round(2)
        swarm.network.partition(["a", "b", "c"], ["d"])
        await asyncio.sleep(LONG_SECONDS)
        alone, kept = branch(peer(swarm, "d")), branch(peer(swarm, "a"))
        assert all(commit.certificate.kind == QUORUM for commit in kept[1:])
        common = parted_after(alone, kept)
        assert alone[common + 1].certificate.kind == DEGRADED
        swarm.network.heal()
        await together(swarm)
        chain = commits(swarm)
        assert [c.certificate.manifest for c in chain[: len(kept)]] == [c.certificate.manifest for c in kept]
        [(name, event)] = switches(swarm)
        lost = event.lost_tokens
        assert name == "d"
        assert lost >= alone[-1].manifest.tokens - alone[common].manifest.tokens > 0
        told = [notice.text for notice in peer(swarm, "d").notices if notice.kind == "fork"]
        assert len(told) == 1
        assert f"{lost:,} tokens are lost" in told[0]
        check_one_history(swarm)
        check_leases(swarm)

    in_swarm(folder, play, small_config(peers=4), seed=seed)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(3))
def test_two_halves_become_one_again(folder: Path, seed: int) -> None:
    """Neither has a majority: the half that trained more wins."""

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c", "d"], replace(WORK, seed=seed))
        await swarm.until_round(2)
        swarm.network.partition(["a", "b"], ["c", "d"])
        await asyncio.sleep(LONG_SECONDS)
        one, other = branch(peer(swarm, "a")), branch(peer(swarm, "c"))
        first = parted_after(one, other) + 1
        assert one[first].certificate.kind == other[first].certificate.kind == DEGRADED
        swarm.network.heal()
        await together(swarm)
        chain = commits(swarm)
        winner, loser = (one, other) if chain[first].certificate == one[first].certificate else (other, one)
        assert [c.certificate.manifest for c in chain[: len(winner)]] == [c.certificate.manifest for c in winner]
        [lost, *_] = {event.lost_tokens for _, event in switches(swarm)}
        assert loser[-1].manifest.tokens - loser[first - 1].manifest.tokens <= lost
        assert {name for name, _ in switches(swarm)} == ({"c", "d"} if winner is one else {"a", "b"})
        check_one_history(swarm)

    in_swarm(folder, play, small_config(peers=4), seed=seed)


def test_three_parts_become_one_again(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(list("abcdef"), WORK)
        await swarm.until_round(2)
        swarm.network.partition("ab", "cd", "ef")
        await asyncio.sleep(LONG_SECONDS)
        swarm.network.heal()
        await together(swarm)
        check_one_history(swarm)

    in_swarm(folder, play, small_config("swarm.experts_per_peer=1", peers=6))


def test_going_over_is_cut_short_and_ends_after_a_restart(folder: Path) -> None:
    """Killed anywhere while it takes the other history: its disk leads back to the winner's."""

    async def play(swarm: MemorySwarm, moment: float) -> None:
        await swarm.start(["a", "b", "c", "d"], WORK)
        await swarm.until_round(2)
        swarm.network.partition(["a", "b", "c"], ["d"])
        await asyncio.sleep(LONG_SECONDS)
        lost = branch(peer(swarm, "d"))[-1]
        swarm.network.heal()
        await asyncio.sleep(moment)
        await peer(swarm, "d").kill()
        await swarm.add("d", WORK)
        await together(swarm)
        assert lost.certificate.manifest not in {c.certificate.manifest for c in commits(swarm)}
        check_one_history(swarm)

    for number, moment in enumerate((0.9, 1.3, 1.7)):
        config = small_config(peers=4)
        in_swarm(folder / str(number), partial(play, moment=moment), config, number)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seconds", [5.0, 20.0, 40.0])
def test_a_router_that_reboots_makes_no_fork(folder: Path, seconds: float) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c", "d"], WORK)
        await swarm.until_round(2)
        swarm.network.partition(["a", "b", "c"], ["d"])
        await asyncio.sleep(seconds)
        swarm.network.heal()
        await together(swarm)
        assert switches(swarm) == []
        assert all(commit.certificate.kind == QUORUM for commit in commits(swarm)[1:])
        check_one_history(swarm)

    in_swarm(folder, play, small_config(peers=4))


def test_a_slow_download_makes_no_fork(folder: Path) -> None:
    """A link that takes most of a minute for a state, longer than any deadline: its peer comes late, and is no fork."""

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"], WORK)
        await swarm.until_round(2)
        state_bytes = 4 * sum(block.size for block in swarm.layout.blocks)
        swarm.network.set_link(None, "c", LinkShape(bytes_per_second=state_bytes / 40))
        await asyncio.sleep(90.0)
        swarm.network.set_link(None, "c", LinkShape())
        await together(swarm)
        assert switches(swarm) == []
        assert all(commit.certificate.kind == QUORUM for commit in commits(swarm)[1:])

    in_swarm(folder, play, small_config("model.vocab_size=8192", "model.embedding_rows=8192", "sync.tile_values=8192"))


def test_who_alone_knows_of_a_commit_whose_state_is_gone_goes_on_until_it_is_back(folder: Path) -> None:
    """The last that is left has the certificate and none of the tiles: it waits as for a majority, no longer."""

    async def never(*given: object, **named: object) -> NoReturn:
        raise PeerSilent("no tile comes")

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start("abc")
        await swarm.until_round(2)
        last = peer(swarm, "c")
        transfers = last.driver._fetchers.urgent
        fetch, transfers.tiles = transfers.tiles, never  # type: ignore[method-assign]
        async with asyncio.timeout(60.0):
            while (
                last.driver.core.state.round.decided is None or min(life.round for life in swarm.up if life != last) < 3
            ):
                await asyncio.sleep(0.01)
        known, tip = last.driver.core.state.round.decided, last.round
        assert known is not None
        for name in "ab":
            await peer(swarm, name).kill()
        transfers.tiles = fetch  # type: ignore[method-assign]
        await swarm.until_round(tip + 3)
        own = last.chain.commit(tip + 1)
        assert own.certificate.kind == DEGRADED
        assert own.certificate.manifest != known.certificate.manifest
        assert [notice.kind for notice in last.notices].count("lost") == 1
        for name in "ab":
            await swarm.add(name, WORK)
        await together(swarm)
        assert last.chain.commit(tip + 1).certificate.manifest == known.certificate.manifest
        check_one_history(swarm)

    in_swarm(folder, play)


def test_where_electors_may_lie_too_few_say_whom_they_wait_for(folder: Path) -> None:
    """Two of three never go on by themselves there. Each silence is told once, and is over with the next round."""

    def told(life: PretendPeer) -> list[str]:
        return [notice.text for notice in life.notices if notice.kind == "quorum"]

    def votes(life: PretendPeer, name: str) -> bool:
        tip = life.chain.commit(life.round)
        return tip.certificate.kind == QUORUM and PeerId(name) in {one.peer for one in electors(tip.manifest.members)}

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start("abc")
        await swarm.until_round(2)
        for silence in (1, 2):
            await swarm.peers[PeerId("b")].kill()
            async with asyncio.timeout(120.0):
                while len(told(peer(swarm, "a"))) < silence:
                    await asyncio.sleep(0.5)
            stood = peer(swarm, "a").round
            await asyncio.sleep(LONG_SECONDS)
            assert peer(swarm, "a").round == stood
            assert len(told(peer(swarm, "a"))) == len(told(peer(swarm, "c"))) == silence
            await swarm.add("b")
            async with asyncio.timeout(600.0):  # until it votes again: without it two of two would go on
                while not all(life.round > stood and votes(life, "b") for life in swarm.up):
                    await asyncio.sleep(0.5)
        assert "3 of 3 electors" in told(peer(swarm, "a"))[0]
        assert "or cannot vote: b;" in told(peer(swarm, "a"))[0]
        assert swarm.organiser is not None
        assert any("or cannot vote: b;" in text for text in swarm.organiser_said)

    in_swarm(folder, play, small_config("swarm.faults=byzantine"))

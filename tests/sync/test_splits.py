"""Networks that fall apart and come together again, under real drivers: one history wins, nobody is left behind."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import pytest

from spes_p2p.checkpoint.load import load_checkpoint
from spes_p2p.consensus.manifest import manifest_hash
from spes_p2p.consensus.membership import electors
from spes_p2p.consensus.messages import (
    QUORUM,
    RENEWAL,
    Commit,
)
from spes_p2p.errors import PeerSilent
from spes_p2p.ids import PeerId
from spes_p2p.swarm.memory_links import LinkShape
from spes_p2p.sync.surroundings import Applied
from tests.simulation.memory_swarm import ORGANISER, MemorySwarm, PretendPeer, PretendWork
from tests.sync.swarm_cases import check_agreement, check_leases, commits, counts, in_swarm, small_config

WORK = PretendWork(step_seconds=0.8)
LONG_SECONDS = 85.0
"""Longer than the node waits before it renews, and a few rounds on the renewal."""


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


async def apart(swarm: MemorySwarm, renewed: str, others: str, step_seconds: float = 8.0) -> None:
    """The node is with `renewed`, who are too few; `others` are a quorum, in slow rounds."""
    for name in others:
        peer(swarm, name).work = replace(WORK, step_seconds=step_seconds)
    stood = max(life.round for life in swarm.up)
    swarm.network.partition([*renewed, ORGANISER], list(others))
    async with asyncio.timeout(600.0):
        while min(peer(swarm, name).round for name in renewed) < stood + 5:
            await asyncio.sleep(0.5)


def told(life: PretendPeer, kind: str) -> list[str]:
    return [notice.text for notice in life.notices if notice.kind == kind]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("overrides", [(), ("sync.overlap=true",), ("sync.codec=int8", "sync.expert_codec=int4")])
def test_what_counted_less_is_left_for_what_counted_more(folder: Path, overrides: tuple[str, ...]) -> None:
    """A quorum in slow rounds goes over to those whom the node has renewed: told in tokens, with its tip kept."""

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start("abcde", WORK)
        await swarm.until_round(2)
        await apart(swarm, "de", "abc", step_seconds=4.0)
        left, kept = branch(peer(swarm, "a")), branch(peer(swarm, "d"))
        common = parted_after(left, kept)
        assert kept[common + 1].certificate.kind == RENEWAL
        assert all(commit.certificate.kind == QUORUM for commit in left[1:])
        assert left[-1].manifest.counted < kept[-1].manifest.counted
        swarm.network.heal()
        await together(swarm, 600.0)
        chain = commits(swarm)
        assert [c.certificate.manifest for c in chain[: len(kept)]] == [c.certificate.manifest for c in kept]
        gone = switches(swarm)
        assert {name for name, _ in gone} == {"a", "b", "c"}
        for name, event in gone:
            life = peer(swarm, name)
            assert event.lost_tokens >= left[-1].manifest.tokens - left[common].manifest.tokens
            assert any(f"{event.lost_tokens:,} tokens are left" in text for text in told(life, "fork"))
            if len(left) > common + 2:
                [folder_of] = (life.folder / "left").iterdir()
                assert load_checkpoint(folder_of).round >= left[-1].manifest.round
        check_one_history(swarm)
        check_leases(swarm)

    in_swarm(folder, play, small_config(*overrides, peers=5))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("moment", [0.9, 1.3, 1.7])
def test_going_over_is_cut_short_and_ends_after_a_restart(folder: Path, moment: float) -> None:
    """Killed anywhere while it takes the other history: its disk leads to the one that counted more."""

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start("abc", WORK)
        await swarm.until_round(2)
        await apart(swarm, "c", "ab", step_seconds=0.1)
        lost = branch(peer(swarm, "c"))[-1]
        swarm.network.heal()
        await asyncio.sleep(moment)
        await peer(swarm, "c").kill()
        await swarm.add("c", WORK)
        await together(swarm, 600.0)
        assert lost.certificate.manifest not in {c.certificate.manifest for c in commits(swarm)}
        check_one_history(swarm)

    in_swarm(folder, play)


def test_who_alone_knows_of_a_commit_whose_state_is_gone_goes_on_by_a_renewal(folder: Path) -> None:
    """It has the certificate and none of the tiles. Those who had them come over, if less was counted there."""

    async def never(*given: object, **named: object) -> NoReturn:
        raise PeerSilent("no tile comes")

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start("abc", WORK)
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
        await swarm.until_round(tip + 5)
        assert last.chain.commit(tip + 1).certificate.kind == RENEWAL
        for name in "ab":
            await swarm.add(name, WORK)
        await together(swarm, 600.0)
        check_one_history(swarm)

    in_swarm(folder, play)


def test_where_electors_may_lie_too_few_say_whom_they_wait_for(folder: Path) -> None:
    """One of three is named by no renewal there. Each silence is told once, and is over with the next round."""

    def votes(life: PretendPeer, names: str) -> bool:
        tip = life.chain.commit(life.round)
        return tip.certificate.kind == QUORUM and {*names} <= {one.peer for one in electors(tip.manifest.members)}

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start("abc", WORK)
        await swarm.until_round(2)
        for silence in (1, 2):
            for name in "bc":
                await peer(swarm, name).kill()
            async with asyncio.timeout(120.0):
                while len(told(peer(swarm, "a"), "waiting")) < silence:
                    await asyncio.sleep(0.5)
            stood = peer(swarm, "a").round
            await asyncio.sleep(LONG_SECONDS)
            assert peer(swarm, "a").round == stood
            assert len(told(peer(swarm, "a"), "waiting")) == silence
            for name in "bc":
                await swarm.add(name, WORK)
            async with asyncio.timeout(600.0):  # until both vote again: without one of them two of two would go on
                while not all(life.round > stood and votes(life, "bc") for life in swarm.up):
                    await asyncio.sleep(0.5)
        assert "needs 3 of 3 electors; missing: b, c" in told(peer(swarm, "a"), "waiting")[0]
        assert any("names two electors at least" in text for text in swarm.organiser_said)

    in_swarm(folder, play, small_config("swarm.faults=byzantine"))

"""Lossy codecs and turns under faults: full disks, damage, deaths and changes of owners lose nothing and count once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spes_p2p import failpoints
from spes_p2p.config.schema import Config
from spes_p2p.consensus.manifest import Contribution
from spes_p2p.consensus.messages import (
    LOST,
    Intent,
)
from spes_p2p.consensus.turns import due_columns
from spes_p2p.errors import RemoteProtocolError, StorageFull
from spes_p2p.exchange.requests import ValuesRequest, pack_request
from spes_p2p.ids import PeerId
from spes_p2p.ownership.assign import columns_of, sole_columns
from spes_p2p.state.layout import Values
from spes_p2p.state.version import Version
from spes_p2p.wire import pack
from tests.simulation.faults import Fault, MemoryFaults
from tests.simulation.memory_swarm import MemorySwarm, PretendPeer, PretendWork
from tests.sync.books import Books
from tests.sync.swarm_cases import check_agreement, commits, counts, in_swarm, small_config, until
from tests.sync.test_driver_disk import raising


def lossy(*more: str, peers: int = 3) -> Config:
    return small_config("sync.codec=int4", "sync.merge_interval=20", "sync.merge_alpha=0.3", *more, peers=peers)


def peer(swarm: MemorySwarm, name: str) -> PretendPeer:
    return swarm.peers[PeerId(name)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("where", ["settle", "chain", "publish"])
def test_a_disk_that_is_full_in_the_middle_of_a_commit(folder: Path, where: str) -> None:
    """Residuals are settled before the certificate is on disk: both may have to be done again."""

    async def play(swarm: MemorySwarm) -> None:
        books = Books(swarm)
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(2)
        full = peer(swarm, "b")
        target: tuple[Any, str] = {
            "settle": (full.residuals, "settle"),
            "chain": (full.chain, "append"),
            "publish": (full.driver._candidate, "publish"),
        }[where]
        with raising(*target, StorageFull):
            await until(lambda: full.driver._dispatcher.was_full)
            await swarm.until_round(full.round + 1, "ac")
        await until(counts(swarm, "b"))
        await swarm.until_round(full.round + 2)
        assert books.check() > 0
        check_agreement(swarm)

    in_swarm(folder, play, lossy())


def test_who_serves_on_a_full_disk_still_counts_and_keeps_what_it_left_out(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        books = Books(swarm)
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(2)
        full = peer(swarm, "b")
        with raising(full.residuals._staged.areas["sent"], "write", StorageFull):
            await swarm.until_round(3)
        assert counts(swarm, "b")()
        await swarm.until_round(5)
        assert books.check() > 0

    in_swarm(folder, play, lossy())


def test_who_catches_up_with_a_round_that_it_took_part_in_keeps_what_it_handed_out(folder: Path) -> None:
    """It never has the state of that round itself: the proposal, or its own reports, say what it handed out."""

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(2)
        late = peer(swarm, "b")
        with raising(late.driver._candidate, "compute", asyncio.CancelledError):
            await until(lambda: late.applied_events[-1].caught_up, 200)
        event = late.applied_events[-1]
        before, after = event.previous.round, event.commit.manifest.round
        await until(lambda: after in late.handed_in)
        (column, *_) = sole_columns(event.commit.manifest.ownership, late.name)
        first = commits(swarm)[before + 1].manifest
        assert any(piece.block == 1 + column and piece.reducer == late.name for piece in first.slices)
        trained, goes_on = late.handed_in[before].values[1 + column], late.handed_in[after].started[1 + column]
        np.testing.assert_allclose(goes_on, trained, rtol=0, atol=1e-6)

    in_swarm(folder, play, lossy("sync.merge_alpha=0.0"))


@pytest.mark.parametrize("step", [failpoints.HEADERS, failpoints.CAUGHT_UP, failpoints.APPENDED, failpoints.PUBLISHED])
def test_a_peer_that_ends_while_it_catches_up(folder: Path, step: str) -> None:
    """Headers, residuals and state go to disk one after the other; what was kept before is brought forward."""

    async def play(swarm: MemorySwarm) -> None:
        books = Books(swarm)
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(3)
        await peer(swarm, "b").kill()
        await swarm.until_round(5, "ac")
        with MemoryFaults(swarm, [Fault(step, peer="b")]) as faults:
            await swarm.add("b")
            async with asyncio.timeout(60):
                await faults.struck.wait()
            await faults.settled()
        if step in (failpoints.APPENDED, failpoints.PUBLISHED):  # on disk before the certificate
            books.kept = frozenset({("b", faults.rounds["b"])})
        await swarm.until_round(peer(swarm, "a").round + 1, "ac")
        await swarm.add("b")
        await until(counts(swarm, "b"))
        await swarm.until_round(peer(swarm, "a").round + 2)
        assert books.check() > 0
        check_agreement(swarm)

    in_swarm(folder, play, lossy())


def test_a_disk_that_is_full_when_a_peer_has_caught_up(folder: Path) -> None:
    """The state is there, what was kept is not brought forward yet: that alone is done again."""

    async def play(swarm: MemorySwarm) -> None:
        books = Books(swarm)
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(3)
        await peer(swarm, "b").kill()
        await swarm.until_round(5, "ac")
        full = await swarm.add("b")
        with raising(full.residuals, "settle", StorageFull):
            await until(lambda: full.driver._dispatcher.was_full)
        await until(counts(swarm, "b"))
        await swarm.until_round(full.round + 2)
        assert books.check() > 0
        check_agreement(swarm)

    in_swarm(folder, play, lossy())


@pytest.mark.parametrize("rounds", [1, 3])
def test_a_second_owner_comes_and_goes(folder: Path, rounds: int) -> None:
    """What a sole owner is ahead counts once, whether its column is handed out when the other comes or not."""

    async def play(swarm: MemorySwarm) -> None:
        books = Books(swarm)
        await swarm.start(["a", "b"])
        await swarm.until_round(3)
        claims = Intent(joining=True, max_columns=4, claims=(0, 1, 2, 3))
        await swarm.add("c", intent=claims)
        await until(counts(swarm, "c"))
        await swarm.until_round(peer(swarm, "a").round + rounds + 1)
        assert any(len(owners) == 2 for owners in commits(swarm)[-1].manifest.ownership)
        await peer(swarm, "c").kill()
        await until(lambda: all(len(owners) == 1 for owners in commits(swarm)[-1].manifest.ownership))
        await swarm.until_round(peer(swarm, "a").round + 3)
        assert books.check() > 0
        check_agreement(swarm)

    in_swarm(folder, play, lossy(f"sync.expert_rounds={rounds}", "swarm.min_peers=2", peers=2))


HUGE = 1000.0


def damage(version: Version, tile_id: int, value: float) -> None:
    tile = version.layout.tiles[tile_id]
    with open(version.block_path(tile.block), "r+b") as file:
        file.seek(4 * tile.start)
        file.write(np.full(tile.size, value, np.float32).tobytes())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("value", [HUGE, np.nan])
@pytest.mark.parametrize("block", [0, 1])
def test_a_damaged_base_is_mended_and_spreads_nowhere(folder: Path, block: int, value: float) -> None:
    """Neither into what its owner sends, nor into what it reduces, nor into the state that it makes; nor is anybody
    blamed for it."""

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(2)
        for life in swarm.up:
            await swarm.until_round(life.round + 1)
            version = life.store.version(life.round)
            for tile_id in swarm.layout.tile_ids_of(block):
                damage(version, tile_id, value)
        await swarm.until_round(swarm.up[0].round + 3)
        assert not any(life.failures for life in swarm.lives)
        blamed = [n for life in swarm.lives for n in life.notices if n.kind == "left out" and not n.text.endswith(LOST)]
        assert not blamed
        check_agreement(swarm)
        for life in swarm.up:
            newest = life.store.version(life.round)
            assert max(np.abs(newest.block(at.index)).max() for at in swarm.layout.blocks) < HUGE / 10

    in_swarm(folder, play, lossy())


def test_nobody_may_ask_for_more_than_a_slice_nor_for_what_it_does_not_reduce(folder: Path) -> None:
    """Encoding takes time and memory: it is done for those who have a use for it."""

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(2)
        driver, layout = peer(swarm, "a").driver, swarm.layout
        own = 1 + driver.core.tip.ownership.index((PeerId("a"),))
        first, most = layout.tile_ids_of(own)[0], driver.core.state.rules.slice_tiles

        async def ask(caller: str, first: int, count: int) -> None:
            request = ValuesRequest(driver.core.tip_hash, first, count, pack(Contribution(PeerId("a"), 0, 0, 0)))
            await driver.answers.on_fetch(PeerId(caller), pack_request(request))

        for caller, tile, count, words in (
            ("a", first, most + 1, "were requested, which are not within one slice"),
            ("a", first, 0, "were requested, which are not within one slice"),
            ("a", len(layout.tiles), 1, "were requested, which are not within one slice"),
            ("b", first, 1, "does not reduce block"),
            ("stranger", 0, 1, "does not reduce block 0"),
        ):
            with pytest.raises(RemoteProtocolError, match=words):
                await ask(caller, tile, count)

    in_swarm(folder, play, lossy())


def test_a_column_that_missed_its_turn_is_handed_out_with_the_next_round(folder: Path) -> None:
    """Values that are not fit cost it one round, not another k."""
    every, spoilt = 3, 4

    def alter(round: int, block: int, values: Values) -> Values:
        return np.full_like(values, np.nan) if round == spoilt - 1 and block > 0 else values

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"], PretendWork(alter=alter))
        await swarm.until_round(2 * every + 2)
        manifests = [commit.manifest for commit in commits(swarm)]
        rounds = [manifest.column_rounds for manifest in manifests]
        column = min(due_columns(manifests[spoilt - 1].ownership, spoilt, every))
        assert [at[column] for at in rounds[spoilt - 1 : spoilt + 2]] == [spoilt - every, spoilt - every, spoilt + 1]

    in_swarm(folder, play, small_config(f"sync.expert_rounds={every}"))


def test_columns_that_move_are_handed_out_first(folder: Path) -> None:
    """Members come at any moment of a round; of who stays nobody loses what it is ahead."""

    async def play(swarm: MemorySwarm) -> None:
        books = Books(swarm)
        await swarm.start(["a", "b"])
        await swarm.until_round(2)
        for name in "cde":
            await swarm.add(name)
            await until(counts(swarm, name))
        await swarm.until_round(swarm.up[0].round + 2)
        moved = 0
        for parent, child in pairwise(commit.manifest for commit in commits(swarm)):
            members, done = {member.peer for member in child.members}, {piece.block for piece in child.slices}
            for column, owners in enumerate(parent.ownership):
                if members & set(owners) - set(child.ownership[column]):
                    moved += 1
                    assert 1 + column in done
        assert moved > 0
        assert not [notice for life in swarm.up for notice in life.notices if notice.kind == "column"]
        books.check()

    in_swarm(folder, play, lossy("sync.expert_rounds=4", peers=2))


def test_who_leaves_when_the_round_is_planned_hands_its_columns_out_with_the_next(folder: Path) -> None:
    """The leader says so after it has planned, and names itself once more."""

    async def play(swarm: MemorySwarm) -> None:
        books = Books(swarm)
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(2)
        leaving: list[tuple[PretendPeer, asyncio.Task[None]]] = []

        def listener(step: str, facts: Mapping[str, Any]) -> None:
            if step == "build" and not leaving:
                leader = peer(swarm, facts["peer"])
                leaving.append((leader, asyncio.get_running_loop().create_task(leader.leave())))

        before = failpoints.listen(listener)
        await until(lambda: bool(leaving))
        failpoints.listen(before)
        leader, task = leaving[0]
        await task
        await swarm.until_round(leader.round + 1)
        parent, last = (commits(swarm)[round].manifest for round in (leader.round - 1, leader.round))
        owned = columns_of(parent.ownership, leader.name)
        assert owned
        assert leader.name not in {member.peer for member in last.members}
        assert {1 + column for column in owned} <= {piece.block for piece in last.slices}
        assert not [notice for life in swarm.up for notice in life.notices if notice.kind == "column"]
        books.check()

    in_swarm(folder, play, small_config("sync.expert_rounds=4"))

"""Contributions that are no training, and arithmetic that gives other bits: what is wrong stays out of the state."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from spes_p2p.codecs.lossy import encode
from spes_p2p.consensus.manifest import Merge
from spes_p2p.consensus.messages import LOST
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.exchange.requests import Request, ValuesRequest
from spes_p2p.ids import Hash, PeerId
from spes_p2p.ownership.assign import columns_of
from spes_p2p.state.layout import Values
from spes_p2p.state.staging import TileData
from spes_p2p.swarm.ports import Blob
from spes_p2p.swarm.streams import FetchRequest
from spes_p2p.sync.reduce import NON_FINITE, TOO_LARGE, WRONG_SIZE
from tests.simulation.memory_swarm import MemorySwarm, PretendPeer, PretendWork
from tests.sync.swarm_cases import Recorder, check_agreement, check_leases, commits, in_swarm, small_config

SPOILT = 3
"""The round whose values one peer spoils."""


def peer(swarm: MemorySwarm, name: str) -> PretendPeer:
    return swarm.peers[PeerId(name)]


def spoiler(blocks: range, value: float) -> PretendWork:
    """Work whose last value in each of `blocks` is another one, in one round."""

    def alter(round: int, block: int, values: Values) -> Values:
        if round == SPOILT - 1 and block in blocks:
            values = values.copy()
            values[-1] = value
        return values

    return PretendWork(alter=alter)


async def start(swarm: MemorySwarm, work: PretendWork) -> None:
    await swarm.start_organiser()
    async with asyncio.TaskGroup() as group:
        for name in "abcd":
            group.create_task(swarm.add(name, work if name == "c" else None))


@pytest.mark.parametrize(("value", "reason"), [(float("nan"), NON_FINITE), (-np.inf, NON_FINITE), (1e6, TOO_LARGE)])
def test_poison_is_left_out_of_its_slice_and_named(folder: Path, value: float, reason: str) -> None:
    async def play(swarm: MemorySwarm) -> None:
        recorder = Recorder(swarm)
        await start(swarm, spoiler(range(1), value))
        await swarm.until_round(SPOILT + 2)
        manifest = commits(swarm)[SPOILT].manifest
        last = [piece for piece in manifest.slices if piece.block == 0][-1]
        assert all(("c" in piece.contributors) == (piece != last) for piece in manifest.slices if piece.block == 0)
        named = [n for life in swarm.up for n in life.notices if n.kind == "left out"]
        assert {(n.peer, n.text.endswith(reason)) for n in named} == {("c", True)}
        spoilt = next(e for e in peer(swarm, "c").applied_events if e.commit.manifest.round == SPOILT)
        assert not spoilt.uncounted  # it drops what was refused
        assert spoilt.refused == ("c",)
        recorder.check(commits(swarm))
        check_agreement(swarm)
        check_leases(swarm)

    in_swarm(folder, play, small_config(peers=4))


def sends_anything(liar: PretendPeer) -> None:
    """Its server does not check what it sends, as that of who wants to harm would not."""
    server = liar.net.transport._server
    assert server is not None

    async def find(caller: PeerId, request: FetchRequest) -> Blob:
        return await liar.driver.answers.on_fetch(caller, request.body)

    server._find = find  # type: ignore[method-assign]


def answers_otherwise(liar: PretendPeer, alter: Callable[[Blob], Blob]) -> None:
    """In one round its values are `alter` of what they should be."""
    honest = liar.driver.answers.serving.answer

    def answer(request: Request, caller: PeerId) -> Blob:
        spoils = isinstance(request, ValuesRequest) and liar.driver.core.tip.round == SPOILT - 1
        return alter(honest(request, caller)) if spoils else honest(request, caller)

    liar.driver.answers.serving.answer = answer  # type: ignore[method-assign]


def check_left_out(swarm: MemorySwarm, reason: str) -> None:
    """c is in no shared slice of the spoilt round, save those that it reduced itself, and each reducer names it."""
    manifest = commits(swarm)[SPOILT].manifest
    shared = [piece for piece in manifest.slices if piece.block == 0]
    assert {"c" in piece.contributors for piece in shared if piece.reducer != "c"} == {False}
    named = {(n.peer, n.text.rsplit(": ")[-1]) for life in swarm.up for n in life.notices if n.kind == "left out"}
    assert named == {("c", reason)}
    for reducer in {piece.reducer for piece in shared} - {"c"}:
        assert [n.peer for n in peer(swarm, reducer).notices if n.kind == "left out"] == [
            "c"
        ]  # once, not for each slice


@pytest.mark.parametrize("change", [-4, 4, 4096], ids=["too short", "too long", "far too long"])
def test_values_of_the_wrong_size_are_left_out_counted_and_named(folder: Path, change: int) -> None:
    def other_size(blob: Blob) -> Blob:
        data = bytes(blob.data)
        return Blob(data[:change] if change < 0 else data + bytes(change))

    async def play(swarm: MemorySwarm) -> None:
        await start(swarm, PretendWork())
        sends_anything(peer(swarm, "c"))
        answers_otherwise(peer(swarm, "c"), other_size)
        await swarm.until_round(SPOILT + 2)
        check_left_out(swarm, WRONG_SIZE)
        for life in swarm.up:
            assert [e.refused for e in life.applied_events if e.commit.manifest.round == SPOILT] == [("c",)]
        check_agreement(swarm)

    in_swarm(folder, play, small_config(peers=4))


def test_who_has_no_values_for_this_round_is_left_out_and_named(folder: Path) -> None:
    """What it has is for another manifest: the request names which, so there is nothing to send."""

    def of_another_round(blob: Blob) -> Blob:
        raise RemoteProtocolError("no values of our own on top of that")

    async def play(swarm: MemorySwarm) -> None:
        await start(swarm, PretendWork())
        answers_otherwise(peer(swarm, "c"), of_another_round)
        await swarm.until_round(SPOILT + 2)
        check_left_out(swarm, LOST)
        check_agreement(swarm)
        check_leases(swarm)

    in_swarm(folder, play, small_config(peers=4))


def test_a_lone_owners_column_that_is_not_finite_keeps_its_last_version(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        recorder = Recorder(swarm)
        await start(swarm, spoiler(range(1, 5), float("nan")))
        await swarm.until_round(SPOILT + 2)
        chain = commits(swarm)
        mine = columns_of(chain[SPOILT - 1].manifest.ownership, PeerId("c"))
        assert mine
        for column in range(4):
            kept = np.array_equal(recorder.blocks[SPOILT][1 + column], recorder.blocks[SPOILT - 1][1 + column])
            assert kept == (column in mine)
            assert chain[SPOILT].manifest.column_rounds[column] == SPOILT - (column in mine)
        assert chain[SPOILT + 2].manifest.column_rounds == (SPOILT + 2,) * 4
        recorder.check(chain)
        check_agreement(swarm)

    in_swarm(folder, play, small_config("sync.merge_alpha=0", peers=4))


def test_other_arithmetic_is_repaired_by_fetching(folder: Path) -> None:
    """One machine merges to other bits: it says so and takes the leader's; as leader the others take its."""
    config = small_config("sync.merge_interval=5", "sync.merge_alpha=0.3", "sync.merge_decay_steps=1000")

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        bench = peer(swarm, "c").driver._candidate
        exact = bench.compute

        def compute(merge: Merge | None) -> bytes:
            return exact(merge and replace(merge, alpha=float(np.float32(merge.alpha * 1.001))))

        bench.compute = compute  # type: ignore[method-assign, assignment]
        await swarm.until_round(6)
        check_agreement(swarm)
        warned = [n for life in swarm.up for n in life.notices if n.kind == "arithmetic"]
        assert len(warned) >= 6
        assert any(notice in peer(swarm, "c").notices for notice in warned)
        assert all("computed other bits" in notice.text for notice in warned)

    in_swarm(folder, play, config)


def hands_out_nothing_finite(liar: PretendPeer, spoils: Callable[[int], bool]) -> None:
    """In the rounds that `spoils` says, all that it reduces is NaN."""
    bench, layout = liar.driver._candidate, liar.swarm.layout
    honest = bench.write

    def nan(tile_id: int) -> TileData:
        tile = layout.tiles[tile_id]
        values, codec = np.full(tile.size, np.nan, np.float32), layout.codec_of(tile.block)
        return values if codec == "fp32" else encode(codec, values)

    def write(first_tile: int, tiles: Iterable[TileData]) -> tuple[Hash, ...]:
        made = [nan(first_tile + at) if spoils(liar.driver.core.tip.round + 1) else t for at, t in enumerate(tiles)]
        return honest(first_tile, made)

    bench.write = write  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "overrides", [(), ("sync.codec=int8",), ("sync.outer=nesterov",)], ids=["fp32", "int8", "outer"]
)
def test_what_a_reducer_hands_out_is_refused_where_it_is_not_finite(folder: Path, overrides: tuple[str, ...]) -> None:
    """Its shared slices are done again by others; a column that it owns alone keeps its last version."""

    async def play(swarm: MemorySwarm) -> None:
        recorder = Recorder(swarm)
        await start(swarm, PretendWork())
        hands_out_nothing_finite(peer(swarm, "c"), lambda round: round == SPOILT)
        await swarm.until_round(SPOILT + 2, ["a", "b", "d"])
        manifest = commits(swarm)[SPOILT].manifest
        mine = columns_of(commits(swarm)[SPOILT - 1].manifest.ownership, PeerId("c"))
        assert mine
        assert "c" not in {piece.reducer for piece in manifest.slices}
        assert {piece.block for piece in manifest.slices} == set(range(5)) - {1 + column for column in mine}
        assert all(np.isfinite(values).all() for blocks in recorder.blocks.values() for values in blocks)
        assert any(n.kind == "refused" and "not finite" in n.text for n in peer(swarm, "a").notices)
        check_agreement(swarm)

    in_swarm(folder, play, small_config("sync.merge_alpha=0", *overrides, peers=4))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("overrides", [(), ("swarm.faults=byzantine",), ("sync.outer=nesterov",)])
def test_a_reducer_that_hands_out_nothing_finite_in_any_round_does_not_stop_the_run(
    folder: Path, overrides: tuple[str, ...]
) -> None:
    """As a leader it insists on them: its proposals are refused, and the next leader's is committed."""

    async def play(swarm: MemorySwarm) -> None:
        recorder = Recorder(swarm)
        await start(swarm, PretendWork())
        hands_out_nothing_finite(peer(swarm, "c"), lambda round: True)
        began, deadline = swarm.clock.now(), peer(swarm, "a").driver.core.state.pace.deadline_seconds(0)
        rounds, led = 8, {0}
        while led == {0} and rounds < 40:  # until it was its turn to lead
            rounds += 4
            await swarm.until_round(rounds, ["a", "b", "d"])
            led = {commit.certificate.ballot for commit in commits(swarm)[1:]}
        assert led > {0}
        assert swarm.clock.now() - began < rounds * 10 * deadline
        assert all(np.isfinite(values).all() for blocks in recorder.blocks.values() for values in blocks)
        assert not any(n.kind == "disk" for name in "abd" for n in peer(swarm, name).notices)
        check_agreement(swarm)

    in_swarm(folder, play, small_config("sync.merge_alpha=0", *overrides, peers=4))

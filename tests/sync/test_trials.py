"""Columns that few contributed to: tried on held-out text, and left as they are where they make the model worse."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spes_p2p.config.schema import Config
from spes_p2p.consensus.actions import Try
from spes_p2p.consensus.manifest import Manifest
from spes_p2p.consensus.membership import leader_order
from spes_p2p.errors import PeerSilent
from spes_p2p.ids import PeerId
from spes_p2p.state.layout import BlockSource, Values
from spes_p2p.state.version import Version
from spes_p2p.sync.tensor_work import TensorWork
from tests.simulation.memory_swarm import MemorySwarm, PretendPeer
from tests.sync.swarm_cases import check_agreement, commits, in_swarm, small_config

NAMES = "abcdef"
ROUNDS = 4
SETTINGS = {
    "plain": (),
    "overlap": ("sync.overlap=true",),
    "turns": ("sync.expert_rounds=2",),
    "outer optimizer": ("sync.outer=nesterov",),
    "int4": ("sync.expert_codec=int4",),
    "crash": ("swarm.faults=crash",),
}
LIE = np.float32(10)


def config_of(*more: str, replicas: int = 1) -> Config:
    return small_config(
        "sync.aggregate=clip", "sync.merge_alpha=0", f"swarm.target_replicas={replicas}", "swarm.experts_per_peer=2",
        "swarm.faults=byzantine", *more, peers=len(NAMES),
    )  # fmt: skip


@dataclass
class Judge:
    """Finds columns harmful that fell far, or all. `tried` are those that it looked at, with the round of the base."""

    accuses_all: bool = False
    tried: list[tuple[int, int]] = field(default_factory=list)

    def harmful(self, committed: BlockSource, new: Mapping[int, Values], columns: Collection[int]) -> frozenset[int]:
        assert isinstance(committed, Version)
        self.tried += [(committed.round, column) for column in columns]
        falls = {column: float(np.mean(new[1 + column] - committed.block(1 + column))) for column in columns}
        return frozenset(column for column, change in falls.items() if self.accuses_all or change < -float(LIE) / 4)


async def start(swarm: MemorySwarm, judges: dict[str, Judge] | None = None) -> dict[str, Judge]:
    """All train, and try the columns of others, but for those without a judge."""
    await swarm.start_organiser()
    chosen = {name: Judge() for name in NAMES} if judges is None else judges

    async def add(name: str) -> None:
        peer = await swarm.add(name)
        peer.disk.judge = chosen.get(name)

    await asyncio.gather(*map(add, NAMES))
    return chosen


def lies(swarm: MemorySwarm, column: int) -> PretendPeer:
    """The owner of a column hands in something else from now on."""
    [owner] = swarm.peers[PeerId("a")].driver.core.tip.ownership[column]
    liar = swarm.peers[owner]
    liar.work.alter = lambda round, block, values: values - LIE if block == 1 + column else values
    return liar


def handed_out(manifest: Manifest) -> set[int]:
    return {piece.block - 1 for piece in manifest.slices if piece.block}


def column_of(swarm: MemorySwarm, name: str, column: int) -> float:
    store = swarm.peers[PeerId(name)].store
    return float(np.mean(store.version(max(store.rounds())).block(1 + column)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_harmful_column_keeps_its_values_and_the_others_go_on(folder: Path, setting: str) -> None:
    async def play(swarm: MemorySwarm) -> None:
        judges = await start(swarm)
        await swarm.until_round(2)
        liar = lies(swarm, 1)
        first = swarm.peers[PeerId("a")].round + 2  # what was handed in before the lie may come in until then
        await swarm.until_round(first + ROUNDS)
        late = [commit.manifest for commit in commits(swarm, "a") if commit.manifest.round > first]
        assert not any(1 in handed_out(manifest) for manifest in late)
        assert set().union(*map(handed_out, late)) == {0, 2, 3}
        assert column_of(swarm, "a", 1) > -float(LIE) / 2
        told = {(life.name, notice.peer) for life in swarm.up for notice in life.notices if "held-out" in notice.text}
        assert {peer for _, peer in told} == {liar.name}
        assert all(judge.tried for judge in judges.values())
        check_agreement(swarm)
        assert {member.peer for member in late[-1].members} >= set(NAMES)

    in_swarm(folder, play, config_of(*SETTINGS[setting]))


def test_a_column_is_tried_by_its_own_values_though_a_state_without_it_is_made_meanwhile(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Making another state takes back what was staged of it: by its old values it would harm nobody."""
    real, taken_back = TensorWork.harmful, set[tuple[int, tuple[bytes, ...]]]()

    async def harmful(self: TensorWork, action: Try) -> frozenset[int]:
        key = id(self), tuple(column.name for column in action.columns)
        if key not in taken_back:
            taken_back.add(key)
            self.candidate._opened().forget(at for column in action.columns for p in column.pieces for at in p.tile_ids)
        return await real(self, action)

    async def play(swarm: MemorySwarm) -> None:
        await start(swarm)
        await swarm.until_round(2)
        lies(swarm, 1)
        first = swarm.peers[PeerId("a")].round + 2
        await swarm.until_round(first + 2)
        late = [commit.manifest for commit in commits(swarm, "a") if commit.manifest.round > first]
        assert not any(1 in handed_out(manifest) for manifest in late)
        assert set().union(*map(handed_out, late)) == {0, 2, 3}
        check_agreement(swarm)

    monkeypatch.setattr(TensorWork, "harmful", harmful)
    in_swarm(folder, play, config_of())
    assert taken_back


def test_values_to_be_tried_that_nobody_has_any_more_are_handed_out_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial that waited for them would wait for ever."""
    lost = set[tuple[int, tuple[bytes, ...]]]()
    real = TensorWork.bring

    async def bring(self: TensorWork, action: Try, *more: Any) -> bool:
        key = id(self), tuple(column.name for column in action.columns)
        if key not in lost:
            lost.add(key)
            raise PeerSilent("nobody")
        return await real(self, action, *more)

    async def play(swarm: MemorySwarm) -> None:
        judges = await start(swarm)
        await swarm.until_round(ROUNDS)
        assert all(handed_out(commit.manifest) == {0, 1, 2, 3} for commit in commits(swarm, "a")[1:ROUNDS])
        assert all(judge.tried for judge in judges.values())
        check_agreement(swarm)

    monkeypatch.setattr(TensorWork, "bring", bring)
    in_swarm(folder, play, config_of())
    assert lost


def test_honest_columns_are_tried_once_by_each_and_all_handed_out(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        judges = await start(swarm)
        await swarm.until_round(ROUNDS)
        assert all(handed_out(commit.manifest) == {0, 1, 2, 3} for commit in commits(swarm, "a")[1:ROUNDS])
        for judge in judges.values():
            assert {judge.tried.count(found) for found in judge.tried} == {1}
            assert {column for _, column in judge.tried} == {0, 1, 2, 3}

    in_swarm(folder, play, config_of())


def test_columns_of_three_are_compared_and_not_tried(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        judges = await start(swarm)
        await swarm.until_round(ROUNDS)
        assert not any(judge.tried for judge in judges.values())

    in_swarm(folder, play, config_of(replicas=3))


def test_a_column_of_two_is_tried_too(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        judges = await start(swarm)
        await swarm.until_round(ROUNDS)
        assert any(judge.tried for judge in judges.values())

    in_swarm(folder, play, config_of(replicas=2))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("liars", ["a", "ab"])
def test_who_calls_all_columns_harmful_harms_nobody(folder: Path, liars: str) -> None:
    """A leader may always lack something; what others build and vote for is as they find it."""

    async def play(swarm: MemorySwarm) -> None:
        judges = {name: Judge(name in liars) for name in NAMES}
        await start(swarm, judges)
        await swarm.until_round(ROUNDS)
        made = commits(swarm, "c")[:ROUNDS]
        for before, commit in pairwise(made):
            order = leader_order(commit.manifest.parent, before.manifest.members)
            leader = order[commit.certificate.ballot % len(order)]
            assert leader in liars or handed_out(commit.manifest) == {0, 1, 2, 3}
        check_agreement(swarm)

    in_swarm(folder, play, config_of())


def test_who_cannot_try_columns_is_outvoted(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await start(swarm, {name: Judge() for name in NAMES[:4]})
        await swarm.until_round(2)
        lies(swarm, 1)
        first = swarm.peers[PeerId("a")].round + 2
        await swarm.until_round(first + ROUNDS)
        late = [commit.manifest for commit in commits(swarm, "e") if commit.manifest.round > first]
        assert not any(1 in handed_out(manifest) for manifest in late)

    in_swarm(folder, play, config_of())


def test_without_anybody_who_can_try_them_columns_are_taken_as_they_come(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await start(swarm, {})
        await swarm.until_round(ROUNDS)
        assert all(handed_out(commit.manifest) == {0, 1, 2, 3} for commit in commits(swarm, "a")[1:ROUNDS])

    in_swarm(folder, play, config_of())


def test_a_leader_that_hands_out_a_harmful_column_is_not_followed(folder: Path) -> None:
    """The owner proposes it whenever it leads, and its friend votes for it."""

    async def play(swarm: MemorySwarm) -> None:
        await start(swarm)
        await swarm.until_round(2)
        liar = lies(swarm, 1)
        friend = next(life for life in swarm.up if life is not liar)
        for life in (liar, friend):
            life.disk.judge = None
        first = liar.round + 2
        await swarm.until_round(first + 2 * len(NAMES))
        late = [commit.manifest for commit in commits(swarm, liar.name) if commit.manifest.round > first]
        assert not any(1 in handed_out(manifest) for manifest in late)
        assert any(commit.certificate.ballot for commit in commits(swarm, liar.name))
        check_agreement(swarm)

    in_swarm(folder, play, config_of())

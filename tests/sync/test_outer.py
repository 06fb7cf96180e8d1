"""The outer optimizer: torch's arithmetic, and swarms whose every round is what oracle and books make of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from spes_p2p.config.schema import Config
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import PeerId
from spes_p2p.interop.hf import state_layout
from spes_p2p.state.initial import InitialState
from spes_p2p.state.layout import MOMENTUM_PREFIX
from spes_p2p.state.version import block_file
from spes_p2p.sync.outer import Nesterov, outer_of
from spes_p2p.sync.outgoing import check_asker
from tests.simulation.memory_swarm import ORGANISER, MemorySwarm, PretendPeer, PretendWork
from tests.sync.books import Books
from tests.sync.chains import MadeRun
from tests.sync.swarm_cases import (
    Recorder,
    check_agreement,
    check_leases,
    commits,
    counts,
    in_swarm,
    small_config,
    until,
)

NESTEROV = "sync.outer=nesterov"
DILOCO = (NESTEROV, "swarm.experts_per_peer=4", "swarm.target_replicas=3", "sync.merge_alpha=0")


def config_of(*more: str, peers: int = 3) -> Config:
    return small_config(NESTEROV, *more, peers=peers)


# ---- arithmetic ----


def test_it_is_the_step_of_torch() -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal(50).astype(np.float32)
    parameter = torch.nn.Parameter(torch.from_numpy(values.copy()))
    theirs = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    ours, velocity, outer = values, np.zeros(50, np.float32), Nesterov(0.7, 0.9)
    for _ in range(5):
        mean = ours + rng.standard_normal(50).astype(np.float32) * np.float32(0.01)
        parameter.grad = parameter.detach() - torch.from_numpy(mean)
        ours, velocity = outer.step(mean, ours, velocity)
        theirs.step()
        assert np.allclose(ours, parameter.detach().numpy(), rtol=0, atol=1e-6)


def test_without_momentum_and_with_rate_one_it_is_plain_averaging() -> None:
    values, mean = np.array([1.0, -2.0], np.float32), np.array([1.5, 3.0], np.float32)
    new, velocity = Nesterov(1.0, 0.0).step(mean, values, np.zeros(2, np.float32))
    assert new.tolist() == mean.tolist()
    assert velocity.tolist() == [0.5, 5.0]


def test_it_leaves_its_operands_as_they_are() -> None:
    operands = [np.full(3, value, np.float32) for value in (3.0, 1.0, 0.5)]
    kept = [operand.copy() for operand in operands]
    Nesterov(0.7, 0.9).step(*operands)
    assert all(np.array_equal(*pair) for pair in zip(operands, kept, strict=True))


def test_only_a_config_that_asks_for_it_has_one() -> None:
    plain, stepped = MadeRun(small_config()), MadeRun(config_of())
    assert outer_of(plain.rules) is None
    assert outer_of(stepped.rules) == Nesterov(0.7, 0.9)


# ---- the grid ----


def test_momentum_follows_the_model_on_the_same_grid_and_begins_at_zero() -> None:
    config = config_of()
    layout, plain = state_layout(config), state_layout(small_config())
    assert layout.tiles[: layout.num_model_tiles] == plain.tiles
    for tile in plain.tiles:
        momentum = layout.tiles[layout.momentum_tile(tile.id)]
        assert (momentum.start, momentum.stop) == (tile.start, tile.stop)
        assert momentum.block == tile.block + len(plain.blocks)
    initial, without = (InitialState(it, 0, 0.02) for it in (layout, plain))
    for block in plain.blocks:
        assert np.array_equal(initial.block(block.index), without.block(block.index))
        assert not initial.block(len(plain.blocks) + block.index).any()
    name = plain.tensors[0].name
    assert layout.locate(MOMENTUM_PREFIX + name)[0] == len(plain.blocks)
    assert plain.num_model_tiles == len(plain.tiles)


def test_nobody_can_ask_for_trained_momentum(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        with pytest.raises(RemoteProtocolError, match="not within one slice"):
            check_asker(
                swarm.layout, swarm.run.rules, commits(swarm)[0].manifest, PeerId("b"), swarm.layout.num_model_tiles, 1
            )

    in_swarm(folder, play, config_of())


# ---- swarms ----

VARIANTS = [
    (),
    ("swarm.target_replicas=2",),
    DILOCO[1:],
    ("sync.merge_interval=20", "sync.merge_alpha=0.3"),
    ("sync.outer_lr=0.5", "sync.outer_momentum=0"),
    ("sync.steps_per_round=[[10,2],[0,4]]",),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("more", VARIANTS, ids=" ".join)
def test_every_round_is_what_the_oracle_says(folder: Path, more: tuple[str, ...]) -> None:
    async def play(swarm: MemorySwarm) -> None:
        recorder = Recorder(swarm)
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(6)
        recorder.check(commits(swarm))
        check_agreement(swarm)

    in_swarm(folder, play, config_of(*more))


LOSSY = [
    ("sync.codec=int8",),
    ("sync.codec=ternary", "swarm.target_replicas=2"),
    ("sync.codec=fp32", "sync.expert_codec=int4"),
    ("sync.expert_rounds=2",),
    ("sync.expert_rounds=3", "sync.codec=int8", "swarm.target_replicas=2"),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("more", LOSSY, ids=" ".join)
def test_every_round_is_what_the_books_say(folder: Path, more: tuple[str, ...]) -> None:
    """With rounding and with turns: the step is made on what was handed out, to the bit; merges come after it."""

    async def play(swarm: MemorySwarm) -> None:
        books = Books(swarm)
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(7)
        books.check()
        assert books.merges > 0
        check_agreement(swarm)

    in_swarm(folder, play, config_of("sync.merge_interval=20", "sync.merge_alpha=0.3", *more))


def peer(swarm: MemorySwarm, name: str) -> PretendPeer:
    return swarm.peers[PeerId(name)]


@pytest.mark.parametrize("seed", [0, *(pytest.param(at, marks=pytest.mark.thorough) for at in (1, 2))])
@pytest.mark.parametrize("more", [("swarm.target_replicas=2",), DILOCO[1:]], ids=["two owners", "DiLoCo"])
def test_reducers_that_change_die_and_come_back_change_nothing(folder: Path, more: tuple[str, ...], seed: int) -> None:
    """Peers join, are killed in the middle of a round, come back with their disk and without it, and leave."""

    async def play(swarm: MemorySwarm) -> None:
        recorder = Recorder(swarm)
        await swarm.start(["a", "b", "c", "d"])
        await swarm.until_round(2)
        await asyncio.sleep(0.98 + 0.07 * seed)
        await peer(swarm, "b").kill(silent=seed == 1)
        await swarm.until_round(4, ["a", "c", "d"])
        await swarm.add("b")
        await swarm.add("e")
        await until(counts(swarm, "e"))
        await until(counts(swarm, "b"))
        await peer(swarm, "c").kill()
        swarm.lose_disk("c")
        await swarm.add("c")
        await until(counts(swarm, "c"))
        await peer(swarm, "a").leave()
        await swarm.until_round(swarm.up[0].round + 2)
        reducers = {piece.reducer for commit in commits(swarm) for piece in commit.manifest.slices if not piece.block}
        assert reducers >= {"a", "b", "c", "d", "e"}
        recorder.check(commits(swarm))
        check_agreement(swarm)
        check_leases(swarm)

    in_swarm(folder, play, config_of(*more, peers=4), seed=seed)


@pytest.mark.parametrize("moment", [1.05, 1.12, 1.2])
def test_a_power_cut_in_the_middle_of_a_round(folder: Path, moment: float) -> None:
    """What was staged and not committed never was: the momentum is that of the tip."""

    async def play(swarm: MemorySwarm) -> None:
        recorder = Recorder(swarm)
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(2)
        await asyncio.sleep(moment)
        for name in "abc":
            await peer(swarm, name).kill()
        await asyncio.gather(*(swarm.add(name) for name in "abc"))
        await swarm.until_round(6)
        recorder.check(commits(swarm))
        check_agreement(swarm)

    in_swarm(folder, play, config_of())


def test_a_column_that_nobody_brings_keeps_values_and_momentum(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        recorder = Recorder(swarm)
        await swarm.start(["a", "b"])
        await swarm.until_round(3)
        (lost, *_) = [c for c, owners in enumerate(commits(swarm)[-1].manifest.ownership) if owners == ("b",)]
        await peer(swarm, "b").kill()
        await swarm.until_round(6, ["a"])
        chain = commits(swarm, "a")
        stale = [c.manifest for c in chain if c.manifest.round and c.manifest.column_rounds[lost] < c.manifest.round]
        assert stale
        for manifest in stale:
            for block in (1 + lost, 1 + lost + len(swarm.layout.model_blocks)):
                before, after = (recorder.blocks[round][block] for round in (manifest.round - 1, manifest.round))
                assert np.array_equal(before, after)
                assert before.any()
        recorder.check(chain)

    in_swarm(folder, play, config_of("sync.merge_alpha=0", peers=2))


def test_who_lost_its_history_takes_the_winners_momentum(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c", "d"], PretendWork(step_seconds=0.8))
        await swarm.until_round(2)
        swarm.network.partition(["a", "b", "c"], ["d", ORGANISER])
        await asyncio.sleep(85.0)
        ours, theirs = peer(swarm, "d").store, peer(swarm, "a").store
        momentum = len(swarm.layout.model_blocks)
        here, there = (store.version(store.rounds()[-1]).block(momentum) for store in (ours, theirs))
        assert not np.array_equal(here, there)
        swarm.network.heal()
        await until(lambda: any(event.switched for event in peer(swarm, "d").applied_events), 120.0)
        await until(counts(swarm, "d"), 120.0)
        check_agreement(swarm)

    in_swarm(folder, play, config_of(peers=4))


def test_damaged_momentum_is_found_and_mended(folder: Path) -> None:
    """A peer that made the step with other momentum would not agree: it fetches those bytes again."""

    async def play(swarm: MemorySwarm) -> None:
        recorder = Recorder(swarm)
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(3)
        victim = peer(swarm, "b")
        path = victim.store.version(victim.round).folder / block_file(len(swarm.layout.model_blocks))
        with open(path, "r+b") as file:
            file.seek(40)
            file.write(b"\xff\x00\xff\x00")
        await swarm.until_round(7)
        assert [notice.text for notice in victim.notices if path.name in notice.text]
        recorder.check(commits(swarm))
        check_agreement(swarm)

    in_swarm(folder, play, config_of())


def test_momentum_never_travels_in_a_round(folder: Path) -> None:
    """A round sends what it sends without an outer optimizer."""

    async def play(swarm: MemorySwarm) -> int:
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(4)
        return sum(event.bytes_sent for life in swarm.up for event in life.applied_events)

    plain = in_swarm(folder / "plain", play, small_config())
    stepped = in_swarm(folder / "stepped", play, config_of())
    assert stepped < 1.1 * plain  # messages are more or fewer by chance; momentum is as large as what is trained

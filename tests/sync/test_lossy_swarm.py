"""Swarms whose values travel rounded: every round is what the books say, bit for bit, and nothing trained is lost."""

from __future__ import annotations

import random
from collections import defaultdict
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest

from spes_p2p.config.schema import Config
from spes_p2p.consensus.turns import due_columns
from spes_p2p.ids import PeerId
from spes_p2p.state.initial import InitialState
from spes_p2p.sync.round_log import RoundLog
from tests.simulation.memory_swarm import MemorySwarm
from tests.simulation.pretend_peer import PretendPeer
from tests.sync.books import Books
from tests.sync.swarm_cases import Recorder, check_agreement, commits, counts, in_swarm, small_config, until

CODECS = (
    ("sync.codec=bf16",),
    ("sync.codec=int8",),
    ("sync.codec=int4",),
    ("sync.codec=int8", "sync.expert_codec=int4"),
    ("sync.codec=ternary",),
    ("sync.codec=int4", "sync.expert_codec=ternary"),
    ("sync.codec=fp32", "sync.expert_codec=int8"),
)


def config_of(codec: tuple[str, ...], *more: str, peers: int = 3) -> Config:
    return small_config(*codec, "sync.merge_interval=20", "sync.merge_alpha=0.3", *more, peers=peers)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("codec", CODECS, ids=" ".join)
@pytest.mark.parametrize("replicas", [1, 2])
def test_every_round_is_what_the_books_say(folder: Path, codec: tuple[str, ...], replicas: int) -> None:
    async def play(swarm: MemorySwarm) -> None:
        books = Books(swarm)
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(6)
        check_agreement(swarm)
        assert books.check() > 0
        assert books.merges == 3

    in_swarm(folder, play, config_of(codec, f"swarm.target_replicas={replicas}"))


def test_the_books_are_right_while_uplinks_and_so_reducers_change(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a mean has left out waits at who reduced it, whoever reduces meanwhile."""
    uplinks = random.Random(0)
    monkeypatch.setattr(RoundLog, "uplink", lambda self: uplinks.randrange(10**6, 10**7))

    async def play(swarm: MemorySwarm) -> None:
        books = Books(swarm)
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(8)
        check_agreement(swarm)
        assert books.check() > 0
        reducers = defaultdict[int, set[PeerId]](set)
        for piece in chain.from_iterable(commit.manifest.slices for commit in commits(swarm)):
            for tile in piece.tile_ids:
                reducers[tile].add(piece.reducer)
        assert any(len(reducers[tile]) > 1 for tile in swarm.layout.tile_ids_of(0))

    in_swarm(folder, play, config_of(("sync.codec=ternary",)))


FAULTY = (
    ("sync.codec=int4",),
    ("sync.codec=ternary",),
    ("sync.codec=int8", "sync.expert_codec=int4"),
    ("sync.codec=int4", "sync.expert_codec=ternary"),
)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("codec", FAULTY, ids=" ".join)
def test_the_books_are_right_while_peers_die_come_back_and_leave(folder: Path, codec: tuple[str, ...]) -> None:
    """Reducers change, ballots are tried again, a column passes to its second owner and to a stranger."""

    async def play(swarm: MemorySwarm) -> None:
        books = Books(swarm)
        await swarm.start(["a", "b", "c", "d"])
        await swarm.until_round(2)
        await swarm.peers[PeerId("b")].kill()
        await swarm.until_round(4, ["a", "c", "d"])
        await swarm.add("b")
        await until(counts(swarm, "b"))
        await kill_the_leader(swarm)
        await swarm.add("e")
        await until(counts(swarm, "e"))
        await next(life for life in swarm.up if life.name != "e").leave()
        await swarm.until_round(swarm.up[0].round + 3)
        check_agreement(swarm)
        assert books.check() > 0
        assert books.merges > 3

    in_swarm(folder, play, config_of(codec, "swarm.target_replicas=2", peers=4))


async def kill_the_leader(swarm: MemorySwarm) -> None:
    """Once it has closed the round: what it had begun is done again by the next one."""

    def closing() -> list[PretendPeer]:
        return [life for life in swarm.up if life.driver.core.state.round.closing >= 0]

    await until(lambda: bool(closing()))
    await closing()[0].kill()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("codec", ["bf16", "int8", "int4", "ternary"])
def test_nothing_that_was_trained_is_lost(folder: Path, codec: str) -> None:
    """What was committed of a column, and what its owner is still ahead, is what the owner trained from the start."""

    async def play(swarm: MemorySwarm) -> None:
        recorder = Recorder(swarm)
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(8)
        initial = InitialState(swarm.layout, swarm.config.run.seed, swarm.config.model.init_std)
        for life in swarm.up:
            for block in range(1, len(swarm.layout.blocks)):
                if commits(swarm)[1].manifest.ownership[block - 1] != (life.name,):
                    continue
                handed = [handed for _, handed in sorted(life.handed_in.items())]
                trained = sum((turn.values[block] - turn.started[block]).astype(np.float64) for turn in handed)
                difference = handed[-1].values[block] - initial.block(block).astype(np.float64) - trained
                assert np.abs(difference).max() < 1e-5
                committed = recorder.blocks[life.round][block]
                assert np.abs(committed - initial.block(block)).max() > 10 * np.abs(difference).max()

    in_swarm(folder, play, small_config(f"sync.codec={codec}", "sync.merge_alpha=0.0"))


TURNS = (("sync.codec=fp32",), ("sync.codec=int8",))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("codec", TURNS, ids=" ".join)
@pytest.mark.parametrize("replicas", [1, 2])
def test_columns_take_turns(folder: Path, codec: tuple[str, ...], replicas: int) -> None:
    """Each in every third round; its owners go on from their own values, and the merge moves those too."""

    async def play(swarm: MemorySwarm) -> None:
        books = Books(swarm)
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(9)
        check_agreement(swarm)
        books.check()
        chain = [commit.manifest for commit in commits(swarm)]
        turns = [{piece.block for piece in manifest.slices} for manifest in chain[1:]]
        due = [due_columns(before.ownership, after.round, 3) for before, after in pairwise(chain)]
        assert turns == [{0, *(1 + column for column in some)} for some in due]
        assert turns[3:6] == turns[6:9]
        assert [sum(1 + column in turn for turn in turns[6:9]) for column in range(4)] == [1] * 4
        assert sorted(chain[9].column_rounds) == [7, 8, 9, 9]
        assert not any(event.stale_columns for life in swarm.up for event in life.applied_events)
        assert books.merges > 3

    in_swarm(folder, play, config_of(codec, "sync.expert_rounds=3", f"swarm.target_replicas={replicas}"))


def test_who_leaves_hands_its_columns_out_first_and_who_dies_takes_some_along(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        recorder = Recorder(swarm)
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(2)
        leaver = swarm.peers[PeerId("b")]
        owned = [column for column, owners in enumerate(leaver.driver.core.tip.ownership) if leaver.name in owners]
        await leaver.leave()
        last = leaver.round
        assert owned
        for column in owned:
            assert np.array_equal(recorder.blocks[last][1 + column], leaver.handed_in[last - 1].values[1 + column])
        victim, survivor = swarm.peers[PeerId("a")], swarm.peers[PeerId("c")]
        await swarm.until_round(last + 2)
        await victim.kill()
        await swarm.until_round(survivor.round + 2)
        said = [notice.text for notice in survivor.notices if notice.kind == "column"]
        assert said
        assert all("are lost with its owner" in text for text in said)

    in_swarm(folder, play, small_config("sync.expert_rounds=4"))

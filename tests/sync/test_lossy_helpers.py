"""A helper that reduces for owners who cannot be dialled: what its hand-outs leave out counts once, however it pauses.

Against the independent ledger, bit for bit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from spes_p2p.config.schema import Config
from spes_p2p.consensus.manifest import Manifest, Slice
from spes_p2p.consensus.membership import LINK_PRIVATE
from spes_p2p.consensus.messages import (
    Intent,
)
from spes_p2p.ids import PeerId
from tests.simulation.memory_swarm import ORGANISER, MemorySwarm
from tests.sync.books import Books
from tests.sync.swarm_cases import check_agreement, commits, counts, in_swarm, small_config, until

HIDDEN = ("a", "b")


def config_of(rounds: int, *more: str) -> Config:
    """Two owners a column; the helpers are full before they get those of `HIDDEN`."""
    wanted = ("sync.codec=int4", "sync.merge_interval=20", "sync.merge_alpha=0.3", "swarm.target_replicas=2")
    return small_config(*wanted, "swarm.experts_per_peer=3", f"sync.expert_rounds={rounds}", *more)


async def start(swarm: MemorySwarm, helpers: Sequence[str]) -> None:
    """Two owners behind NAT, each its own, beside peers that can be dialled and train little."""
    swarm.network.hide(*HIDDEN)
    await swarm.start_organiser()
    hidden = Intent(joining=True, max_columns=4, link_class=LINK_PRIVATE)
    public = Intent(joining=True, max_columns=1)
    await asyncio.gather(
        *(swarm.add(name, intent=hidden) for name in HIDDEN), *(swarm.add(name, intent=public) for name in helpers)
    )


def helped(manifest: Manifest) -> list[Slice]:
    """Slices of columns that somebody else reduced for several owners."""
    return [p for p in manifest.slices if p.block and p.reducer not in p.contributors and len(p.contributors) > 1]


def chain_of(swarm: MemorySwarm) -> list[Manifest]:
    return [commit.manifest for commit in commits(swarm)]


def paused(swarm: MemorySwarm) -> bool:
    """Whether one helper handed a tile out twice, with rounds between in which nobody did."""
    turns: dict[tuple[PeerId, int], int] = {}
    for manifest in chain_of(swarm)[1:]:
        for piece in helped(manifest):
            before = turns.get((piece.reducer, piece.first_tile), manifest.round)
            if before < manifest.round - 1:
                return True
            turns[piece.reducer, piece.first_tile] = manifest.round
    return False


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_a_helper_carries_what_it_left_out_over_rounds_without_the_column(folder: Path, rounds: int) -> None:
    async def play(swarm: MemorySwarm) -> None:
        books = Books(swarm)
        await start(swarm, ["c"])
        await swarm.until_round(10)
        assert any(map(helped, chain_of(swarm))), "the case that needs a helper did not come up"
        assert rounds == 1 or paused(swarm)
        check_agreement(swarm)
        assert books.check() > 0
        owners = chain_of(swarm)[-1].ownership
        kept = {peer for peer, tile in books.ledger.handed if peer not in owners_of(swarm, owners, tile)}
        assert kept == {"c"}, "it has nothing to carry"

    in_swarm(folder, play, config_of(rounds))


def owners_of(swarm: MemorySwarm, ownership: Sequence[Sequence[PeerId]], tile_id: int) -> Sequence[PeerId]:
    """The owners of a tile's column; of shared tiles everybody, as far as this test goes."""
    block = swarm.layout.tiles[tile_id].block
    return ownership[block - 1] if block else [life.name for life in swarm.up]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rounds", [1, 3])
def test_another_helper_takes_over_while_the_column_pauses_and_the_first_comes_back(folder: Path, rounds: int) -> None:
    """What the first one had kept is dropped when the second hands the tile out, and never comes again."""

    async def play(swarm: MemorySwarm) -> None:
        books = Books(swarm)
        await start(swarm, ["c", "d"])
        await swarm.until_round(5)
        first = {piece.reducer for manifest in chain_of(swarm) for piece in helped(manifest)}
        assert first
        gone = sorted(first)[0]
        await swarm.peers[gone].kill()
        left = [life.name for life in swarm.up]
        await swarm.until_round(swarm.peers[left[0]].round + 2 * rounds + 1, left)
        await swarm.add(gone, intent=Intent(joining=True, max_columns=1))
        await until(counts(swarm, gone))
        await swarm.until_round(max(life.round for life in swarm.up) + 2 * rounds + 2)
        handed = [(piece.reducer, piece.first_tile) for manifest in chain_of(swarm) for piece in helped(manifest)]
        of_gone = {tile for reducer, tile in handed if reducer == gone}
        assert of_gone & {tile for reducer, tile in handed if reducer != gone}, "nobody took over"
        check_agreement(swarm)
        books.check()

    in_swarm(folder, play, config_of(rounds))


@pytest.mark.parametrize("rounds", [1, 3])
def test_a_serving_node_is_such_a_helper(folder: Path, rounds: int) -> None:
    async def play(swarm: MemorySwarm) -> None:
        books = Books(swarm)
        swarm.network.hide(*HIDDEN)
        await swarm.start_organiser()
        hidden = Intent(joining=True, max_columns=4, link_class=LINK_PRIVATE)
        await asyncio.gather(*(swarm.add(name, intent=hidden) for name in HIDDEN))
        await swarm.until_round(10)
        found = [piece for manifest in chain_of(swarm) for piece in helped(manifest)]
        assert {piece.reducer for piece in found} == {ORGANISER}
        check_agreement(swarm)
        assert books.check() > 0

    in_swarm(folder, play, config_of(rounds, "swarm.min_peers=2", "swarm.experts_per_peer=4"), serve=True)

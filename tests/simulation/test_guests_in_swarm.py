"""Guests in a swarm of real trainers: every hand-out against the formula written out, and what becomes of guests.

The oracle takes what peers handed in, the committed states and the manifests, and uses none of the arithmetic of the
product: bases by numpy's SVD of what each hand-out changed are compared with those that the peers have.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from spes_p2p.config.load import bundled_config, load_config
from spes_p2p.config.schema import Config
from spes_p2p.consensus.manifest import Manifest
from spes_p2p.consensus.membership import LINK_PRIVATE
from spes_p2p.consensus.messages import (
    Intent,
)
from spes_p2p.data.loader import open_dataset
from spes_p2p.ids import PeerId
from spes_p2p.state.basis import Basis
from spes_p2p.state.layout import Layout, Values
from spes_p2p.sync.inputs import Snapshot
from tests.peer.real import SMALL, make_tokens
from tests.simulation.pretend_peer import PretendPeer
from tests.simulation.training_swarm import Measure, TrainingPeer, TrainingSwarm
from tests.simulation.virtual_time import run_virtual

RANK = 4
NAMES = ("peer-a", "peer-b", "peer-c")
GUESTS = (
    *SMALL,
    f"model.guest_rank={RANK}",
    "model.num_experts=3",
    "model.expert_ffn=48",
    "sync.tile_values=384",
    "sync.guest_codec=fp32",
    "sync.steps_per_round=4",
    "sync.merge_alpha=0",
    "swarm.min_peers=3",
    "swarm.experts_per_peer=1",
    "optimizer.lr=0.02",
    "optimizer.batch_sequences=2",
    "scheduler.warmup_steps=1",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokens(tmp_path_factory.mktemp("corpus"), words=4000)


def config_of(data: Path, *overrides: str) -> Config:
    return load_config(bundled_config("tiny"), (*GUESTS, f"data.path={data}", *overrides))


@dataclass
class Seen:
    """Of each round: the manifest, the model's blocks, and by peer what went in and the bases that it has then."""

    layout: Layout
    manifests: dict[int, Manifest] = field(default_factory=dict)
    blocks: dict[int, list[Values]] = field(default_factory=dict)
    inputs: dict[tuple[int, str], Snapshot] = field(default_factory=dict)
    bases: dict[tuple[int, str], Mapping[int, Basis]] = field(default_factory=dict)

    def watch(self, peer: PretendPeer, manifest: Manifest) -> None:
        round = manifest.round
        blocks = [np.array(peer.store.version(round).block(block.index)) for block in self.layout.model_blocks]
        assert all(map(np.array_equal, blocks, self.blocks.setdefault(round, blocks))), "peers differ"
        self.manifests[round] = manifest
        self.inputs[round, peer.name] = peer.inputs.snapshot
        self.bases[round, peer.name] = peer.disk.bases.now


def play(
    config: Config,
    folder: Path,
    rounds: int,
    story: Callable[[TrainingSwarm], object] | None = None,
    begin: Callable[[TrainingSwarm], object] = lambda swarm: swarm.start(NAMES),
) -> tuple[Seen, TrainingSwarm]:
    async def run() -> tuple[Seen, TrainingSwarm]:
        swarm = TrainingSwarm(config, folder, open_dataset(config), torch.device("cpu"), Measure(10**6, 10**6))
        seen = Seen(swarm.layout)
        swarm.watch = seen.watch
        await cast("asyncio.Future[None]", begin(swarm))
        if story is not None:
            await cast("asyncio.Future[None]", story(swarm))
        await swarm.until_round(rounds)
        await swarm.stop()
        return seen, swarm

    return run_virtual(run(), 1e7)


def expected_column(seen: Seen, manifest: Manifest, column: int) -> tuple[NDArray[np.float64], int]:
    """What the owners must hand out by the formula of the design, in fp64, and how many guests are in it."""
    round, block = manifest.round, 1 + column
    before = seen.blocks[round - 1][block].astype(np.float64)
    tokens = {entry.peer: entry.tokens for entry in manifest.roster}
    owners = next(piece.contributors for piece in manifest.slices if piece.block == block)
    handed = {peer: seen.inputs[round, peer] for peer in tokens}
    weighted = [tokens[peer] * handed[peer].arrays[block].astype(np.float64) for peer in owners]
    mean = np.sum(weighted, axis=0) / sum(tokens[peer] for peer in owners)
    guests = [peer for peer in tokens if peer not in owners and column in handed[peer].coordinates]
    total = sum(tokens[peer] for peer in (*owners, *guests))
    basis = seen.bases[round - 1, owners[0]][column].values.astype(np.float64)
    made, at, q_at = before.copy(), 0, 0
    for placed in seen.layout.blocks[block].tensors:
        (out, width), part = placed.tensor.shape, slice(placed.offset, placed.offset + placed.tensor.size)
        q = basis[q_at : q_at + width * RANK].reshape(width, RANK)
        d = (mean - before)[part].reshape(out, width)
        inside = sum(tokens[peer] for peer in owners) * d @ q
        for peer in guests:
            coordinates = handed[peer].coordinates[column]
            assert coordinates.mark == seen.bases[round - 1, owners[0]][column].mark
            brought = torch.from_numpy(coordinates.values[at : at + out * RANK])
            brought = brought.bfloat16().float() if seen.layout.guest_codec == "bf16" else brought
            inside = inside + tokens[peer] * brought.numpy().reshape(out, RANK)
        made[part] += (d + (inside / total - d @ q) @ q.T).reshape(-1)
        at, q_at = at + out * RANK, q_at + width * RANK
    return made, len(guests)


def check_hand_outs(seen: Seen, tolerance: float = 2e-6) -> int:
    """Of all rounds that were seen whole; how many had guests that moved something."""
    counted = 0
    for round, manifest in sorted(seen.manifests.items()):
        for column in {piece.block - 1 for piece in manifest.slices} - {-1}:
            if round - 1 not in seen.blocks:
                continue
            made, guests = expected_column(seen, manifest, column)
            np.testing.assert_allclose(seen.blocks[round][1 + column], made, atol=tolerance)
            counted += guests > 0
    return counted


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("sync.expert_rounds=2",),
        ("swarm.experts_per_peer=2", "swarm.target_replicas=2"),
        ("sync.expert_rounds=2", "sync.overlap=true"),
        ("sync.guest_codec=bf16",),
    ],
    ids=lambda overrides: " ".join(overrides) or "plain",
)
def test_every_hand_out_has_what_guests_trained(data: Path, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    seen, _ = play(config_of(data, *overrides), tmp_path, 5)
    assert check_hand_outs(seen) >= 5


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("codec", "error"), [("bf16", 0.003), ("int8", 0.01), ("int4", 0.15)])
def test_with_a_lossy_codec_it_is_the_change_with_guests_that_is_encoded(
    data: Path, tmp_path: Path, codec: str, error: float
) -> None:
    """An owner goes on from its master, so nothing piles up: every hand-out is within one rounding of the formula."""
    seen, _ = play(config_of(data, f"sync.expert_codec={codec}"), tmp_path, 4)
    for round in range(1, 5):
        for column in range(3):
            made, guests = expected_column(seen, seen.manifests[round], column)
            before, after = (seen.blocks[at][1 + column] for at in (round - 1, round))
            assert guests == 2
            assert np.linalg.norm(after - made) < error * np.linalg.norm(made - before)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_owners_that_cannot_be_dialled_take_everybody_in(data: Path, tmp_path: Path, codec: str) -> None:
    """Two peers at home own a column each: the guest at the other home is in it, since the public one reduces it."""

    async def homes(swarm: TrainingSwarm) -> None:
        swarm.network.hide("peer-a", "peer-b")
        await swarm.start_organiser()
        hidden = Intent(joining=True, max_columns=1, link_class=LINK_PRIVATE)
        public = Intent(joining=True, max_columns=1)
        intents = dict(zip(NAMES, (hidden, hidden, public)))
        await asyncio.gather(*(swarm.add(name, intent=intent) for name, intent in intents.items()))

    seen, swarm = play(config_of(data, f"sync.expert_codec={codec}"), tmp_path, 5, begin=homes)
    whole = [round for round, manifest in seen.manifests.items() if round > 1 and len(manifest.roster) == 3]
    assert len(whole) >= 3
    for round in whole:
        manifest = seen.manifests[round]
        for column in range(3):
            made, guests = expected_column(seen, manifest, column)
            before, after = (seen.blocks[at][1 + column] for at in (round - 1, round))
            assert guests == 2
            error = 0.05 if codec == "int8" else 1e-5
            assert np.linalg.norm(after - made) < error * np.linalg.norm(made - before)
    events = [event for peer in swarm.peers.values() for event in peer.applied_events]
    assert {event.guests for event in events if event.commit.manifest.round in whole} == {NAMES}


def test_bases_follow_what_was_handed_out_and_coordinates_begin_anew(data: Path, tmp_path: Path) -> None:
    seen, _ = play(config_of(data, "sync.expert_rounds=3"), tmp_path, 7)
    for round in range(1, 8):
        manifest = seen.manifests[round]
        due = {piece.block - 1 for piece in manifest.slices} - {-1}
        for name in NAMES:
            bases, before = seen.bases[round, name], seen.bases[round - 1, name]
            assert set(bases) == {0, 1, 2}
            assert {column for column in range(3) if bases[column].mark != before[column].mark} == due
            same = seen.bases[round, NAMES[0]]
            assert all(np.array_equal(bases[column].values, same[column].values) for column in range(3))
    # coordinates of a column grow over the three rounds of its turn, from zero again after it was handed out
    sizes = {
        round: float(np.abs(seen.inputs[round, name].coordinates[column].values).mean())
        for round in range(1, 8)
        for name in NAMES[:1]
        for column in range(3)
        if column == max(seen.inputs[round, name].coordinates)
    }
    turn = next(round for round in range(1, 8) if sizes[round + 1] < sizes[round])
    assert sizes[turn + 1] < sizes[turn + 2] < sizes[turn + 3]


def test_a_newcomer_is_a_guest_from_the_next_hand_out_on_and_the_dead_are_left_out(data: Path, tmp_path: Path) -> None:
    async def story(swarm: TrainingSwarm) -> None:
        await swarm.until_round(3)
        await swarm.add("peer-d", intent=Intent(joining=True, max_columns=0))
        await swarm.until_round(7)
        assert swarm.peers[PeerId("peer-d")].disk.bases.now, "it has seen hand-outs"
        await swarm.peers[PeerId("peer-d")].kill()
        await swarm.until_round(9)
        await swarm.peers[PeerId("peer-c")].kill()
        await swarm.until_round(12)

    seen, swarm = play(config_of(data, "sync.expert_rounds=2", "swarm.experts_per_peer=2"), tmp_path, 14, story)
    counted = check_hand_outs(seen)
    assert counted >= 10
    owners = swarm.peers[PeerId("peer-a")].driver.core.tip.ownership
    assert all(owners), "the columns of who died have gone to others"
    newcomer = [round for (round, name), snapshot in seen.inputs.items() if name == "peer-d" and snapshot.coordinates]
    assert newcomer


def test_who_comes_back_has_the_bases_that_it_had(data: Path, tmp_path: Path) -> None:
    found: list[Mapping[int, Basis]] = []

    async def story(swarm: TrainingSwarm) -> None:
        await swarm.until_round(4)
        peer = cast(TrainingPeer, swarm.peers[PeerId("peer-b")])
        await peer.kill()
        found.append(peer.disk.bases.now)
        again = await swarm.add("peer-b")
        found.append(again.disk.bases.now)

    play(config_of(data, "sync.expert_rounds=3"), tmp_path, 6, story)
    before, after = found
    assert set(before) == {0, 1, 2}
    assert after, "those that were not handed out meanwhile"
    for column, basis in after.items():
        if basis.mark == before[column].mark:
            assert np.array_equal(basis.values, before[column].values)

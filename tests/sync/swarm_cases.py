"""What the tests of whole in-memory swarms share: a very small run, and the questions that all of them ask."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import numpy as np

from spes_p2p.config.load import load_config
from spes_p2p.config.schema import Config
from spes_p2p.consensus.manifest import Manifest, manifest_hash
from spes_p2p.consensus.messages import (
    Commit,
)
from spes_p2p.data.leases import take
from spes_p2p.ids import Hash, PeerId
from spes_p2p.state.initial import InitialState
from spes_p2p.state.layout import BlockSource, Values
from spes_p2p.sync.candidate_state import whole_state
from tests import oracle
from tests.simulation.memory_swarm import MemorySwarm, PretendPeer
from tests.simulation.pretend_peer import HandedIn
from tests.simulation.virtual_time import run_virtual

T = TypeVar("T")
GUARD_SECONDS = 0.05
TINY = Path(__file__).parents[2] / "configs" / "tiny.yaml"
SMALL = (
    "model.d_model=8",
    "model.num_heads=2",
    "model.head_dim=4",
    "model.num_layers=2",
    "model.num_experts=4",
    "model.expert_ffn=4",
    "model.vocab_size=32",
    "model.embedding_rows=32",
    "sync.tile_values=128",
    "sync.slice_tiles=4",
    "sync.steps_per_round=10",
    "swarm.experts_per_peer=2",
)


def small_config(*overrides: str, peers: int = 3) -> Config:
    """A run of about 2,000 values in 18 tiles, 4 columns."""
    return load_config(TINY, [*SMALL, f"swarm.min_peers={peers}", *overrides])


def in_swarm(
    folder: Path,
    play: Callable[[MemorySwarm], Awaitable[T]],
    config: Config | None = None,
    seed: int = 0,
    leased: bool = True,
    max_virtual_seconds: float = 3600.0,
    archive: bool = False,
    serve: bool = False,
) -> T:
    """Plays one story on a virtual clock; a driver that broke fails it."""

    async def main() -> T:
        swarm = MemorySwarm(config or small_config(), folder, seed, leased, archive=archive, serve=serve)
        guard = asyncio.create_task(guard_promises(swarm))
        result = await play(swarm)
        guard.cancel()
        await asyncio.wait([guard])
        assert guard.cancelled() or guard.result() is None
        await swarm.stop()
        await asyncio.sleep(0.001)  # who was cancelled has ended
        left = [task.get_coro() for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert not left, f"still running after stop: {left}"
        for life in swarm.lives:
            if life.failures:
                raise life.failures[0]
        return result

    return run_virtual(main(), max_virtual_seconds)


async def guard_promises(swarm: MemorySwarm) -> None:
    """A state that an elector has signed for is whole on its disk, looked at some twenty times a round."""
    while True:
        for life in swarm.up:
            record = life.votes.record
            newest = {signed.value.value for signed in (record.backed,) if signed is not None}
            for manifest in (content.manifest for content in record.contents):
                if manifest_hash(manifest) in newest:
                    held = whole_state(life.store, manifest.round, manifest.state_root)
                    superseded = life.store.rounds()[-1] >= manifest.round
                    if held is None and not superseded:  # another history may have won
                        assert not life.chain.has(record.parent, manifest.round - 1), f"{life.name} signed and forgot"
        await asyncio.sleep(GUARD_SECONDS)


def commits(swarm: MemorySwarm, name: str = "") -> list[Commit]:
    """The chain, from the disk of one peer (any that is up)."""
    chain = swarm.peers[name].chain if name else swarm.up[0].chain  # type: ignore[index]
    return [chain.commit(round) for round in range(chain.length)]


def check_agreement(swarm: MemorySwarm) -> dict[int, Hash]:
    """All versions on all disks have, hashed afresh, the roots that the chain says; all chains agree. Returns roots."""
    roots: dict[int, Hash] = {}
    for peer in swarm.up:
        for round in peer.store.rounds():
            peer.store.version(round).verify()
            assert peer.store.version(round).root == peer.chain.commit(round).manifest.state_root, peer.name
        for round in range(peer.chain.length):
            root = peer.chain.commit(round).manifest.state_root
            assert roots.setdefault(round, root) == root, f"{peer.name} has another round {round}"
    return roots


def check_leases(swarm: MemorySwarm, name: str = "") -> int:
    """No position was counted twice, nothing below the cursor is nowhere; the number of positions counted."""
    chain = commits(swarm, name)
    used: set[int] = set()
    for parent, child in pairwise(chain):
        leases = parent.manifest.leases
        for entry in child.manifest.roster:
            spans, _ = take(leases.of(entry.peer), entry.sequences)
            positions = {at for start, stop in spans for at in range(start, stop)}
            assert len(positions) == entry.sequences
            assert not positions & used, f"round {child.manifest.round} counts positions of {entry.peer} again"
            used |= positions
    last = chain[-1].manifest.leases
    waiting = [span for _, ranges in last.held for span in ranges] + list(last.returned)
    held = [at for start, stop in waiting for at in range(start, stop)]
    assert not used & set(held)
    assert used | set(held) == set(range(last.cursor))
    return len(used)


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Waits for something that must come within so many virtual seconds."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def counts(swarm: MemorySwarm, name: str) -> Callable[[], bool]:
    """Whether the newest commit of everybody counts work of this peer."""
    return lambda: all(
        commit is not None and any(entry.peer == name for entry in commit.manifest.roster)
        for commit in (life.chain.newest for life in swarm.up)
    )


class Recorder:
    """Keeps every committed state as tensors, and holds each round against the oracle."""

    def __init__(self, swarm: MemorySwarm) -> None:
        self.swarm = swarm
        self.states: dict[int, dict[str, Values]] = {}
        self.blocks: dict[int, list[Values]] = {}
        swarm.watch = self._watch

    def _watch(self, peer: PretendPeer, manifest: Manifest) -> None:
        version = peer.store.version(manifest.round)
        self.blocks[manifest.round] = [np.array(version.block(at)) for at in range(len(self.swarm.layout.blocks))]
        state = self.tensors(version, range(len(self.swarm.layout.blocks)))
        for name, value in self.states.setdefault(manifest.round, state).items():
            assert np.array_equal(state[name], value, equal_nan=True), f"{name} of round {manifest.round}"

    def tensors(self, source: BlockSource, blocks: Iterable[int]) -> dict[str, Values]:
        layout = self.swarm.layout
        return {
            placed.tensor.name: np.array(layout.view(source.block(index), placed.tensor.name))
            for index in blocks
            for placed in layout.blocks[index].tensors
        }

    def check(self, chain: list[Commit]) -> None:
        """Every round is what the oracle makes of what went in."""
        initial = InitialState(self.swarm.layout, self.swarm.config.run.seed, self.swarm.config.model.init_std)
        self.states[0] = self.tensors(initial, range(len(self.swarm.layout.blocks)))
        for parent, child in pairwise(chain):
            self._check_round(parent.manifest, child.manifest)

    def _check_round(self, parent: Manifest, child: Manifest) -> None:
        sync = self.swarm.config.sync
        handed = {entry.peer: self._handed_in(entry.peer, parent) for entry in child.roster}
        if any(len(lives) != 1 for lives in handed.values()):
            return  # restarted in this round: what went in may be of either life
        peers = [
            oracle.Contributor(entry.peer, entry.tokens, entry.steps, self._before(handed[entry.peer][0]))
            for entry in child.roster
        ]
        slices = [oracle.SliceOf(s.block, s.first_tile, s.tiles, s.contributors) for s in child.slices]
        trusted = None
        if self.swarm.config.swarm.trusted == "vouched":
            admission = self.swarm.rules.admission_of(parent)
            trusted = [entry.peer for entry in child.roster if admission.is_trusted(entry.peer)]
            peers = oracle.capped(peers, trusted)
        assert child.step == oracle.next_step(parent.step, peers)
        alpha = oracle.alpha_of(parent.step, child.step, sync.merge_interval, sync.merge_alpha, sync.merge_decay_steps)
        expected = oracle.round_result(
            peers, slices, self.states[parent.round], alpha, sync.merge_top_k, sync.tile_values,
            outer_of(self.swarm.config), trusted,
        )  # fmt: skip
        where = f"round {child.round}"
        oracle.check_equal(self.states[child.round], expected, where)
        assert oracle.root_of(self.states[child.round], sync.tile_values) == child.state_root.hex(), where

    def _handed_in(self, name: PeerId, parent: Manifest) -> list[HandedIn]:
        found = [life.handed_in.get(parent.round) for life in self.swarm.lives if life.name == name]
        return [handed for handed in found if handed is not None and handed.manifest == parent]

    def _before(self, handed: HandedIn) -> dict[str, Values]:
        return self.tensors(Blocks(handed.values), handed.values)


def outer_of(config: Config) -> oracle.Outer | None:
    """The outer step of each round, by the oracle."""
    sync = config.sync
    return oracle.Outer(sync.outer_lr, sync.outer_momentum) if sync.outer == "nesterov" else None


class Blocks:
    """A block source over arrays."""

    def __init__(self, arrays: dict[int, Values]) -> None:
        self._arrays = arrays

    def block(self, index: int) -> Values:
        return self._arrays[index]

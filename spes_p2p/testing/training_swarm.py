"""Peers that really train, in one process: the trainer and the sync of real peers, on the in-memory network.

For comparisons of methods: no sockets, no waiting, and the same seed gives the same data to every method. Time is
virtual; an inner step takes what the caller says, whatever it really took.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
import torch

from spes_p2p.config.schema import Config
from spes_p2p.data.leases import Ranges
from spes_p2p.data.loader import LocalLoader, held_out_batches
from spes_p2p.data.manifest import Dataset
from spes_p2p.ids import PeerId
from spes_p2p.ownership.expert_map import columns_of
from spes_p2p.state.layout import BlockSource, Values
from spes_p2p.sync.core.messages import Manifest, manifest_hash
from spes_p2p.testing.memory_swarm import MemorySwarm
from spes_p2p.testing.pretend_peer import PretendPeer, Turn
from spes_p2p.testing.virtual_time import run_virtual
from spes_p2p.train.trainer import Trainer

LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class Point:
    """The committed model after a round. `bytes_sent`: of all peers together, since the beginning."""

    round: int
    step: int
    tokens: int
    bytes_sent: int
    held_out_loss: float


@dataclass
class TrainingPeer(PretendPeer):
    """A peer with a model. It has data of its own: an order of the whole dataset that its name gives."""

    points: list[Point] = field(default_factory=list)

    async def start(self) -> None:
        swarm = cast(TrainingSwarm, self.swarm)
        self.trainer = Trainer(swarm.config, swarm.layout, swarm.device)
        self.loader = LocalLoader(swarm.dataset, swarm.config, self.name)
        await super().start()

    def _begin(self, manifest: Manifest, carried: BlockSource | None, first_steps: int = 0) -> None:
        base, masters = self.store.version(manifest.round), self._masters(manifest)
        owned = columns_of(manifest.ownership, self.name)
        if not self._tokens or self.swarm.config.sync.overlap:
            self.trainer.adopt(owned, base, manifest.step)
            self._measure(manifest)
        self.trainer.adopt(owned, carried or masters, manifest.step, round_steps=first_steps)
        blocks = (0, *(1 + column for column in owned))
        self._started = self._told = self.swarm.clock.now()
        started = {block: np.empty(0, np.float32) for block in blocks}
        self._turn = Turn(manifest, base, masters, started, steps=first_steps, first_steps=first_steps)
        self._training = asyncio.get_running_loop().create_task(self._train(self._turn))

    async def _train(self, turn: Turn) -> None:
        config = self.swarm.config
        while turn.steps < turn.manifest.steps_per_round and not turn.closing:
            await asyncio.sleep(self.work.step_seconds)
            result = self.trainer.train_step(self.loader.next_batch(config.optimizer.batch_sequences))
            turn.steps += 1
            self._steps += 1
            self._tokens += result.tokens
            self._tell(turn)
        self._training = None
        self._hand_in()

    def _snapshot(self, turn: Turn) -> None:
        turn.handed_in = True
        self.inputs.take(manifest_hash(turn.manifest), tuple(turn.started), self.trainer.contribution)

    def _step_ahead(self, turn: Turn, data: Ranges) -> None:
        if not turn.lead.steps:
            self.trainer.run_ahead()
        result = self.trainer.train_step(self.loader.next_batch(self.swarm.config.optimizer.batch_sequences))
        turn.lead.steps += 1
        turn.lead.tokens += result.tokens

    def _now(self, turn: Turn, block: int) -> Values:
        return self.trainer.contribution(block)

    def _measure(self, manifest: Manifest) -> None:
        """The held-out loss, by one peer."""
        swarm = cast(TrainingSwarm, self.swarm)
        if self.name != min(swarm.peers):
            return
        loss = self.trainer.evaluate(held_out_batches(swarm.dataset, swarm.config, swarm.config.eval.sequences))
        point = Point(manifest.round, manifest.step, manifest.tokens, swarm.bytes_sent(), loss)
        self.points.append(point)
        swarm.report(point)


class TrainingSwarm(MemorySwarm):
    """An organiser and peers that train a model of `config` on `dataset`."""

    peer_class = TrainingPeer

    def __init__(
        self,
        config: Config,
        folder: Path,
        dataset: Dataset,
        device: torch.device,
        report: Callable[[Point], None] = lambda point: None,
    ) -> None:
        super().__init__(config, folder, config.run.seed, leased=False)
        self.dataset = dataset
        self.device = device
        self.report = report

    def bytes_sent(self) -> int:
        """By all peers together, in all rounds until now."""
        return sum(event.bytes_sent for peer in self.peers.values() for event in peer.applied_events)


@dataclass(frozen=True)
class Training:
    """What came out. `trained_values`: values with gradients and moments at the peer that has most of them."""

    points: tuple[Point, ...]
    trained_values: int


def train(
    config: Config,
    folder: Path,
    dataset: Dataset,
    steps: int,
    device: torch.device,
    report: Callable[[Point], None] = lambda point: None,
) -> Training:
    """Trains with `swarm.min_peers` peers until the run has made `steps` global steps."""

    async def play() -> Training:
        swarm = TrainingSwarm(config, folder, dataset, device, report)
        await swarm.start([f"peer-{number:03d}" for number in range(config.swarm.min_peers)])
        first = cast(TrainingPeer, swarm.peers[PeerId("peer-000")])
        while not first.points or first.points[-1].step < steps:
            for peer in swarm.peers.values():
                if peer.failures:
                    raise peer.failures[0]
            await asyncio.sleep(LOOK_SECONDS)
        trained = max(
            sum(swarm.layout.blocks[block].size for block in (0, *(1 + c for c in peer.trainer.owned)))
            for peer in cast("list[TrainingPeer]", list(swarm.peers.values()))
        )
        await swarm.stop()
        for peer in cast("list[TrainingPeer]", list(swarm.peers.values())):
            peer.trainer.close()
        return Training(tuple(first.points), trained)

    return run_virtual(play(), 1e9)

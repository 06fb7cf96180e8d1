"""Peers that really train, in one process: the trainer and the sync of real peers, on the in-memory network.

For comparisons of methods: no sockets, no waiting, and the same seed gives the same data to every method. Time is
virtual; an inner step takes what the caller says, whatever it really took.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import torch

from spes_p2p.config.schema import Config
from spes_p2p.consensus.messages import Manifest
from spes_p2p.data.manifest import Dataset
from spes_p2p.ids import PeerId
from spes_p2p.interop.own import Model, OwnStart
from spes_p2p.testing.learning import TrainerOf
from spes_p2p.testing.memory_swarm import MemorySwarm
from spes_p2p.testing.pretend_peer import PretendPeer
from spes_p2p.testing.virtual_time import run_virtual
from spes_p2p.train.stages import Load, Turn

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
        self.learner = TrainerOf(swarm.config, swarm.dataset, swarm.device, self.name, swarm.model)
        self.work = replace(self.work, learner=self.learner)
        await super().start()

    def _begin(self, load: Load) -> None:
        is_committed = not self.machine.work.tokens or self.swarm.config.sync.overlap
        if is_committed and self.name == min(self.swarm.peers):
            self._measure(load.turn.manifest)
        super()._begin(load)

    def _snapshot(self, turn: Turn) -> None:
        """Without keeping what was handed in for ever."""
        self.inputs.take(turn.tip_hash, turn.blocks, self.learner.values)

    def _measure(self, manifest: Manifest) -> None:
        """The held-out loss of the committed model."""
        swarm = cast(TrainingSwarm, self.swarm)
        committed, sequences = self.store.version(manifest.round), swarm.config.eval.sequences
        loss = self.learner.held_out_loss(committed, sequences, manifest.step)
        point = Point(manifest.round, manifest.step, manifest.tokens, swarm.bytes_sent(), loss)
        self.points.append(point)
        swarm.report(point)


class TrainingSwarm(MemorySwarm):
    """An organiser and peers that train the model of `config`, or a `model` of one's own, on `dataset`."""

    peer_class = TrainingPeer

    def __init__(
        self,
        config: Config,
        folder: Path,
        dataset: Dataset,
        device: torch.device,
        report: Callable[[Point], None] = lambda point: None,
        model: Model | None = None,
    ) -> None:
        start = None if model is None else OwnStart(model, config)
        super().__init__(config, folder, config.run.seed, leased=False, start=start)
        self.model = model
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
    model: Model | None = None,
) -> Training:
    """Trains with `swarm.min_peers` peers until the run has made `steps` global steps."""

    async def play() -> Training:
        swarm = TrainingSwarm(config, folder, dataset, device, report, model)
        await swarm.start([f"peer-{number:03d}" for number in range(config.swarm.min_peers)])
        first = cast(TrainingPeer, swarm.peers[PeerId("peer-000")])
        while not first.points or first.points[-1].step < steps:
            for peer in swarm.peers.values():
                if peer.failures:
                    raise peer.failures[0]
            await asyncio.sleep(LOOK_SECONDS)
        trained = max(
            sum(swarm.layout.blocks[block].size for block in (0, *(1 + c for c in peer.learner.owned)))
            for peer in cast("list[TrainingPeer]", list(swarm.peers.values()))
        )
        await swarm.stop()
        for peer in cast("list[TrainingPeer]", list(swarm.peers.values())):
            peer.learner.close()
        return Training(tuple(first.points), trained)

    return run_virtual(play(), 1e9)

"""Peers that really train, in one process: the trainer and the sync of real peers, on the in-memory network.

For comparisons of methods: no sockets, no waiting, and the same seed gives the same data to every method. Time is
virtual; an inner step takes what the caller says, whatever it really took.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, cast

import torch

from spes_p2p.config.schema import Config
from spes_p2p.consensus.manifest import Manifest
from spes_p2p.data.leases import Ranges, count
from spes_p2p.data.loader import LeasedLoader, LocalLoader, held_out_batches
from spes_p2p.data.manifest import Dataset
from spes_p2p.ids import PeerId
from spes_p2p.interop.hf import state_layout
from spes_p2p.state.layout import BlockSource, Values
from spes_p2p.train.memory import Held
from spes_p2p.train.stages import Load, Turn
from spes_p2p.train.trainer import Trainer
from tests.simulation.memory_swarm import MemorySwarm
from tests.simulation.pretend_peer import PretendPeer
from tests.simulation.virtual_time import run_virtual

LOOK_SECONDS = 0.1


class TrainerOf:
    """The trainer of one peer, as `PretendWork.learner`: on the sequences that it leases, or on data of its own.

    It is a real one, on real data: only the network and the clock are pretended.
    """

    def __init__(
        self,
        config: Config,
        dataset: Dataset,
        device: torch.device,
        own_data_of: PeerId | None = None,
    ) -> None:
        """`own_data_of`: nothing is leased, and this name gives the order in which the dataset is gone through."""
        self._config = config
        self._dataset = dataset
        self._loader = None if own_data_of is None else LocalLoader(dataset, config, own_data_of)
        self.trainer = Trainer(config, state_layout(config), device)

    def begin(self, owned: tuple[int, ...], values: BlockSource, step: int, round_steps: int = 0) -> None:
        self.trainer.adopt(owned, values, step, round_steps=round_steps)

    def run_ahead(self) -> None:
        self.trainer.run_ahead()

    def train(self, positions: Ranges) -> None:
        """One inner step."""
        loader = self._loader or LeasedLoader(self._dataset, self._config, positions)
        sequences = count(positions) if self._loader is None else self._config.optimizer.batch_sequences
        self.trainer.train_step(loader.next_batch(sequences))

    def values(self, block: int) -> Values:
        return self.trainer.contribution(block)

    def held_out_loss(self, committed: BlockSource, sequences: int, step: int = 0) -> float:
        """Mean cross entropy of a committed state over held-out sequences, nats a token; `begin` must follow."""
        self.trainer.adopt(self.trainer.learner.owned, committed, step)
        return self.trainer.evaluate(held_out_batches(self._dataset, self._config, sequences))


def held_out_loss(
    config: Config, dataset: Dataset, committed: BlockSource, sequences: int, device: torch.device
) -> float:
    """The same of a state that nobody here trains on."""
    return TrainerOf(config, dataset, device).held_out_loss(committed, sequences)


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
    """A peer with a model. Where its swarm leases nothing it has data of its own: the whole dataset, in an order that
    its name gives."""

    points: list[Point] = field(default_factory=list)

    async def start(self) -> None:
        swarm = cast(TrainingSwarm, self.swarm)
        own_data_of = None if swarm.leased else self.name
        self.learner = TrainerOf(swarm.config, swarm.dataset, swarm.device, own_data_of)
        self.work = replace(self.work, learner=self.learner)
        await super().start()

    def _begin(self, load: Load) -> None:
        if self.name == min(self.swarm.peers):
            self._measure(load.turn.manifest)
        super()._begin(load)
        self.learner.trainer.use_decay(load.turn.manifest.decay)

    def _snapshot(self, turn: Turn) -> None:
        """Without keeping what was handed in for ever."""
        self.values.snapshot(turn)

    def _measure(self, manifest: Manifest) -> None:
        """The held-out loss of the committed model, where it is time for it."""
        swarm = cast(TrainingSwarm, self.swarm)
        if not swarm.is_due(manifest.step, self.points):
            return
        loss = swarm.evaluator.held_out_loss(self.store.version(manifest.round), swarm.config.eval.sequences)
        point = Point(manifest.round, manifest.step, manifest.tokens, swarm.bytes_sent(), loss)
        self.points.append(point)
        swarm.report(point)


@dataclass(frozen=True)
class Measure:
    """The held-out loss is taken at the beginning, then every so many steps at least, and at the end of `steps`.

    `report` hears of each point.
    """

    steps: int
    every_steps: int = 1
    report: Callable[[Point], None] = lambda point: None


class TrainingSwarm(MemorySwarm):
    """An organiser and peers that train the model of `config` on `dataset`."""

    peer_class = TrainingPeer
    leased: ClassVar[bool] = False
    """Whether peers train on what the run leases to them, as in a real run, and not in orders of their own."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        dataset: Dataset,
        device: torch.device,
        measure: Measure,
    ) -> None:
        super().__init__(config, folder, config.run.seed, leased=self.leased)
        self.dataset = dataset
        self.device = device
        self.report = measure.report
        self._measure = measure
        self.evaluator = TrainerOf(config, dataset, device)

    def is_due(self, step: int, points: Sequence[Point]) -> bool:
        """Whether a point of the curve is taken at this step."""
        last = points[-1].step if points else -math.inf
        return last < step and (step - last >= self._measure.every_steps or step >= self._measure.steps)

    def bytes_sent(self) -> int:
        """By all peers together, until now."""
        return sum(peer.node.transport.traffic.sent for peer in self.peers.values())


@dataclass(frozen=True)
class Training:
    """What came out. `held`: what is allocated at the peer whose trained values, gradients and moments take most."""

    points: tuple[Point, ...]
    held: Held


def train(
    config: Config,
    folder: Path,
    dataset: Dataset,
    measure: Measure,
    device: torch.device,
) -> Training:
    """Trains with `swarm.min_peers` peers until the run has made `measure.steps` global steps."""

    async def play() -> Training:
        swarm = TrainingSwarm(config, folder, dataset, device, measure)
        await swarm.start([f"peer-{number:03d}" for number in range(config.swarm.min_peers)])
        first = cast(TrainingPeer, swarm.peers[PeerId("peer-000")])
        while not first.points or first.points[-1].step < measure.steps:
            for peer in swarm.peers.values():
                if peer.failures:
                    raise peer.failures[0]
            await asyncio.sleep(LOOK_SECONDS)
        await swarm.until_round(first.points[-1].round)  # what they still fetch from each other was sent, too
        points = (*first.points[:-1], replace(first.points[-1], bytes_sent=swarm.bytes_sent()))
        learners = [peer.learner for peer in cast("list[TrainingPeer]", list(swarm.peers.values()))]
        held = max((learner.trainer.learner.held for learner in learners), key=lambda held: held.training)
        await swarm.stop()
        for learner in (*learners, swarm.evaluator):
            learner.trainer.close()
        return Training(points, held)

    return run_virtual(play(), 1e9)

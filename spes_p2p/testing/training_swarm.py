"""Peers that really train, in one process: the trainer and the sync of real peers, on the in-memory network.

For comparisons of methods: no sockets, no waiting, and the same seed gives the same data to every method. Time is
virtual; an inner step takes what the caller says, whatever it really took.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, cast

import torch

from spes_p2p.config.schema import Config
from spes_p2p.consensus.manifest import Manifest
from spes_p2p.data.manifest import Dataset
from spes_p2p.ids import PeerId
from spes_p2p.interop.own import Model, OwnStart
from spes_p2p.state.basis import Coordinates
from spes_p2p.testing.learning import TrainerOf
from spes_p2p.testing.memory_swarm import MemorySwarm
from spes_p2p.testing.pretend_peer import PretendPeer
from spes_p2p.testing.virtual_time import run_virtual
from spes_p2p.train.judge import HeldOutJudge
from spes_p2p.train.memory import Held
from spes_p2p.train.stages import Load, Turn
from spes_p2p.train.work_judge import MemoryJudge

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
    """A peer with a model. Where its swarm leases nothing it has data of its own: the whole dataset, in an order that
    its name gives."""

    points: list[Point] = field(default_factory=list)

    async def start(self) -> None:
        swarm = cast(TrainingSwarm, self.swarm)
        own_data_of = None if swarm.leased else self.name
        self.learner = TrainerOf(swarm.config, swarm.dataset, swarm.device, own_data_of, swarm.model)
        self.work = replace(self.work, learner=self.learner)
        if swarm.model is None:
            self.column_judge = HeldOutJudge(swarm.config, swarm.dataset)
            self.work_judge = MemoryJudge(swarm.config, swarm.dataset)
        await super().start()

    def _begin(self, load: Load) -> None:
        if self.name == min(self.swarm.peers):
            self._measure(load.turn.manifest)
        super()._begin(load)
        self.learner.use_decay(load.turn.manifest.decay)
        self.learner.use_bases(self.disk.bases.now, load.left_out)

    def _snapshot(self, turn: Turn) -> None:
        """Without keeping what was handed in for ever."""
        self.values.snapshot(turn)

    def _coordinates(self) -> Mapping[int, Coordinates]:
        return self.learner.coordinates()

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
    """An organiser and peers that train the model of `config`, or a `model` of one's own, on `dataset`."""

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
        model: Model | None = None,
    ) -> None:
        start = None if model is None else OwnStart(model, config)
        super().__init__(config, folder, config.run.seed, leased=self.leased, start=start)
        self.model = model
        self.dataset = dataset
        self.device = device
        self.report = measure.report
        self._measure = measure
        self.evaluator = TrainerOf(config, dataset, device, model=model)

    def is_due(self, step: int, points: Sequence[Point]) -> bool:
        """Whether a point of the curve is taken at this step."""
        last = points[-1].step if points else -math.inf
        return last < step and (step - last >= self._measure.every_steps or step >= self._measure.steps)

    def bytes_sent(self) -> int:
        """By all peers together, until now."""
        return sum(peer.node.transport.bytes_sent for peer in self.peers.values())


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
    model: Model | None = None,
) -> Training:
    """Trains with `swarm.min_peers` peers until the run has made `measure.steps` global steps."""

    async def play() -> Training:
        swarm = TrainingSwarm(config, folder, dataset, device, measure, model)
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
        held = max((learner.held for learner in learners), key=lambda held: held.training)
        await swarm.stop()
        for learner in (*learners, swarm.evaluator):
            learner.close()
        return Training(points, held)

    return run_virtual(play(), 1e9)

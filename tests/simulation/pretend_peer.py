"""One peer of a MemorySwarm: the real driver and disk, and a pretended trainer that does arithmetic on the state.

Each inner step adds a seeded change to the values that the peer owns, so that a test can compute what a round must
give. What to train on, and when, the trainer's machine says, as in a real peer. There is no model and no thread, unless
a `Learner` is given.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from spes_p2p.checkpoint.save import save_checkpoint
from spes_p2p.consensus.actions import Notice
from spes_p2p.consensus.manifest import Manifest
from spes_p2p.consensus.messages import Intent
from spes_p2p.data.leases import Ranges
from spes_p2p.ids import PeerId
from spes_p2p.state.layout import BlockSource, Values
from spes_p2p.swarm.memory_backend import MemoryPeer
from spes_p2p.sync.driver import build_driver
from spes_p2p.sync.joining import Joining
from spes_p2p.sync.surroundings import Applied, Role
from spes_p2p.train import stages
from spes_p2p.train.commits import news_of
from spes_p2p.train.machine import TrainerMachine
from spes_p2p.train.values import TrainedValues

if TYPE_CHECKING:
    from tests.simulation.memory_swarm import MemorySwarm

ORGANISER = PeerId("organiser")
LEAVE_SECONDS = 10.0
Alter = Callable[[int, int, Values], Values]


class Learner(Protocol):
    """Trains for real in the place of a pretended trainer (`tests/simulation/training_swarm.py`)."""

    def begin(self, owned: tuple[int, ...], values: BlockSource, step: int, round_steps: int = 0) -> None:
        """A round on top of global step `step`, of which `values` have `round_steps` already."""

    def run_ahead(self) -> None:
        """Steps from now on are those of the next round (`sync.overlap`)."""

    def train(self, positions: Ranges) -> None:
        """One inner step on these sequences."""

    def values(self, block: int) -> Values:
        """Present values of block 0 or of an owned column."""


def _as_trained(round: int, block: int, values: Values) -> Values:
    return values


@dataclass
class PretendWork:
    """How a trainer pretends: `step_seconds` an inner step, each adding normal values times `change`.

    `alter(round, block, values)` may spoil what is handed in on top of a round. `saves`: a checkpoint every round.
    `finishes_steps`: a running step is not broken off when the round closes, as with a real trainer. `learner` trains
    in its place, in no time by the virtual clock.
    """

    step_seconds: float = 0.1
    change: float = 0.01
    seed: int = 0
    alter: Alter = _as_trained
    saves: bool = False
    finishes_steps: bool = False
    learner: Learner | None = None


@dataclass
class HandedIn:
    """What a peer brought into the round on top of `manifest`: flat values by block, and what it had started from."""

    manifest: Manifest
    started: dict[int, Values]
    values: dict[int, Values]


@dataclass
class Pretended:
    """What was trained in a turn: the values that it began with, and so many steps since, ahead of it too."""

    name: PeerId
    work: PretendWork
    turn: stages.Turn
    started: dict[int, Values]
    steps: int = 0
    steps_ahead: int = 0
    closing: bool = False

    def trained(self, block: int) -> Values:
        """As of the turn's last step."""
        if self.work.learner is not None:
            return self.work.learner.values(block)
        return self.started[block] + np.float32(self.work.change * self.steps) * self._change(block)

    def ahead(self, block: int) -> Values:
        """What was trained of a block since the snapshot; nothing where a learner keeps that to itself."""
        if self.work.learner is not None:
            return np.zeros_like(self.started[block])
        return np.float32(self.work.change * self.steps_ahead) * self._change(block, "ahead/")

    def _change(self, block: int, kind: str = "") -> Values:
        seed = zlib.crc32(f"{self.work.seed}/{self.name}/{self.turn.manifest.round}/{kind}{block}".encode())
        return np.random.default_rng(seed).standard_normal(self.started[block].shape, dtype=np.float32)


@dataclass
class PretendPeer:
    """One life of one peer, from `start` to `leave` or `kill`."""

    swarm: MemorySwarm
    name: PeerId
    folder: Path
    work: PretendWork
    intent: Intent
    notices: list[Notice] = field(default_factory=list)
    applied_events: list[Applied] = field(default_factory=list)
    failures: list[BaseException] = field(default_factory=list)
    handed_in: dict[int, HandedIn] = field(default_factory=dict)
    ahead: dict[int, dict[int, Values]] = field(default_factory=dict)
    """By round that it stood on: what it trained since its snapshot, until the round's commit came."""
    is_up: bool = True
    joined: bool = False
    _ended: bool = False

    async def start(self) -> None:
        """Joins, or goes on from what is on disk."""
        swarm = self.swarm
        self.net: MemoryPeer = swarm.network.peer(self.name)
        self.said: list[str] = []
        self.node = swarm.node(self.net, self.said.append)
        sources = partial(swarm.sources_of, self.name)
        joining = Joining(swarm.run, self.node, self.folder, sources, self.folder / "checkpoints")
        self.disk = disk = await joining.enter(self.intent)
        self._pretended: Pretended | None = None
        self._training: asyncio.Task[None] | None = None
        self._gone = asyncio.Event()
        self.store, self.chain, self.votes = disk.store, disk.chain, disk.votes
        self.inputs, self.residuals = self.disk.inputs, self.disk.residuals
        rules = stages.TrainingRules.of(swarm.run.config, self.name, swarm.run.rules.leased)
        self.machine = TrainerMachine(rules, swarm.layout)
        self.values = TrainedValues(swarm.layout, self.store, self.inputs, self.residuals, self._now)
        role = Role(self.intent, tuple(await sources()))
        self.driver = build_driver(swarm.run, self.node, disk, role, self)
        await self.driver.start()
        self.joined = True
        swarm.watch(self, disk.tip.manifest)
        start = disk.tip.manifest
        self._do(self.machine.handle(stages.Begin(start, self.driver.core.state.is_member(start))))

    @property
    def round(self) -> int:
        """The round whose state is committed here."""
        return self.driver.core.tip.round

    # ---- Hooks ----

    def close_training(self) -> None:
        if self._pretended is not None and self._training is not None and self.work.finishes_steps:
            self._pretended.closing = True
        else:
            self._hand_in()

    def rounds_in_use(self) -> frozenset[int]:
        return frozenset()

    def notice(self, notice: Notice) -> None:
        self.notices.append(notice)

    def failed(self, error: BaseException) -> None:
        self.failures.append(error)

    def applied(self, event: Applied) -> None:
        """Goes on from a commit: with the new values, and what it did not count."""
        self.applied_events.append(event)
        self.swarm.watch(self, event.commit.manifest)
        if self._training is not None:
            self._training.cancel()
        turn = self.machine.turn
        if turn is not None and self.machine.own.lead.steps:
            self.ahead[turn.manifest.round] = {block: self._present.ahead(block) for block in turn.blocks}
        news = news_of(self.machine, (event,), self.chain, self.driver.core.state.is_member(event.commit.manifest))
        self._do(self.machine.handle(news))

    # ---- what the trainer's machine says ----

    def _do(self, actions: list[stages.Action]) -> None:
        for action in actions:
            match action:
                case stages.TakeSnapshot(turn):
                    self._snapshot(turn)
                case stages.SayReady():
                    trained = self.swarm.clock.now() - self._started
                    self.driver.progressed(self.machine.report(True, trained, self.work.step_seconds))
                case stages.StartAhead():
                    if self.work.learner is not None:
                        self.work.learner.run_ahead()
                    self._training = asyncio.get_running_loop().create_task(self._train())
                case stages.Load():
                    self._begin(action)
                case stages.Say(text):
                    self.notice(Notice("own", text))
                case stages.StandAside() | stages.Depart():
                    self.values.end()
                    self._gone.set()

    def _begin(self, load: stages.Load) -> None:
        """Trains on top of a manifest."""
        turn = load.turn
        carried = None if load.rebase is None else self.values.rebased(turn.manifest, load.rebase, is_read_late=True)
        masters = self.values.begin(turn)
        source = carried or masters
        if self.work.learner is not None:
            self.work.learner.begin(turn.owned, source, turn.manifest.step, load.own_steps)
        base = self.values.base
        for block in turn.blocks:
            base.block(block)  # maps it: the store may drop this version while we still need it
        if self.work.saves:
            save_checkpoint(
                self.folder / "checkpoints", base, turn.manifest.step, {"round": turn.manifest.round}, {}, 2
            )
        self._started = self._told = self.swarm.clock.now()
        self._pretended = Pretended(
            self.name, self.work, turn, {block: np.array(source.block(block)) for block in turn.blocks}
        )
        if self.intent.leaving:  # named again: there is something to hand out
            self._leave_with_a_step()
        else:
            self._training = asyncio.get_running_loop().create_task(self._train())

    async def _train(self) -> None:
        """All steps that are to be made, or as far as the lease goes. Ended from outside by the close or the commit."""
        now = self._present
        while self.machine.steps_left and not now.closing and (data := self.machine.own.next_positions()) is not None:
            await asyncio.sleep(self.work.step_seconds)
            self._step(data)
            told = self.swarm.clock.now()
            if self.machine.stage is stages.Stage.TRAINING and told - self._told >= self.swarm.run.heartbeat_seconds:
                self._told = told
                self.driver.progressed(self.machine.report(False, told - self._started, self.work.step_seconds))
        self._training = None
        self._hand_in()

    def _step(self, data: Ranges) -> None:
        now = self._present
        if self.work.learner is not None:
            self.work.learner.train(data)
        if self.machine.stage is stages.Stage.AHEAD:
            now.steps_ahead += 1
        else:
            now.steps += 1
        sequences = self.swarm.config.optimizer.batch_sequences
        self.machine.handle(stages.StepMade(sequences * self.swarm.config.data.sequence_length, sequences))

    def _hand_in(self) -> None:
        """Snapshots what was trained and says READY; once a round."""
        if self.machine.stage is not stages.Stage.TRAINING:
            return
        if self._training is not None:
            self._training.cancel()
        self._do(self.machine.handle(stages.RoundEnded()))
        if not self.intent.leaving:
            self._do(self.machine.handle(stages.GoAhead()))

    def _snapshot(self, turn: stages.Turn) -> None:
        round = turn.manifest.round
        values = {block: self.work.alter(round, block, self._present.trained(block)) for block in turn.blocks}
        self.handed_in[round] = HandedIn(turn.manifest, self._present.started, values)
        self.inputs.take(turn.tip_hash, turn.blocks, values.__getitem__)

    # ---- values ----

    @property
    def _present(self) -> Pretended:
        assert self._pretended is not None
        return self._pretended

    def _now(self, block: int) -> Values:
        """The values of a block: as they are trained, or while a round is synced."""
        handed = self.handed_in.get(self._present.turn.manifest.round)
        if self.work.learner is not None or handed is None or handed.manifest != self._present.turn.manifest:
            return self._present.trained(block)
        return handed.values[block] + self._present.ahead(block)

    # ---- the end ----

    def _leave_with_a_step(self) -> None:
        """With turns columns are handed out with work that a round counts."""
        if self.machine.needs_a_step and (data := self.machine.own.next_positions()) is not None:
            self._step(data)
        self._hand_in()
        if self.machine.stage in (stages.Stage.HANDED_IN, stages.Stage.AHEAD):
            self.machine.handle(stages.Leave())

    async def leave(self) -> None:
        """Hands in what was trained, says goodbye, and goes when a manifest without this peer is committed.

        With turns that is a step at least.
        """
        self.intent = replace(self.intent, leaving=True)
        self._leave_with_a_step()
        self.driver.wish(self.intent)
        try:
            async with asyncio.timeout(LEAVE_SECONDS):
                await self._gone.wait()
        finally:
            await self.kill()

    def die(self, silent: bool = False) -> None:
        """At once nothing more comes from this peer; `kill` must follow, which waits for its tasks."""
        self.is_up = False
        self.swarm.network.kill(self.name, silent)
        if self.joined:  # else whoever started it must cancel that
            self.driver.halt()
            if self._training is not None:
                self._training.cancel()

    async def kill(self, silent: bool = False) -> None:
        """The end of the process, without a word; `silent`: its host answers nobody either."""
        if self._ended:
            return
        self._ended = True
        if self.is_up:
            self.die(silent)
        if self.joined:
            await self.driver.stop()
            self.store.close()

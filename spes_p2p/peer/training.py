"""The loop over rounds of one peer: adopt the committed state, train, hand in, wait for the commit.

Runs in the main thread. What to do is decided by the trainer's machine (`train/machine.py`); here it is done, with
threads, clocks and the disk. How a peer takes its leave stands in `departure.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from spes_p2p.consensus.manifest import Manifest
from spes_p2p.data.loader import LeasedLoader
from spes_p2p.errors import StorageFull
from spes_p2p.ids import NO_HASH
from spes_p2p.observe.events import Columns, Event, Note, Warning
from spes_p2p.peer.connection import LEAVE_SECONDS, Connection
from spes_p2p.peer.evaluator import Evaluator
from spes_p2p.peer.pausing import PauseSwitch
from spes_p2p.peer.resume import TrainingSetup
from spes_p2p.state.layout import BlockSource
from spes_p2p.state.version import Version
from spes_p2p.sync.dump import RoundDump
from spes_p2p.sync.surroundings import Applied
from spes_p2p.train import stages
from spes_p2p.train.commits import news_of
from spes_p2p.train.loop import RoundWork, run_inner_steps
from spes_p2p.train.machine import TrainerMachine
from spes_p2p.train.routing import LoadMeter
from spes_p2p.train.step import ShouldDrop
from spes_p2p.train.step_log import StepLog
from spes_p2p.train.trainer import StepResult
from spes_p2p.train.values import TrainedValues

REPORT_SECONDS = 1.0
PATIENCE_SECONDS = 15.0
"""A newcomer that has waited this long is told why."""
DROP_SHARE = 0.5
"""A step of which less is done is given up when its round closes."""
PAUSE_GRACE_SECONDS = 15.0
PAUSE_LOOK_SECONDS = 0.2


class StepLimits:
    """When a peer's inner steps end: its round is over, somebody wants the machine, or the peer is to go.

    Asked by the training thread, before and within inner steps.
    """

    def __init__(
        self, connection: Connection, machine: TrainerMachine, pause: PauseSwitch, last_round: int | None
    ) -> None:
        """`last_round`: with which this peer is done by its own choice."""
        self._connection = connection
        self._gate = connection.gate
        self._machine = machine
        self._pause = pause
        self._last_round = last_round

    @property
    def end(self) -> int | None:
        """The round with which this peer is done: by its own choice, or because the organiser ends the run."""
        known = [last for last in (self._last_round, self._connection.last_round) if last is not None]
        return min(known, default=None)

    def is_over(self) -> bool:
        """Whether the last round is committed."""
        return self.end is not None and self._machine.newest >= self.end

    def should_stop(self) -> bool:
        """Whether to end the round after the running step."""
        return self._pause.active or self._gate.should_stop() or self.is_over()

    def should_drop(self, share: float) -> bool:
        """Whether to give up a step of which `share` is done. Raises what the peer failed with.

        Somebody who wants the machine, or wants us to leave, is not kept waiting. At the end of a round those who wait
        for us wait for less than half a step; and who has nothing else to hand in makes its step all the same, or a
        peer whose step takes longer than the others' round would never get anywhere.
        """
        if self.must_end(share):
            return True
        has_work = bool(self._machine.own.uncounted.tokens or self._machine.own.steps)
        return has_work and share < DROP_SHARE and self._gate.should_stop()

    def must_end(self, share: float = 0.0) -> bool:
        """The same of a step that nobody waits for."""
        self._gate.check()
        return self._pause.active or self._gate.stopping or self.is_over()

    def has_news(self) -> bool:
        """Whether to end, after the running step, what is trained ahead."""
        return self._pause.active or self._gate.has_news() or self.is_over()

    def is_short_pause(self) -> bool:
        """Waits for a moment whether a pause is over again: once handed in, a peer trains in the next round only."""
        until = self._pause.since + PAUSE_GRACE_SECONDS
        while self._pause.active and not self._gate.should_stop() and time.monotonic() < until:
            self._pause.wait(PAUSE_LOOK_SECONDS)
        return not self._pause.active and not self._gate.should_stop()


ValuesAhead = Callable[[Manifest], BlockSource | None]
"""What to begin a round on top of a manifest with, where that is more than its state."""


class Save(Protocol):
    def __call__(self, manifest: Manifest, version: Version, uncounted: stages.Uncounted, final: bool = False) -> None:
        """`final`: nothing comes after it, so it is not one to leave out."""


@dataclass(frozen=True)
class LoopOptions:
    """`dump`: where what goes into rounds is written. `last_round`: the round with which this peer is done.

    While `pause` says so nothing is trained: the peer is ready with what it has, and follows the rounds. `saved_ahead`:
    what the newest checkpoint is ahead of a state, for a round that begins anew although this peer has trained before.
    """

    dump: RoundDump | None
    last_round: int | None
    pause: PauseSwitch
    saved_ahead: ValuesAhead


class TrainingLoop:
    """Trains until told to stop. `save` is called after each commit that was adopted."""

    def __init__(
        self,
        connection: Connection,
        learning: TrainingSetup,
        emit: Callable[[Event], None],
        save: Save,
        options: LoopOptions,
    ) -> None:
        config, disk = learning.config, connection.disk
        self.connection = connection
        self.gate = connection.gate
        self.config = config
        self.trainer = learning.trainer
        self.emit = emit
        self.save = save
        leased = isinstance(learning.loader, LeasedLoader)
        self.machine = TrainerMachine(stages.TrainingRules.of(config, connection.peer_id, leased), connection.layout)
        self.values = TrainedValues(
            connection.layout, disk.store, disk.inputs, disk.residuals, learning.trainer.contribution
        )
        self._step_seconds = 0.0
        """How long an inner step takes of late."""
        self._loader = learning.loader
        self._options = options
        self._pause = options.pause
        self.limits = StepLimits(connection, self.machine, self._pause, options.last_round)
        self._evaluator = Evaluator(connection.peer_id, learning, emit, lambda: self.gate.stopping)
        turns, is_lossy = config.sync.takes_turns, connection.layout.codec_of(1) != "fp32"
        self._is_ahead = config.sync.enabled and (turns or config.sync.overlap or is_lossy)
        """Whether trained values may be ahead of committed ones: with turns, overlap or a lossy codec."""
        self._values_ahead: ValuesAhead | None = None
        self.step_log = StepLog(config.output.log_every_steps, emit)
        self._load = LoadMeter()
        self._began = 0.0
        self._seconds = 0.0
        """Training time of the round so far."""
        self._lead_seconds = 0.0
        self._reported = 0.0
        self._explained: Note | Warning | None = None

    # ---------------------------------------------------------------- life

    def begin(
        self, start: Manifest, restored: stages.Restored | None = None, values_ahead: ValuesAhead | None = None
    ) -> None:
        """To be called before `run`: takes up the state of `start`.

        `restored`: trainer and loader already stand where a checkpoint of `start` left them. `values_ahead`: else,
        what to begin with where it is not just the committed state; asked once, when this peer is in.
        """
        self._values_ahead = values_ahead
        self.do(self.machine.handle(stages.Begin(start, self.connection.is_member(start), restored)))

    def run(self) -> None:
        """Trains until this peer is asked to stop or the last round is committed."""
        while not self.gate.stopping and not self.limits.is_over():
            if self.machine.stage is stages.Stage.TRAINING:
                self._train()
            if self.machine.stage in (stages.Stage.HANDED_IN, stages.Stage.AHEAD):
                self._run_ahead()
            news = self.gate.wait(time.monotonic() + PATIENCE_SECONDS)
            if news:
                self.take(news)
            elif self.machine.stage is stages.Stage.OUTSIDE:
                self._explain_waiting()
        self.step_log.flush()

    def _explain_waiting(self) -> None:
        """Tells the user once why this peer, which is not a member yet, is waiting."""
        why: Note | Warning = Note("this peer is in; it trains from the end of the running round on")
        if (lost := self.connection.lost_round()) is not None:
            why = Warning(
                f"no node that answers has the state of round {lost}, the newest: the run goes on when a peer that has "
                "it is back, or from an older state when the organiser's node finds nobody"
            )
        elif not self.connection.others():
            why = Warning("no member of the run answers: the run is on hold until one comes back")
        if why != self._explained and not self.gate.stopping:
            self._explained = why
            self.emit(why)

    # ---------------------------------------------------------------- training

    def _train(self) -> None:
        while self._train_until_paused():
            continue

    def _train_until_paused(self) -> bool:
        """Trains the rest of the round and hands in; whether a short pause was all that ended it."""
        machine, before = self.machine, self._seconds
        self._began = time.monotonic() - before
        self._report(before)
        work = self._run_steps(machine.steps_left, self.limits.should_stop, self.limits.should_drop)
        self._look_at_memory(work.steps)
        self._seconds = before + work.seconds
        if self._pause.active and self.limits.is_short_pause():
            return True
        if self._pause.active:
            self.connection.presence.progress.tokens_per_second = 0.0
            if len(self.trainer.learner.owned):  # in every round: an heir may come, and take them over, in any
                self.train_one_step(time.monotonic() + LEAVE_SECONDS)
        if not self.gate.stopping and not self.limits.is_over():  # how to leave is decided in `departure`
            self.hand_in()
        return False

    def hand_in(self) -> None:
        """Snapshots the trained values and says READY, once a round."""
        self.do(self.machine.handle(stages.RoundEnded()))

    def train_one_step(self, until: float) -> None:
        """Makes one more step if, without it, columns would not be handed out and there is time until `until`."""

        def is_late() -> bool:
            return time.monotonic() > until

        if self.machine.needs_a_step and time.monotonic() + self._step_seconds < until:
            self._run_steps(1, is_late, lambda share: is_late())

    def _run_steps(self, wanted: int, should_stop: Callable[[], bool], should_drop: ShouldDrop) -> RoundWork:
        return run_inner_steps(self.trainer, self._loader, wanted, should_stop, self._on_step, self.emit, should_drop)

    def _run_ahead(self) -> None:
        """Trains on while the round is synced, at most the next round's steps; ends with the first news."""
        turn, machine = self.machine.turn, self.machine
        is_last = turn is None or (self.limits.end is not None and turn.manifest.round + 1 >= self.limits.end)
        if is_last or self.gate.stopping or self._pause.active:
            return
        self.do(machine.handle(stages.GoAhead()))
        if machine.stage is stages.Stage.AHEAD:
            work = self._run_steps(
                machine.steps_left, self.limits.has_news, self.limits.must_end
            )  # nobody waits for it
            self._lead_seconds += work.seconds

    def _look_at_memory(self, steps: int) -> None:
        """Lowers the limit of owned columns to what fits beside the activations that the first steps showed."""
        fit = self.trainer.learner.columns_that_fit() if steps else None
        if fit is not None and self.connection.wishes.limit_columns(fit):
            self.emit(
                Warning(f"activations leave memory for only {fit} expert columns: this peer will take on no more")
            )

    def _on_step(self, result: StepResult) -> None:
        now, machine = time.monotonic(), self.machine
        machine.handle(stages.StepMade(result.tokens, self.config.optimizer.batch_sequences, result.skipped))
        speed = result.tokens / max(result.seconds, 1e-9)
        self._step_seconds = result.seconds
        self._load.add(result)
        progress = self.connection.presence.progress
        progress.step, progress.tokens_per_second = result.step, speed
        progress.tokens += 0 if result.skipped else result.tokens
        self.step_log.add(result)
        if (
            now - self._reported > REPORT_SECONDS and machine.stage is stages.Stage.TRAINING
        ):  # else READY is what counts
            self._reported = now
            self._report(now - self._began)

    def _report(self, seconds: float) -> None:
        turn = self.machine.turn
        work = self.machine.report(ready=False, seconds=seconds, step_seconds=self._step_seconds)
        self.gate.report(work, turn.tip_hash if turn is not None else NO_HASH)

    # ---------------------------------------------------------------- commits

    def take(self, events: tuple[Applied, ...]) -> None:
        """Goes on from the newest of these commits."""
        is_member = self.connection.is_member(events[-1].commit.manifest)
        news = news_of(self.machine, events, self.connection.disk.chain, is_member)
        self.do(self.machine.handle(news), events)

    def do(self, actions: list[stages.Action], events: tuple[Applied, ...] = ()) -> None:
        """Carries out what the machine said, after these commits."""
        for action in actions:
            if isinstance(action, stages.CloseTurn):
                self.dump_round(events[0])
            else:
                self._do(action)

    def _do(self, action: stages.Action) -> None:
        match action:
            case stages.TakeSnapshot(turn):
                self.values.snapshot(turn)
            case stages.SayReady(turn):
                if (load := self._load.take(turn.manifest.round + 1)) is not None:  # before the round can be over
                    self.emit(load)
                self.gate.report(
                    self.machine.report(ready=True, seconds=self._seconds, step_seconds=0.0), turn.tip_hash
                )
            case stages.StartAhead():
                self.trainer.run_ahead()
            case stages.UseLease(place):
                if isinstance(self._loader, LeasedLoader):
                    self._loader.use(place.ranges, place.consumed)
            case stages.Load():
                ahead, self._values_ahead = self._values_ahead, self._options.saved_ahead
                begins_anew = action.rebase is None and not action.restored
                self._adopt(action, ahead(action.turn.manifest) if ahead is not None and begins_anew else None)
            case stages.StandAside(newest):
                self.trainer.wake()  # before what it would load is gone
                self.values.end()
                self.gate.use(newest.round)
            case stages.Say(text):
                self.emit(Warning(text))

    def _adopt(self, load: stages.Load, carried: BlockSource | None = None) -> None:
        """Starts a round."""
        turn, manifest = load.turn, load.turn.manifest
        is_due = not self._pause.active and self._evaluator.is_due(manifest, self._has_committed_model())
        is_idle = carried is None and self._is_idle(load)
        if load.rebase is not None:
            if not is_idle:
                self.trainer.wake()  # what was trained may be read when the new state is loaded
            is_read_late = turn.owned != self.trainer.learner.owned or is_due  # the model changes before it is read
            carried = self.values.rebased(manifest, load.rebase, is_read_late)
        masters = self.values.begin(turn)
        self.trainer.use_decay(manifest.decay)
        self._seconds, self._lead_seconds = self._lead_seconds, 0.0
        if not load.restored:
            new = set(turn.owned) - set(self.trainer.learner.owned)
            if is_idle:  # from here on the device is free
                self.trainer.park()
                carried = carried if self.config.sync.takes_turns else None  # without turns that is the new state
            if self._is_ahead and is_due:  # what is trained on is not what the run has
                self.trainer.adopt(turn.owned, self.values.base, manifest.step)
                self._evaluator.evaluate(manifest)
            self.trainer.adopt(turn.owned, carried or masters, manifest.step, round_steps=load.own_steps)
            if new and manifest.round:
                self.emit(Columns(manifest.round, tuple(sorted(new))))
            if not self._pause.active or new or self.machine.own.uncounted.tokens:  # else the last one has it all
                self.save(manifest, self.values.base, self.machine.own.uncounted)
        self.gate.use(manifest.round)
        if not self._is_ahead and is_due:
            self._evaluator.evaluate(manifest)

    def _is_idle(self, load: stages.Load) -> bool:
        """Whether this peer is paused, others have its columns, and it has no work that a round has yet to count."""
        rebase, columns = load.rebase, load.turn.owned or self.trainer.learner.owned
        carries = rebase is not None and rebase.ahead
        return self._pause.active and not (columns or carries or self.machine.own.uncounted.tokens)

    def _has_committed_model(self) -> bool:
        """Whether the model that is loaded for an evaluation is the committed one."""
        return self._is_ahead or not (self.machine.own.uncounted.tokens or self.machine.carries)

    def dump_round(self, event: Applied) -> None:
        """What went into a round, where that was asked for."""
        manifest, dump = event.commit.manifest, self._options.dump
        snapshot, store = self.connection.disk.inputs.snapshot, self.connection.disk.store
        if dump is None or snapshot.parent != manifest.parent:
            return
        try:
            dump.write(manifest, event.previous, snapshot, snapshot.blocks, store.version(manifest.round))
        except StorageFull as error:
            self.emit(Warning(f"round {manifest.round} was not dumped: {error}"))

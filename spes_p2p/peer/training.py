"""The loop over rounds of one peer: adopt the committed state, train, hand in, wait for the commit.

Runs in the main thread. What a round does not count is carried: theta <- new + (theta - old), and its tokens count
once, when a roster lists them. With `sync.overlap` it does not wait: theta <- new + (theta - snapshot), with one round
outstanding (design section 4).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from spes_p2p.config.schema import Config
from spes_p2p.consensus.membership import leader_order, trainers
from spes_p2p.consensus.messages import Manifest, Work, manifest_hash
from spes_p2p.data.leases import Ranges
from spes_p2p.data.loader import AnyDataset, Batch, LeasedLoader, LocalLoader, held_out_batches
from spes_p2p.errors import DataLate, LocalProtocolError, StorageFull
from spes_p2p.ids import NO_HASH, Hash
from spes_p2p.observe.events import Eval, Event, Step, Warning
from spes_p2p.ownership.expert_map import columns_of
from spes_p2p.peer.connection import LEAVE_SECONDS, LINGER_SECONDS, Connection
from spes_p2p.peer.handover import HandOver
from spes_p2p.peer.pausing import PauseSwitch
from spes_p2p.peer.task_runner import TaskRunner
from spes_p2p.state.layout import BlockSource
from spes_p2p.state.version import Version
from spes_p2p.sync.driver import Applied
from spes_p2p.sync.dump import RoundDump
from spes_p2p.sync.going_over import Parting, Way, told
from spes_p2p.sync.inputs import Carried, RunAhead
from spes_p2p.sync.outgoing import Masters
from spes_p2p.train.loop import RoundWork, run_inner_steps
from spes_p2p.train.routing import LoadMeter
from spes_p2p.train.step import ShouldDrop
from spes_p2p.train.trainer import StepResult, Trainer

REPORT_SECONDS = 1.0
EVALUATION_WAIT_SECONDS = 10.0
"""So long the held-out data is waited for, where it comes from others."""
DROP_SHARE = 0.5
"""A step of which less is done is given up when its round closes."""
PAUSE_GRACE_SECONDS = 15.0
PAUSE_LOOK_SECONDS = 0.2
PATIENCE_SECONDS = 15.0
"""A newcomer that has waited so long is told why."""


@dataclass
class Uncounted:
    """Work that no round has counted yet."""

    tokens: int = 0
    steps: int = 0


@dataclass
class _Lead:
    """What was trained since the snapshot of a round that is still being synced; not in `Uncounted` yet."""

    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0


@dataclass
class _Turn:
    """One round of this peer: the manifest it trains on, and what it trains from."""

    manifest: Manifest
    head: Hash
    base: Version
    masters: Masters
    owned: tuple[int, ...]
    seconds_before: float = 0.0
    """Training time of what was made of it while the round before was synced."""


class Save(Protocol):
    def __call__(self, manifest: Manifest, version: Version, uncounted: Uncounted, final: bool = False) -> None:
        """`final`: nothing comes after it, so it is not one to leave out."""
        ...


class TrainingLoop:
    """Trains until told to stop. `save` is called after each commit that was adopted."""

    def __init__(
        self,
        connection: Connection,
        config: Config,
        trainer: Trainer,
        loader: LeasedLoader | LocalLoader,
        dataset: AnyDataset,
        emit: Callable[[Event], None],
        save: Save,
        dump: RoundDump | None,
        last_round: int | None,
        tasks: TaskRunner | None = None,
        pause: PauseSwitch | None = None,
    ) -> None:
        """`tasks` evaluates the newest checkpoint beside the training, when it is this peer's turn.

        While `pause` says so nothing is trained: the peer is ready with what it has, and follows the rounds.
        """
        self._tasks = tasks
        self._pause = pause or PauseSwitch()
        self._connection = connection
        self._gate = connection.gate
        self._config = config
        self._trainer = trainer
        self._loader = loader
        self._dataset = dataset
        self._emit = emit
        self._save = save
        self._dump = dump
        self._last_round = last_round
        self._me = connection.peer_id
        self._takes_turns = config.sync.column_rounds > 1
        self._overlaps = config.sync.overlap and config.sync.enabled
        is_lossy = connection.layout.codec_of(1) != "fp32"
        self._is_ahead = config.sync.enabled and (self._takes_turns or self._overlaps or is_lossy)
        """What is trained on is not what the run has; without exchange each peer has nothing but its own."""
        self._carries = False
        """Whether what is trained on has own changes that the newest round did not count."""
        self._load = LoadMeter()
        self._moments = HandOver(connection, config, trainer, emit)
        self._turn: _Turn | None = None
        self._parting: Parting | None = None
        """Where the newest commit may be undone by another history."""
        self._handed_in = NO_HASH
        self._reported = 0.0
        self._explained = ""
        self._taken = 0
        """The newest round that training has heard of."""
        self._started = 0.0
        self.uncounted = Uncounted()
        self._lead = _Lead()

    # ---------------------------------------------------------------- life

    def begin(self, start: Manifest, resumed: bool = False, carried: BlockSource | None = None) -> None:
        """To be called before `run`: takes up the state of `start`.

        `resumed`: the trainer and loader already stand where a checkpoint of `start` left them. `carried`: else, values
        to begin with where they are not just those of `start`; not kept.
        """
        self._taken = start.round
        if self._connection.is_member():
            self._begin(start, carried, resumed)

    def run(self) -> None:
        """Trains until the gate says stop or the last round is committed."""
        while not self._gate.stopping and not self._is_over():
            if self._turn is not None and self._handed_in != self._turn.head:
                self._train()
            if self._turn is not None and self._may_run_ahead(self._turn):
                self._run_ahead(self._turn)
            news = self._gate.wait(time.monotonic() + PATIENCE_SECONDS)
            if news.applied:
                self._take(news.applied)
            elif self._turn is None:
                self._explain_waiting()
        if not self._is_over():
            self._leave()
            return
        self._save_end()
        if self._do_others_go_on():
            self._leave()

    def _explain_waiting(self) -> None:
        """Who is no member can only wait; says once for what."""
        text = "this peer trains as soon as a round names it as a member"
        if (lost := self._connection.lost_round()) is not None:
            text = (
                f"nobody who answers has the state of round {lost}, the newest: it is lost unless a former peer comes "
                "back with --resume; a bootstrap node with --archive DIR goes on from the state that it keeps"
            )
        elif not self._connection.others():
            text = "no member of the run answers: it stands still until one comes back"
        if text != self._explained and not self._gate.stopping:
            self._explained = text
            self._emit(Warning(text))

    def _is_over(self) -> bool:
        return self._end is not None and self._taken >= self._end

    @property
    def _end(self) -> int | None:
        """The round with which this peer is done: by its own choice, or because the organiser ends the run."""
        known = [last for last in (self._last_round, self._connection.last_round) if last is not None]
        return min(known, default=None)

    def _save_end(self) -> None:
        """A run that is over is kept, however seldom checkpoints are saved."""
        if self._turn is not None and self._connection.last_round is not None:
            self._save(self._turn.manifest, self._turn.base, self.uncounted, final=True)

    def _do_others_go_on(self) -> bool:
        """Serves the others until they have the last round too; the bootstrap node hears of it with a heartbeat.

        True as soon as one trains on: then it was the last round by our own choice alone, and we leave as always.
        """
        now, end = time.monotonic(), self._taken
        told, until = now + 2 * self._config.swarm.heartbeat_seconds, now + LINGER_SECONDS
        while time.monotonic() < until and not self._gate.stopping:
            others = self._connection.others()
            ended = self._connection.last_round == end
            if not ended and any(o.round > end or (o.round == end and o.work.expected_tokens) for o in others):
                return True
            if time.monotonic() > told and all(other.round >= end for other in others):
                break
            self._gate.wait(time.monotonic() + 0.2)
        return False

    def _leave(self) -> None:
        """Hands in what was trained, and goes when a manifest without us is committed, or after a while.

        Where nobody else is there, nothing is handed in: a later life goes on from this very step.
        """
        until = time.monotonic() + LEAVE_SECONDS
        if self._lead.tokens:  # it is handed in on top of the round that is being synced
            self._take_next(time.monotonic() + LEAVE_SECONDS / 2)
        turn = self._turn
        if turn is None or not self._connection.is_member():
            return
        is_new = self._handed_in != turn.head
        if (is_new or not self.uncounted.tokens) and not self._connection.others():
            self._save(turn.manifest, turn.base, self.uncounted, final=True)
            return
        if is_new:
            self._train_one_step(until)
            self._hand_in(turn)
        self._connection.leave()
        self._moments.offer_all(turn.manifest)
        uncounted: frozenset[int] | None = None
        used = 0
        while time.monotonic() < until:
            news = self._gate.wait(until, heed_stop=False)
            newest = news.applied[-1].commit.manifest if news.applied else turn.manifest
            if news.applied and self._takes_turns and not self._nobody_counts_on_us(newest):
                turn, uncounted, used = self._hand_in_again(turn, news.applied, until), None, 0
            elif news.applied:
                self._dump_round(news.applied[0])
                used += self._note_counted(news.applied[0])
                if uncounted is None:  # the first child is the only one that can have counted our snapshot
                    uncounted = news.applied[0].uncounted
                self._moments.still_stand(news.applied)
                if self._nobody_counts_on_us(newest):
                    self._save_last(turn, newest, uncounted, used)
                    self._moments.wait_until_taken(newest, until)
                    self._wait_for_a_holder(newest, until)
                    return

    def _take_next(self, until: float) -> None:
        """Goes on from the round that is being synced, if it comes in time."""
        news = self._gate.wait(until, heed_stop=False)
        if news.applied:
            self._take(news.applied)
        else:
            text = f"{self._lead.tokens:,} tokens are lost: the round that they came after was not synced in time"
            self._emit(Warning(text))

    def _hand_in_again(self, turn: _Turn, events: tuple[Applied, ...], until: float) -> _Turn:
        """Who is still named when it leaves had columns to hand out that the round did not take."""
        self._take(events)
        if self._turn is None:
            return turn
        self._train_one_step(until)
        self._hand_in(self._turn)
        self._moments.offer_all(self._turn.manifest)
        return self._turn

    def _nobody_counts_on_us(self, newest: Manifest) -> bool:
        """The manifest does not name us, or names nobody who stays: the last to leave stay named."""
        members = {member.peer for member in newest.members}
        leaving = {status.peer for status in self._connection.others() if status.intent.leaving}
        return self._me not in members or members <= leaving | {self._me}

    def _wait_for_a_holder(self, newest: Manifest, until: float) -> None:
        """One of those who stay must have the newest state: the others get it from there."""
        while time.monotonic() < until and self._connection.are_others_behind(newest.round):
            self._gate.wait(time.monotonic() + 0.2, heed_stop=False)

    def _save_last(self, turn: _Turn, newest: Manifest, uncounted: frozenset[int], used: int) -> None:
        """What a later life goes on from: the state that we leave behind, and moments as new as it.

        With turns also what our columns are ahead: where nobody stays, nobody has taken them over. And work that is
        saved as uncounted is in the values, too: a later life would hand in its tokens without it. `used`: sequences
        that were counted.
        """
        base = self._connection.disk.store.version(newest.round)
        self._keep_place(newest, used)
        has_more = self._takes_turns or self.uncounted.tokens
        own = self._carried(turn, newest, uncounted) if has_more else self._masters(newest)
        self._trainer.adopt(turn.owned, own, newest.step)
        self._save(newest, base, self.uncounted, final=True)

    # ---------------------------------------------------------------- one round

    def _train(self) -> None:
        while self._train_until_paused():
            continue

    def _train_until_paused(self) -> bool:
        """Trains the rest of the round and hands in; whether a short pause was all that ended it."""
        turn = self._turn
        assert turn is not None
        before = turn.seconds_before
        self._started = time.monotonic() - before
        self._gate.report(self._work(ready=False, seconds=before, step_seconds=self._moments.step_seconds), turn.head)
        wanted = turn.manifest.steps_per_round - self._trainer.round_steps
        work = self._run_steps(wanted, self._should_stop, self._should_drop)
        self.uncounted.tokens += work.tokens
        self.uncounted.steps += work.steps
        self._look_at_memory(work.steps)
        turn.seconds_before = before + work.seconds
        if self._pause.active and self._is_short():
            return True
        if self._pause.active:
            self._connection.progress.tokens_per_second = 0.0
        if self._pause.active and turn.owned:
            self._train_one_step(time.monotonic() + LEAVE_SECONDS)
        if not self._gate.stopping and not self._is_over():  # how to leave is decided in `_leave`
            self._hand_in(turn, turn.seconds_before)
        return False

    def _is_short(self) -> bool:
        """Waits for a moment whether a pause is over again: once handed in, a peer trains in the next round only."""
        until = self._pause.since + PAUSE_GRACE_SECONDS
        while self._pause.active and not self._gate.should_stop() and time.monotonic() < until:
            self._pause.wait(PAUSE_LOOK_SECONDS)
        return not self._pause.active and not self._gate.should_stop()

    def _run_steps(self, wanted: int, should_stop: Callable[[], bool], should_drop: ShouldDrop) -> RoundWork:
        return run_inner_steps(self._trainer, self._loader, wanted, should_stop, self._on_step, self._emit, should_drop)

    def _should_stop(self) -> bool:
        return self._pause.active or self._gate.should_stop() or self._is_over()

    def _should_drop(self, share: float) -> bool:
        """Whether to give up a step of which `share` is done. Raises what the peer failed with.

        Somebody who wants the machine, or wants us to leave, is not kept waiting. At the end of a round those who wait
        for us wait for less than half a step; and who has nothing else to hand in makes its step all the same, or a
        peer whose step takes longer than the others' round would never get anywhere.
        """
        if self._must_end(share):
            return True
        has_work = bool(self.uncounted.tokens or self._trainer.round_steps)
        return has_work and share < DROP_SHARE and self._gate.should_stop()

    def _must_end(self, share: float = 0.0) -> bool:
        self._gate.check()
        return self._pause.active or self._gate.stopping or self._is_over()

    def _may_run_ahead(self, turn: _Turn) -> bool:
        """Handed in, with another round to come."""
        is_last = self._end is not None and turn.manifest.round + 1 >= self._end
        wanted = self._overlaps and not is_last and not self._gate.stopping and not self._pause.active
        return wanted and self._handed_in == turn.head

    def _run_ahead(self, turn: _Turn) -> None:
        """Trains on while the round is synced, at most the next round's steps; ends with the first news."""
        if not self._lead.steps:
            self._trainer.run_ahead()
        most = min(self._config.sync.overlap_steps or turn.manifest.steps_per_round, turn.manifest.steps_per_round)
        wanted = most - self._lead.steps
        work = self._run_steps(wanted, self._has_news, self._must_end)  # nobody waits for it
        self._lead.tokens += work.tokens
        self._lead.steps += work.steps
        self._lead.seconds += work.seconds

    def _has_news(self) -> bool:
        return self._pause.active or self._gate.has_news() or self._is_over()

    def _look_at_memory(self, steps: int) -> None:
        """Owns no more from now on than the steps that were made leave room for."""
        fit = self._trainer.columns_that_fit() if steps else None
        if fit is not None and self._connection.limit_columns(fit):
            self._emit(Warning(f"activations leave memory for {fit} expert columns: no more will be taken over"))

    def _train_one_step(self, until: float) -> None:
        """Columns are handed out with work that a round counts: who leaves and has none would keep them to itself."""

        def is_late() -> bool:
            return time.monotonic() > until

        in_time = time.monotonic() + self._moments.step_seconds < until
        if self._takes_turns and not self.uncounted.tokens and in_time:
            work = self._run_steps(1, is_late, lambda share: is_late())
            self.uncounted.tokens += work.tokens
            self.uncounted.steps += work.steps

    def _on_step(self, result: StepResult, own_steps: int) -> None:
        now = time.monotonic()
        speed = result.tokens / max(result.seconds, 1e-9)
        self._moments.step_seconds = result.seconds
        self._load.add(result)
        progress = self._connection.progress
        progress.step, progress.tokens_per_second = result.step, speed
        progress.tokens += result.tokens
        if own_steps % self._config.output.log_every_steps == 0:
            self._emit(
                Step(result.step, result.loss, result.tokens, speed, result.lr, result.grad_norm),
            )
        is_ahead = self._turn is not None and self._handed_in == self._turn.head  # READY is what counts then
        if now - self._reported > REPORT_SECONDS and not is_ahead:
            self._reported = now
            work = self._work(ready=False, seconds=now - self._started, step_seconds=result.seconds)
            self._gate.report(work, self._turn.head if self._turn else NO_HASH)

    def _work(self, ready: bool, seconds: float, step_seconds: float = 0.0) -> Work:
        batch = self._config.optimizer.batch_sequences * self._config.data.sequence_length
        steps = self._turn.manifest.steps_per_round if self._turn else 0
        return Work(
            ready=ready,
            tokens=self.uncounted.tokens,
            steps=self.uncounted.steps,
            sequences=self._loader.consumed if isinstance(self._loader, LeasedLoader) else 0,
            seconds=seconds,
            ready_in_seconds=0.0 if ready else step_seconds,
            expected_tokens=steps * batch,
        )

    def _hand_in(self, turn: _Turn, seconds: float = 0.0) -> None:
        """Snapshots the trained values and says READY."""
        self._snapshot(turn)
        self._handed_in = turn.head
        if (load := self._load.take(turn.manifest.round + 1)) is not None:  # before the round can be over
            self._emit(load)
        self._gate.ready(self._work(ready=True, seconds=seconds), turn.head)

    def _snapshot(self, turn: _Turn) -> None:
        blocks = (0, *(1 + column for column in turn.owned))
        self._connection.disk.inputs.take(turn.head, blocks, self._trainer.contribution)

    # ---------------------------------------------------------------- commits

    def _take(self, events: tuple[Applied, ...]) -> None:
        """Goes on from the newest of these commits; the first says what it counted of our work."""
        if any(event.switched for event in events):
            self._go_over(events)
            return
        turn, uncounted = self._turn, events[0].uncounted
        if turn is not None and not events[0].handed_in and (events[0].counted is None or self._takes_turns):
            if self._handed_in != turn.head:  # decided while we trained
                self._snapshot(turn)
            uncounted = self._own_tiles(turn) if events[0].counted is None else self._not_handed_out(turn)
        used = self._note_counted(events[0])
        lead = self._take_lead()
        self._dump_round(events[0])
        self._carries, self._parting = False, None
        newest = events[-1].commit.manifest
        self._taken = newest.round
        if turn is not None:
            self._moments.offer(turn.manifest, newest)
        if not self._connection.is_member():
            self._turn = None
            self._gate.use(newest.round)
            return
        if turn is not None and self._keep_place(newest, used):
            carried = self._go_on(turn, newest, uncounted)
            self._parting = Parting.after(events[-1], self._me, turn.manifest, turn.owned, carried)
            self._begin(newest, self._with_lead(turn, newest, carried, lead), False, lead)
        else:
            self._begin(newest, None, False)

    def _take_lead(self) -> _Lead:
        """What was trained ahead is now work of the round that begins."""
        lead, self._lead = self._lead, _Lead()
        self.uncounted.tokens += lead.tokens
        self.uncounted.steps += lead.steps
        return lead

    def _go_on(self, turn: _Turn, newest: Manifest, uncounted: frozenset[int]) -> Carried:
        """What training goes on from after `newest`, but for what was trained ahead."""
        uncounted &= self._tiles_of(self._stay(turn, newest))  # a column of another owner is the same for everybody
        self._carries = bool(uncounted)
        return self._carried(turn, newest, uncounted)

    def _with_lead(self, turn: _Turn, newest: Manifest, carried: Carried, lead: _Lead) -> BlockSource:
        if not lead.steps:
            return carried
        inputs, blocks = self._connection.disk.inputs, self._stay(turn, newest)
        ahead = RunAhead(carried, self._trainer.contribution, inputs.snapshot, blocks)
        stays = columns_of(newest.ownership, self._me) == turn.owned and not self._may_evaluate(newest)
        return ahead if stays else inputs.freeze(ahead, blocks)  # else the model changes before it is read

    def _stay(self, turn: _Turn, newest: Manifest) -> tuple[int, ...]:
        """Blocks that are trained here before and after."""
        owned = columns_of(newest.ownership, self._me)
        return (0, *(1 + column for column in turn.owned if column in owned))

    def _go_over(self, events: tuple[Applied, ...]) -> None:
        """Another history of the run won: this peer's work goes over to it, where its data is still this peer's."""
        newest, turn = events[-1].commit.manifest, self._turn
        if events[0].switched:
            own, parting = sum(event.own_tokens for event in events), self._parting
            steps = newest.steps_per_round if self._lead.steps else self._trainer.round_steps
            lead = _Lead(steps=steps, seconds=turn.seconds_before if turn is not None else 0.0)
        else:  # what came of the turn, and that it is undone, is heard of in one moment
            own, parting, lead = 0, self._parting_of(turn), self._lead
        self._take_lead()
        own += self.uncounted.tokens
        way = parting.way(self._connection.disk.chain) if parting is not None else None
        carried = self._bring_over(way, newest) if way is not None and self._connection.is_member() else None
        kept = self.uncounted.tokens if carried is not None else 0
        for text in told(own, kept, way):
            self._emit(Warning(text))
        self._taken, self._parting, self._carries = newest.round, None, carried is not None
        if carried is None:
            self._turn = None
        self._gate.use(newest.round)
        if self._connection.is_member():
            lead.steps = min(lead.steps, newest.steps_per_round)
            self._begin(newest, carried, False, lead if carried is not None else None)

    def _parting_of(self, turn: _Turn | None) -> Parting | None:
        """That of a turn whose outcome was not heard before another history won."""
        if turn is None:
            return None
        if self._handed_in != turn.head:
            self._snapshot(turn)
        layout, trained = self._connection.layout, self._connection.disk.inputs.snapshot
        work = Carried(layout, turn.masters, turn.masters, trained, self._own_tiles(turn), turn.base.is_sound)
        return Parting(self._me, turn.manifest, turn.owned, work, None)

    def _bring_over(self, way: Way, newest: Manifest) -> BlockSource | None:
        """What training goes on from, and `uncounted` with it; None where the data of the work is somebody else's."""
        tokens, steps = way.uncounted(self.uncounted.tokens, self.uncounted.steps)
        if isinstance(self._loader, LeasedLoader):
            self._loader.uncount(way.undone)
        self.uncounted = Uncounted(tokens, steps)
        if not self._move_lease(newest, way.sequences):
            return None
        values = way.values(newest, self._masters(newest), self._trainer.contribution, self._trainer.owned)
        return self._connection.disk.inputs.freeze(values, way.blocks(newest))

    def _masters(self, manifest: Manifest) -> Masters:
        """What is trained on after `manifest`, where it counted all that was trained before."""
        disk = self._connection.disk
        ahead = disk.residuals.ahead(manifest_hash(manifest))
        return Masters(self._connection.layout, disk.store.version(manifest.round), ahead)

    def _carried(self, turn: _Turn, newest: Manifest, uncounted: frozenset[int]) -> Carried:
        """What is trained on after `newest`, which did not count what was trained of these tiles."""
        layout, inputs = self._connection.layout, self._connection.disk.inputs
        return Carried(layout, self._masters(newest), turn.masters, inputs.snapshot, uncounted, turn.base.is_sound)

    def _own_tiles(self, turn: _Turn) -> frozenset[int]:
        return self._tiles_of((0, *(1 + column for column in turn.owned)))

    def _tiles_of(self, blocks: tuple[int, ...]) -> frozenset[int]:
        layout = self._connection.layout
        return frozenset(tile_id for block in blocks for tile_id in layout.tile_ids_of(block))

    def _not_handed_out(self, turn: _Turn) -> frozenset[int]:
        """Own tiles that the child of a turn's manifest did not take, though it counts an earlier life."""
        first = self._connection.disk.chain.child_of(turn.manifest)
        slices = first.slices if first is not None else ()  # none where another history won in this moment
        done = {tile_id for piece in slices if self._me in piece.contributors for tile_id in piece.tile_ids}
        return self._own_tiles(turn) - done

    def _note_counted(self, event: Applied) -> int:
        """Sequences that the round counted of ours; what it counted is no longer uncounted."""
        if event.counted is None:
            return 0
        self.uncounted = Uncounted()
        return event.counted.sequences

    def _keep_place(self, newest: Manifest, used: int) -> bool:
        """Moves the loader to the new lease; False where our uncounted work lost its place in the data, and is gone."""
        tokens = self.uncounted.tokens
        if self._move_lease(newest, used):
            return True
        if tokens:
            self._emit(Warning(f"{tokens:,} tokens were lost: their data was leased to others"))
        return False

    def _move_lease(self, newest: Manifest, used: int) -> bool:
        if not isinstance(self._loader, LeasedLoader):
            return True
        ranges = newest.leases.of(self._me)
        try:
            self._loader.set_lease(ranges, self._loader.consumed - used)
        except LocalProtocolError:
            self._restart_loader(ranges)
            return False
        return True

    def _restart_loader(self, ranges: Ranges) -> None:
        assert isinstance(self._loader, LeasedLoader)
        self.uncounted = Uncounted()
        self._loader.load_state_dict({"ranges": [list(span) for span in ranges], "offset": 0})

    def _begin(self, manifest: Manifest, carried: BlockSource | None, resumed: bool, lead: _Lead | None = None) -> None:
        """Starts a round on top of `manifest`, of which `lead` is made already."""
        lead = lead or _Lead()
        base = self._connection.disk.store.version(manifest.round)
        owned = columns_of(manifest.ownership, self._me)
        first = self._turn is None
        masters = self._masters(manifest)
        self._turn = _Turn(manifest, manifest_hash(manifest), base, masters, owned, lead.seconds)
        if not resumed:
            if first:
                self.uncounted = Uncounted()
            if first and isinstance(self._loader, LeasedLoader):
                self._restart_loader(manifest.leases.of(self._me))
            new = set(owned) - set(self._trainer.owned)
            if self._is_ahead and self._evaluates(manifest):  # what is trained on is not what the run has
                self._trainer.adopt(owned, base, manifest.step)
                self._evaluate(manifest)
            self._trainer.adopt(owned, carried or masters, manifest.step, round_steps=lead.steps)
            self._moments.take(manifest, new)
            if not self._pause.active or new or self.uncounted.tokens:  # else a former checkpoint has all that counts
                self._save(manifest, base, self.uncounted)
        self._gate.use(manifest.round)
        if not self._is_ahead and self._evaluates(manifest):
            self._evaluate(manifest)
        self._start_tasks(manifest)

    def _evaluate(self, manifest: Manifest) -> None:
        """The held-out loss of the model as it is loaded."""
        until = time.monotonic() + EVALUATION_WAIT_SECONDS
        batches = held_out_batches(
            self._dataset,
            self._trainer.config,  # with the micro-batch that fits by now
            self._config.eval.sequences,
            lambda: self._gate.stopping or time.monotonic() > until,
        )
        tokens = 0

        def counted() -> Iterator[Batch]:
            nonlocal tokens
            for batch in itertools.takewhile(lambda batch: not self._gate.stopping, batches):
                tokens += batch.tokens.size
                yield batch

        try:
            loss = self._trainer.evaluate(counted())
        except DataLate as error:
            if not self._gate.stopping:
                self._emit(Warning(f"round {manifest.round} was not evaluated: {error}"))
            return
        if np.isfinite(loss) and not self._gate.stopping:
            self._emit(Eval(manifest.round, manifest.step, loss, tokens))

    def _start_tasks(self, manifest: Manifest) -> None:
        """Tasks on the newest checkpoint, beside the training, when they are due and it is our turn."""
        is_due = manifest.round > 0 and manifest.round % self._config.eval.tasks_every_rounds == 0
        if self._tasks is not None and is_due and not self._pause.active and self._is_evaluator(manifest):
            self._tasks.start()

    def _evaluates(self, manifest: Manifest) -> bool:
        return not self._pause.active and self._may_evaluate(manifest)

    def _may_evaluate(self, manifest: Manifest) -> bool:
        """The same, should a pause end by then."""
        every = self._config.eval.every_rounds
        return bool(every) and manifest.round % every == 0 and self._is_evaluator(manifest)

    def _is_evaluator(self, manifest: Manifest) -> bool:
        """One peer whose model is the committed one; without exchange everybody, since each has a model of its own."""
        if not self._config.sync.enabled:
            return True
        order = leader_order(manifest_hash(manifest), trainers(manifest.members))
        has_it = self._is_ahead or not (self.uncounted.tokens or self._carries)
        return order[:1] == (self._me,) and has_it

    def _dump_round(self, event: Applied) -> None:
        manifest = event.commit.manifest
        inputs, store = self._connection.disk.inputs, self._connection.disk.store
        if self._dump is None or inputs.parent != manifest.parent:
            return
        try:
            self._dump.write(manifest, event.previous, inputs, inputs.blocks, store.version(manifest.round))
        except StorageFull as error:
            self._emit(Warning(f"round {manifest.round} was not dumped: {error}"))

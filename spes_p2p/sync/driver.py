"""Carries out what the round's state machine decides: messages, disk, arithmetic, on one asyncio loop.

One event goes into `Consensus` at a time, and its actions are begun in their order; a voting record is fsynced before
anything that follows from it leaves. Long work (reducing, fetching, building) runs beside, and comes back as an event.
Messages go through the `Outbox`, the new state is a `CandidateState`, what was missed comes by `CatchUp`. Knows no
trainer: `Hooks` is what the peer around it provides.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from spes_p2p import failpoints
from spes_p2p.consensus import actions as do
from spes_p2p.consensus import events as on
from spes_p2p.consensus.events import placed
from spes_p2p.consensus.forks import Way, parted_text, tokens_lost
from spes_p2p.consensus.machine import Consensus
from spes_p2p.consensus.messages import Commit, Contribution, Envelope, Intent, Manifest, Work, manifest_hash
from spes_p2p.consensus.reducing import LOST
from spes_p2p.consensus.rules import lost_columns, stale_columns, tokens_gone
from spes_p2p.errors import LinkTooSlow, NetworkError, RemoteProtocolError, StorageFull, TileDamaged
from spes_p2p.exchange.moments import MomentStore
from spes_p2p.exchange.patience import Patience
from spes_p2p.exchange.rates import Rates
from spes_p2p.exchange.requests import DataRequest, ValuesRequest, kind_of, unpack_request
from spes_p2p.exchange.retention import Retention
from spes_p2p.exchange.transfers import Transfers
from spes_p2p.failpoints import reached
from spes_p2p.ids import NO_HASH, Hash, PeerId
from spes_p2p.state.layout import Layout
from spes_p2p.state.staging import Staging
from spes_p2p.state.store import StateStore, Version
from spes_p2p.swarm.ports import Blob, Clock, Transport
from spes_p2p.sync.candidate_state import CandidateState, wire_tiles
from spes_p2p.sync.catch_up import CatchUp, ForkPoint, Parted
from spes_p2p.sync.chain import Chain, VoteBook
from spes_p2p.sync.donor import Serving
from spes_p2p.sync.genesis import RunInfo, check_same_run
from spes_p2p.sync.guests import Bases
from spes_p2p.sync.histories import Choices
from spes_p2p.sync.inputs import Inputs
from spes_p2p.sync.keeping_up import KeepingUp
from spes_p2p.sync.outbox import Outbox
from spes_p2p.sync.outer import outer_optimizer
from spes_p2p.sync.outgoing import Outgoing, check_asker
from spes_p2p.sync.residuals import Residuals
from spes_p2p.sync.round_executor import RoundExecutor
from spes_p2p.sync.scrub import Mender, Scrubber
from spes_p2p.sync.sealing import EnvelopeChecker
from spes_p2p.sync.tasks import Tasks


@dataclass
class RoundTimes:
    """When the phases of a round began, in seconds of our clock."""

    started: float
    closed: float = 0.0
    planned: float = 0.0
    proposed: float = 0.0
    decided: float = 0.0
    applied: float = 0.0
    sent_before: int = 0
    received_before: int = 0

    def seconds(self) -> dict[str, float]:
        """Duration of each phase that was seen."""
        marks = [
            ("train", self.started, self.closed),
            ("close", self.closed, self.planned),
            ("reduce", self.planned, self.proposed),
            ("vote", self.proposed, self.decided),
            ("apply", self.decided, self.applied),
        ]
        return {name: round(end - start, 4) for name, start, end in marks if start and end >= start}


@dataclass(frozen=True)
class Applied:
    """A commit that is the state here now.

    `counted` is what the first round after `previous` counted of this peer; `handed_in` says whether its values were in
    `Inputs` by then, and `uncounted` are the tiles whose slice did not take them; `caught_up` is true when the peer was
    behind and skipped rounds.
    """

    commit: Commit
    previous: Manifest
    counted: Contribution | None
    handed_in: bool
    uncounted: frozenset[int]
    caught_up: bool
    seconds: dict[str, float]
    bytes_sent: int
    bytes_received: int
    deadline_seconds: float
    leavers: frozenset[PeerId]
    """Who had said that it leaves."""
    switched: bool = False
    """The commit is of another history than `previous`: our own lost, with `lost_tokens` that it had counted."""
    lost_tokens: int = 0
    own_tokens: int = 0
    """This peer's among them."""
    stale_columns: tuple[int, ...] = ()
    """Columns that missed their turn."""
    refused: tuple[PeerId, ...] = ()
    """Whose values a reducer found unfit, as far as it is known here."""


class Hooks(Protocol):
    """What happens around the protocol. Called on the loop's thread; must not block."""

    def close_training(self) -> None:
        """Finish the running inner step and call `Driver.ready`."""
        ...

    def applied(self, event: Applied) -> None: ...

    def rounds_in_use(self) -> frozenset[int]:
        """Rounds whose states somebody still reads: they stay on disk."""
        ...

    def notice(self, notice: do.Notice) -> None: ...

    def failed(self, error: BaseException) -> None:
        """Something broke that is not part of the protocol: the peer should stop and say so."""
        ...


@dataclass
class Disk:
    """Where one peer keeps its part of a run."""

    store: StateStore
    chain: Chain
    votes: VoteBook
    inputs: Inputs
    residuals: Residuals
    bases: Bases
    moments: MomentStore | None = None
    """What is handed over to new owners of columns; none where nothing is trained."""
    data: Callable[[DataRequest], Blob] | None = None
    """Answers what others ask of the run's data (see `pieces`); none where none is here."""


@dataclass
class Arithmetic:
    """What the state arithmetic needs to know of the run: the grid, and how many neighbours a merge has."""

    layout: Layout
    merge_top_k: int


class Driver:
    """One peer's part in the sync of a run. All coroutines and callbacks belong to one event loop."""

    def __init__(
        self,
        core: Consensus,
        info: RunInfo,
        transport: Transport,
        checker: EnvelopeChecker,
        disk: Disk,
        arithmetic: Arithmetic,
        hooks: Hooks,
        clock: Clock,
        held_bytes: int | None = None,
        follow: str = "",
    ) -> None:
        """`held_bytes`: what contributions that are being reduced may take of memory, if not the usual.

        `follow`: first digits of the child that this peer goes on with where histories meet, whatever others choose.
        """
        self.core = core
        self._info = info
        self._transport = transport
        self._checker = checker
        self._disk = disk
        self._layout = arithmetic.layout
        self._hooks = hooks
        self._clock = clock
        self._tasks = Tasks(self._task_failed)
        disk.residuals.open(disk.chain, core.tip.round, core.me)
        disk.bases.open(disk.chain, core.tip)
        for problem in disk.residuals.problems:
            hooks.notice(do.Notice("disk", problem))
        outgoing = Outgoing(self._layout, disk.inputs, disk.residuals, self._committed)
        self._serving = Serving(info, disk.chain, disk.store, outgoing.serve, disk.moments, disk.data)
        self._retention = Retention(disk.store, clock.now)
        self._keeping_up = KeepingUp(self._layout)
        self._patience = Patience(lambda: 2 * core.state.pace.deadline_seconds(0), self._trained_seconds)
        rates = Rates(clock.now)
        self._transfers = Transfers(
            transport, self._layout, self._stall_seconds, self._on_bytes, self._on_refused, self._patience, False, rates
        )
        self._outbox = Outbox(
            transport, checker, self._tasks, lambda: core.state.pace.suspect_seconds, self._heard, hooks.notice
        )
        outer = outer_optimizer(core.state.rules)
        self._candidate = CandidateState(disk.store, self._layout, arithmetic.merge_top_k, self._is_bound, outer)
        self._candidate.enter(core.tip.round)
        self._executor = RoundExecutor(
            core, self._layout, outgoing, disk.residuals, self._candidate, self._transfers, self._tasks, self._tell,
            hooks.notice, clock.now, lambda: disk.store.version(core.tip.round), disk.bases, held_bytes,
        )  # fmt: skip
        later = Transfers(  # the running round of others goes first
            transport, self._layout, self._stall_seconds, self._on_bytes, self._on_refused, self._patience, True, rates
        )
        self._catching_up = CatchUp(
            info, core.state.rules, checker.check, disk.chain, disk.store, later, self._tasks.in_thread
        )
        self._fetching: asyncio.Task[None] | None = None
        self._actions: deque[do.Action] = deque()
        self._carrying_out = False
        self._broken = False
        self._times = self._fresh_times()
        self._full_until: float | None = None
        self._was_full = False
        self._choices = Choices(follow)
        self._parted: set[Hash] = set()
        """Manifests after which another final history than ours goes on, and of which a person was told."""

    # ---------------------------------------------------------------- life

    async def start(self) -> None:
        """Serves others and begins to tick. `core` must stand on the chain's newest commit whose state is here."""
        self._recover()
        await self._transport.serve(self, self._is_no_stranger)
        self._tasks.spawn(self._tick_for_ever())
        self._tasks.spawn(self._scrubber().run())

    def halt(self) -> None:
        """From now on nothing is begun, said or answered; `stop` waits for what is under way."""
        self._tasks.halt()

    async def stop(self) -> None:
        """Ends all tasks and threads; the network and the disk stay open for their owner to close."""
        await self._tasks.stop()

    def training(self, work: Work) -> None:
        """The trainer's progress in the middle of a round."""
        self._tell(on.TrainingProgressed(work))

    def ready(self, work: Work) -> None:
        """The trainer has stopped, and its snapshot is in `Inputs`."""
        reached(failpoints.READY, peer=self.core.me, round=self.core.tip.round + 1)
        self._times.closed = self._clock.now()
        self._tell(on.TrainingProgressed(work))

    def wish(self, intent: Intent) -> None:
        """What this peer wants has changed."""
        self._tell(on.IntentChanged(intent))

    def greet(self, known: Iterable[PeerId]) -> None:
        """Peers of the run that were found somewhere: who is no member hears from us too."""
        self._tell(on.PeersFound(tuple(known)))

    def choose(self, children: Mapping[Hash, Hash]) -> None:
        """The organiser's word, by parent: the child that the run goes on with."""
        self._choices.told(children)
        self._tell(on.HistoryChosen(tuple(sorted(self._choices.children))))

    # ---------------------------------------------------------------- serving (ports.Handler)

    async def on_call(self, caller: PeerId, request: bytes) -> bytes:
        """One envelope in, our envelope out."""
        self._require_life()
        envelope = self._checker.open(caller, request)
        check_same_run(envelope, self._info)
        self._tell(on.MessageReceived(envelope))
        [reply] = self.core.handle(on.ReplyRequested(caller), self._clock.now())
        assert isinstance(reply, do.Send)
        return self._outbox.answer(caller, reply.envelope)

    async def on_fetch(self, caller: PeerId, request: bytes) -> Blob:
        """Values, tiles, headers: see `requests`."""
        self._require_life()
        asked = unpack_request(request)
        if isinstance(asked, ValuesRequest):
            check_asker(
                self._layout, self.core.state.rules.slice_tiles, self.core.tip, caller, asked.first_tile, asked.count
            )
            if not self.core.is_counted(asked.parent, asked.entry):
                raise RemoteProtocolError("the work that is asked for is not what is here")
        reached(failpoints.SERVE + kind_of(asked), peer=self.core.me, round=self.core.tip.round + 1, caller=caller)
        blob = await self._tasks.in_thread(lambda: self._serving.answer(asked))
        if self._is_behind(caller):
            self._retention.asked(caller, asked)
        return blob

    def _is_no_stranger(self, caller: PeerId) -> bool:
        """Our own tip may be older than the chain, where we catch up; the organiser archives."""
        return caller == self._info.organiser or self._disk.chain.names(caller)

    def _is_behind(self, caller: PeerId) -> bool:
        """Whether it may need a state for longer than we would keep it anyway; a stranger may."""
        contact = self.core.state.others.contacts.get(caller)
        return contact is None or contact.status.round < self.core.tip.round - 1

    def _require_life(self) -> None:
        if self._tasks.stopped or self._broken:
            raise RemoteProtocolError("this peer is ending")

    # ---------------------------------------------------------------- actions

    def _tell(self, event: on.Event) -> None:
        """Something happened: the state machine decides, and what it decides is begun."""
        event = placed(event, self.core.tips_to_place(event), self._disk.chain.has)
        self._run(self.core.handle(event, self._clock.now()))

    def _run(self, actions: Sequence[do.Action]) -> None:
        """Begins actions in order, after all earlier ones, also where beginning one of them was the next event."""
        self._actions.extend(actions)
        if self._carrying_out or self._tasks.stopped or self._broken:
            return
        self._carrying_out = True
        try:
            while self._actions and not self._broken:
                self._begin(self._actions.popleft())
        finally:
            self._carrying_out = False

    def _begin(self, action: do.Action) -> None:
        match action:
            case do.Persist():
                self._persist(action)
            case do.Forget():
                self._forget(action)
            case do.Send():
                self._outbox.post(action.to, action.envelope)
            case do.CloseTraining():
                self._hooks.close_training()
            case do.Notice():
                self._hooks.notice(action)
            case _ if self._full_until is None:
                self._begin_work(action)

    def _persist(self, action: do.Persist) -> None:
        try:
            reached(failpoints.PERSIST, peer=self.core.me, round=self.core.tip.round + 1)
            self._disk.votes.write(action.record)
            reached(failpoints.PERSISTED, peer=self.core.me, round=self.core.tip.round + 1)
        except StorageFull as error:
            self._actions.clear()  # whatever follows from a vote that is not on disk
            self._disk_is_full(error)
        except OSError as error:
            self._broken = True  # not a word more: the state machine takes the vote for given
            self._hooks.failed(error)

    def _forget(self, action: do.Forget) -> None:
        try:
            self._disk.votes.forget(action.above)
        except StorageFull as error:
            self._disk_is_full(error)
        self._tell(on.IncarnationBegun(self._disk.votes.incarnation))

    def _begin_work(self, action: do.Action) -> None:
        """What needs room on the disk."""
        match action:
            case do.Reduce():
                self._tasks.spawn(self._executor.reduce(action))
            case do.Fetch():
                self._tasks.spawn(self._executor.fetch(action))
            case do.Build():
                self._tasks.spawn(self._executor.build(action))
            case do.Verify():
                self._times.proposed = self._times.proposed or self._clock.now()
                self._tasks.spawn(self._executor.verify(action.proposal.value))
            case do.Adopt():
                self._times.decided = self._clock.now()
                self._tasks.spawn(self._adopt(action.commit))
            case do.CatchUp():
                self._tasks.spawn(self._catch_up(action))

    def _task_failed(self, error: BaseException) -> None:
        if isinstance(error, StorageFull):
            self._disk_is_full(error)
        else:
            self._hooks.failed(error)

    async def _tick_for_ever(self) -> None:
        pause = self.core.state.pace.heartbeat_seconds / 2
        while True:
            self._tell(on.ClockTicked())
            self._note_phase()
            self._try_disk_again()
            await asyncio.sleep(pause)

    def _heard(self, answer: Envelope) -> None:
        self._tell(on.MessageReceived(answer))

    # ---------------------------------------------------------------- committing

    async def _adopt(self, commit: Commit) -> None:
        """The certificate first: a state without one is none, and the other way round a restart ends what we began."""
        root = commit.manifest.state_root
        if self._fetching is not None:  # from somebody who claims to be further: what is here is certain
            self._fetching.cancel()
            await asyncio.wait((self._fetching,))
            self._tell(on.CatchUpFailed())
        async with self._executor.lock:
            if commit.manifest.parent != self.core.tip_hash:
                return
            if self._candidate.finished(root) is None:
                self._tell(on.StateLost(self._candidate.lost(self.core.state.round.verified_roots())))
                self._tell(on.AdoptFailed())
                return
            await self._tasks.in_thread(lambda: self._commit(commit))
            await self._applied(commit, commit.manifest)

    def _commit(self, commit: Commit) -> None:
        made = self._candidate.finished(commit.manifest.state_root)
        assert made is not None
        self._disk.residuals.settle(
            commit.manifest, commit.certificate.manifest, lambda tile_id: made.wire_hashes[tile_id]
        )
        self._disk.chain.append(commit)
        reached(failpoints.APPENDED, peer=self.core.me, round=commit.manifest.round)
        after = self._candidate.publish(commit.manifest.state_root)
        before = self._disk.store.version(commit.manifest.round - 1)
        self._disk.bases.settle(commit.manifest, commit.certificate.manifest, before, after)
        reached(failpoints.PUBLISHED, peer=self.core.me, round=commit.manifest.round)

    async def _catch_up(self, action: do.CatchUp) -> None:
        """Headers from the holder, checked from our tip on; then the tiles of its newest state that differ."""
        tip, head = self.core.tip.round, self.core.tip_hash
        self._fetching = asyncio.current_task()
        try:
            newest, meeting, way = await self._headers(tip, action)
            if newest is None:
                self._tell(on.ForkRejected(action.head, way is Way.WAIT))
                return
            reached(failpoints.HEADERS, peer=self.core.me, round=newest.manifest.round)
            self._check_link()
            newest, staging = await self._state(newest, tip, action.holder, is_ours=meeting is None)
            reached(failpoints.CAUGHT_UP, peer=self.core.me, round=newest.manifest.round)
        except LinkTooSlow:
            raise
        except (NetworkError, RemoteProtocolError, TileDamaged) as error:  # what is damaged is mended beside
            self._hooks.notice(do.Notice("behind", f"could not catch up yet: {error}", action.holder))
            self._tell(on.CatchUpFailed())
            return
        finally:
            if self._fetching is asyncio.current_task():
                self._fetching = None
        async with self._executor.lock:
            if self.core.tip_hash != head:  # our own child was committed meanwhile
                return
            if meeting is None and not self.core.still_takes(self._disk.chain.commit(tip + 1)):
                self._tell(on.ForkRejected(action.head, look_again=True))
                return
            if meeting is not None:
                self._disk.votes.leave(self.core.state.own.record)
                await self._tasks.in_thread(partial(self._disk.chain.switch, meeting.theirs))
                await self._tasks.in_thread(partial(self._bring_residuals_over, meeting))
                await self._tasks.in_thread(staging.publish)
                await self._tasks.in_thread(lambda: self._disk.bases.open(self._disk.chain, newest.manifest))
                await self._switched(newest, meeting, action.holder)
            else:
                await self._follow(tip, newest, staging)

    async def _state(self, newest: Commit, tip: int, holder: PeerId, is_ours: bool) -> tuple[Commit, Staging]:
        """A state to go to, finished: that of `newest`, or one on our own line that we have begun with."""
        now, received = self._clock.now(), self._transport.bytes_received
        others = [  # who stands on an older state has not what is wanted, and may be slow to say so
            peer
            for peer, contact in self.core.state.others.contacts.items()
            if peer != holder and self.core.alive(peer, now) and contact.status.round >= newest.manifest.round - 1
        ]
        try:
            if is_ours:
                newest = await self._catching_up.aim(newest, tip, [holder, *others])
            return newest, await self._catching_up.state(newest.manifest, tip, [holder, *others])
        finally:
            self._keeping_up.fetched(self._transport.bytes_received - received, self._clock.now() - now)

    def _check_link(self) -> None:
        """A newcomer whose link is too slow to ever take part is told so, and ends."""
        chain = self._disk.chain
        if not self.core.state.is_member() and chain.length > 1:
            rounds = range(max(1, chain.length - self.core.state.rules.expert_rounds), chain.length)
            newest = [chain.commit(round).manifest for round in rounds]
            self._keeping_up.headers(self._clock.now(), chain.length - 1, newest)

    async def _headers(self, tip: int, action: do.CatchUp) -> tuple[Commit | None, ForkPoint | None, Way]:
        """The commit to go to, None where we stay; and the meeting, if it is on another history than ours."""
        chain = self._disk.chain
        if action.round >= chain.length or (action.round > tip and chain.has(action.head, action.round)):
            with contextlib.suppress(Parted):
                return await self._catching_up.headers(tip, action.holder, action.round), None, Way.MOVE
        meeting = await self._catching_up.meet(tip, action.holder, action.round)
        if self._choices.meet(meeting):
            self._tell(on.HistoryChosen(tuple(sorted(self._choices.children))))
        way = self.core.way_to(meeting.ours, meeting.theirs, self._clock.now())
        if way is Way.PARTED and manifest_hash(meeting.common) not in self._parted:
            self._parted.add(manifest_hash(meeting.common))
            self._hooks.notice(do.Notice("parted", parted_text(meeting.common, meeting.ours, meeting.theirs)))
        if way is not Way.MOVE:
            return None, None, way
        if meeting.ours:
            return meeting.theirs[-1], meeting, way
        await self._catching_up.append(meeting.theirs, chain.commit(tip))
        return meeting.theirs[-1], None, way

    async def renewed(self, commit: Commit) -> None:
        """Goes on to a commit of our chain whose values are those of our tip: the organiser's renewal."""
        tip = self.core.tip.round
        staging = await self._catching_up.state(commit.manifest, tip, ())
        async with self._executor.lock:
            if self.core.tip.round == tip:
                await self._follow(tip, commit, staging)

    async def _follow(self, tip: int, newest: Commit, staging: Staging) -> None:
        """To a later state of our own chain."""
        first = self._disk.chain.commit(tip + 1).manifest
        hashes = wire_tiles(*self.core.handed_out(first))  # here: a thread would look at what changes meanwhile
        await self._tasks.in_thread(lambda: self._keep_residuals(first, newest.manifest, hashes))
        await self._tasks.in_thread(staging.publish)
        await self._tasks.in_thread(lambda: self._disk.bases.open(self._disk.chain, newest.manifest))
        await self._applied(newest, first)

    def _committed(self, head: Hash) -> Version | None:
        current = self.core.state.round  # one look: the loop goes on beside this thread
        if current.tip_hash != head:
            return None
        version = self._disk.store.version(current.tip.round)
        return version if version.root == current.tip.state_root else None  # else another history is taking our place

    def _keep_residuals(self, first: Manifest, newest: Manifest, hashes: Mapping[int, Hash]) -> None:
        """What lossy codecs left, brought to the round that we caught up with; `hashes`: what `first` handed out."""
        rounds = range(first.round + 1, newest.round + 1)
        later = (self._disk.chain.commit(round).manifest for round in rounds)
        self._disk.residuals.settle(first, manifest_hash(newest), lambda tile_id: hashes.get(tile_id, NO_HASH), later)

    def _bring_residuals_over(self, meeting: ForkPoint) -> None:
        """What lossy codecs left until the last common manifest, if it is our tip's parent: older ones are not here."""
        residuals, (first, *later) = self._disk.residuals, [commit.manifest for commit in meeting.theirs]
        newest = meeting.theirs[-1].manifest
        if len(meeting.ours) > 1:
            residuals.clear(newest)
            return
        try:
            residuals.settle(first, manifest_hash(newest), lambda tile_id: NO_HASH, later)
        except StorageFull:  # the chain has gone over already: on with less
            residuals.clear(newest)

    async def _switched(self, commit: Commit, meeting: ForkPoint, holder: PeerId) -> None:
        """We stand on another history now: the rounds that ours had since the two parted are lost."""
        self._retention.clear()  # what is kept for others is of the history that lost
        lost = tokens_lost(meeting.common, meeting.ours)
        rosters = [entry for left in meeting.ours for entry in left.manifest.roster]
        own = sum(entry.tokens for entry in rosters if entry.peer == self.core.me)
        text = f"{len(meeting.ours)} rounds with {lost:,} tokens are lost: another history of the run won"
        self._hooks.notice(do.Notice("fork", f"{text} (they parted after round {meeting.common.round})", holder))
        event = replace(self._event(commit, None), caught_up=True, lost_tokens=lost, own_tokens=own, switched=True)
        votes = self._disk.votes
        votes.leave(
            self.core.state.own.record
        )  # again: it may have voted meanwhile; from here to `switched` nothing comes between
        votes.arrive(manifest_hash(commit.manifest))
        await self._enter(event, on.HistorySwitched(commit, votes.incarnation))

    async def _applied(self, commit: Commit, first: Manifest) -> None:
        """`first` is the child of the tip that we had: the only round that can have counted our snapshot."""
        if self.core.state.rules.expert_rounds > 1 and (lost := lost_columns(self.core.tip, first)):
            await self._tell_what_is_gone(first, lost)
        await self._enter(self._event(commit, first), on.CommitApplied(commit))

    async def _tell_what_is_gone(self, child: Manifest, columns: Sequence[int]) -> None:
        """Columns are handed out now and then: what an owner had trained since goes with it."""
        rounds = range(min(child.column_rounds[column] for column in columns), child.round)
        before = await self._tasks.in_thread(lambda: [self._disk.chain.commit(round).manifest for round in rounds])
        for column, tokens in tokens_gone(before, child, columns).items():
            since = child.column_rounds[column]
            text = f"{tokens:,} tokens of column {column} since round {since} are lost with its owner"
            self._hooks.notice(do.Notice("column", text))

    def _event(self, commit: Commit, first: Manifest | None) -> Applied:
        times = self._times
        times.applied = self._clock.now()
        roster = first.roster if first is not None else ()
        return Applied(
            commit,
            self.core.tip,
            next((entry for entry in roster if entry.peer == self.core.me), None),
            first is not None and self._disk.inputs.parent == first.parent,
            self._uncounted(first) if first is not None else frozenset(),
            first is not None and commit.manifest.round > first.round,
            times.seconds(),
            self._transport.bytes_sent - times.sent_before,
            self._transport.bytes_received - times.received_before,
            self.core.state.pace.deadline_seconds(0),
            self._leavers(),
            stale_columns=stale_columns(self.core.state.rules.expert_rounds, commit.manifest),
            refused=self._refused(),
        )

    async def _enter(self, event: Applied, change: on.CommitApplied | on.HistorySwitched) -> None:
        """The state machine and the trainer go on from a new committed state."""
        round = event.commit.manifest.round
        self._candidate.enter(round)
        self._tell(on.UplinkMeasured(int(self._transport.measured_uplink())))
        keep = self._hooks.rounds_in_use()  # before the trainer goes on
        self._times = self._fresh_times()
        self._room_again()
        self._tell(change)
        self._hooks.applied(event)
        reached(failpoints.APPLIED, peer=self.core.me, round=round)
        keep |= self._hooks.rounds_in_use()  # it may have taken what was pending just before this commit
        await self._drop_all_but(keep | {round, round - 1})

    async def _drop_all_but(self, keep: frozenset[int]) -> None:
        states, wires = self._retention.needed(self.core.tip.round)
        await self._tasks.in_thread(lambda: self._drop(keep | states, wires))

    def _drop(self, keep: frozenset[int], wires: frozenset[int]) -> None:
        store = self._disk.store
        for round in set(store.rounds()) - keep:
            store.drop(round, keep_wire=round in wires)
        store.drop_wires(wires)

    def _refused(self) -> tuple[PeerId, ...]:
        """Whose values were unfit, unless another reducer of the same slice took them."""
        round = self.core.state.round
        words = ((signed.value.left_out, round.reports.get(index)) for index, signed in round.all_reports())
        named = {
            peer
            for left_out, report in words
            for peer, reason in left_out
            if reason != LOST and (report is None or peer not in report.value.contributors)
        }
        return tuple(sorted(named))

    def _leavers(self) -> frozenset[PeerId]:
        others = {peer for peer, contact in self.core.state.others.contacts.items() if contact.status.intent.leaving}
        return frozenset(others | {self.core.me} if self.core.state.own.intent.leaving else others)

    def _uncounted(self, first: Manifest) -> frozenset[int]:
        """Tiles for which we have trained values that did not go in, and that are not poison."""
        inputs, me = self._disk.inputs, self.core.me
        if inputs.parent != first.parent:
            return frozenset()
        done = {tile_id for piece in first.slices if me in piece.contributors for tile_id in piece.tile_ids}
        plan = self.core.state.round.plan
        for index, report in self.core.state.round.all_reports() if plan else ():
            if plan is not None and dict(report.value.left_out).get(me, LOST) != LOST:
                done.update(plan.value.slices[index].tile_ids)
        return frozenset(tile_id for block in inputs.blocks for tile_id in self._layout.tile_ids_of(block)) - done

    # ---------------------------------------------------------------- the disk

    def _binding(self) -> list[Manifest]:
        """What we have signed for, or know to be decided."""
        record, decided = self.core.state.own.record, self.core.state.round.decided
        manifests = [signed.value.manifest for signed in (record.accepted, record.degraded) if signed is not None]
        return manifests + ([decided.manifest] if decided is not None else [])

    def _is_bound(self, root: Hash) -> bool:
        return any(manifest.state_root == root for manifest in self._binding())

    def _recover(self) -> None:
        """After a restart or a full disk: we go on standing by the state that we have signed for."""
        self._candidate.recover()
        for manifest in self._binding():
            if self._candidate.finished(manifest.state_root) is not None:
                self._tell(on.StateVerified(manifest_hash(manifest)))

    def _disk_is_full(self, error: StorageFull) -> None:
        """Nothing can be staged: say so once, train on, look again later."""
        if not self._was_full:
            self._was_full = True
            self._hooks.notice(do.Notice("disk", f"{error}; training goes on, but this peer cannot vote until then"))
        if self._fetching is not None:  # asked for again when there is room
            self._fetching.cancel()
        self._retention.clear()
        self._tasks.spawn(self._make_room())
        self._full_until = self._clock.now() + 10 * self.core.state.pace.heartbeat_seconds
        self._tell(on.DiskFull(self._disk.votes.record))

    async def _make_room(self) -> None:
        async with self._executor.lock:  # a state that is being committed is no one to drop
            tip = self.core.tip.round
            await self._drop_all_but(self._hooks.rounds_in_use() | {tip, tip - 1})

    def _room_again(self) -> None:
        if self._was_full and self._full_until is None:
            self._was_full = False
            self._hooks.notice(do.Notice("disk", "there is room again: this peer takes part in the votes"))

    def _try_disk_again(self) -> None:
        if self._full_until is not None and self._clock.now() > self._full_until and not self._executor.lock.locked():
            self._full_until = None
            self._tell(on.DiskHasRoom())
            self._recover()

    def _scrubber(self) -> Scrubber:
        transfers = Transfers(  # its bytes are no part of a round
            self._transport, self._layout, self._stall_seconds, patience=self._patience, patient=True
        )
        return Scrubber(
            self._disk.store, Mender(self._disk.store, transfers, self._tasks.in_thread), self._tasks.in_thread,
            lambda: self.core.tip.round, self._holders, self._hooks.notice, self._hooks.failed,
            self.core.state.pace.heartbeat_seconds,
        )  # fmt: skip

    def _holders(self) -> list[PeerId]:
        now = self._clock.now()
        return [
            *(peer for peer in self.core.state.others.contacts if self.core.alive(peer, now)),
            *self.core.state.others.seeds,
        ]

    # ---------------------------------------------------------------- small things

    def _stall_seconds(self) -> float:
        return max(self.core.state.pace.suspect_seconds, 2.0)

    def _trained_seconds(self) -> float:
        """How long a round trains, or the running one did."""
        current = self.core.state.round
        this = current.closed_at - current.started_at if current.closed_at is not None else 0.0
        return max(self.core.state.pace.round_seconds, this)

    def _on_bytes(self) -> None:
        self._tell(on.BytesMoved())

    def _on_refused(self, peer: PeerId) -> None:
        self._tell(on.HostRefusedDial(peer))

    def _note_phase(self) -> None:
        if self.core.state.round.plan is not None and not self._times.planned:
            self._times.planned = self._clock.now()

    def _fresh_times(self) -> RoundTimes:
        return RoundTimes(
            self._clock.now(),
            sent_before=self._transport.bytes_sent,
            received_before=self._transport.bytes_received,
        )

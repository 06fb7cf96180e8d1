"""Carries out what the round's state machine decides: messages, disk, arithmetic, on one asyncio loop.

What is begun, guarded and told stands in parts that need no tensor: `Dispatcher` (events and actions in order, votes, a
full disk), `RoundExecutor` (reduce, fetch, build, verify) and `Committer` (adopt, catch up, go over to another
history). Here they are given the real disk and network, and their long work runs as tasks. Knows no trainer: `Hooks` is
what the peer around it provides.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterable

from spes_p2p import failpoints
from spes_p2p.consensus import actions as do
from spes_p2p.consensus import events as on
from spes_p2p.consensus.content import Envelope
from spes_p2p.consensus.machine import Consensus, Start
from spes_p2p.consensus.manifest import Contribution
from spes_p2p.consensus.messages import Intent, Work
from spes_p2p.consensus.state import Identity
from spes_p2p.consensus.timing import Pace
from spes_p2p.errors import PeerClosed, RemoteProtocolError, StorageFull
from spes_p2p.exchange.patience import Patience
from spes_p2p.exchange.rates import Rates
from spes_p2p.exchange.requests import ValuesRequest, kind_of, unpack_request
from spes_p2p.exchange.transfers import FewStreams, Transfers
from spes_p2p.failpoints import reached
from spes_p2p.ids import PeerId
from spes_p2p.state.layout import VALUE_BYTES
from spes_p2p.swarm.door import Door
from spes_p2p.swarm.ports import Blob
from spes_p2p.sync.candidate_state import CandidateState
from spes_p2p.sync.catch_up import CatchUp, Fetched, HeadersOnly
from spes_p2p.sync.committer import Committer, long_work
from spes_p2p.sync.disk_history import DiskHistory
from spes_p2p.sync.dispatcher import Dispatcher
from spes_p2p.sync.donor import Serving
from spes_p2p.sync.genesis import check_same_run
from spes_p2p.sync.node import Node, Run
from spes_p2p.sync.organiser_words import Words
from spes_p2p.sync.outbox import Outbox
from spes_p2p.sync.outer import outer_of
from spes_p2p.sync.outgoing import Outgoing, check_asker
from spes_p2p.sync.round_executor import RoundExecutor
from spes_p2p.sync.scrub import Scrubber, TileRepairer
from spes_p2p.sync.sealing import SIGNATURES
from spes_p2p.sync.surroundings import Disk, Hooks, PeerContext, Role
from spes_p2p.sync.tasks import Tasks
from spes_p2p.sync.tensor_work import TensorWork
from spes_p2p.wire import unpack

LEAST_STALL_SECONDS = 2.0


class Fetchers:
    """`urgent`, `later` and `idle` transfers that share what is known of other peers."""

    def __init__(self, context: PeerContext, tell: Callable[[on.Event], None]) -> None:
        self._core, self._clock = context.core, context.node.clock

        def fetcher(kind: type[Transfers], patient: bool) -> Transfers:
            return kind(
                transport, layout, self._stall_seconds, lambda: tell(on.BytesMoved()),
                lambda peer: tell(on.HostRefusedDial(peer)), patience, patient, rates,
            )  # fmt: skip

        transport, layout, own = context.node.transport, context.layout, self._core.state.own
        rates = Rates(self._clock.now)
        patience = Patience(lambda: 2 * self._core.state.pace.deadline_seconds(0), self._trained_seconds)
        self.urgent = fetcher(Transfers, patient=False)
        self.later = fetcher(Transfers if own.intent.joining else FewStreams, patient=True)
        """Transfers that yield to what the running round of other peers needs."""
        self.idle = Transfers(transport, layout, self._stall_seconds, patience=patience, patient=True)
        """Transfers for repairs, whose bytes are not counted as part of a round."""

    def holders(self) -> list[PeerId]:
        """Peers that may have the committed state: those heard from recently, and the seeds."""
        others, now = self._core.state.others, self._clock.now()
        return [*(peer for peer in others.contacts if self._core.alive(peer, now)), *others.seeds]

    def _stall_seconds(self) -> float:
        return max(self._core.state.pace.suspect_seconds, LEAST_STALL_SECONDS)

    def _trained_seconds(self) -> float:
        """How long a round trains, or the running one did."""
        current = self._core.state.round
        this = current.closed_at - current.started_at if current.closed_at is not None else 0.0
        return max(self._core.state.pace.round_seconds, this)


class Answers:
    """What one peer says when it is asked."""

    def __init__(self, context: PeerContext, dispatcher: Dispatcher, history: DiskHistory, outgoing: Outgoing) -> None:
        info, disk, node, pace = context.run.info, context.disk, context.node, context.core.state.pace
        self._context, self._dispatcher, self._history = context, dispatcher, history
        self._core, self._info = context.core, info
        door = Door(SIGNATURES, self.knows, node.clock)
        self.outbox = Outbox(
            node.transport, node.checker, context.tasks, lambda: pace.suspect_seconds, self.hear, context.hooks.notice,
            door,
        )  # fmt: skip
        self.serving = Serving(info, disk.chain, disk.store, outgoing.serve, disk.data)

    def knows(self, caller: PeerId) -> bool:
        """Whether `caller` is the organiser, or a member by the chain's newest commit (maybe newer than our tip)."""
        return caller == self._info.organiser or self._context.disk.chain.names(caller)

    def hear(self, envelope: Envelope) -> None:
        """A message came."""
        self._dispatcher.tell(on.MessageReceived(envelope))
        self._history.hear(envelope.commit)

    async def on_call(self, caller: PeerId, request: bytes) -> bytes:
        """One envelope in, our envelope out."""
        self._require_life(PeerClosed)  # no refusal, of which the others would tell: it has said that it leaves
        envelope = self.outbox.open(caller, request)
        check_same_run(envelope, self._info)
        self.hear(envelope)
        self._require_life(PeerClosed)
        return self.outbox.answer(caller, self._dispatcher.reply_to(caller))

    async def on_fetch(self, caller: PeerId, request: bytes) -> Blob:
        """Values, tiles, headers: see `requests`."""
        self._require_life(RemoteProtocolError)
        asked, core = unpack_request(request), self._core
        if isinstance(asked, ValuesRequest):
            check_asker(self._context.layout, core.state.rules, core.tip, caller, asked.first_tile, asked.count)
            entry = unpack(Contribution, asked.work)
            if not core.is_counted(asked.parent, entry):
                raise RemoteProtocolError("this peer no longer has the requested work")
        reached(failpoints.SERVE + kind_of(asked), peer=core.me, round=core.tip.round + 1, caller=caller)
        blob = await self._context.tasks.in_thread(lambda: self.serving.answer(asked, caller))
        if self._is_behind(caller):
            self._history.retention.asked(caller, asked)
        return blob

    def _is_behind(self, caller: PeerId) -> bool:
        """Whether it may need a state for longer than we would keep it anyway; a stranger may."""
        contact = self._core.state.others.contacts.get(caller)
        return contact is None or contact.status.round < self._core.tip.round - 1

    def _require_life(self, error: type[PeerClosed | RemoteProtocolError]) -> None:
        if self._dispatcher.halted:
            raise error("this peer is shutting down")


class Driver:
    """One peer's part in the sync of a run. All coroutines and callbacks belong to one event loop."""

    def __init__(self, core: Consensus, run: Run, node: Node, disk: Disk, role: Role, hooks: Hooks) -> None:
        self.core = core
        self._disk, self._hooks = disk, hooks
        self._tasks = Tasks(self._task_failed)
        self._context = context = PeerContext(core, run, node, disk, hooks, self._tasks)
        disk.residuals.open(disk.chain, core.tip.round, core.me)
        for problem in disk.residuals.problems:
            hooks.notice(do.Notice("disk", problem))
        self._candidate = CandidateState(
            disk.store, run.layout, run.config.sync.merge_top_k, core.state.is_bound, outer_of(context.rules)
        )
        self._candidate.enter(core.tip.round)
        self._dispatcher = Dispatcher(core, disk.votes, disk.chain, self._candidate, hooks, self, node.clock.now)
        self._tell = self._dispatcher.tell
        self._fetchers = Fetchers(context, self._tell)
        self._outgoing = Outgoing(context)
        self._work = TensorWork(context, self._outgoing, self._candidate, self._fetchers.urgent, role.held_bytes)
        self._executor = RoundExecutor(self._dispatcher, self._work)
        self._catching_up = (CatchUp if disk.keeps_states else HeadersOnly)(
            run.info, context.rules, node.checker.check, disk.chain, disk.store, self._fetchers.later,
            self._tasks.in_thread,
        )  # fmt: skip
        self._history = DiskHistory(context, self._candidate, self._catching_up)
        self._log = self._history.log
        self._committer: Committer[Fetched] = Committer(self._dispatcher, self._history)
        self.answers = Answers(context, self._dispatcher, self._history, self._outgoing)

    # ---- life ----

    async def start(self) -> None:
        """Serves others and begins to tick. `core` must stand on the chain's newest commit whose state is here."""
        self._dispatcher.start()
        await self._context.node.transport.serve(self.answers, self.answers.knows)
        self._tasks.spawn(self._tick_for_ever())
        if not self._disk.keeps_states:
            return
        store, fetchers, in_thread = self._disk.store, self._fetchers, self._tasks.in_thread
        scrubber = Scrubber(
            TileRepairer(store, fetchers.idle, in_thread), lambda: self.core.tip.round, fetchers.holders,
            self._hooks.notice, self._hooks.failed, self.core.state.pace.heartbeat_seconds,
        )  # fmt: skip
        self._tasks.spawn(scrubber.run())

    def halt(self) -> None:
        """From now on nothing is begun, said or answered; `stop` waits for what is under way."""
        self._dispatcher.halted = True
        self._tasks.halt()

    async def stop(self) -> None:
        """Ends all tasks and threads; the network and the disk stay open for their owner to close."""
        self._dispatcher.halted = True
        await self._tasks.stop()

    async def _tick_for_ever(self) -> None:
        while True:
            self._dispatcher.tick()
            self._log.look()
            while self._disk.chain.problems:
                self._hooks.notice(do.Notice("disk", self._disk.chain.problems.popleft()))
            await asyncio.sleep(self.core.state.pace.heartbeat_seconds / 2)

    def _task_failed(self, error: BaseException) -> None:
        if isinstance(error, StorageFull):
            self._dispatcher.disk_is_full(error)
        else:
            self._hooks.failed(error)

    # ---- what others of this peer have to say ----

    def progressed(self, work: Work) -> None:
        """The trainer's progress in a round; once `work` is ready it has stopped, and its snapshot is in `Inputs`."""
        if work.ready:
            reached(failpoints.READY, peer=self.core.me, round=self.core.tip.round + 1)
            self._log.closed()
        self._tell(on.TrainingProgressed(work))

    def wish(self, intent: Intent) -> None:
        """What this peer wants has changed."""
        self._tell(on.IntentChanged(intent))

    def greet(self, known: Iterable[PeerId]) -> None:
        """Sends our status also to these peers of the run, although they are not members."""
        self._tell(on.PeersFound(tuple(known)))

    def hide_status(self, hidden: bool) -> None:
        """Sets whether this peer tells others which manifest it stands on."""
        self.answers.outbox.hides_status = hidden

    def obey(self, words: Words) -> None:
        """All that the organiser has signed until now of the learning rate and of peers."""
        if words.decay is not None:
            self._tell(on.DecayOrdered(words.decay))
        if words.roll is not None:
            self._tell(on.RollSigned(words.roll))

    # ---- Effects of the dispatcher ----

    def send(self, action: do.Send) -> None:
        self.answers.outbox.post(action.to, action.envelope)

    def begin(self, action: do.Work) -> None:
        match action:
            case do.Verify():
                self._log.proposed()
            case do.Adopt():
                self._log.decided()
        self._tasks.spawn(long_work(action, self._executor, self._committer))

    def make_room(self) -> None:
        self._history.make_room()

    def is_catching_up(self) -> bool:
        return self._history.is_catching_up

    def has_room(self) -> bool:
        store = self._disk.store
        return shutil.disk_usage(store.directory).free >= store.layout.num_values * VALUE_BYTES


def build_driver(run: Run, node: Node, disk: Disk, role: Role, hooks: Hooks) -> Driver:
    """A driver that stands on the tip of `disk`; it is yet to be started."""
    organiser = node.sealer if node.me == run.info.organiser else None
    identity = Identity(node.me, run.rules, node.sealer, node.checker.check, organiser)
    votes, tip = disk.votes, disk.tip
    start = Start(
        votes.incarnation, tip.manifest, tip, votes.record, role.intent, node.first_sequence, role.seeds, node.secret,
        disk.keeps_states,
    )  # fmt: skip
    core = Consensus.begin(identity, start, Pace(run.heartbeat_seconds), node.clock.now())
    return Driver(core, run, node, disk, role, hooks)

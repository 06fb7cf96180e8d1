"""One event at a time into `Consensus`, and its actions begun in their order: the driver's decisions that need no work.

A voting record is on disk before anything that follows from it leaves; on a full disk nothing is staged until there may
be room again. What an action does is up to `Effects`: the real driver's have sockets and tasks, a simulator's have not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from spes_p2p import failpoints
from spes_p2p.consensus import actions as do
from spes_p2p.consensus import events as on
from spes_p2p.consensus.content import Envelope
from spes_p2p.consensus.machine import Consensus
from spes_p2p.consensus.manifest import manifest_hash
from spes_p2p.errors import StateError, StorageFull
from spes_p2p.failpoints import reached
from spes_p2p.ids import PeerId
from spes_p2p.sync.interfaces import Candidate, Effects, KnownChain, Owner, Votes

RETRY_HEARTBEATS = 10
"""Heartbeats after which a full disk is tried again."""


class Dispatcher:
    """Feeds one `Consensus`, and begins what it decides.

    Who carries out what takes long (`RoundExecutor`, `Committer`) has clock, disk and notices from here.
    """

    def __init__(
        self,
        core: Consensus,
        votes: Votes,
        chain: KnownChain,
        candidate: Candidate,
        owner: Owner,
        effects: Effects,
        now: Callable[[], float],
    ) -> None:
        """`now()`: seconds of a monotonic clock."""
        self.core = core
        self.votes = votes
        self.chain = chain
        self.candidate = candidate
        self.notice = owner.notice
        self.now = now
        self._owner = owner
        self._effects = effects
        self._queue: deque[do.Action] = deque()
        self._is_beginning = False
        self._retry_at: float | None = None
        self._looks_on = not core.state.own.intent.joining
        self.halted = False
        """Stops: no further action is begun."""
        self.was_full = False
        """The disk was found full, and no commit has found room since."""
        self._has_promised = False
        """Since the last commit we said by what is free that there is room. Once only: a quota may say otherwise each
        time, and others would wait for us for ever."""

    def start(self) -> None:
        """After a restart we go on standing by the state that we have signed for."""
        self._recover()

    def tell(self, event: on.Event) -> None:
        """Something happened: the state machine decides, and what it decides is begun.

        A disk that is broken, or holds what is damaged, ends this peer, not just the call of another that led there.
        """
        try:
            self.carry_out(self.core.handle(event, self.now()))
        except (OSError, StateError) as error:
            self.halted = True  # not a word more: the state machine takes for given what was to be written
            self._owner.failed(error)

    def reply_to(self, peer: PeerId) -> Envelope:
        """What to answer a peer that has just sent us something."""
        [reply] = self.core.handle(on.ReplyRequested(peer), self.now())
        assert isinstance(reply, do.Send)
        return reply.envelope

    def tick(self) -> None:
        """Time passed: at least once a heartbeat."""
        self.tell(on.ClockTicked())
        is_due = self._retry_at is not None and self.now() > self._retry_at and not self._effects.is_catching_up()
        is_counted_out = self._retry_at is None and self.core.state.liveness.was_full  # until something is written
        if (is_due or is_counted_out) and not self.candidate.lock.locked():
            for_state = not self._has_promised and self._effects.has_room()
            if is_due or for_state:
                self._retry_at = None
                self._has_promised |= for_state
                self.tell(on.DiskHasRoom(for_state))
                self._recover()

    def carry_out(self, actions: Sequence[do.Action]) -> None:
        """Begins actions in order, after all earlier ones, even if beginning one of these caused the next event."""
        self._queue.extend(actions)
        if self._is_beginning or self.halted:
            return
        self._is_beginning = True
        try:
            while self._queue and not self.halted:
                self.begin(self._queue.popleft())
        finally:
            self._is_beginning = False

    def begin(self, action: do.Action) -> None:
        """Begins one action."""
        match action:
            case do.Persist():
                self._persist(action)
            case do.Forget():
                try:
                    self.votes.forget(action.above)
                except StorageFull as error:
                    self.disk_is_full(error)
                self.tell(on.IncarnationBegun(self.votes.incarnation))
            case do.Send():
                self._effects.send(action)
            case do.CloseTraining():
                self._owner.close_training()
            case do.Notice():
                self.notice(action)
            case _ if self._retry_at is None:
                self._effects.begin(action)

    def _persist(self, action: do.Persist) -> None:
        try:
            reached(failpoints.PERSIST, peer=self.core.me, round=self.core.tip.round + 1)
            self.votes.write(action.record)
            reached(failpoints.PERSISTED, peer=self.core.me, round=self.core.tip.round + 1)
        except StorageFull as error:
            # without whatever follows from a vote that is not on disk; what is to be forgotten is no vote
            self._queue = deque(action for action in self._queue if isinstance(action, do.Forget))
            self.disk_is_full(error)

    # ---- the next state ----

    def _recover(self) -> None:
        self.candidate.recover()
        for manifest in self.core.state.bound_manifests():
            if self.candidate.finished(manifest.state_root) is not None:
                self.tell(on.StateVerified(manifest_hash(manifest)))

    def tell_lost(self) -> None:
        """States that were verified here and are not whole any more count as verified no longer."""
        verified = self.core.state.round.verified_roots()
        self.tell(on.StateLost(tuple(sorted(root for root in verified if self.candidate.finished(root) is None))))

    # ---- a full disk ----

    @property
    def is_full(self) -> bool:
        """Whether nothing is staged, until the disk is tried again."""
        return self._retry_at is not None

    def disk_is_full(self, error: StorageFull) -> None:
        """Nothing can be staged: say so once, train on, look again later."""
        if not self.was_full:
            self.was_full = True
            goes_on = "no newer state is taken" if self._looks_on else "training continues, but this peer cannot vote"
            self.notice(do.Notice("disk", f"{error}; {goes_on} until there is room"))
        self._effects.make_room()
        self._retry_at = self.now() + RETRY_HEARTBEATS * self.core.state.pace.heartbeat_seconds
        self.tell(on.DiskFull(self.votes.record))

    def found_room(self) -> None:
        """A commit was written."""
        self._has_promised = False
        if self.was_full and not self.is_full:
            self.was_full = False
            self.notice(do.Notice("disk", "there is disk space again"))

"""The state machine of one peer: decides everything, touches nothing.

`Consensus.handle` takes an event (`events.py`) and the time, and returns actions (`actions.py`). It holds no tensor and
no socket, and reads no clock. What it decides is written as a table of rules (`table.py`), tried in order after each
event until none fires, so that a test can see which were exercised. What it knows is one `State`; its `Parts` do the
work.

State is sent, not events: every peer repeats its signed status and whatever the receiver lacks, so loss, doubling and
reordering need no handling of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from spes_p2p.consensus import events as on
from spes_p2p.consensus.actions import Action, Send
from spes_p2p.consensus.lifecycle import new_vote
from spes_p2p.consensus.liveness import Liveness
from spes_p2p.consensus.manifest import Contribution, Manifest, Slice, manifest_hash
from spes_p2p.consensus.messages import Commit, Intent, Status
from spes_p2p.consensus.parts import PartClasses, Parts
from spes_p2p.consensus.rules import Outcome
from spes_p2p.consensus.state import Identity, Others, Own, RoundState, State
from spes_p2p.consensus.table import TICK, Table, situation_of
from spes_p2p.consensus.timing import Pace
from spes_p2p.consensus.vote_record import VoteRecord
from spes_p2p.consensus.wanted import Wanted
from spes_p2p.failpoints import reached
from spes_p2p.ids import Hash, PeerId

Observer = Callable[[on.Event, float, list[Action]], None]
"""Is told of an event, its time, and what came of it."""


QUIET = (on.BytesMoved, on.StateLost, on.PeersFound, on.UplinkMeasured)
"""Events from which nothing follows at once."""


def take(event: on.Event, parts: Parts, now: float) -> bool:
    """Gives an event to the part that takes it in; whether the rules should look at what has changed.

    Decides nothing. Raises TypeError for what is no event.
    """
    match event:
        case on.BytesMoved():
            parts.staging.bytes_moved(now)
        case on.StateLost(state_roots):
            parts.staging.state_lost(state_roots)
        case on.PeersFound(peers):
            parts.lifecycle.peers_found(peers)
        case on.UplinkMeasured(bytes_per_second):
            parts.lifecycle.uplink_measured(bytes_per_second)
        # how work went that was asked for
        case on.TrainingProgressed(work):
            parts.round_plan.trained(work, now)
        case on.SliceReduced(report):
            parts.reducing.reduced(report, now)
        case on.SliceStaged(key, hashes):
            parts.staging.staged(key, hashes, now)
        case on.FetchFailed(key, is_unfit):
            parts.staging.fetch_failed(key, now, is_unfit)
        case on.StagingFailed(key):
            parts.staging.staging_failed(key, now)
        case on.SlicesLost(keys):
            parts.staging.unstaged(keys, now)
        case on.StateBuilt(build, wire_root, state_root, merge):
            parts.reducing.built(build, Outcome(build.roster, build.slices, wire_root, state_root, merge), now)
        case on.StateVerified(manifest):
            parts.staging.verified(manifest, now)
        case on.VerifyFailed():
            parts.staging.verify_failed(now)
        case on.AdoptFailed():
            parts.following.adopt_failed()
        case on.CatchUpFailed(is_ours):
            parts.following.catch_up_failed(now, is_ours)
        # where we stand, or what we may and want to do, is another
        case on.CommitApplied(commit):
            parts.following.applied(commit, now)
        case on.HeavierFound(manifest):
            parts.following.goes_over(manifest, now)
        case on.HistorySwitched(commit):
            parts.following.switched(commit, now)
        case on.LighterFound(tip_hash):
            parts.following.stays(tip_hash)
        case on.IncarnationBegun(incarnation):
            parts.lifecycle.begin_incarnation(incarnation)
        case on.DiskFull(durable):
            parts.lifecycle.disk_full(durable, now)
        case on.DiskHasRoom(for_state):
            parts.lifecycle.disk_has_room(for_state)
        case on.DecayOrdered(order):
            parts.lifecycle.order_decay(order)
        case on.RollSigned(roll):
            parts.lifecycle.take_roll(roll)
        case on.IntentChanged(intent):
            parts.lifecycle.change_intent(intent)
        case _:
            raise TypeError(f"{event!r} is no event")
    return not isinstance(event, QUIET)


@dataclass(frozen=True)
class Start:
    """What a peer begins with: mostly what it finds on its disk.

    `record` is what a restarted elector has bound itself to; `first_sequence` differs in each life of a peer, and
    rises. `seeds` hear our statuses from the beginning. `secret`: what this peer draws follows from it. `keeps_states`:
    see `Own`.
    """

    incarnation: int
    tip: Manifest
    commit: Commit | None = None
    record: VoteRecord | None = None
    intent: Intent = field(default_factory=Intent)
    first_sequence: int = 0
    seeds: tuple[PeerId, ...] = ()
    secret: bytes = b""
    keeps_states: bool = True


class Consensus:
    """The protocol as one peer runs it, over all rounds. All but `handle` only asks.

    `state` is there to be read: only the parts change it. `wanted` says whether work is still of use. `fired` counts
    the rules. `observer`, where there is one, is told of every event after it was handled.
    """

    PART_CLASSES: ClassVar[PartClasses] = PartClasses()

    def __init__(self, state: State) -> None:
        self.state = state
        self.me = state.me
        self.fired: Counter[str] = Counter()
        self.observer: Observer | None = None
        self.wanted = Wanted(state)
        self._parts = Parts(state, self.PART_CLASSES)
        self._table = Table(self._parts)

    @classmethod
    def begin(cls, identity: Identity, start: Start, pace: Pace, now: float) -> Consensus:
        """A process begins: it asks first what became of the run."""
        name = manifest_hash(start.tip)
        own = Own(
            start.incarnation, start.intent, start.commit,
            life=start.first_sequence, sequence=start.first_sequence, secret=start.secret,
            keeps_states=start.keeps_states,
        )  # fmt: skip
        others = Others(seeds=start.seeds, told_round=start.tip.round)
        round = RoundState(start.tip, name, new_vote(identity, start.tip), now, now)
        core = cls(State(identity, pace, own, others, round, Liveness(), now, last_event=now))
        lifecycle = core._parts.lifecycle
        lifecycle.enter(start.tip, now)
        if start.record is not None and start.record.parent == name:
            lifecycle.resume(start.record)
        core.state.liveness.ask(now)
        return core

    # ---------------------------------------------------------------- events

    def handle(self, event: on.Event, now: float) -> list[Action]:
        """Takes `event` in at `now`, seconds of a monotonic clock, and says what is to be done, in this order."""
        if isinstance(event, on.MessageReceived):
            self._receive(event, now)
        elif isinstance(event, on.ReplyRequested):
            self.state.out.append(Send(event.peer, self._parts.gossip.answer(event.peer)))
        elif isinstance(event, on.ClockTicked):
            self._advance(now, TICK)
        elif isinstance(event, on.HostRefusedDial):
            if event.peer != self.me:
                self.state.others.refused_dial.add(event.peer)
            self._advance(now, TICK)
        elif take(event, self._parts, now):
            self._advance(now)
        actions, self.state.out = self.state.out, []
        if self.observer is not None:
            self.observer(event, now, actions)
        return actions

    def _receive(self, event: on.MessageReceived, now: float) -> None:
        """Takes a message in. One without news (most heartbeats) does not cause the rules to be tried."""
        parts = self._parts
        parts.lifecycle.notice_sleep(now)
        new = parts.inbound.take(event.envelope, now)
        if self._listen(now) or new:
            self._advance(now)
        elif self.state.others.reply_due:
            parts.gossip.flush(now)

    # ---------------------------------------------------------------- rules

    def _listen(self, now: float) -> bool:
        self._parts.lifecycle.notice_sleep(now)
        return self._parts.quorum.listen(now)

    def _advance(self, now: float, tick: int = 0) -> None:
        """Tries the rules until none fires, then says what others should know. Time alone is looked at in a tick."""
        self._listen(now)
        fired = True
        while fired:
            situation, fired = situation_of(self.state, self._parts, now) | tick, False
            for name, rule in self._table.fitting(situation):
                if rule(now):
                    self.fired[name] += 1
                    fired = True
                    reached(name, peer=self.me, round=self.state.tip.round + 1)
                    break
        self._parts.gossip.flush(now)

    # ---------------------------------------------------------------- questions

    @property
    def tip(self) -> Manifest:
        """The newest manifest whose state is committed here."""
        return self.state.tip

    @property
    def tip_hash(self) -> Hash:
        return self.state.tip_hash

    def status(self) -> Status:
        """What we say of ourselves now."""
        return self._parts.members.own_status()

    def alive(self, peer: PeerId, now: float) -> bool:
        """Whether `peer` was heard of late; ourselves always."""
        return self._parts.contacts.alive(peer, now)

    def is_counted(self, parent: Hash, entry: Contribution) -> bool:
        """Whether a plan for the child of `parent` that has `entry` for us counts the work that is here."""
        return self._parts.round_plan.is_counted(parent, entry)

    def sure_holders(self, piece: Slice, now: float) -> tuple[PeerId, ...]:
        """Who has a slice of this round for certain: its reducer, and who says so; of those that we can ask."""
        return self._parts.holders.sure(piece, now)

    def handed_out(self, child: Manifest) -> tuple[tuple[Slice, ...], tuple[bytes, ...]]:
        """Slices of a committed child of our tip with the hashes of their tiles, as far as we know: ours at least."""
        return self._parts.reducing.handed_out(child)

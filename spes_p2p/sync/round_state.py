"""What the round's state machine knows, and the questions that all its parts ask. Decides nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from spes_p2p.ids import NO_HASH, Hash, PeerId
from spes_p2p.swarm.membership import electors, is_majority, leader_order
from spes_p2p.sync.actions import (
    Action,
    Build,
    Notice,
    Persist,
)
from spes_p2p.sync.messages import (
    Acceptance,
    Ballots,
    Commit,
    DegradedVote,
    Intent,
    Manifest,
    Plan,
    Proposal,
    Report,
    Sealer,
    Signed,
    Status,
    Work,
    manifest_hash,
    plan_hash,
)
from spes_p2p.sync.rules import (
    CheckSignature,
    Outcome,
    RunRules,
)
from spes_p2p.sync.timing import Pace
from spes_p2p.sync.votes import VoteRecord

MAX_NEWCOMERS = 64
Key = tuple[int, int]
"""(first tile, tiles) of a slice."""
Heard = tuple[PeerId, ...]
"""The electors of a degraded proposal; empty for an ordinary one."""


@dataclass
class Contact:
    """The newest that was heard of one peer. Times are ours; `voting_at` is when it last said that it can vote."""

    signed: Signed[Status]
    at: float
    voting_at: float
    gone: bool = False
    probed: bool = False

    @property
    def status(self) -> Status:
        return self.signed.value


@dataclass
class RoundState:
    """Everything about the child of one manifest; forgotten when it is committed."""

    tip: Manifest
    head: Hash
    order: tuple[PeerId, ...]
    started_at: float
    progress_at: float
    work: Work = field(default_factory=Work)
    ready_at: float | None = None
    close_asked: bool = False
    closing: int = -1
    closed_at: float | None = None
    view: int = 0
    prepare: int = -1
    plan: Signed[Plan] | None = None
    reports: dict[int, Signed[Report]] = field(default_factory=dict)
    reducing: set[int] = field(default_factory=set)
    fetching: dict[Key, bytes] = field(default_factory=dict)
    failed: set[Key] = field(default_factory=set)
    staged: dict[Key, bytes] = field(default_factory=dict)
    building: Build | None = None
    outcome: tuple[Build, Outcome] | None = None
    proposals: dict[tuple[Heard, int], Signed[Proposal]] = field(default_factory=dict)
    verifying: Hash = NO_HASH
    verified: set[Hash] = field(default_factory=set)
    own_vote: Signed[Acceptance] | None = None
    own_degraded: Signed[DegradedVote] | None = None
    votes: dict[tuple[int, Hash], dict[PeerId, Signed[Acceptance]]] = field(default_factory=dict)
    degraded_votes: dict[tuple[Heard, Hash], dict[PeerId, Signed[DegradedVote]]] = field(default_factory=dict)
    decided: Commit | None = None
    adopting: bool = False
    sent: dict[PeerId, set[object]] = field(default_factory=dict)


class CoreState:
    """The knowledge of one peer: its tip, the round on top of it, and whom it hears."""

    def __init__(
        self,
        me: PeerId,
        incarnation: int,
        rules: RunRules,
        sealer: Sealer,
        check_signature: CheckSignature,
        pace: Pace,
        tip: Manifest,
        now: float,
        intent: Intent | None = None,
        tip_commit: Commit | None = None,
    ) -> None:
        self.me = me
        self.incarnation = incarnation
        self.rules = rules
        self.pace = pace
        self.intent = intent or Intent()
        self.contacts: dict[PeerId, Contact] = {}
        self.seeds: tuple[PeerId, ...] = ()
        self.fired: Counter[str] = Counter()
        self._sealer = sealer
        self._check = check_signature
        self._sequence = 0
        self._status: Signed[Status] | None = None
        self._loud: object = None
        self._next_heartbeat = now
        self._last_tick = now
        self._fresh: set[PeerId] = set()
        self.degraded_set: Heard = ()
        self._asked: dict[PeerId, float] = {}
        self._out: list[Action] = []
        self._commit = tip_commit
        self.record = VoteRecord(NO_HASH)
        self._enter(tip, now)

    @property
    def tip(self) -> Manifest:
        """The newest manifest whose state is committed here."""
        return self.round.tip

    @property
    def head(self) -> Hash:
        return self.round.head

    @property
    def last_commit(self) -> Commit | None:
        """The certificate and manifest of the tip, where known."""
        return self._commit

    def is_member(self) -> bool:
        """Whether the tip names this incarnation."""
        return any(m.peer == self.me and m.incarnation == self.incarnation for m in self.tip.members)

    def is_elector(self) -> bool:
        return self._elector.get(self.me) == self.incarnation

    def alive(self, peer: PeerId, now: float) -> bool:
        """Whether `peer` was heard of late; ourselves always."""
        if peer == self.me:
            return True
        contact = self.contacts.get(peer)
        return contact is not None and not contact.gone and now - contact.at <= self.pace.suspect_seconds

    def _leader_of(self, heard: Heard, ballot: int) -> PeerId:
        order = self.round.order
        if heard:
            return next((peer for peer in order if peer in heard), PeerId(""))
        return order[ballot % len(order)] if order else PeerId("")

    def _leading(self, now: float) -> bool:
        """Whether we may act as leader: of a degraded set, of ballot 0, or of a ballot that a majority promised."""
        if not self.is_elector():
            return False
        if self.degraded_set:
            return self._leader_of(self.degraded_set, 0) == self.me
        ballot = self.round.view
        if self._leader_of((), ballot) != self.me or self.record.promised != ballot:
            return False
        return ballot == 0 or is_majority(len(self._promisers(ballot)), len(self._elector))

    def _promisers(self, ballot: int) -> list[Ballots]:
        """Ballots of the electors that promised exactly `ballot`, ours first."""
        mine = [self._ballots()] if self.record.promised == ballot else []
        return mine + [s.ballots for s in self._electors_here() if s.ballots.promised == ballot]

    def _electors_here(self) -> list[Status]:
        """Statuses of other electors that stand on our head, in the incarnation that may vote."""
        found = []
        for peer, incarnation in self._elector.items():
            contact = self.contacts.get(peer)
            if contact and contact.status.head == self.round.head and contact.status.incarnation == incarnation:
                found.append(contact.status)
        return found

    def _members_here(self, now: float) -> list[Status]:
        """Statuses of living members on our head, ours included."""
        found = [self._own_status()] if self.is_member() else []
        for member in self.tip.members:
            contact = self.contacts.get(member.peer)
            if contact and member.peer != self.me and self.alive(member.peer, now):
                status = contact.status
                if status.head == self.round.head and status.incarnation == member.incarnation:
                    found.append(status)
        return found

    def _ballots(self) -> Ballots:
        record, current = self.record, self.round
        return Ballots(current.prepare, record.promised, record.accepted_ballot, record.accepted_hash, current.closing)

    def _own_status(self) -> Status:
        current = self.round
        slices = current.plan.value.slices if current.plan else ()
        return Status(
            fingerprint=self.rules.fingerprint,
            peer=self.me,
            incarnation=self.incarnation,
            sequence=self._sequence,
            round=current.tip.round,
            head=current.head,
            work=current.work,
            intent=self.intent,
            ballots=self._ballots(),
            plan=plan_hash(current.plan.value) if current.plan else NO_HASH,
            reports=bytes(index in current.reports for index in range(len(slices))),
            staged=bytes(piece.key in current.staged for piece in slices),
            proposal=max((ballot for heard, ballot in current.proposals if not heard), default=-1),
            unheard=tuple(p for p in self._elector if p != self.me and p not in self._fresh),
        )

    def _proposal_of(self, name: Hash) -> Proposal | None:
        for signed in self.round.proposals.values():
            if manifest_hash(signed.value.manifest) == name:
                return signed.value
        return None

    def _target(self) -> Signed[Proposal] | None:
        """The proposal to stage: the decided one, else that of the highest ballot (in a degraded set: that set's)."""
        current = self.round
        if current.decided is not None:
            name = current.decided.certificate.manifest
            return next((s for s in current.proposals.values() if manifest_hash(s.value.manifest) == name), None)
        heard = self.degraded_set
        fitting = [signed for (said, _), signed in current.proposals.items() if said == heard]
        return max(fitting, key=lambda signed: signed.value.ballot, default=None)

    def _highest_acceptance(self) -> Ballots:
        if self.degraded_set:
            known = [self._ballots()] + [s.ballots for s in self._electors_here() if s.peer in self.degraded_set]
        else:
            known = self._promisers(self.round.view)
        return max(known, key=lambda ballots: ballots.accepted, default=Ballots())

    def _bound(self) -> tuple[bool, Proposal | None]:
        """Whether we must propose a certain manifest again, and its proposal where we have it.

        Of the promises (or of all that a degraded set heard) the acceptance at the highest ballot binds; a degraded
        leader is bound, next, by what it signed before.
        """
        best = self._highest_acceptance()
        if best.accepted >= 0:
            return True, self._proposal_of(best.accepted_manifest)
        if self.degraded_set and self.record.degraded is not None:
            return True, self.record.degraded.value
        return False, None

    def _contradicts(self, name: Hash) -> bool:
        """A degraded vote must not go against an acceptance that the set knows of."""
        best = self._highest_acceptance()
        return best.accepted >= 0 and best.accepted_manifest != name

    def _degraded_electors(self, now: float) -> Heard:
        """The electors that are heard, when a majority was unheard for long enough; empty otherwise (design 4)."""
        others = [peer for peer in self._elector if peer != self.me]
        if not self.is_elector() or self.round.decided:
            return ()
        silent = {peer: self._silent_seconds(peer, now) for peer in others}
        suspects = [peer for peer in others if silent[peer] > self.pace.suspect_seconds or self._is_gone(peer)]
        if is_majority(len(self._elector) - len(suspects), len(self._elector)):
            return ()
        wait = self.pace.degraded_wait_seconds(all(self._is_gone(peer) for peer in suspects))
        lost = {peer for peer in suspects if silent[peer] >= wait}
        if is_majority(len(self._elector) - len(lost), len(self._elector)):
            return ()
        return tuple(sorted(peer for peer in self._elector if peer not in lost))

    def _silent_seconds(self, peer: PeerId, now: float) -> float:
        """Time since `peer` last said, in the incarnation that may vote, that it can."""
        contact = self.contacts.get(peer)
        if contact is None or contact.status.incarnation != self._elector[peer]:
            return now - self._elector_since
        return now - contact.voting_at

    def _is_gone(self, peer: PeerId) -> bool:
        """Nothing is to be hoped for from this elector: refused, reborn without its record, or unable to vote."""
        contact = self.contacts.get(peer)
        if contact is None:
            return False
        return contact.gone or contact.status.incarnation != self._elector[peer] or not contact.status.intent.can_vote

    def _progress(self, now: float) -> None:
        if self.round.plan is not None:
            self.pace.observe_quiet(now - self.round.progress_at)
        self.round.progress_at = now

    def _enter(self, tip: Manifest, now: float) -> None:
        head = manifest_hash(tip)
        self.round = RoundState(tip, head, leader_order(head, tip.members), now, now)
        self._elector = {member.peer: member.incarnation for member in electors(tip.members)}
        self._elector_since = now
        self.degraded_set = ()
        self._asked.clear()
        if self.record.parent != head:
            self.record = VoteRecord(head)
        named = {member.peer for member in tip.members}
        for peer in [p for p, c in self.contacts.items() if p not in named and not self.alive(p, now)]:
            del self.contacts[peer]

    def _note(self, kind: str, text: str, peer: PeerId | None = None) -> None:
        self._out.append(Notice(kind, text, peer))

    def _bind(self, record: VoteRecord) -> None:
        self.record = record
        self._out.append(Persist(record))

    def _is_closing(self) -> bool:
        current = self.round
        if current.closing >= 0 or current.plan is not None or current.proposals:
            return True
        return any(status.ballots.closing >= 0 for status in self._electors_here())

    def _take_plan(self, signed: Signed[Plan], now: float) -> None:
        """Staged tiles stay: they are known by their hashes, whatever plan they came from."""
        current = self.round
        current.plan = signed
        current.reports.clear()
        current.reducing.clear()
        current.failed.clear()
        current.building = None
        current.outcome = None
        self._progress(now)

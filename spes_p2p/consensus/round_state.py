"""What the round's state machine knows, and the questions that all its parts ask. Decides nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace

from spes_p2p.consensus.actions import Action, Notice, Persist
from spes_p2p.consensus.certificate import CheckSignature
from spes_p2p.consensus.forks import Line, Standing, Way, choose, has_quorum
from spes_p2p.consensus.liveness import Liveness
from spes_p2p.consensus.membership import Member, electors, is_majority, leader_order, next_members, rank, trainers
from spes_p2p.consensus.messages import (
    MAX_MEMBERS,
    Ballots,
    Commit,
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
from spes_p2p.consensus.rules import RunRules
from spes_p2p.consensus.slices import reducer_order
from spes_p2p.consensus.state import HOPELESS, MOST_REMEMBERED, MOST_TURNS, Contact, Heard, Key, RoundState, Wanted
from spes_p2p.consensus.timing import Pace
from spes_p2p.consensus.votes import VoteRecord
from spes_p2p.ids import NO_HASH, Hash, PeerId
from spes_p2p.ownership.assign import Wish

MAX_NOTICE = 300
"""Characters of what is told to a person."""


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
        on_chain: Callable[[Hash, int], bool] = lambda head, round: True,
    ) -> None:
        self.me = me
        self.incarnation = incarnation
        self.rules = rules
        self.pace = pace
        self.intent = intent or Intent()
        self.contacts: dict[PeerId, Contact] = {}
        self.seeds: tuple[PeerId, ...] = ()
        self.uplink_bytes_per_second = 0
        """As measured, 0 while unknown; told with our statuses, within what the intent allows."""
        self.told_round = tip.round
        """The newest round by the word of the bootstrap node, which need not have its state."""
        self.fired: Counter[str] = Counter()
        self.degraded_set: Heard = ()
        self.record = VoteRecord(NO_HASH)
        self.liveness = Liveness(now)
        self.chosen: frozenset[Hash] = frozenset()
        """Children of which the organiser signed that the run goes on with them."""
        self._sealer = sealer
        self._check = check_signature
        self._sequence = self.life = 0
        self._status: Signed[Status] | None = None
        self._loud: object = None
        self._news = False
        self._poked: set[PeerId] = set()
        self._next_heartbeat = now
        self._last_event = now
        self._gone: set[PeerId] = set()
        self._kept_waiting: set[PeerId] = set()
        """Whose running step a round waited for in vain, until they are READY."""
        self._moving_in_vain: set[PeerId] = set()
        """Whose moving bytes a round waited for in vain, until a slice of theirs comes."""
        self._asked: dict[PeerId, float] = {}
        self._asked_last: PeerId | None = None
        self._asked_in_vain: Counter[PeerId] = Counter()
        self._hollow: set[PeerId] = set()
        """Whose tiles were asked for in vain: of them one try is enough, until one of theirs comes."""
        self._ahead_since: float | None = None
        self._on_chain = on_chain
        self._strays: dict[Hash, bool] = {}
        self._looked_at: dict[Hash, float] = {}
        """Until when other histories, by their heads, are not looked at again."""
        self._out: list[Action] = []
        self._commit = tip_commit
        self._elector: dict[PeerId, int] = {}
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

    def status(self) -> Status:
        """What we say of ourselves now."""
        return self._own_status()

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
        return contact is not None and peer not in self._gone and now - contact.at <= self.pace.suspect_seconds

    def _is_stray(self, status: Status) -> bool:
        """Whether a peer that is no further than we are stands on another history of the run than ours."""
        if status.head == self.head or not 0 <= status.round <= self.tip.round:
            return False
        if status.head not in self._strays:
            if len(self._strays) >= MOST_REMEMBERED:
                self._strays.clear()
            self._strays[status.head] = not self._on_chain(status.head, status.round)
        return self._strays[status.head]

    def _is_majority(self, count: int) -> bool:
        """Whether `count` of the electors of our head are a strict majority of them."""
        return is_majority(count, len(self._elector))

    def _leader_of(self, heard: Heard, ballot: int) -> PeerId:
        order = self.round.order
        if heard:
            return next((peer for peer in order if peer in heard), PeerId(""))
        return order[ballot % len(order)] if order else PeerId("")

    def _leading(self) -> bool:
        """As an elector, may we act as leader: of a degraded set, of ballot 0, or of one that a majority promised?"""
        if self.degraded_set:
            return self._leader_of(self.degraded_set, 0) == self.me
        ballot = self.round.view
        if self._leader_of((), ballot) != self.me or self.record.promised != ballot:
            return False
        return ballot == 0 or self._is_majority(len(self._promisers(ballot)))

    def _promisers(self, ballot: int) -> list[Ballots]:
        """Ballots of the electors that promised exactly `ballot`, ours first."""
        mine = [self._ballots()] if self.record.promised == ballot else []
        return mine + [s.ballots for s in self._electors_here() if s.ballots.promised == ballot]

    def _electors_here(self) -> list[Status]:
        """Statuses of other electors that stand on our head, in the incarnation that may vote."""
        found, head, contacts = [], self.round.head, self.contacts
        for peer, incarnation in self._elector.items():
            contact = contacts.get(peer)
            if contact is not None:
                status = contact.signed.value
                if status.head == head and status.incarnation == incarnation:
                    found.append(status)
        return found

    def _trainers_here(self, now: float) -> list[Status]:
        """Those of `_members_here` that train."""
        training = {member.peer for member in trainers(self.tip.members)}
        return [status for status in self._members_here(now) if status.peer in training]

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
            intent=self._told_intent(),
            ballots=self._ballots(),
            plan=plan_hash(current.plan.value) if current.plan else NO_HASH,
            reports=bytes(index in current.reports for index in range(len(slices))),
            staged=bytes(piece.key in current.staged for piece in slices),
            proposal=self._newest_ballot(),
            unheard=self._unheard(),
            moved=current.moved,
            life=self.life,
        )

    def _told_intent(self) -> Intent:
        told, measured = self.intent.uplink_bytes_per_second, self.uplink_bytes_per_second
        uplink = min(told, measured) if told and measured else told or measured
        can_vote = self.intent.can_vote and self.liveness.can_be_counted_on(self.pace, self._last_event)
        if (uplink, can_vote) == (told, self.intent.can_vote):
            return self.intent
        return replace(self.intent, uplink_bytes_per_second=uplink, can_vote=can_vote)

    def _has_staged(self, key: Key, report: Report) -> bool:
        """Whether the very tiles that a report promises are on our disk."""
        return self.round.staged.get(key) == b"".join(report.wire_hashes)

    def _newest_ballot(self) -> int:
        """The highest ballot of which we know an ordinary proposal that may be made; -1 for none."""
        ballots = (ballot for heard, ballot in self.round.proposals if not heard and self._may_act(ballot))
        return max(ballots, default=-1)

    def _unheard(self) -> tuple[PeerId, ...]:
        """Electors that do not reach us: others pass their statuses on."""
        limit = self._last_event - 2 * self.pace.heartbeat_seconds
        return tuple(
            peer
            for peer in self._elector
            if peer != self.me and (peer not in self.contacts or self.contacts[peer].direct_at < limit)
        )

    def _proposal_of(self, name: Hash) -> Signed[Proposal] | None:
        for signed in self.round.proposals.values():
            if manifest_hash(signed.value.manifest) == name:
                return signed
        return None

    def _target(self) -> Signed[Proposal] | None:
        """The proposal to stage: the decided one, else the newest that we could vote for."""
        current = self.round
        if not current.proposals:
            return None
        if current.decided is not None:
            return self._proposal_of(current.decided.certificate.manifest)
        heard, floor = self.degraded_set, 0 if self.degraded_set else self.record.promised
        fitting = sorted(
            ballot
            for said, ballot in current.proposals
            if said == heard and ballot >= floor and (heard or self._may_act(ballot))
        )
        hopeful = [ballot for ballot in fitting if not self._is_hopeless(current.proposals[(heard, ballot)])]
        return current.proposals[(heard, (hopeful or fitting)[-1])] if fitting else None

    def _note_vain_try(self, proposal: Signed[Proposal] | None) -> None:
        if proposal is not None:
            self.round.in_vain[manifest_hash(proposal.value.manifest)] += 1
            self.round.missing = None

    def _is_hopeless(self, proposal: Signed[Proposal]) -> bool:
        """Whether nobody gave its tiles, or they do not hash to its root, time and again: then another may do."""
        return self.round.in_vain.get(manifest_hash(proposal.value.manifest), 0) >= HOPELESS

    def _stands_by_a_state(self) -> bool:
        """Whether what is staged serves a proposal, or one that we accepted: then plans no longer matter."""
        return self.record.accepted is not None or self._target() is not None

    def _highest_acceptance(self) -> Ballots:
        """Of the promises (or of all that a degraded set heard) the acceptance at the highest ballot."""
        if self.degraded_set:
            known = [self._ballots()] + [s.ballots for s in self._electors_here() if s.peer in self.degraded_set]
        else:
            known = self._promisers(self.round.view)
            free = [ballots for ballots in known if self._is_free(ballots)]
            known = free if self._is_majority(len(free)) else known
        return max(known, key=lambda ballots: ballots.accepted, default=Ballots())

    def _is_free(self, ballots: Ballots) -> bool:
        """Whether an elector has accepted nothing, or what is here.

        Any majority of promises will do. One without those who stand by a state that nobody hands out is the better
        one: its tiles may never come.
        """
        return ballots.accepted < 0 or ballots.accepted_manifest in self.round.verified

    def _bound(self) -> tuple[bool, Proposal | None]:
        """Whether we must propose a certain manifest again, and its proposal where we have it.

        The acceptance at the highest ballot binds; a degraded leader is bound, next, by what it signed before.
        """
        best = self._highest_acceptance()
        if best.accepted >= 0:
            signed = self._proposal_of(best.accepted_manifest)
            return True, signed.value if signed else None
        if self.degraded_set and self.record.degraded is not None:
            return True, self.record.degraded.value
        return False, None

    def _contradicts(self, name: Hash) -> bool:
        """A degraded vote must not go against an acceptance that the set knows of."""
        best = self._highest_acceptance()
        return best.accepted >= 0 and best.accepted_manifest != name

    def _can_vote(self) -> bool:
        """Whether we are an elector that can write its votes, and has asked what became of the run."""
        return self.is_elector() and self.intent.can_vote and self.liveness.asking_since is None

    def _live_electors(self, now: float) -> list[PeerId]:
        """Electors of our tip that were heard of late, say that they can vote, and stand on it or on one before it."""
        found = [self.me] if self._can_vote() and self.liveness.can_be_counted_on(self.pace, now) else []
        return found + [peer for peer in self._elector if peer != self.me and self._is_live(peer, now)]

    def _is_live(self, peer: PeerId, now: float) -> bool:
        contact = self.contacts.get(peer)
        if contact is None or now - contact.at > self.pace.suspect_seconds:
            return False
        status = contact.signed.value
        if status.incarnation != self._elector[peer] or not status.intent.can_vote:
            return False
        return status.head == self.head or (0 <= status.round < self.tip.round and not self._is_stray(status))

    def _degraded_electors(self, now: float) -> Heard:
        """Who makes a degraded child: the live electors on our tip, where no live quorum was heard for W; else none."""
        decided = self.round.decided
        is_bound = decided is not None and not self._is_lost(decided, now)
        if is_bound or not self._can_vote() or not self.liveness.may_make(self.pace, now):
            return ()
        live = {self.me, *self._live_electors(now)}
        return tuple(sorted(p for p in live if p == self.me or self.contacts[p].status.head == self.head))

    def way_to(self, ours: Line, theirs: Line, now: float) -> Way:
        """Whether to go from our tip, the last of `ours`, to the tip of `theirs`, which was checked.

        Both begin on top of one common manifest.
        """
        accepted = self.record.accepted_ballot, self.record.accepted_hash
        may_take = self.liveness.may_take(self.pace, now)
        return choose(ours, theirs, Standing(may_take, self.rules.final_rounds, *accepted, self.chosen))

    def still_takes(self, child: Commit) -> bool:
        """Whether a child of our tip that was to be taken may be, now that its state is here."""
        is_free = has_quorum(child) or child.certificate.manifest in self.chosen
        return is_free or not self.liveness.hears_quorum

    def _is_lost(self, commit: Commit, now: float) -> bool:
        """Whether nobody who was heard for very long has the state of our certified child.

        A leaver need not go on: who has the state brings it when they meet again.
        """
        current = self.round
        moves = current.adopting or current.following or now - current.progress_at <= self.pace.deadline_seconds(0)
        if moves or self.intent.leaving or self._can_be_had(commit.certificate.manifest, now):
            current.reachable_at = now
        return now - current.reachable_at > self.pace.lost_state_wait_seconds()

    def _is_out_of_reach(self, name: Hash, now: float) -> bool:
        """Whether this child is committed by those who are given up, and none of those who are left has its state."""
        return bool(self.degraded_set) and not self._can_be_had(name, now)

    def _can_be_had(self, name: Hash, now: float) -> bool:
        """Whether the state of a certified child is here, or somebody who is heard has it."""
        bound = (signed for signed in (self.record.accepted, self.record.degraded) if signed is not None)
        if name in self.round.verified or any(manifest_hash(signed.value.manifest) == name for signed in bound):
            return True  # what we signed for is on our disk
        living = (contact.status for peer, contact in self.contacts.items() if self.alive(peer, now))
        return any(status.round > self.tip.round or status.ballots.accepted_manifest == name for status in living)

    def _is_silent(self, peer: PeerId, now: float) -> bool:
        """Whether this elector did not say of late, in the incarnation that may vote, that it can."""
        contact = self.contacts.get(peer)
        if contact is None or not self.alive(peer, now):
            return True
        status = contact.status
        return status.incarnation != self._elector[peer] or not status.intent.can_vote

    def _progress(self, now: float) -> None:
        if self.round.plan is not None:
            self.pace.observe_quiet(now - self.round.progress_at)
        self.round.progress_at = now
        self.round.borrowed = 0.0

    def _enter(self, tip: Manifest, now: float) -> None:
        head = manifest_hash(tip)
        self.round = RoundState(tip, head, leader_order(head, tip.members), now, now)
        self.round.work = Work(ready=self.intent.serving)
        self._elector = {member.peer: member.incarnation for member in electors(tip.members)}
        self.liveness.enter(now)
        self.round.asked = any(contact.status.ballots.prepare >= 0 for contact in self.contacts.values())
        self.degraded_set = ()
        self._ahead_since = None
        if self._asked_last is not None:
            self._asked_in_vain.pop(self._asked_last, None)
            self._asked_last = None
        self._asked = {peer: at for peer, at in self._asked.items() if self._asked_in_vain[peer]}
        if self.record.parent != head:
            self.record = VoteRecord(head)
        named = {member.peer for member in tip.members}
        for peer in [p for p in self.contacts if p not in named and not self.alive(p, now)]:
            del self.contacts[peer]

    def _note(self, kind: str, text: str, peer: PeerId | None = None) -> None:
        """Cleaned and cut: words of others may be part of it, and it goes to a terminal."""
        plain = "".join(sign if sign.isprintable() else "?" for sign in text[:MAX_NOTICE])
        self._out.append(Notice(kind, plain, peer))

    def _bind(self, record: VoteRecord) -> None:
        self.record = record
        self.round.missing = None
        self._out.append(Persist(record))

    def _is_closing(self) -> bool:
        current = self.round
        if current.closing >= 0 or current.plan is not None or current.proposals:
            return True
        return any(self._may_close(status) for status in self._electors_here())

    def _may_close(self, status: Status) -> bool:
        """Whether an elector says that it closes the round, and may: it leads the ballot of which it says so."""
        ballot = status.ballots.closing
        if ballot < 0:
            return False
        if self.degraded_set:
            return status.peer == self._leader_of(self.degraded_set, 0)
        return status.peer == self._leader_of((), ballot) and (ballot == 0 or self._is_reached(ballot))

    def _is_reached(self, ballot: int) -> bool:
        """Whether a majority of the electors has promised `ballot` or a later one, as far as we heard."""
        return self._is_majority(sum(promised >= ballot for promised in self._promised()))

    def _may_act(self, ballot: int) -> bool:
        """Whether somebody may plan or propose at `ballot`: the first leader, or one that a majority promised.

        A word of that may come later than the plan; then both come again.
        """
        return ballot == 0 or (ballot > 0 and self._is_reached(ballot))

    def _promised(self) -> list[int]:
        """The highest ballot that each elector on our head has promised, ours among them."""
        mine = [self.record.promised] if self.is_elector() else []
        return mine + [status.ballots.promised for status in self._electors_here()]

    def _is_near(self, ballot: int) -> bool:
        """Whether a ballot can come about by turns: from our view, or the one that a majority has reached."""
        most = MOST_TURNS * len(self._elector)
        return 0 <= ballot <= self.round.view + most or (ballot > most and self._is_reached(ballot - most))

    def _take_plan(self, signed: Signed[Plan], now: float) -> None:
        """Staged tiles stay: they are known by their hashes, whatever plan they came from."""
        current = self.round
        current.plan = signed
        current.plan_at = now
        current.mine = tuple(i for i, piece in enumerate(signed.value.slices) if self.me in reducer_order(piece))
        current.index_of = {piece.key: i for i, piece in enumerate(signed.value.slices)}
        current.reports.clear()
        current.voids.clear()
        current.seen.clear()
        current.reducing.clear()
        current.failed.clear()
        current.missing = None
        current.building = None
        current.outcome = None
        current.progress_at = now

    def _missing(self) -> dict[Key, Wanted]:
        """Slices that are wanted and not staged; worked out anew only when something that it hangs on has changed."""
        current = self.round
        if current.missing is None:
            staged = current.staged
            current.missing = {w.piece.key: w for w in self._wanted() if staged.get(w.piece.key) != w.hashes}
        return current.missing

    def _wanted(self) -> list[Wanted]:
        """Slices to be staged here, with their hashes and who has them surely."""
        current = self.round
        proposal = self._target()
        if proposal is not None and manifest_hash(proposal.value.manifest) in current.verified:
            return []
        if proposal is not None:
            pairs = zip(proposal.value.manifest.slices, proposal.value.wire_hashes, strict=True)
            return [Wanted(piece, hashes, piece.reducer) for piece, hashes in pairs]
        if current.plan is None or self._stands_by_a_state():
            return []
        slices = current.plan.value.slices
        return [
            Wanted(slices[index], b"".join(report.value.wire_hashes), report.value.reducer)
            for index, report in current.reports.items()
        ]

    def _verified_before(self) -> Proposal | None:
        """A proposal of a lower ballot whose state is here: a free leader takes it up, which saves everybody's work."""
        current = self.round
        if self.degraded_set or not current.verified:
            return None
        fitting = [
            (ballot, signed.value)
            for (heard, ballot), signed in current.proposals.items()
            if not heard and manifest_hash(signed.value.manifest) in current.verified
        ]
        return max(fitting, key=lambda pair: pair[0])[1] if fitting else None

    def _take_decision(self, commit: Commit, now: float) -> None:
        self.round.decided, self.round.reachable_at = commit, now
        self.round.missing = None
        self.round.failed.clear()
        self._progress(now)

    def _forget_votes(self) -> None:
        """Of what we have voted only what is on disk may count; what others decided comes again."""
        current = self.round
        current.own_vote = current.own_degraded = current.decided = None
        current.prepare = -1
        for ballots in (current.votes, current.degraded_votes):
            for votes in ballots.values():
                votes.pop(self.me, None)
        for key in [key for key, signed in current.proposals.items() if signed.author == self.me]:
            del current.proposals[key]

    def _next_members(
        self, now: float, needed: Collection[PeerId] = ()
    ) -> tuple[tuple[Member, ...], dict[PeerId, Wish]]:
        """Who would be a member after this round, and what they want: everyone heard, newcomers, but no leavers.

        Leavers that are `needed` count as heard.
        """
        heard: list[Member] = []
        newcomers: list[Member] = []
        leavers: set[PeerId] = set()
        wishes: dict[PeerId, Wish] = {}
        known = {member.peer: member.incarnation for member in self.tip.members}
        trains = {member.peer: member.trains for member in self.tip.members}
        statuses = [self._own_status()] + [c.status for p, c in self.contacts.items() if self.alive(p, now)]
        for status in statuses:
            intent, is_known = status.intent, known.get(status.peer) == status.incarnation
            does_train = trains[status.peer] if is_known else not intent.serving
            member = Member(status.peer, status.incarnation, False, intent.link_class, does_train)
            if status.intent.leaving and status.peer not in needed:
                leavers.add(status.peer)
            elif is_known:
                heard.append(member)
            elif status.intent.joining and status.head == self.round.head:  # who has caught up
                newcomers.append(member)
            wishes[status.peer] = Wish(intent.max_columns, intent.claims, intent.releases) if does_train else Wish(0)
        if not heard and not newcomers:  # the last to leave stays named, so that it can come back and go on
            heard = [m for m in self.tip.members if m.peer in leavers]
            leavers = set()
        newcomers.sort(key=lambda member: rank(self.round.head, member.peer))  # a low peer id is no privilege
        members = next_members(self.tip.members, heard, newcomers, leavers, MAX_MEMBERS)
        named = {member.peer for member in members}
        return members, {peer: wish for peer, wish in wishes.items() if peer in named}

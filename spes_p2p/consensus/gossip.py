"""What this peer says to whom: its status, and what the receiver lacks.

An author says what is new at once; everybody repeats and passes on what others lack with each heartbeat. So an event
costs at most one envelope a peer, and what is lost comes again."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from spes_p2p.consensus.actions import Send
from spes_p2p.consensus.contacts import Contacts
from spes_p2p.consensus.content import Content, Envelope
from spes_p2p.consensus.heard_votes import HeardVotes
from spes_p2p.consensus.leadership import Leadership
from spes_p2p.consensus.members import Members
from spes_p2p.consensus.membership import most_new, rank
from spes_p2p.consensus.messages import (
    Plan,
    Report,
    Signed,
    Status,
    Votes,
    plan_hash,
)
from spes_p2p.consensus.part import Part
from spes_p2p.consensus.proposals import Proposals
from spes_p2p.consensus.staging import Staging
from spes_p2p.consensus.state import Contact
from spes_p2p.consensus.vote_record import ballot_of
from spes_p2p.ids import PeerId, sha256


@dataclass(eq=False)
class Gossip(Part):
    """Turns the state into messages."""

    _contacts: Contacts
    _leadership: Leadership
    _members: Members
    _proposals: Proposals
    _staging: Staging

    def flush(self, now: float) -> None:
        """Speaks to all at each heartbeat and when our state has changed, else to those whose state has."""
        current = self._state.round
        beat = now >= self._state.next_heartbeat
        if beat:
            self._state.next_heartbeat = now + self._pace.heartbeat_seconds
            for sent in current.sent.values():
                sent.clear()
        ballots = self._leadership.own_ballots()
        votes = (ballots.prevoted, ballots.precommitted, ballots.closing, self._proposals.lacks())
        can_vote = self._liveness.can_be_counted_on(self._pace, now)
        loud = (current.tip_hash, current.work.ready, votes, self._own.intent, can_vote, current.plan is None)
        speak = beat or loud != self._own.last_broadcast
        if speak:
            self._own.last_broadcast = loud
            self._members.speak()
        audience = (
            self._audience(now)
            if speak or self._own.has_news
            else [p for p in sorted(self._others.reply_due) if self._contacts.alive(p, now)]
        )
        newcomers = self._next_newcomers() if audience else []
        for peer in audience:
            envelope = self.envelope(peer, now if beat else None, newcomers)
            if speak or envelope.has_news:
                self._state.out.append(Send(peer, envelope))
        self._own.has_news = False
        self._others.reply_due.clear()

    def _audience(self, now: float) -> list[PeerId]:
        named = [member.peer for member in self._state.tip.members if member.peer != self._me]
        strangers = [p for p in self._others.contacts if p not in named and self._contacts.alive(p, now)]
        return (
            named
            + strangers
            + [p for p in self._others.seeds if p not in named and p not in strangers and p != self._me]
        )

    def answer(self, peer: PeerId) -> Envelope:
        """What `peer` is told when it asks, between two heartbeats."""
        return self.envelope(peer, None, self._next_newcomers())

    def envelope(self, peer: PeerId, beat_at: float | None, newcomers: Collection[PeerId]) -> Envelope:
        """Our status and what `peer` lacks according to its last status; nothing is sent twice between two heartbeats.

        `beat_at`: the time of the heartbeat, which also carries the messages of others; None between heartbeats.
        `newcomers`: who may be named next.
        """
        current = self._state.round
        contact = self._others.contacts.get(peer)
        statuses: tuple[Signed[Status], ...] = (self._own.status,) if self._own.status else ()
        if contact is None:
            return Envelope(self._me, statuses)
        theirs = contact.status
        answers = 0 if contact.is_old else theirs.life
        sent = current.sent.setdefault(peer, set())
        statuses += _remembered(contact)
        if beat_at is not None and theirs.unheard and self._state.is_member():
            statuses += self._passed_on(theirs, beat_at)
        if self._contacts.is_behind(theirs) or theirs.round < 0:
            commit = self._own.commit if _once(sent, "tip") else None
            return Envelope(self._me, statuses, commit=commit, answers=answers)
        if theirs.head != current.tip_hash or self._looks_on(theirs, newcomers):
            return Envelope(self._me, statuses, answers=answers)
        relay = beat_at is not None
        plan = self._plan_for(theirs, sent, relay)
        return Envelope(
            self._me,
            statuses,
            plan=plan,
            ready=tuple(current.ready[entry] for entry in plan.value.roster) if plan else (),
            reports=self._reports_for(theirs, sent, relay) if current.plan is not None else (),
            votes=self._votes_for(theirs, sent, relay),
            contents=self._contents_for(theirs, sent),
            commit=current.decided if relay and current.decided and _once(sent, "decided") else None,
            answers=answers,
        )

    def _looks_on(self, theirs: Status, newcomers: Collection[PeerId]) -> bool:
        """Whether a peer takes no part in this round or the next: an archive, or a newcomer that has to wait.

        Keys cost nothing: all that a round says, for as many as there may be, would be more than a home's uplink bears.
        """
        if any(member.peer == theirs.peer for member in self._state.tip.members):
            return False
        return not theirs.intent.joining or theirs.peer not in newcomers

    def _next_newcomers(self) -> list[PeerId]:
        """Whom the next manifest may name, by the same rule (see `next_members`)."""
        head, now, admission = self._state.tip_hash, self._state.last_event, self._state.admission()
        members = {member.peer for member in self._state.tip.members}
        strange = (contact.status for peer, contact in self._others.contacts.items() if peer not in members)
        here = (s.peer for s in strange if s.head == head and s.intent.joining and not s.intent.leaving)
        living = [peer for peer in here if self._contacts.alive(peer, now) and not admission.is_banned(peer)]
        vouched = [peer for peer in living if admission.has_strangers and admission.is_trusted(peer)]
        strangers = sorted((peer for peer in living if peer not in vouched), key=lambda peer: rank(head, peer))
        return vouched + strangers[: most_new(len(members))]

    def _passed_on(self, theirs: Status, now: float) -> tuple[Signed[Status], ...]:
        """Fresh statuses of electors that do not reach `theirs` themselves; whatever it asks for, each once.

        Members do it: who looks on has no tiles to pass on, and a quorum that is heard and cannot work would be renewed
        by nobody.
        """
        limit = now - 2 * self._pace.heartbeat_seconds
        asked = {*theirs.unheard} - {theirs.peer}
        known = (self._others.contacts.get(peer) for peer in self._state.electors if peer in asked)
        return tuple(contact.signed for contact in known if contact is not None and contact.at >= limit)

    def _plan_for(self, theirs: Status, sent: set[object], relay: bool) -> Signed[Plan] | None:
        plan = self._state.round.plan
        if plan is None or not (relay or plan.author == self._me) or theirs.plan == plan_hash(plan.value):
            return None
        return plan if _once(sent, plan_hash(plan.value)) else None

    def _reports_for(self, theirs: Status, sent: set[object], relay: bool) -> tuple[Signed[Report], ...]:
        """Own reports at once, those of others only where we can serve what they promise; none before the plan."""
        current = self._state.round
        assert current.plan is not None
        if theirs.plan != plan_hash(current.plan.value):
            return ()
        slices, known = current.plan.value.slices, theirs.reports
        wanted = [
            report
            for index, report in current.reports.items()
            if not (index < len(known) and known[index])
            and (report.author == self._me or (relay and self._staging.has_staged(slices[index].key, report.value)))
        ]
        for index, voids in current.empty_reports.items():
            if self._me in voids and index not in current.reports:
                wanted.append(voids[self._me])
        return tuple(r for r in wanted if _once(sent, ("report", r.value.index, r.author)))

    def _votes_for(self, theirs: Status, sent: set[object], relay: bool) -> tuple[Votes, ...]:
        """Ours, with what they lack of the newest proposal and polka; and those of electors that do not reach them."""
        heard, told = self._state.round.vote.heard, self._state.round.vote.to_tell
        proposal, polka = told.proposal, told.polka
        if proposal and (theirs.proposal >= proposal.value.ballot or not (relay or proposal.author == self._me)):
            proposal = None
        if polka and (theirs.ballots.polka >= polka.ballot or not relay):
            polka = None
        mine = Votes(told.prevote, told.precommit, proposal, polka)
        others = [_said_by(p, heard) for p in theirs.unheard if relay and p != self._me]
        known = tuple(v for v in (mine, *others) if v != Votes() and _once(sent, _key(v)))
        return known + self._votes_before_for(theirs.peer) if relay else known

    def _votes_before_for(self, peer: PeerId) -> tuple[Votes, ...]:
        """All that we heard of the vote on our tip, for one elector that nobody can foresee: who votes this way before
        some and that way before others is found out so, and every liar is somebody's neighbour soon."""
        before, current = self._others.votes_before, self._state.round
        if before is None or current.has_told_votes:
            return ()
        here = [status.peer for status in self._contacts.electors_here()]
        if peer != min(here, key=lambda one: sha256(self._own.secret, current.tip_hash, one.encode()), default=None):
            return ()
        current.has_told_votes = True
        first = (signed for signed in before.proposals.values() if signed.value.polka is None)
        proposals = tuple(Votes(proposal=signed) for signed in first)
        known = (_said_by(one, before) for one in before.electorate.order)
        return proposals + tuple(votes for votes in known if votes != Votes())

    def _contents_for(self, theirs: Status, sent: set[object]) -> tuple[Content, ...]:
        """What they ask for; what we propose without being asked."""
        names, proposal = list(theirs.lacks), self._state.round.vote.to_tell.proposal
        if proposal and proposal.author == self._me and theirs.proposal < proposal.value.ballot:
            names.append(proposal.value.value)
        known = ((name, self._proposals.named(name)) for name in dict.fromkeys(names))
        return tuple(content for name, content in known if content and _once(sent, ("content", name)))


def _remembered(contact: Contact) -> tuple[Signed[Status], ...]:
    """What a peer has said before its last words, where it may have forgotten it."""
    if contact.is_old:
        return (contact.signed,)
    is_asking = not contact.status.intent.can_vote
    return (contact.furthest,) if is_asking and contact.furthest is not None else ()


def _once(sent: set[object], what: object) -> bool:
    if what in sent:
        return False
    sent.add(what)
    return True


def _said_by(peer: PeerId, heard: HeardVotes) -> Votes:
    return Votes(heard.prevotes.get(peer), heard.precommits.get(peer))


def _key(votes: Votes) -> object:
    """What tells what was sent once."""
    author = votes.prevote or votes.precommit
    polka = votes.polka.ballot if votes.polka else -1
    said = ballot_of(votes.prevote), ballot_of(votes.precommit), ballot_of(votes.proposal), polka
    return "votes", author.author if author else "", *said

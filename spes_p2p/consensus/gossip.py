"""What the round's state machine says to whom: its status, and what the receiver lacks.

An author says what is new at once; everybody repeats and passes on what others lack with each heartbeat. So an event
costs at most one envelope a peer, and what is lost comes again.
"""

from __future__ import annotations

from spes_p2p.consensus.actions import Send
from spes_p2p.consensus.messages import Envelope, Plan, Proposal, Report, Signed, Status, manifest_hash, plan_hash
from spes_p2p.consensus.round_state import CoreState
from spes_p2p.consensus.state import Contact
from spes_p2p.ids import PeerId


class Speaking(CoreState):
    """Turns the state into messages."""

    def _flush(self, now: float) -> None:
        """Speaks to all at each heartbeat and when our state has changed, else to those whose state has."""
        current, record = self.round, self.record
        beat = now >= self._next_heartbeat
        if beat:
            self._next_heartbeat = now + self.pace.heartbeat_seconds
            for sent in current.sent.values():
                sent.clear()
        votes = (current.prepare, record.promised, record.accepted_ballot, current.closing)
        can_vote = self.liveness.can_be_counted_on(self.pace, now)
        loud = (current.head, current.work.ready, votes, self.intent, can_vote, current.plan is None)
        speak = beat or loud != self._loud
        if speak:
            self._loud = loud
            self._sequence += 1
            self._status = self._sealer.seal(self._own_status())
        audience = (
            self._audience(now) if speak or self._news else [p for p in sorted(self._poked) if self.alive(p, now)]
        )
        for peer in audience:
            envelope = self._envelope(peer, now if beat else None)
            if speak or _has_news(envelope):
                self._out.append(Send(peer, envelope))
        self._news = False
        self._poked.clear()

    def _audience(self, now: float) -> list[PeerId]:
        named = [member.peer for member in self.tip.members if member.peer != self.me]
        strangers = [p for p in self.contacts if p not in named and self.alive(p, now)]
        return named + strangers + [p for p in self.seeds if p not in named and p not in strangers and p != self.me]

    def _envelope(self, peer: PeerId, beat_at: float | None) -> Envelope:
        """Our status and what `peer`, by its last word, lacks; nothing twice between two heartbeats.

        With `beat_at` also what others have said: at the heartbeat at that time.
        """
        current = self.round
        contact = self.contacts.get(peer)
        statuses: tuple[Signed[Status], ...] = (self._status,) if self._status else ()
        if contact is None:
            return Envelope(self.me, statuses)
        theirs = contact.status
        answers = 0 if contact.is_old else theirs.life
        sent = current.sent.setdefault(peer, set())
        statuses += self._remembered(contact)
        if beat_at is not None and theirs.unheard:
            statuses += self._passed_on(theirs, beat_at)
        if theirs.round < current.tip.round:
            commit = self._commit if self._once(sent, "tip") else None
            return Envelope(self.me, statuses, commit=commit, answers=answers)
        if theirs.head != current.head or self._looks_on(theirs):
            return Envelope(self.me, statuses, answers=answers)
        relay = beat_at is not None
        vote, degraded = current.own_vote, current.own_degraded
        return Envelope(
            self.me,
            statuses,
            plan=self._plan_for(theirs, sent, relay),
            reports=self._reports_for(theirs, sent, relay) if current.plan is not None else (),
            proposals=self._proposals_for(theirs, sent, relay) if current.proposals else (),
            votes=(vote,) if vote and self._once(sent, ("vote", vote.value.ballot)) else (),
            degraded_votes=(degraded,) if degraded and self._once(sent, degraded.value) else (),
            commit=current.decided if relay and current.decided and self._once(sent, "decided") else None,
            answers=answers,
        )

    @staticmethod
    def _remembered(contact: Contact) -> tuple[Signed[Status], ...]:
        """What a peer has said before its last words, where it may have forgotten it."""
        if contact.is_old:
            return (contact.signed,)
        is_asking = not contact.status.intent.can_vote
        return (contact.furthest,) if is_asking and contact.furthest is not None else ()

    def _looks_on(self, theirs: Status) -> bool:
        """Whether a peer takes no part in rounds, such as an archive."""
        return not theirs.intent.joining and all(member.peer != theirs.peer for member in self.tip.members)

    def _passed_on(self, theirs: Status, now: float) -> tuple[Signed[Status], ...]:
        """Fresh statuses of electors that do not reach `theirs` themselves."""
        limit = now - 2 * self.pace.heartbeat_seconds
        known = ((p, self.contacts.get(p)) for p in theirs.unheard if p != theirs.peer)
        return tuple(contact.signed for _, contact in known if contact is not None and contact.at >= limit)

    def _plan_for(self, theirs: Status, sent: set[object], relay: bool) -> Signed[Plan] | None:
        plan = self.round.plan
        if plan is None or not (relay or plan.author == self.me) or theirs.plan == plan_hash(plan.value):
            return None
        return plan if self._once(sent, plan_hash(plan.value)) else None

    def _reports_for(self, theirs: Status, sent: set[object], relay: bool) -> tuple[Signed[Report], ...]:
        """Own reports at once, those of others only where we can serve what they promise; none before the plan."""
        current = self.round
        assert current.plan is not None
        if theirs.plan != plan_hash(current.plan.value):
            return ()
        slices, known = current.plan.value.slices, theirs.reports
        wanted = [
            report
            for index, report in current.reports.items()
            if not (index < len(known) and known[index])
            and (report.author == self.me or (relay and self._has_staged(slices[index].key, report.value)))
        ]
        for index, voids in current.voids.items():
            if self.me in voids and index not in current.reports:
                wanted.append(voids[self.me])
        return tuple(r for r in wanted if self._once(sent, ("report", r.value.index, r.author)))

    def _proposals_for(self, theirs: Status, sent: set[object], relay: bool) -> tuple[Signed[Proposal], ...]:
        """The newest proposal; to a candidate also what was accepted; in a degraded set that set's."""
        current = self.round
        chosen: list[Signed[Proposal]] = []
        newest = self._newest_ballot()
        if newest > theirs.proposal:
            chosen.append(current.proposals[((), newest)])
        if not relay:
            chosen = [signed for signed in chosen if signed.author == self.me]
        asks = theirs.ballots.prepare >= 0 or bool(self.degraded_set)
        if asks and self.record.accepted is not None:
            chosen.append(self.record.accepted)
        if asks and relay:
            chosen += self._accepted_by_others()
        chosen += [
            signed
            for (heard, _), signed in current.proposals.items()
            if heard and theirs.peer in heard and (relay or signed.author == self.me)
        ]
        return tuple(s for s in chosen if self._once(sent, ("proposal", s.value.heard, s.value.ballot)))

    def _accepted_by_others(self) -> list[Signed[Proposal]]:
        """Proposals that other electors say they accepted, as far as we have them: a candidate may need one."""
        names = {status.ballots.accepted_manifest for status in self._electors_here() if status.ballots.accepted >= 0}
        return [s for s in self.round.proposals.values() if manifest_hash(s.value.manifest) in names]

    @staticmethod
    def _once(sent: set[object], what: object) -> bool:
        if what in sent:
            return False
        sent.add(what)
        return True


def _has_news(envelope: Envelope) -> bool:
    return bool(
        envelope.plan
        or envelope.reports
        or envelope.proposals
        or envelope.votes
        or envelope.degraded_votes
        or envelope.commit
    )

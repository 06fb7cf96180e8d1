"""What the round's state machine says to whom: its status, and what the receiver lacks."""

from __future__ import annotations

from spes_p2p.ids import NO_HASH, PeerId
from spes_p2p.sync.actions import (
    Send,
)
from spes_p2p.sync.messages import (
    Envelope,
    Plan,
    Proposal,
    Report,
    Signed,
    Status,
    plan_hash,
)
from spes_p2p.sync.round_state import CoreState


class Speaking(CoreState):
    """Turns the state into messages."""

    def _flush(self, now: float) -> None:
        """Speaks at each heartbeat, and at once when something that others wait for has changed."""
        beat = now >= self._next_heartbeat
        if beat:
            self._next_heartbeat = now + self.pace.heartbeat_seconds
            for sent in self.round.sent.values():
                sent.clear()
            limit = 2 * self.pace.heartbeat_seconds
            self._fresh = {p for p, c in self.contacts.items() if now - c.at <= limit}
        loud = (self.round.head, self.round.work.ready, self._ballots(), self.intent, self.round.plan is None)
        if beat or loud != self._loud:
            self._loud = loud
            self._sequence += 1
            self._status = self._sealer.seal(self._own_status())
            beat = True
        for peer in self._audience(now):
            envelope = self._envelope(peer, resend=beat)
            if beat or _has_news(envelope):
                self._out.append(Send(peer, envelope))

    def _audience(self, now: float) -> list[PeerId]:
        named = [member.peer for member in self.tip.members if member.peer != self.me]
        strangers = [p for p in self.contacts if p not in named and self.alive(p, now)]
        return named + strangers + [p for p in self.seeds if p not in named and p not in strangers and p != self.me]

    def _envelope(self, peer: PeerId, resend: bool) -> Envelope:
        """Our status and what `peer`, by its last word, lacks; nothing twice between two heartbeats."""
        current = self.round
        contact = self.contacts.get(peer)
        statuses: tuple[Signed[Status], ...] = (self._status,) if self._status else ()
        if contact is None:
            return Envelope(self.me, statuses)
        theirs = contact.status
        sent = current.sent.setdefault(peer, set())
        if theirs.round < current.tip.round:
            commit = self._commit if self._once(sent, "tip") else None
            return Envelope(self.me, statuses, commit=commit)
        if theirs.head != current.head:
            return Envelope(self.me, statuses)
        if resend:
            statuses += tuple(self.contacts[p].signed for p in theirs.unheard if p in self._fresh and p != peer)
        return Envelope(
            self.me,
            statuses,
            plan=self._plan_for(theirs, sent),
            reports=self._reports_for(theirs, sent),
            proposals=self._proposals_for(theirs, sent),
            votes=(current.own_vote,) if current.own_vote and self._once(sent, current.own_vote.value) else (),
            degraded_votes=(current.own_degraded,)
            if current.own_degraded and self._once(sent, current.own_degraded.value)
            else (),
            commit=current.decided if current.decided and self._once(sent, "decided") else None,
        )

    def _plan_for(self, theirs: Status, sent: set[object]) -> Signed[Plan] | None:
        plan = self.round.plan
        if plan is None or theirs.plan == plan_hash(plan.value) or not self._once(sent, plan_hash(plan.value)):
            return None
        return plan

    def _reports_for(self, theirs: Status, sent: set[object]) -> tuple[Signed[Report], ...]:
        current = self.round
        if current.plan is None or (theirs.plan != plan_hash(current.plan.value) and theirs.plan != NO_HASH):
            return ()
        known = theirs.reports
        return tuple(
            report
            for index, report in current.reports.items()
            if not (index < len(known) and known[index]) and self._once(sent, ("report", index, report.author))
        )

    def _proposals_for(self, theirs: Status, sent: set[object]) -> tuple[Signed[Proposal], ...]:
        """The newest proposal; to a candidate also the one that we accepted; in a degraded set that set's."""
        current = self.round
        chosen: list[Signed[Proposal]] = []
        newest = max((k for h, k in current.proposals if not h), default=-1)
        if newest > theirs.proposal:
            chosen.append(current.proposals[((), newest)])
        if self.record.accepted is not None and (theirs.ballots.prepare >= 0 or self.degraded_set):
            chosen.append(self.record.accepted)
        chosen += [signed for (heard, _), signed in current.proposals.items() if heard and theirs.peer in heard]
        return tuple(s for s in chosen if self._once(sent, ("proposal", s.value.heard, s.value.ballot)))

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

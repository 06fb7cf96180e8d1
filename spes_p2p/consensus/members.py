"""What this peer says of itself, and which members it can count on now."""

from __future__ import annotations

from dataclasses import dataclass, replace

from spes_p2p.consensus.contacts import Contacts
from spes_p2p.consensus.leadership import Leadership
from spes_p2p.consensus.membership import trainers
from spes_p2p.consensus.messages import Intent, Ready, Signed, Status, plan_hash
from spes_p2p.consensus.part import Part
from spes_p2p.consensus.proposals import Proposals
from spes_p2p.consensus.statements import ready_for
from spes_p2p.ids import NO_HASH, PeerId


@dataclass(eq=False)
class Members(Part):
    """This peer and the members of its tip, as far as they are heard."""

    _contacts: Contacts
    _leadership: Leadership
    _proposals: Proposals

    def own_status(self) -> Status:
        current = self._state.round
        slices = current.plan.value.slices if current.plan else ()
        return Status(
            fingerprint=self._rules.fingerprint,
            peer=self._me,
            incarnation=self._own.incarnation,
            sequence=self._own.sequence,
            round=current.tip.round,
            head=current.tip_hash,
            work=current.work,
            intent=self.announced_intent(),
            ballots=self._leadership.own_ballots(),
            plan=plan_hash(current.plan.value) if current.plan else NO_HASH,
            reports=bytes(index in current.reports for index in range(len(slices))),
            staged=bytes(piece.key in current.staged for piece in slices),
            proposal=self._leadership.proposed(),
            lacks=self._proposals.lacks(),
            unheard=self._contacts.unheard(),
            moved=current.moved,
            life=self._own.life,
            ready_signature=own.signature if (own := self.own_ready()) else b"",
        )

    def own_ready(self) -> Signed[Ready] | None:
        """What we have trained, signed once; None while we train on, or where it is nothing."""
        current = self._state.round
        ready = ready_for(self._rules.fingerprint, current.tip_hash, self._me, self._own.incarnation, current.work)
        if ready is None:
            return None
        if current.own_ready is None or current.own_ready.value != ready:
            current.own_ready = self._state.identity.sealer.seal(ready)
        return current.own_ready

    def announced_intent(self) -> Intent:
        told, measured = self._own.intent.uplink_bytes_per_second, self._own.uplink_bytes_per_second
        uplink = min(told, measured) if told and measured else told or measured
        can_vote = self._own.intent.can_vote and self._liveness.can_be_counted_on(self._pace, self._state.last_event)
        if (uplink, can_vote) == (told, self._own.intent.can_vote):
            return self._own.intent
        return replace(self._own.intent, uplink_bytes_per_second=uplink, can_vote=can_vote)

    def members_here(self, now: float) -> list[Status]:
        """Statuses of living members on our head, ours included."""
        found = [self.own_status()] if self._state.is_member() else []
        for member in self._state.tip.members:
            contact = self._others.contacts.get(member.peer)
            if contact and member.peer != self._me and self._contacts.alive(member.peer, now):
                status = contact.status
                if status.head == self._state.round.tip_hash and status.incarnation == member.incarnation:
                    found.append(status)
        return found

    def trainers_here(self, now: float) -> list[Status]:
        """Those of `_members_here` that train."""
        training = {member.peer for member in trainers(self._state.tip.members)}
        return [status for status in self.members_here(now) if status.peer in training]

    def live_electors(self, now: float) -> list[PeerId]:
        """Electors of our tip that were heard of late, say that they can vote, and stand on it or on one before it."""
        found = [self._me] if self._leadership.can_vote() and self._liveness.can_be_counted_on(self._pace, now) else []
        return found + [peer for peer in self._state.electors if peer != self._me and self._is_live(peer, now)]

    def _is_live(self, peer: PeerId, now: float) -> bool:
        contact = self._others.contacts.get(peer)
        if contact is None or now - contact.at > self._pace.suspect_seconds:
            return False
        status = contact.signed.value
        if status.incarnation != self._state.electors[peer] or not status.intent.can_vote:
            return False
        return status.head == self._state.tip_hash or (
            0 <= status.round < self._state.tip.round and not self._contacts.is_forked(status)
        )

    def speak(self) -> None:
        """Signs our status as it is now."""
        self._own.sequence += 1
        self._own.status = self._state.identity.sealer.seal(self.own_status())

    def statuses(self, now: float) -> list[Signed[Status]]:
        """The newest words of all who live, ours included: next members follow from them."""
        if self._own.status is None or not self._still_holds(self._own.status.value):
            self.speak()
        assert self._own.status is not None
        others = self._others.contacts.items()
        return [self._own.status, *(contact.signed for peer, contact in others if self._contacts.alive(peer, now))]

    def _still_holds(self, said: Status) -> bool:
        """Whether we would say the same of what next members hang on."""
        return (said.head, said.incarnation, said.intent) == (
            self._state.tip_hash, self._own.incarnation, self.announced_intent()
        )  # fmt: skip

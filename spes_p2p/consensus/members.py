"""What this peer says of itself, and which members it can count on now."""

from __future__ import annotations

from dataclasses import dataclass, replace

from spes_p2p.consensus.bounds import is_sane_intent
from spes_p2p.consensus.contacts import Contacts
from spes_p2p.consensus.leadership import Leadership
from spes_p2p.consensus.membership import rank, trainers
from spes_p2p.consensus.messages import Declaration, Intent, Signed, Status, declared, plan_hash
from spes_p2p.consensus.part import Part
from spes_p2p.consensus.place import roll_number
from spes_p2p.consensus.proposals import Proposals
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
            counted=current.tip.counted,
            roll=roll_number(current.tip),
            silent=self._silent(),
        )

    def _silent(self) -> tuple[PeerId, ...]:
        """Trusted members whom we do not hear, not even through others."""
        admission, now = self._state.admission(), self._state.last_event
        trusted = (member.peer for member in self._state.tip.members if admission.is_trusted(member.peer))
        return tuple(peer for peer in trusted if not self._contacts.alive(peer, now))

    def announced_intent(self) -> Intent:
        told, measured = self._own.intent.uplink_bytes_per_second, self._own.uplink_bytes_per_second
        uplink = min(told, measured) if told and measured else told or measured
        can_vote = self._own.intent.can_vote and self._liveness.can_be_counted_on(self._pace, self._state.last_event)
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
        """Electors of our tip that were heard of late, say that they can vote, and stand on it or lower."""
        found = [self._me] if self._leadership.can_vote() and self._liveness.can_be_counted_on(self._pace, now) else []
        return found + [peer for peer in self._state.electors if peer != self._me and self._is_live(peer, now)]

    def _is_live(self, peer: PeerId, now: float) -> bool:
        contact = self._others.contacts.get(peer)
        if contact is None or now - contact.at > self._pace.suspect_seconds:
            return False
        status = contact.signed.value
        if status.incarnation != self._state.electors[peer] or not status.intent.can_vote:
            return False
        return status.head == self._state.tip_hash or self._contacts.is_behind(status)

    def speak(self) -> None:
        """Signs our status as it is now."""
        self._own.sequence += 1
        self._own.status = self._state.identity.sealer.seal(self.own_status())

    def own_declaration(self) -> Signed[Declaration]:
        """What we have trained and want, signed; said anew where it is something else by now."""
        if self._own.status is None or not self._still_holds(self._own.status.value):
            self.speak()
        assert self._own.status is not None
        return declared(self._own.status)

    def declarations(self, now: float) -> list[Signed[Declaration]]:
        """The newest of all who live and whom the next manifest may name, ours included: next members follow from them.

        Members come first, electors before others; then newcomers, as far as they may vote, and strangers last, in the
        order in which they are named (see `members_after`).
        """
        tip, admission = self._state.tip, self._state.admission()
        members = {member.peer for member in tip.members}
        others = self._others.contacts.items()
        known = [self.own_declaration(), *(declared(c.signed) for peer, c in others if self._contacts.alive(peer, now))]
        named = [one for one in known if is_sane_intent(one.value.intent, self._rules.num_columns)]
        here = [one for one in named if one.author in members or self._would_join(one.value)]

        def place(one: Signed[Declaration]) -> tuple[bool, bool, bool, bytes]:
            peer = one.author
            turn = rank(self._state.tip_hash, peer)
            return peer not in self._state.electors, peer not in members, not admission.is_trusted(peer), turn

        return sorted(here, key=place)

    def _still_holds(self, said: Status) -> bool:
        """Whether we would declare the same."""
        current = self._state.round
        return (said.head, said.incarnation, said.intent, said.work) == (
            current.tip_hash, self._own.incarnation, self.announced_intent(), current.work
        )  # fmt: skip

    def _would_join(self, said: Declaration) -> bool:
        return said.head == self._state.tip_hash and said.intent.joining and not said.intent.leaving

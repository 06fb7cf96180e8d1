"""Whom this peer hears, and where they stand. Decides nothing."""

from __future__ import annotations

from collections.abc import Iterator

from spes_p2p.consensus.membership import LINK_PUBLIC
from spes_p2p.consensus.messages import Status
from spes_p2p.consensus.part import Part
from spes_p2p.consensus.place import claimed_place, place_of
from spes_p2p.consensus.state import MAX_NEWCOMERS, MOST_FORMER
from spes_p2p.ids import PeerId


class Contacts(Part):
    """Questions about what other peers said last."""

    def alive(self, peer: PeerId, now: float) -> bool:
        """Whether `peer` was heard of late; ourselves always."""
        if peer == self._me:
            return True
        contact = self._others.contacts.get(peer)
        return (
            contact is not None
            and peer not in self._others.refused_dial
            and now - contact.at <= self._pace.suspect_seconds
        )

    def living(self, now: float) -> Iterator[Status]:
        """The newest statuses of all others that were heard of late."""
        return (contact.status for peer, contact in self._others.contacts.items() if self.alive(peer, now))

    def joining(self, now: float) -> Iterator[Status]:
        """Of these who would take part and has the state of our head."""
        head = self._state.tip_hash
        return (s for s in self.living(now) if s.head == head and s.intent.joining and not s.intent.leaving)

    def is_behind(self, status: Status) -> bool:
        """Whether a peer stands lower than we do, on our history or another one: it is to come here."""
        return status.round >= 0 and claimed_place(status) < place_of(self._state.tip)

    def electors_here(self) -> list[Status]:
        """The newest statuses of other electors whose head is ours, in the incarnation that may vote."""
        found, head, contacts = [], self._state.round.tip_hash, self._others.contacts
        for peer, incarnation in self._state.electors.items():
            contact = contacts.get(peer)
            if contact is not None:
                status = contact.signed.value
                if status.head == head and status.incarnation == incarnation:
                    found.append(status)
        return found

    def unheard(self) -> tuple[PeerId, ...]:
        """Electors that do not reach us: others pass their statuses on."""
        limit = self._state.last_event - 2 * self._pace.heartbeat_seconds
        return tuple(
            peer
            for peer in self._state.electors
            if peer != self._me and (peer not in self._others.contacts or self._others.contacts[peer].direct_at < limit)
        )

    def is_silent(self, peer: PeerId, now: float) -> bool:
        """Whether this elector did not say of late, in the incarnation that may vote, that it can."""
        contact = self._others.contacts.get(peer)
        if contact is None or not self.alive(peer, now):
            return True
        status = contact.status
        return status.incarnation != self._state.electors[peer] or not status.intent.can_vote

    def can_ask(self, peer: PeerId) -> bool:
        """Whether one of us two can be dialled."""
        contact = self._others.contacts.get(peer)
        here = self._own.intent.link_class == LINK_PUBLIC
        return here or contact is None or contact.status.intent.link_class == LINK_PUBLIC

    def is_staged_elsewhere(self, index: int, reducer: PeerId) -> bool:
        """Whether another than its reducer says that it has staged a slice of the plan."""
        statuses = (contact.status for peer, contact in self._others.contacts.items() if peer != reducer)
        return any(s.head == self._state.round.tip_hash and index < len(s.staged) and s.staged[index] for s in statuses)

    def has_room_for(self, peer: PeerId, now: float) -> bool:
        """Whether to keep a contact for `peer`: always for a member, for who was one lately or is trusted, however many
        strangers there are; a new one of these may replace a silent one."""
        known = {member.peer for member in self._state.tip.members} | self._others.named.keys()
        admission = self._state.admission()
        if peer in known or admission.is_named(peer):
            return True
        strangers = [p for p in self._others.contacts if p not in known and not admission.is_named(p)]
        if len(strangers) < MAX_NEWCOMERS:
            return True
        longest = min(strangers, key=lambda other: self._others.contacts[other].at)
        if self.alive(longest, now):
            return False
        self.forget(longest)
        return True

    def note_members(self) -> None:
        """Remembers who was a member, and for how many rounds; of too many former ones those of the fewest go.

        So who has been here for long is not forgotten for keys that come and go.
        """
        rounds, members = self._others.named, {member.peer for member in self._state.tip.members}
        for peer in sorted(members):
            rounds[peer] = rounds.pop(peer, 0) + 1
        gone = [peer for peer in rounds if peer not in members]
        for peer in sorted(gone, key=lambda one: rounds[one])[: max(0, len(gone) - MOST_FORMER)]:
            del rounds[peer]

    def forget(self, peer: PeerId) -> None:
        """Of a peer that is no member and was not heard for long nothing is kept."""
        del self._others.contacts[peer]
        for kept in (self._others.asked, self._others.asked_in_vain):
            kept.pop(peer, None)
        self._others.refused_dial.discard(peer)
        self._state.round.sent.pop(peer, None)

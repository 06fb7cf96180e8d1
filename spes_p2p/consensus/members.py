"""What this peer says of itself, which members it can count on now, and who would be a member next."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from spes_p2p.consensus.contacts import Contacts
from spes_p2p.consensus.leadership import Leadership
from spes_p2p.consensus.membership import (
    Member,
    next_members,
    rank,
    trainers,
)
from spes_p2p.consensus.messages import (
    MAX_MEMBERS,
    Intent,
    Status,
    plan_hash,
)
from spes_p2p.consensus.proposals import Proposals
from spes_p2p.consensus.state import (
    State,
)
from spes_p2p.ids import NO_HASH, PeerId
from spes_p2p.ownership.assign import OwnershipRequest


class Members:
    """This peer and the members of its tip, as far as they are heard."""

    def __init__(self, state: State, contacts: Contacts, leadership: Leadership, proposals: Proposals) -> None:
        self._state = state
        self._liveness = state.liveness
        self._others = state.others
        self._own = state.own
        self._pace = state.pace
        self._rules = state.rules
        self._me = state.me
        self._contacts = contacts
        self._leadership = leadership
        self._proposals = proposals

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
            intent=self.told_intent(),
            ballots=self._leadership.own_ballots(),
            plan=plan_hash(current.plan.value) if current.plan else NO_HASH,
            reports=bytes(index in current.reports for index in range(len(slices))),
            staged=bytes(piece.key in current.staged for piece in slices),
            proposal=self._leadership.proposed(),
            lacks=self._proposals.lacks(),
            unheard=self._contacts.unheard(),
            moved=current.moved,
            life=self._own.life,
        )

    def told_intent(self) -> Intent:
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

    def next_members(
        self, now: float, needed: Collection[PeerId] = ()
    ) -> tuple[tuple[Member, ...], dict[PeerId, OwnershipRequest]]:
        """Who would be a member after this round, and what they want: everyone heard, newcomers, but no leavers.

        Leavers that are `needed` count as heard.
        """
        heard: list[Member] = []
        newcomers: list[Member] = []
        leavers: set[PeerId] = set()
        wishes: dict[PeerId, OwnershipRequest] = {}
        known = {member.peer: member.incarnation for member in self._state.tip.members}
        trains = {member.peer: member.trains for member in self._state.tip.members}
        statuses = [self.own_status()] + [
            c.status for p, c in self._others.contacts.items() if self._contacts.alive(p, now)
        ]
        for status in statuses:
            intent, is_known = status.intent, known.get(status.peer) == status.incarnation
            does_train = trains[status.peer] if is_known else not intent.serving
            member = Member(status.peer, status.incarnation, False, intent.link_class, does_train)
            if status.intent.leaving and status.peer not in needed:
                leavers.add(status.peer)
            elif is_known:
                heard.append(member)
            elif status.intent.joining and status.head == self._state.round.tip_hash:  # who has caught up
                newcomers.append(member)
            wishes[status.peer] = (
                OwnershipRequest(intent.max_columns, intent.claims, intent.releases)
                if does_train
                else OwnershipRequest(0)
            )
        if not heard and not newcomers:  # the last to leave stays named, so that it can come back and go on
            heard = [m for m in self._state.tip.members if m.peer in leavers]
            leavers = set()
        newcomers.sort(
            key=lambda member: rank(self._state.round.tip_hash, member.peer)
        )  # a low peer id is no privilege
        members = next_members(self._state.tip.members, heard, newcomers, leavers, MAX_MEMBERS)
        named = {member.peer for member in members}
        return members, {peer: wish for peer, wish in wishes.items() if peer in named}

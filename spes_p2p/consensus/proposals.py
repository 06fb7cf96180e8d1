"""Which manifests are proposed for the next round, and which of them this peer stages or is bound to."""

from __future__ import annotations

from spes_p2p.consensus.contacts import Contacts
from spes_p2p.consensus.leadership import Leadership
from spes_p2p.consensus.messages import (
    Ballots,
    Commit,
    Proposal,
    Signed,
    manifest_hash,
)
from spes_p2p.consensus.state import (
    HOPELESS,
    MOST_VOTES,
    State,
)
from spes_p2p.ids import Hash


class Proposals:
    """The proposals that are known in this round."""

    def __init__(self, state: State, contacts: Contacts, leadership: Leadership) -> None:
        self._state = state
        self._others = state.others
        self._own = state.own
        self._pace = state.pace
        self._contacts = contacts
        self._leadership = leadership

    def named(self, name: Hash) -> Signed[Proposal] | None:
        for signed in self._state.round.proposals.values():
            if manifest_hash(signed.value.manifest) == name:
                return signed
        return None

    def target(self) -> Signed[Proposal] | None:
        """The proposal to stage: the decided one, else the newest that we could vote for."""
        current = self._state.round
        if not current.proposals:
            return None
        if current.decided is not None:
            return self.named(current.decided.certificate.manifest)
        heard, floor = self._state.degraded_set, 0 if self._state.degraded_set else self._own.record.promised
        fitting = sorted(
            ballot
            for said, ballot in current.proposals
            if said == heard and ballot >= floor and (heard or self._leadership.may_act(ballot))
        )
        hopeful = [ballot for ballot in fitting if not self._is_hopeless(current.proposals[(heard, ballot)])]
        return current.proposals[(heard, (hopeful or fitting)[-1])] if fitting else None

    def note_vain_try(self, proposal: Signed[Proposal] | None) -> None:
        if proposal is not None:
            self._state.round.in_vain[manifest_hash(proposal.value.manifest)] += 1

    def _is_hopeless(self, proposal: Signed[Proposal]) -> bool:
        """Whether nobody gave its tiles, or they do not hash to its root, time and again: then another may do."""
        return self._state.round.in_vain.get(manifest_hash(proposal.value.manifest), 0) >= HOPELESS

    def stands_by_a_state(self) -> bool:
        """Whether what is staged serves a proposal, or one that we accepted: then plans no longer matter."""
        return self._own.record.accepted is not None or self.target() is not None

    def highest_acceptance(self) -> Ballots:
        """Of the promises (or of all that a degraded set heard) the acceptance at the highest ballot."""
        if self._state.degraded_set:
            known = [self._leadership.own_ballots()] + [
                s.ballots for s in self._contacts.electors_here() if s.peer in self._state.degraded_set
            ]
        else:
            known = self._leadership.promisers(self._state.round.view)
            free = [ballots for ballots in known if self._is_free(ballots)]
            known = free if self._contacts.is_majority(len(free)) else known
        return max(known, key=lambda ballots: ballots.accepted, default=Ballots())

    def _is_free(self, ballots: Ballots) -> bool:
        """Whether an elector has accepted nothing, or what is here.

        Any majority of promises will do. One without those who stand by a state that nobody hands out is the better
        one: its tiles may never come.
        """
        return ballots.accepted < 0 or ballots.accepted_manifest in self._state.round.verified

    def bound(self) -> tuple[bool, Proposal | None]:
        """Whether we must propose a certain manifest again, and its proposal where we have it.

        The acceptance at the highest ballot binds; a degraded leader is bound, next, by what it signed before.
        """
        best = self.highest_acceptance()
        if best.accepted >= 0:
            signed = self.named(best.accepted_manifest)
            return True, signed.value if signed else None
        if self._state.degraded_set and self._own.record.degraded is not None:
            return True, self._own.record.degraded.value
        return False, None

    def contradicts(self, name: Hash) -> bool:
        """A degraded vote must not go against an acceptance that the set knows of."""
        best = self.highest_acceptance()
        return best.accepted >= 0 and best.accepted_manifest != name

    def verified_before(self) -> Proposal | None:
        """A proposal of a lower ballot whose state is here: a free leader takes it up, which saves everybody's work."""
        current = self._state.round
        if self._state.degraded_set or not current.verified:
            return None
        fitting = [
            (ballot, signed.value)
            for (heard, ballot), signed in current.proposals.items()
            if not heard and manifest_hash(signed.value.manifest) in current.verified
        ]
        return max(fitting, key=lambda pair: pair[0])[1] if fitting else None

    def can_be_had(self, name: Hash, now: float) -> bool:
        """Whether the state of a certified child is here, or somebody who is heard has it."""
        bound = (signed for signed in (self._own.record.accepted, self._own.record.degraded) if signed is not None)
        if name in self._state.round.verified or any(manifest_hash(signed.value.manifest) == name for signed in bound):
            return True  # what we signed for is on our disk
        living = (contact.status for peer, contact in self._others.contacts.items() if self._contacts.alive(peer, now))
        return any(
            status.round > self._state.tip.round or status.ballots.accepted_manifest == name for status in living
        )

    def is_out_of_reach(self, name: Hash, now: float) -> bool:
        """Whether this child is committed by those who are given up, and none of those who are left has its state."""
        return bool(self._state.degraded_set) and not self.can_be_had(name, now)

    def is_lost(self, commit: Commit, now: float) -> bool:
        """Whether nobody who was heard for very long has the state of our certified child.

        A leaver need not go on: who has the state brings it when they meet again.
        """
        current = self._state.round
        moves = current.adopting or current.following or now - current.progress_at <= self._pace.deadline_seconds(0)
        if moves or self._own.intent.leaving or self.can_be_had(commit.certificate.manifest, now):
            current.reachable_at = now
        return now - current.reachable_at > self._pace.lost_state_wait_seconds()

    def make_room_for(self, proposal: Proposal) -> bool:
        """Of one leader's the lowest ballot goes, unless somebody may need it: it was accepted, or is decided."""
        current, record = self._state.round, self._own.record
        bound = {s.ballots.accepted_manifest for s in self._contacts.electors_here() if s.ballots.accepted >= 0}
        bound |= {manifest_hash(s.value.manifest) for s in (record.accepted, record.degraded) if s is not None}
        if current.decided is not None:
            bound.add(current.decided.certificate.manifest)
        theirs = sorted(
            (ballot, heard)
            for (heard, ballot), signed in current.proposals.items()
            if signed.author == proposal.leader and manifest_hash(signed.value.manifest) not in bound
        )
        if len(theirs) < MOST_VOTES:
            return True
        ballot, heard = theirs[0]
        if proposal.ballot < ballot:
            return False
        del current.proposals[(heard, ballot)]
        return True

"""The organiser's node names other electors where a quorum of the tip's is missing: a renewal, signed by its key alone.

State, tokens, members, ownership and leases stay as they are, so a needless renewal does no harm, and nobody has to
agree to it. Where a quorum goes on all the same, its child has counted more, and who stands on the renewal comes over
(`place`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from spes_p2p.consensus.actions import CatchUp
from spes_p2p.consensus.contacts import Contacts
from spes_p2p.consensus.leadership import Leadership
from spes_p2p.consensus.manifest import Manifest, manifest_hash
from spes_p2p.consensus.membership import LINK_CLASSES, LINK_PRIVATE, Admission, Member
from spes_p2p.consensus.messages import RENEWAL, Certificate, Commit, Renewal, Seal, Sealer, Status
from spes_p2p.consensus.part import Part
from spes_p2p.consensus.place import claimed_place
from spes_p2p.consensus.rules import renewed_manifest
from spes_p2p.consensus.sizes import most_members
from spes_p2p.consensus.voting import Voting
from spes_p2p.ids import PeerId, short

MOST_ROUNDS_BACK = 10
"""Where nobody who is heard has the newest state the run may go on from an earlier one, but from none before these."""


@dataclass(eq=False)
class Renewing(Part):
    """Looks with each tick whether a renewal is due, at who has the key.

    `short_since` (see `Others`) is when somebody waited first and fewer than a quorum counted; only a quorum that
    counts for a whole `renew_after_seconds`, since `counted_since`, or a round starts that again.
    """

    _contacts: Contacts
    _leadership: Leadership
    _voting: Voting

    def renew(self, now: float) -> bool:
        """Signs a renewal of the tip, where one is due and somebody is there to be named."""
        sealer = self._state.identity.organiser
        decided = self._state.round.decided
        is_coming = self._state.round.adopting or (decided is not None and decided.certificate.kind == RENEWAL)
        if sealer is None or self._liveness.asking_since is not None or is_coming:
            return False
        admission, others = self._state.admission(), self._others
        if not self._is_due(admission, now):
            return False
        chosen = self._mutual(self._standing(admission, now))
        newcomers = [] if len(chosen) >= self._rules.fewest_renewed else self._newcomers(admission, now)
        named = sorted(admission.drawn([*chosen, *(member.peer for member in newcomers)]))
        if len(named) < self._rules.fewest_renewed:
            self._step_back(admission, now)
            if not self._state.round.following:
                self._tell_who_is_lacking(admission, now)
            return False
        roll = None if others.roll is None else others.roll.value
        manifest = renewed_manifest(self._rules, self._state.tip, named, newcomers, roll)
        self._voting.take_decision(signed_renewal(manifest, self._rules.organiser, sealer), now)
        others.lighter.clear()
        names = ", ".join(short(peer) for peer in named)
        self._state.notify("renewal", f"round {manifest.round} is a renewal: {names} go on with the run")
        return True

    # ---------------------------------------------------------------- when

    def _is_due(self, admission: Admission, now: float) -> bool:
        others, deadline = self._others, self._rules.renew_after_seconds
        if self._has_dislodged(admission):
            return True
        if self._counted(admission, now) >= self._state.electorate.quorum:
            others.counted_since = now if others.counted_since is None else others.counted_since
            if now - others.counted_since >= deadline:
                others.short_since = None
            return False
        others.counted_since = None
        if not any(self._waiting(now)):
            return False
        others.short_since = now if others.short_since is None else others.short_since
        return now - others.short_since >= deadline or self._all_have_gone(now)

    def _has_dislodged(self, admission: Admission) -> bool:
        """Whether the organiser's roll leaves no quorum to the tip's electors: it wants others, whoever waits."""
        electorate = self._state.electorate
        left = [peer for peer in electorate.order if not admission.is_banned(peer)]
        return len(left) < electorate.quorum and len(left) < len(electorate.order)

    def _counted(self, admission: Admission, now: float) -> int:
        """How many electors of the tip stand on it with their vote record, are heard, and hear a quorum themselves."""
        return sum(self._counts(peer, admission, now) for peer in self._state.electors)

    def _counts(self, peer: PeerId, admission: Admission, now: float) -> bool:
        if peer == self._me:
            able = self._leadership.can_vote() and self._liveness.can_be_counted_on(self._pace, now)
            return able and self._liveness.hears_quorum and not self._own.intent.leaving
        status = self._status_here(peer, self._state.electors[peer], now)
        if status is None or admission.is_banned(peer):
            return False
        heard = sum(other == peer or other not in status.silent for other in self._state.electors)
        return heard >= self._state.electorate.quorum

    def _status_here(self, peer: PeerId, incarnation: int, now: float) -> Status | None:
        """What a peer says that is heard, stands on the tip, can vote and stays."""
        contact = self._others.contacts.get(peer)
        if contact is None or not self._contacts.alive(peer, now):
            return None
        status = contact.status
        is_here = status.head == self._state.tip_hash and status.incarnation == incarnation
        return status if is_here and status.intent.can_vote and not status.intent.leaving else None

    def _waiting(self, now: float) -> Iterable[Status]:
        """Peers that are READY or ask to join; who only serves is always READY, and so waits for nobody."""
        members = {member.peer: member.incarnation for member in self._state.tip.members}
        for status in self._contacts.living(now):
            is_member = members.get(status.peer) == status.incarnation
            waits = status.work.ready if is_member else status.intent.joining
            if waits and not status.intent.serving and not status.intent.leaving and status.round >= 0:
                yield status

    def _all_have_gone(self, now: float) -> bool:
        """Whether every elector has said goodbye, and is gone."""
        contacts, electors = self._others.contacts, self._state.electors
        said = (peer in contacts and contacts[peer].status.intent.leaving for peer in electors)
        return self._me not in electors and all(said) and not any(self._contacts.alive(peer, now) for peer in electors)

    # ---------------------------------------------------------------- who

    def _standing(self, admission: Admission, now: float) -> dict[PeerId, frozenset[PeerId]]:
        """Trusted members that stand on the tip and are heard, and whom each does not hear."""
        found: dict[PeerId, frozenset[PeerId]] = {}
        for member in self._state.tip.members:
            if not _is_trusted(admission, member.peer):
                continue
            if member.peer == self._me:
                if self._state.is_member() and self._own.intent.can_vote and not self._own.intent.leaving:
                    found[self._me] = frozenset()
            elif (status := self._status_here(member.peer, member.incarnation, now)) is not None:
                found[member.peer] = frozenset(status.silent)
        return found

    def _mutual(self, standing: dict[PeerId, frozenset[PeerId]]) -> list[PeerId]:
        """Of these some who all hear each other: who hears most of them comes first."""
        chosen: list[PeerId] = []
        for peer in sorted(standing, key=lambda one: (len(standing[one] & standing.keys()), one)):
            if all(peer not in standing[other] and other not in standing[peer] for other in chosen):
                chosen.append(peer)
        return chosen

    def _newcomers(self, admission: Admission, now: float) -> list[Member]:
        """Trusted peers that have the state, and would take part, this node with them; as many as there is room for."""
        room = most_members(self._rules) - len(self._state.tip.members)
        able = [
            Member(status.peer, status.incarnation, True, known_link_class(status), not status.intent.serving)
            for status in self._contacts.joining(now)
            if _is_trusted(admission, status.peer)
        ]
        mine = self._own.intent
        if mine.joining and mine.can_vote and not mine.leaving and not self._state.is_member():
            able.append(Member(self._me, self._own.incarnation, True, mine.link_class, not mine.serving))
        return able[: max(0, room)]

    def _step_back(self, admission: Admission, now: float) -> None:
        """Without a state of its own this node stands where others have one: where those who wait stand."""
        if self._own.keeps_states or self._state.round.following:
            return
        oldest = self._state.tip.round - MOST_ROUNDS_BACK
        waiting = (s for s in self._waiting(now) if s.round >= oldest and _is_trusted(admission, s.peer))
        below = [status for status in waiting if self._contacts.is_behind(status)]
        if not below:
            self._others.lighter.clear()
            return
        self._others.lighter[self._state.tip_hash] = None  # a claim of it, without its state, must delay nothing
        best = max(below, key=lambda status: (claimed_place(status), status.peer))
        self._state.round.following = True
        self._others.asked_last = best.peer
        self._state.out.append(CatchUp(best.peer, best.round, best.head, is_back=True))

    def _tell_who_is_lacking(self, admission: Admission, now: float) -> None:
        """A person must help. The node says it once for each text."""
        waiting = (status.peer for status in self._waiting(now) if not admission.is_banned(status.peer))
        strangers = sorted(peer for peer in waiting if not admission.is_trusted(peer))
        if strangers:
            whom = ", ".join(short(peer) for peer in strangers[:6])
            text = f"the run can go on when somebody is here who may vote: vouch for one of {whom} (spes-p2p run vouch)"
        elif self._rules.fewest_renewed > 1:
            text = "a renewal names two electors at least (swarm.faults: byzantine), and fewer are heard with the state"
        else:
            text = f"nobody who is heard has the state of round {self._state.tip.round}: the run goes on once one has"
        if text != self._others.lacking:
            self._others.lacking = text
            self._state.notify("renewal", text)


def signed_renewal(manifest: Manifest, organiser: PeerId, sealer: Sealer) -> Commit:
    """A manifest by `renewed_manifest` with its certificate: one seal, the organiser's."""
    name = manifest_hash(manifest)
    signed = sealer.seal(Renewal(manifest.fingerprint, manifest.parent, name))
    seal = Seal(organiser, signed.public_key, signed.signature)
    return Commit(Certificate(manifest.parent, RENEWAL, 0, name, (seal,)), manifest)


def _is_trusted(admission: Admission, peer: PeerId) -> bool:
    return admission.is_trusted(peer) and not admission.is_banned(peer)


def known_link_class(status: Status) -> int:
    """The link class that a peer announces; unknown ones count as the class that leads last."""
    return status.intent.link_class if status.intent.link_class in LINK_CLASSES else LINK_PRIVATE

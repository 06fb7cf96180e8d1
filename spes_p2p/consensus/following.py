"""How a peer reaches the newest committed state: through the child of its tip, or a later manifest of another peer."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from spes_p2p.consensus.actions import Adopt, CatchUp
from spes_p2p.consensus.contacts import Contacts
from spes_p2p.consensus.lifecycle import Lifecycle
from spes_p2p.consensus.manifest import Manifest
from spes_p2p.consensus.messages import RENEWAL, Commit, Status
from spes_p2p.consensus.part import Part
from spes_p2p.consensus.place import Place, claimed_place, place_of, roll_number
from spes_p2p.consensus.proposals import Proposals
from spes_p2p.consensus.state import MOST_REMEMBERED, Contact
from spes_p2p.ids import Hash, PeerId


@dataclass(eq=False)
class Following(Part):
    """Adopts what is certified, catches up, goes over to another history."""

    _contacts: Contacts
    _proposals: Proposals
    _lifecycle: Lifecycle

    def adopt(self, now: float) -> bool:
        """A certified child whose state is here becomes the committed state."""
        current = self._state.round
        commit = current.decided
        if commit is None or current.adopting:
            return False
        if commit.certificate.kind != RENEWAL and commit.certificate.manifest not in current.verified:
            return False
        current.adopting = True
        self._state.out.append(Adopt(commit))
        return True

    def follow(self, now: float) -> bool:
        """Somebody stands on a manifest that goes before ours: fetch it by hash.

        Also where our child is certified and cannot be staged.
        """
        current = self._state.round
        place, roll = place_of(current.tip), roll_number(current.tip)
        contacts = self._others.contacts.items()
        ahead = [c for peer, c in contacts if self._is_ahead(c.status, place, roll) and self._contacts.alive(peer, now)]
        if not ahead:
            self._others.ahead_since = None
        elif self._others.ahead_since is None:
            self._others.ahead_since = now
        if current.adopting or current.following or not ahead or not self._is_left_behind(ahead, now):
            return False
        members = {member.peer for member in current.tip.members}
        not_asked = self._not_asked(ahead, members, now)
        if not not_asked:
            return False
        best = max(not_asked, key=lambda status: self._promise_of(status, members))
        self._others.asked[best.peer] = now
        self._others.asked_last = best.peer
        current.following = True
        self._state.out.append(CatchUp(best.peer, best.round, best.head))
        return True

    def _is_ahead(self, status: Status, place: Place, roll: int) -> bool:
        """Whether it says that it stands higher than `place`, or that it knows a later roll, which may dislodge us."""
        if status.round < 0 or status.head == self._state.tip_hash or status.head in self._others.lighter:
            return False
        return claimed_place(status) > place or status.roll > roll

    def _promise_of(self, status: Status, members: Set[PeerId]) -> tuple[bool, int, Place, PeerId]:
        """Sort key for whom to catch up with: first members that did not fail us, since anybody can claim a place."""
        return status.peer in members, -self._others.asked_in_vain[status.peer], claimed_place(status), status.peer

    def _not_asked(self, ahead: list[Contact], members: Set[PeerId], now: float) -> list[Status]:
        """Of whom to ask now: each once per deadline, and less often if it failed us more often than all members did.

        If all of them fail alike, our own link is to blame, and there is no reason to wait once it recovers.
        """
        vain, asked = self._others.asked_in_vain, self._others.asked
        heard = (peer for peer in members if peer in self._others.contacts)
        least = min((vain[peer] for peer in heard if self._contacts.alive(peer, now)), default=0)
        deadline = self._pace.deadline_seconds(0)

        def may_be_asked(peer: PeerId) -> bool:
            pause = deadline * 2.0 ** min(max(0, vain[peer] - least), 4)
            return now - asked.get(peer, float("-inf")) > pause

        return [contact.status for contact in ahead if may_be_asked(contact.status.peer)]

    def _is_left_behind(self, ahead: list[Contact], now: float) -> bool:
        """The certificate of our child normally comes with the next message, its tiles from those who stage them."""
        decided = self._state.round.decided
        if any(c.status.round != self._state.tip.round + 1 for c in ahead) or not self._state.is_member():
            return True
        if decided is not None:
            return not self._can_stage(decided)
        return self._others.ahead_since is not None and now - self._others.ahead_since > self._pace.suspect_seconds

    def _can_stage(self, commit: Commit) -> bool:
        if commit.certificate.manifest in self._state.round.verified:
            return True
        content = self._proposals.named(commit.certificate.manifest)
        return content is not None and not any(
            piece.key in self._state.round.failed for piece in commit.manifest.slices
        )

    def applied(self, commit: Commit, now: float) -> None:
        """`commit` is the committed state here, whether voted or caught up with."""
        before = self._state.round
        if commit.manifest.round > self._state.tip.round:
            if commit.manifest.parent == self._state.tip_hash and before.first_closed_at is not None:
                trained = before.first_closed_at - before.started_at
                self._pace.observe_round(max(trained, before.work.seconds))  # some of it may have been made ahead
            self._own.commit = commit
            self._lifecycle.enter(commit.manifest, now)
            self._others.short_since = self._others.counted_since = None
            if before.heavier is not None:  # it goes on coming, and may go before this one, too
                current = self._state.round
                current.following, current.heavier, current.heavier_at = True, before.heavier, before.heavier_at

    def goes_over(self, heavier: Manifest, now: float) -> None:
        """The state of this one comes: until it is here we go on, but for votes (see `Leadership.can_vote`)."""
        self._state.round.heavier, self._state.round.heavier_at = heavier, now

    def switched(self, commit: Commit, now: float) -> None:
        """Another history goes before ours: `commit` is the committed state here, in place of our rounds."""
        is_back = place_of(commit.manifest) < place_of(self._state.tip)
        self._own.commit = commit
        self._lifecycle.enter(commit.manifest, now)
        if not is_back:
            self._others.short_since = self._others.counted_since = None

    def stays(self, tip_hash: Hash) -> None:
        """We stay on our history: who stands on the other comes over."""
        if len(self._others.lighter) >= MOST_REMEMBERED:
            del self._others.lighter[next(iter(self._others.lighter))]
        self._others.lighter[tip_hash] = None
        asked, self._others.asked_last = self._others.asked_last, None
        if asked is not None:
            self._others.asked_in_vain[asked] += 1
        self._state.round.following, self._state.round.heavier = False, None

    def catch_up_failed(self, now: float, is_ours: bool) -> None:
        """The holder could not serve what it said it has; another is asked. `is_ours`: no fault of the holder."""
        asked, self._others.asked_last = self._others.asked_last, None
        if asked is not None and not is_ours:
            self._others.asked_in_vain[asked] += 1
            if any(member.peer == asked for member in self._state.tip.members):
                self._liveness.failed(now)
        self._state.round.following, self._state.round.heavier = False, None

    def adopt_failed(self) -> None:
        """The state of the certified child is not whole on disk any more: it is made again. A renewal comes again."""
        current = self._state.round
        current.adopting = False
        if current.decided is not None and current.decided.certificate.kind == RENEWAL:
            current.decided = None

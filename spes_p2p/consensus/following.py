"""How a peer reaches the newest committed state: through the child of its tip, or a later manifest of another peer."""

from __future__ import annotations

from dataclasses import dataclass

from spes_p2p.consensus.actions import Adopt, CatchUp
from spes_p2p.consensus.contacts import Contacts
from spes_p2p.consensus.ledger import Ledger
from spes_p2p.consensus.lifecycle import Lifecycle
from spes_p2p.consensus.messages import Commit
from spes_p2p.consensus.part import Part
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
        if commit is None or current.adopting or commit.certificate.manifest not in current.verified:
            return False
        current.adopting = True
        self._state.out.append(Adopt(commit))
        return True

    def follow(self, now: float) -> bool:
        """Somebody stands on a later manifest, or on one that is not in our history: fetch it by hash, or compare.

        Also where our child is certified and cannot be staged.
        """
        current = self._state.round
        ahead, strays = [], []
        head = current.tip_hash
        for peer, contact in self._others.contacts.items():
            status = contact.signed.value
            if status.head != head and self._others.looked_at.get(status.head, float("-inf")) <= now:
                if status.round > current.tip.round and self._contacts.alive(peer, now):
                    ahead.append(contact)
                elif self._contacts.is_forked(status) and self._contacts.alive(peer, now):
                    strays.append(contact)
        if not ahead:
            self._others.ahead_since = None
        elif self._others.ahead_since is None:
            self._others.ahead_since = now
        if current.adopting or current.following:
            return False
        asked = [*strays, *ahead] if ahead and self._is_left_behind(ahead, now) else strays
        not_asked = [contact for contact in asked if self._may_ask(contact.status.peer, now)]
        if not not_asked:
            return False
        best = max(not_asked, key=self._promise_of)
        self._others.asked[best.status.peer] = now
        self._others.asked_last = best.status.peer
        current.following = True
        self._state.out.append(CatchUp(best.status.peer, best.status.round, best.status.head))
        return True

    def _promise_of(self, contact: Contact) -> tuple[bool, int, int, PeerId]:
        """Sort key for whom to catch up with: first members that did not fail us, since anybody can claim a round."""
        status = contact.status
        is_member = any(member.peer == status.peer for member in self._state.tip.members)
        return is_member, -self._others.asked_in_vain[status.peer], status.round, status.peer

    def _may_ask(self, peer: PeerId, now: float) -> bool:
        """Whether to ask `peer` now: once per deadline, and less often if it failed us more often than all members did.

        If all of them fail alike, our own link is to blame, and there is no reason to wait once it recovers.
        """
        vain, tip = self._others.asked_in_vain, self._state.tip
        others = (member.peer for member in tip.members if member.peer in self._others.contacts)
        least = min((vain[other] for other in others if self._contacts.alive(other, now)), default=0)
        pause = self._pace.deadline_seconds(0) * 2.0 ** min(max(0, vain[peer] - least), 4)
        return now - self._others.asked.get(peer, float("-inf")) > pause

    def _is_left_behind(self, ahead: list[Contact], now: float) -> bool:
        """The certificate of our child normally comes with the next message, its tiles from those who stage them."""
        decided = self._state.round.decided
        if any(c.status.round > self._state.tip.round + 1 for c in ahead) or not self._state.is_member():
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

    def applied(self, commit: Commit, ledger: Ledger | None, now: float) -> None:
        """`commit` is the committed state here, whether voted or caught up with; `ledger`: see `CommitApplied`."""
        if commit.manifest.round > self._state.tip.round:
            if commit.manifest.parent == self._state.tip_hash and self._state.round.first_closed_at is not None:
                trained = self._state.round.first_closed_at - self._state.round.started_at
                self._pace.observe_round(
                    max(trained, self._state.round.work.seconds)
                )  # some of it may have been made ahead
            self._own.commit = commit
            manifest = commit.manifest
            counted = self._state.ledger.after(manifest.roster, manifest.audited) if ledger is None else ledger
            self._state.ledger = counted
            self._lifecycle.enter(commit.manifest, now)

    def switched(self, commit: Commit, ledger: Ledger, incarnation: int, now: float) -> None:
        """Another history won: `commit` is the committed state here, in place of our rounds since they parted.

        `incarnation` is a new one where our earlier votes for the child of `commit` can not be stood by any more.
        """
        self._own.incarnation = incarnation
        self._own.commit = commit
        self._state.ledger = ledger
        self._others.placed.clear()
        self._others.looked_at.clear()
        self._lifecycle.enter(commit.manifest, now)

    def fork_rejected(self, tip_hash: Hash, look_again: bool, now: float) -> None:
        """We stay on our history."""
        if len(self._others.looked_at) >= MOST_REMEMBERED:
            del self._others.looked_at[next(iter(self._others.looked_at))]
        self._others.looked_at[tip_hash] = now + self._pace.deadline_seconds(0) if look_again else float("inf")
        self._others.asked_last = None
        self._state.round.following = False

    def catch_up_failed(self, now: float, is_ours: bool) -> None:
        """The holder could not serve what it said it has; another is asked. `is_ours`: no fault of the holder."""
        asked, self._others.asked_last = self._others.asked_last, None
        if asked is not None and not is_ours:
            self._others.asked_in_vain[asked] += 1
            if any(member.peer == asked for member in self._state.tip.members):
                self._liveness.failed(now)
        self._state.round.following = False

    def adopt_failed(self) -> None:
        """The state of the certified child is not whole on disk any more : it is made again."""
        self._state.round.adopting = False

"""Which manifests are voted on for the next round, and which of them this peer stages or is bound to."""

from __future__ import annotations

from dataclasses import dataclass

from spes_p2p.consensus.contacts import Contacts
from spes_p2p.consensus.content import Content
from spes_p2p.consensus.electorate import NIL
from spes_p2p.consensus.leadership import Leadership
from spes_p2p.consensus.manifest import manifest_hash
from spes_p2p.consensus.messages import Commit, DegradedProposal, Signed
from spes_p2p.consensus.part import Part
from spes_p2p.consensus.state import HOPELESS, Key
from spes_p2p.consensus.vote_events import Verdict
from spes_p2p.ids import Hash, PeerId

MOST_CONTENTS = 32
"""Contents that are kept beside those that are needed."""


@dataclass(eq=False)
class Proposals(Part):
    """What is proposed in this round, and the contents that are known."""

    _contacts: Contacts
    _leadership: Leadership

    def named(self, name: Hash) -> Content | None:
        return self._state.round.contents.get(name)

    def wanted(self) -> list[Hash]:
        """The manifests that matter to us, the most urgent first.

        The decided one; else that of our degraded set; else the proposal of this ballot, where our lock allows it, and
        what was nearly decided before.
        """
        current, vote = self._state.round, self._state.round.vote
        if current.decided is not None:
            return [current.decided.certificate.manifest]
        if self._state.degraded_set:
            known = self.degraded()
            bound = [self.kept_by_set()[2], known.value.value if known else NIL]
            return list(dict.fromkeys(name for name in bound if name != NIL))
        if vote.decided is not None:
            return [vote.decided.value]
        proposal, polka = vote.heard.proposal_at(self._leadership.ballot()), vote.heard.polka
        names = [proposal.value.value] if proposal and vote.record.allows(proposal.value) else []
        names += [polka.value] if polka else []
        return list(dict.fromkeys(name for name in (*names, vote.record.locked_value) if name != NIL))

    def lacks(self) -> tuple[Hash, ...]:
        """Manifests whose content we need from others."""
        contents = self._state.round.contents
        return tuple(name for name in self.wanted() if name not in contents and name not in self._state.round.refused)

    def target(self) -> Content | None:
        """What to stage: the first that is wanted and not hopeless."""
        known = [found for name in self.wanted() if (found := self.named(name)) is not None]
        hopeful = [content for content in known if not self.is_hopeless(content)]
        return next(iter(hopeful or known), None)

    def degraded(self) -> Signed[DegradedProposal] | None:
        """The newest proposal of our degraded set."""
        return self._state.round.degraded_proposals.get(self._state.degraded_set)

    def note_failed_staging(self, content: Content | None) -> None:
        if content is not None:
            self._state.round.in_vain[manifest_hash(content.manifest)] += 1

    def is_hopeless(self, content: Content) -> bool:
        """Whether staging it failed again and again (no tiles, or a wrong root); then another may replace it."""
        return self._state.round.in_vain.get(manifest_hash(content.manifest), 0) >= HOPELESS

    def stands_by_a_state(self) -> bool:
        """Whether what is staged serves a proposal, or one that we voted for: then plans no longer matter."""
        return bool(self._state.record.pinned) or self.target() is not None

    def kept_by_set(self) -> tuple[int, int, Hash]:
        """(ballot of its polka, ballot of a prevote, manifest) that a degraded set must keep to, NIL for none.

        That of the newest polka that one of it knows; else what one of it prevoted last.
        """
        heard = (s for s in self._contacts.electors_here() if s.peer in self._state.degraded_set)
        known = [(s.ballots.polka, s.ballots.backed, s.ballots.value) for s in heard]
        known.append(self._state.round.vote.best_known)
        void = {NIL, *self._state.round.refused}
        return max((kept for kept in known if kept[2] not in void), default=(-1, -1, NIL))

    def bound(self) -> tuple[bool, Content | None]:
        """Whether the leader of a degraded set must propose a certain manifest, and its content where we have it.

        What the set keeps to binds; next, what it signed before.
        """
        name, signed = self.kept_by_set()[2], self._state.record.degraded
        if name == NIL and signed is not None:
            name = signed.value.value
        return name != NIL, self.named(name)

    def verified_before(self) -> Content | None:
        """One whose state is here, of an earlier ballot: a free leader takes it up, which saves everybody's work.

        Not one that leaves out an elector who lives here, too: another leader may have been told that it leaves.
        """
        current = self._state.round
        if self._state.degraded_set:
            return None
        unfit = {name for name, verdict in current.vote.verdicts.items() if verdict is Verdict.INCOMPLETE}
        fit = current.verified - unfit - current.unfair
        return next((found for name in fit if (found := self.named(name)) is not None), None)

    def refuse_with(self, key: Key, hashes: bytes) -> None:
        """Refuses all manifests with these tiles: no honest peer votes for one, and a leader that lies may insist."""
        for name, content in list(self._state.round.contents.items()):
            pieces = zip(content.manifest.slices, content.wire_hashes, strict=True)
            if any(piece.key == key and own == hashes for piece, own in pieces):
                self.refuse(name)

    def refuse(self, name: Hash) -> None:
        """Refuses a manifest that is known, unless it is decided: too late then."""
        current = self._state.round
        if current.decided is None:
            del current.contents[name]
            current.refused.add(name)

    def can_be_had(self, name: Hash, now: float) -> bool:
        """Whether the state of a certified child is here, or somebody who is heard has it."""
        if self._is_held(name, now):
            return True
        if name in self._state.round.given_up:
            return False
        living = self._contacts.living(now)
        return any(status.round > self._state.tip.round and self._is_believed(status.peer) for status in living)

    def _is_held(self, name: Hash, now: float) -> bool:
        """Whether it is here, since what we voted for is on our disk, or an elector that is heard has it."""
        if name in self._state.round.verified or name in self._state.record.pinned:
            return True
        contacts = ((peer, self._others.contacts.get(peer)) for peer in self._state.electors)
        living = (contact.status for peer, contact in contacts if contact and self._contacts.alive(peer, now))
        return any(status.ballots.value == name or status.round > self._state.tip.round for status in living)

    def _is_believed(self, peer: PeerId | None) -> bool:
        """Whether a peer's word counts that it is further, which anybody can say: not of who was asked in vain.

        An elector's always does, since its link may be slow; where it might lie, nobody goes on without a quorum.
        """
        return peer in self._state.electors or (peer is not None and not self._others.asked_in_vain[peer])

    def is_out_of_reach(self, name: Hash, now: float) -> bool:
        """Whether this child is committed by those who are given up, and none of those who are left has its state."""
        return bool(self._state.degraded_set) and not self.can_be_had(name, now)

    def look_for(self, commit: Commit, now: float) -> None:
        """Notes whether the state of our certified child can be had now; to be called with each tick.

        A leaver need not go on: who has the state brings it when they meet again.
        """
        current, name = self._state.round, commit.certificate.manifest
        is_coming = current.following and self._is_believed(self._others.asked_last)
        moves = is_coming or now - current.progress_at <= self._pace.deadline_seconds(0)
        if current.adopting or self._own.intent.leaving or self._is_held(name, now):
            current.held_at = now
        if moves or current.held_at == now or self.can_be_had(name, now):
            current.reachable_at = now

    def is_lost(self, now: float) -> bool:
        """Whether nobody who was heard for very long has the state of our certified child (see `look_for`).

        Others than electors may claim that, each under a new key, and send something: that makes the wait twice as long
        at most.
        """
        current, wait = self._state.round, self._pace.lost_state_wait_seconds()
        return now - current.reachable_at > wait or now - current.held_at > 2 * wait

    def take(self, content: Content, now: float) -> None:
        """Keeps a content; of too many the oldest goes that nobody needs."""
        current = self._state.round
        name = manifest_hash(content.manifest)
        needed = {name, *self.wanted(), *current.verified, *self._state.record.pinned}
        current.contents[name] = content
        self._state.note_time(current.contents_since, name, now)
        for other in [at for at in current.contents if at not in needed][
            : max(0, len(current.contents) - MOST_CONTENTS)
        ]:
            del current.contents[other]

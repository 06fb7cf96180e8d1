"""The rules of the second half of a round: propose, accept, certify; what if a leader or a majority is lost."""

from __future__ import annotations

from spes_p2p.ids import NO_HASH, Hash, PeerId
from spes_p2p.ownership.assign import Wish
from spes_p2p.swarm.membership import Member, is_majority, next_members
from spes_p2p.sync import votes
from spes_p2p.sync.actions import (
    Probe,
    Verify,
)
from spes_p2p.sync.messages import (
    DEGRADED,
    MAJORITY,
    Acceptance,
    Certificate,
    Commit,
    DegradedVote,
    Manifest,
    Proposal,
    Seal,
    Signed,
    manifest_hash,
)
from spes_p2p.sync.round_state import CoreState, Heard
from spes_p2p.sync.rules import (
    Outcome,
    child_manifest,
)


class Voting(CoreState):
    """From a new state to its certificate."""

    def _rule_propose(self, now: float) -> bool:
        """The leader proposes: what it is bound to, else what it built; one proposal a ballot, ever."""
        current = self.round
        if current.decided or not self._leading(now) or not self.intent.can_vote:
            return False
        heard, ballot = self.degraded_set, current.view
        if (heard, ballot) in current.proposals:
            return False
        content = self._content_to_propose(now)
        if content is None:
            return False
        manifest, hashes = content
        name = manifest_hash(manifest)
        if not heard:
            if not votes.can_propose(self.record, ballot, name):
                return False
            self._bind(votes.propose(self.record, ballot, name))
        proposal = Proposal(current.head, ballot, self.me, manifest, hashes, heard)
        current.proposals[(heard, ballot)] = self._sealer.seal(proposal)
        self._progress(now)
        return True

    def _content_to_propose(self, now: float) -> tuple[Manifest, tuple[bytes, ...]] | None:
        bound, proposal = self._bound()
        if bound:
            return (proposal.manifest, proposal.wire_hashes) if proposal else None
        if self.round.outcome is None:
            return None
        build, outcome = self.round.outcome
        return self._make_manifest(outcome, now), build.hashes

    def _rule_verify(self, now: float) -> bool:
        """All slices of the proposal at hand are staged: compute the state that it names."""
        current = self.round
        proposal = self._target()
        if proposal is None or current.verifying != NO_HASH:
            return False
        name = manifest_hash(proposal.value.manifest)
        if name in current.verified:
            return False
        pairs = zip(proposal.value.manifest.slices, proposal.value.wire_hashes, strict=True)
        if any(current.staged.get(piece.key) != hashes for piece, hashes in pairs):
            return False
        current.verifying = name
        self._out.append(Verify(proposal))
        return True

    def _rule_accept(self, now: float) -> bool:
        """An elector accepts a proposal whose state it has on disk, unless it promised a later ballot."""
        current = self.round
        if current.decided or not self.is_elector() or not self.intent.can_vote or self.degraded_set:
            return False
        proposal = self._target()
        if proposal is None or proposal.value.heard:
            return False
        name = manifest_hash(proposal.value.manifest)
        if name not in current.verified or not votes.can_accept(self.record, proposal.value):
            return False
        ballot = proposal.value.ballot
        if current.own_vote is not None and current.own_vote.value.ballot == ballot:
            return False
        self._bind(votes.accept(self.record, proposal))
        self._vote(ballot, name, now)
        return True

    def _rule_certify(self, now: float) -> bool:
        """A strict majority of acceptances with one ballot is the commit."""
        current = self.round
        if current.decided:
            return False
        for (ballot, name), seals in current.votes.items():
            if is_majority(len(seals), len(self._elector)):
                proposal = self._proposal_of(name)
                if proposal is not None:
                    self._decide(MAJORITY, ballot, (), proposal.manifest, list(seals.values()))
                    return True
        return False

    def _rule_next_ballot(self, now: float) -> bool:
        """The leader is lost or nothing moves: look to the next one; if that is us, ask for promises."""
        current = self.round
        if current.decided or not self.is_elector() or not self.intent.can_vote or not self._leader_failed(now):
            return False
        current.view += 1
        current.progress_at = now
        if self._leader_of((), current.view) == self.me and votes.can_promise(self.record, current.view):
            self._bind(votes.promise(self.record, current.view))
            current.prepare = current.view
            current.building = None
            current.outcome = None
        return True

    def _rule_promise(self, now: float) -> bool:
        """A later leader asks: promise, unless the present one is heard and bytes move."""
        current = self.round
        if current.decided or not self.is_elector() or not self.intent.can_vote:
            return False
        for ballot, peer in self._asking():
            given_up = current.view > self.record.promised or self._leader_failed(now)
            if votes.can_promise(self.record, ballot) and self._leader_of((), ballot) == peer and given_up:
                self._bind(votes.promise(self.record, ballot))
                current.view = max(current.view, ballot)
                current.progress_at = now
                return True
        return False

    def _rule_degraded_vote(self, now: float) -> bool:
        """A majority is unheard for long: sign with all that are heard, and nothing but what they all sign."""
        current, heard = self.round, self.degraded_set
        if current.decided or not heard or not self.is_elector() or not self.intent.can_vote:
            return False
        proposal = self._target()
        if proposal is None or proposal.value.heard != heard:
            return False
        name = manifest_hash(proposal.value.manifest)
        if name not in current.verified or self._contradicts(name):
            return False
        vote = DegradedVote(self.rules.fingerprint, current.head, heard, name)
        if current.own_degraded is not None and current.own_degraded.value == vote:
            return False
        self._bind(votes.vote_degraded(self.record, proposal))
        current.own_degraded = self._sealer.seal(vote)
        current.degraded_votes.setdefault((heard, name), {})[self.me] = current.own_degraded
        return True

    def _rule_degraded_certify(self, now: float) -> bool:
        """All electors that the degraded proposal calls heard have signed it."""
        current = self.round
        if current.decided:
            return False
        for (heard, name), seals in current.degraded_votes.items():
            proposal = self._proposal_of(name)
            if set(seals) == set(heard) and proposal is not None and self.me in heard:
                self._decide(DEGRADED, -1, heard, proposal.manifest, list(seals.values()))
                return True
        return False

    def _rule_probe(self, now: float) -> bool:
        """A silent elector is dialled afresh once: a refusing host shortens the wait."""
        for peer in self._elector:
            contact = self.contacts.get(peer)
            if contact is not None and not contact.probed and peer != self.me and not self.alive(peer, now):
                contact.probed = True
                self._out.append(Probe(peer))
                return True
        return False

    def _make_manifest(self, outcome: Outcome, now: float) -> Manifest:
        heard: list[Member] = []
        newcomers: list[Member] = []
        leavers: set[PeerId] = set()
        wishes: dict[PeerId, Wish] = {}
        known = {member.peer: member.incarnation for member in self.tip.members}
        statuses = [self._own_status()] + [c.status for p, c in self.contacts.items() if self.alive(p, now)]
        for status in statuses:
            member = Member(status.peer, status.incarnation, False, status.intent.link_class)
            if status.intent.leaving:
                leavers.add(status.peer)
            elif known.get(status.peer) == status.incarnation:
                heard.append(member)
            elif status.intent.joining:
                newcomers.append(member)
            wishes[status.peer] = Wish(status.intent.max_columns, status.intent.claims, status.intent.releases)
        if not heard and not newcomers:  # the last to leave stays named, so that it can come back and go on
            heard = [m for m in self.tip.members if m.peer in leavers]
            leavers = set()
        members = next_members(self.tip.members, heard, newcomers, leavers)
        named = {member.peer for member in members}
        return child_manifest(
            self.rules, self.tip, outcome, members, {peer: wish for peer, wish in wishes.items() if peer in named}
        )

    def _vote(self, ballot: int, name: Hash, now: float) -> None:
        current = self.round
        current.own_vote = self._sealer.seal(Acceptance(self.rules.fingerprint, current.head, ballot, name))
        current.votes.setdefault((ballot, name), {})[self.me] = current.own_vote
        self._progress(now)

    def _decide(
        self,
        kind: str,
        ballot: int,
        heard: Heard,
        manifest: Manifest,
        seals: list[Signed[Acceptance]] | list[Signed[DegradedVote]],
    ) -> None:
        """Only as many seals as needed: one more than half, or all of a degraded set; in a fixed order."""
        chosen = sorted(seals, key=lambda signed: signed.author)
        if kind == MAJORITY:
            chosen = chosen[: len(self._elector) // 2 + 1]
        certificate = Certificate(
            self.round.head,
            kind,
            ballot,
            manifest_hash(manifest),
            heard,
            tuple(Seal(signed.author, signed.public_key, signed.signature) for signed in chosen),
        )
        self.round.decided = Commit(certificate, manifest)

    def _asking(self) -> list[tuple[int, PeerId]]:
        """(ballot, candidate) of those who ask for promises, the highest first."""
        asked = [(s.ballots.prepare, s.peer) for s in self._electors_here() if s.ballots.prepare >= 0]
        return sorted(asked, reverse=True)

    def _leader_failed(self, now: float) -> bool:
        """The leader of our view is lost, or the round should move and does not."""
        current = self.round
        leader = self._leader_of((), current.view)
        if leader != self.me and (
            self._is_gone(leader) or self._silent_seconds(leader, now) > self.pace.suspect_seconds
        ):
            return True
        deadline = self.pace.deadline_seconds(current.view)
        if self._is_closing() or current.view > 0:
            return now - current.progress_at > deadline
        if current.ready_at is None:
            return False
        patience = max(self.pace.round_seconds, current.work.seconds)
        return now - current.ready_at > 1.5 * patience + deadline

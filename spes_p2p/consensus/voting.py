"""The rules of the second half of a round: propose, accept, certify; what if a leader or a majority is lost."""

from __future__ import annotations

from collections.abc import Sequence

from spes_p2p.consensus import votes
from spes_p2p.consensus.actions import Verify
from spes_p2p.consensus.forks import Way, best
from spes_p2p.consensus.messages import (
    DEGRADED,
    MAJORITY,
    Acceptance,
    Ballots,
    Certificate,
    Commit,
    DegradedVote,
    Manifest,
    Proposal,
    Seal,
    Signed,
    manifest_hash,
)
from spes_p2p.consensus.round_state import CoreState
from spes_p2p.consensus.rules import Outcome, child_manifest
from spes_p2p.consensus.state import Heard
from spes_p2p.ids import NO_HASH, PeerId

Content = tuple[Manifest, tuple[bytes, ...]]
"""A manifest and the tile hashes of each of its slices, joined."""


class Voting(CoreState):
    """From a new state to its certificate."""

    def _rule_propose(self, now: float) -> bool:
        """The leader proposes: what it is bound to, else what it has verified or built; one proposal a ballot, ever."""
        current = self.round
        if self.degraded_set:
            return self._propose_degraded(now)
        ballot = current.view
        if ((), ballot) in current.proposals:
            return False
        content = self._content_to_propose(now)
        if content is None:
            return False
        name = manifest_hash(content[0])
        if not votes.can_propose(self.record, ballot, name):
            return False
        self._bind(votes.propose(self.record, ballot, name))
        self._put_forward((), ballot, content, now)
        return True

    def _propose_degraded(self, now: float) -> bool:
        """Like an ordinary proposal; another one only where an acceptance comes to light that binds the set.

        Attempts are numbered by status sequence, which grows over restarts too.
        """
        heard, current = self.degraded_set, self.round
        earlier = [ballot for said, ballot in current.proposals if said == heard]
        bound, proposal = self._bound()
        if earlier:
            last = current.proposals[(heard, max(earlier))].value.manifest
            if not bound or proposal is None or manifest_hash(proposal.manifest) == manifest_hash(last):
                return False
        content = self._content_to_propose(now)
        if content is None:
            return False
        self._put_forward(heard, max([self._sequence, *(ballot + 1 for ballot in earlier)]), content, now)
        return True

    def _put_forward(self, heard: Heard, ballot: int, content: Content, now: float) -> None:
        best = self._highest_acceptance() if heard else Ballots()
        accepted = best.accepted if best.accepted_manifest == manifest_hash(content[0]) else -1
        proposal = Proposal(self.round.head, ballot, self.me, content[0], content[1], heard, accepted)
        self.round.proposals[(heard, ballot)] = self._sealer.seal(proposal)
        self.round.missing = None
        self._news = True
        self._progress(now)

    def _content_to_propose(self, now: float) -> Content | None:
        bound, proposal = self._bound()
        if not bound:
            proposal = self._verified_before()
        if bound and self._may_be_freed(proposal, now):
            return None
        if bound or proposal is not None:
            return (proposal.manifest, proposal.wire_hashes) if proposal else None
        if self.round.outcome is None:
            return None
        build, outcome = self.round.outcome
        return self._make_manifest(outcome, now), build.hashes

    def _may_be_freed(self, proposal: Proposal | None, now: float) -> bool:
        """Whether promises that free us of what is not here may still come: two heartbeats are waited for them."""
        current = self.round
        if self.degraded_set or now - current.progress_at > 2 * self.pace.heartbeat_seconds:
            return False
        if proposal is not None and manifest_hash(proposal.manifest) in current.verified:
            return False
        living = sum(self.alive(peer, now) for peer in self._elector)
        return len(self._promisers(current.view)) < living

    def _rule_verify(self, now: float) -> bool:
        """All slices of the proposal at hand are staged: compute the state that it names."""
        current = self.round
        proposal = self._target()
        if proposal is None or current.verifying != NO_HASH or now < current.verify_after:
            return False
        name = manifest_hash(proposal.value.manifest)
        if name in current.verified or self._missing():
            return False
        current.verifying = name
        current.reducing.clear()
        current.fetching.clear()
        self._out.append(Verify(proposal))
        return True

    def _rule_accept(self, now: float) -> bool:
        """An elector accepts a proposal whose state it has on disk, unless it promised a later ballot."""
        current = self.round
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
        current.view = max(current.view, ballot)
        current.own_vote = self._sealer.seal(Acceptance(self.rules.fingerprint, current.head, ballot, name))
        current.votes.setdefault((ballot, name), {})[self.me] = current.own_vote
        self._news = True
        self._progress(now)
        return True

    def _rule_certify(self, now: float) -> bool:
        """A strict majority of acceptances with one ballot is the commit."""
        current = self.round
        for (ballot, name), seals in current.votes.items():
            if self._is_majority(len(seals)) and not self._is_out_of_reach(name, now):
                proposal = self._proposal_of(name)
                if proposal is not None:
                    manifest = proposal.value.manifest
                    self._take_decision(self._commit_of(MAJORITY, ballot, (), manifest, list(seals.values())), now)
                    return True
        return False

    def _rule_next_ballot(self, now: float) -> bool:
        """The leader is lost or nothing moves: look to the next one; if that is us, ask for promises.

        A leader that gives up says so by promising the next ballot. Without a majority in hearing nobody can be
        elected, and ballots stay where they are.
        """
        current = self.round
        if not self._leader_failed(now) or not self.liveness.hears_quorum:
            return False
        leaders = {self._leader_of((), current.view), self._leader_of((), current.view + 1)}
        current.view += 1
        current.progress_at = now
        if self.me in leaders and votes.can_promise(self.record, current.view):
            self._bind(votes.promise(self.record, current.view))
        if self._leader_of((), current.view) == self.me and self.record.promised == current.view:
            current.prepare = current.view
            if current.outcome is None:
                current.building = None
        return True

    def _rule_promise(self, now: float) -> bool:
        """A later leader asks: promise, unless the present one is heard and bytes move."""
        current = self.round
        if not current.asked:
            return False
        for ballot, peer in self._asking():
            if not votes.can_promise(self.record, ballot) or self._leader_of((), ballot) != peer:
                continue
            if current.view > self.record.promised or self._leader_failed(now):
                self._bind(votes.promise(self.record, ballot))
                current.view = max(current.view, ballot)
                current.progress_at = now
                return True
        return False

    def _rule_degraded_vote(self, now: float) -> bool:
        """A majority is unheard for long: give the leader of those who are heard our signature for its proposal."""
        current, heard = self.round, self.degraded_set
        if self._leader_of(heard, 0) == self.me:
            return False
        proposal = self._degraded_proposal()
        if proposal is None:
            return False
        vote = self._degraded_vote_for(proposal.value)
        if current.own_degraded is not None and current.own_degraded.value == vote:
            return False
        self._bind(votes.vote_degraded(self.record, proposal))
        current.own_degraded = self._sealer.seal(vote)
        self._news = True
        return True

    def _rule_degraded_certify(self, now: float) -> bool:
        """All others that the degraded proposal calls heard have signed: its leader signs last, and that decides.

        So there is one content for a set of electors, ever: only its leader can complete a certificate, and the record
        keeps it whole.
        """
        current, heard = self.round, self.degraded_set
        proposal = self._degraded_proposal()
        if proposal is None or self.record.degraded_votes:
            return False
        vote = self._degraded_vote_for(proposal.value)
        given = current.degraded_votes.get((heard, vote.manifest), {})
        given = {peer: signed for peer, signed in given.items() if signed.value == vote}
        if any(peer != self.me and peer not in given for peer in heard):
            return False
        seals = [self._sealer.seal(vote), *(given[peer] for peer in heard if peer != self.me)]
        self._bind(votes.vote_degraded(self.record, proposal, tuple(seals)))
        self._take_decision(self._commit_of(DEGRADED, vote.ballot, heard, proposal.value.manifest, seals), now)
        return True

    def _degraded_vote_for(self, proposal: Proposal) -> DegradedVote:
        name = manifest_hash(proposal.manifest)
        return DegradedVote(self.rules.fingerprint, proposal.parent, proposal.heard, proposal.accepted, name)

    def _degraded_proposal(self) -> Signed[Proposal] | None:
        """The proposal of our degraded set, if its state is here and no acceptance that we know of is against it."""
        proposal = self._target()
        if proposal is None or proposal.value.heard != self.degraded_set:
            return None
        name = manifest_hash(proposal.value.manifest)
        return proposal if name in self.round.verified and not self._contradicts(name) else None

    def _rule_take(self, now: float) -> bool:
        """A degraded child that others made is taken where no live quorum was heard for long; before one is made."""
        offered = self.round.offered
        if not offered or not self.liveness.may_take(self.pace, now) or self.liveness.hears_quorum:
            return False
        fitting = [
            (commit,) for name, commit in offered.items()
            if self._can_be_had(name, now) and self.way_to((), (commit,), now) is Way.MOVE
        ]  # fmt: skip
        if not fitting:
            return False
        self._take_decision(best(fitting, self.rules.final_rounds)[0], now)
        return True

    def _make_manifest(self, outcome: Outcome, now: float) -> Manifest:
        members, wishes = self._next_members(now, self._ahead(outcome))
        return child_manifest(self.rules, self.tip, outcome, members, wishes)

    def _ahead(self, outcome: Outcome) -> frozenset[PeerId]:
        """Who has trained columns that the round does not hand out: if it leaves, then with the next, which does."""
        if self.rules.expert_rounds == 1:
            return frozenset()
        done = {piece.block - 1 for piece in outcome.slices}
        owners = {owner for column, some in enumerate(self.tip.ownership) if column not in done for owner in some}
        return frozenset(owners & {entry.peer for entry in outcome.roster})

    def _commit_of(
        self,
        kind: str,
        ballot: int,
        heard: Heard,
        manifest: Manifest,
        seals: Sequence[Signed[Acceptance]] | Sequence[Signed[DegradedVote]],
    ) -> Commit:
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
        return Commit(certificate, manifest)

    def _asking(self) -> list[tuple[int, PeerId]]:
        """(ballot, candidate) of those who ask for promises, the highest first."""
        asked = [(s.ballots.prepare, s.peer) for s in self._electors_here() if s.ballots.prepare >= 0]
        return sorted((pair for pair in asked if self._is_near(pair[0])), reverse=True)

    def _leader_failed(self, now: float) -> bool:
        """The leader of our view is lost or has given up, or the round should move and does not."""
        current = self.round
        if self._is_out(self._leader_of((), current.view), now):
            return True
        deadline = self.pace.deadline_seconds(current.view)
        if current.close_asked or not self._has_leader():
            return now - current.progress_at > deadline
        if current.ready_at is None:
            return False
        patience = 1.5 * max(self.pace.round_seconds, current.work.seconds)
        return now - max(current.ready_at + patience, current.progress_at) > deadline

    def _is_out(self, leader: PeerId, now: float) -> bool:
        """Whether the leader of our view can not lead: silent, given up, left behind, or without its own proposal."""
        current = self.round
        if leader == self.me:
            proposed = any(ballot == current.view for ballot, _ in self.record.proposed)
            waited = now - current.started_at > 2 * self.pace.heartbeat_seconds
            return proposed and waited and ((), current.view) not in current.proposals
        if self._is_silent(leader, now):
            return True
        contact = self.contacts.get(leader)
        if contact is None:
            return False
        status = contact.status
        if status.head == current.head:
            return status.ballots.promised > current.view
        return status.round <= current.tip.round and now - current.started_at > self.pace.deadline_seconds(current.view)

    def _has_leader(self) -> bool:
        """Whether the leader of our view may act: nobody needs to be elected for ballot 0."""
        view = self.round.view
        return view == 0 or self._is_majority(len(self._promisers(view)))

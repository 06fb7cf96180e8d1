"""The vote on the child of the tip: single-decree Paxos among the electors, one instance a round.

A leader proposes a manifest at its ballot; electors accept it once its state is on their disks; a majority of
acceptances at one ballot is the certificate. When a leader is lost, the next one asks for promises and proposes what
they bind it to. The record of one elector, and what it may do, stands in `votes`; who leads in `leadership`. What goes
on without a quorum is in `degraded`."""

from __future__ import annotations

from collections.abc import Sequence

from spes_p2p.consensus import votes
from spes_p2p.consensus.actions import (
    Persist,
)
from spes_p2p.consensus.contacts import Contacts
from spes_p2p.consensus.leadership import Leadership
from spes_p2p.consensus.members import Members
from spes_p2p.consensus.messages import (
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
from spes_p2p.consensus.proposals import Proposals
from spes_p2p.consensus.rules import (
    Outcome,
    child_manifest,
)
from spes_p2p.consensus.state import (
    Heard,
    State,
)
from spes_p2p.consensus.votes import VoteRecord
from spes_p2p.ids import PeerId

Content = tuple[Manifest, tuple[bytes, ...]]
"""A manifest and the tile hashes of each of its slices, joined."""


class Voting:
    """Proposes, accepts, certifies; passes the lead on."""

    def __init__(
        self, state: State, contacts: Contacts, leadership: Leadership, members: Members, proposals: Proposals
    ) -> None:
        self._state = state
        self._liveness = state.liveness
        self._others = state.others
        self._own = state.own
        self._pace = state.pace
        self._rules = state.rules
        self._me = state.me
        self._contacts = contacts
        self._leadership = leadership
        self._members = members
        self._proposals = proposals

    def propose(self, now: float) -> bool:
        """The leader proposes: what it is bound to, else what it has verified or built; one proposal a ballot, ever."""
        current = self._state.round
        if self._state.degraded_set:
            return self._propose_degraded(now)
        ballot = current.view
        if ((), ballot) in current.proposals:
            return False
        content = self._content_to_propose(now)
        if content is None:
            return False
        name = manifest_hash(content[0])
        if not votes.can_propose(self._own.record, ballot, name):
            return False
        self.bind(votes.propose(self._own.record, ballot, name))
        self._put_forward((), ballot, content, now)
        return True

    def _propose_degraded(self, now: float) -> bool:
        """Like an ordinary proposal; another one only where an acceptance comes to light that binds the set.

        Attempts are numbered by status sequence, which grows over restarts too.
        """
        heard, current = self._state.degraded_set, self._state.round
        earlier = [ballot for said, ballot in current.proposals if said == heard]
        bound, proposal = self._proposals.bound()
        if earlier:
            last = current.proposals[(heard, max(earlier))].value.manifest
            if not bound or proposal is None or manifest_hash(proposal.manifest) == manifest_hash(last):
                return False
        content = self._content_to_propose(now)
        if content is None:
            return False
        self._put_forward(heard, max([self._own.sequence, *(ballot + 1 for ballot in earlier)]), content, now)
        return True

    def _put_forward(self, heard: Heard, ballot: int, content: Content, now: float) -> None:
        best = self._proposals.highest_acceptance() if heard else Ballots()
        accepted = best.accepted if best.accepted_manifest == manifest_hash(content[0]) else -1
        proposal = Proposal(self._state.round.tip_hash, ballot, self._me, content[0], content[1], heard, accepted)
        self._state.round.proposals[(heard, ballot)] = self._state.identity.sealer.seal(proposal)
        self._own.has_news = True
        self._state.note_progress(now)

    def _content_to_propose(self, now: float) -> Content | None:
        bound, proposal = self._proposals.bound()
        if not bound:
            proposal = self._proposals.verified_before()
        if bound and self._may_be_freed(proposal, now):
            return None
        if bound or proposal is not None:
            return (proposal.manifest, proposal.wire_hashes) if proposal else None
        if self._state.round.outcome is None:
            return None
        build, outcome = self._state.round.outcome
        return self._make_manifest(outcome, now), build.hashes

    def _may_be_freed(self, proposal: Proposal | None, now: float) -> bool:
        """Whether promises that free us of what is not here may still come: two heartbeats are waited for them."""
        current = self._state.round
        if self._state.degraded_set or now - current.progress_at > 2 * self._pace.heartbeat_seconds:
            return False
        if proposal is not None and manifest_hash(proposal.manifest) in current.verified:
            return False
        living = sum(self._contacts.alive(peer, now) for peer in self._state.electors)
        return len(self._leadership.promisers(current.view)) < living

    def accept(self, now: float) -> bool:
        """An elector accepts a proposal whose state it has on disk, unless it promised a later ballot."""
        current = self._state.round
        proposal = self._proposals.target()
        if proposal is None or proposal.value.heard:
            return False
        name = manifest_hash(proposal.value.manifest)
        if name not in current.verified or not votes.can_accept(self._own.record, proposal.value):
            return False
        ballot = proposal.value.ballot
        if current.own_vote is not None and current.own_vote.value.ballot == ballot:
            return False
        self.bind(votes.accept(self._own.record, proposal))
        current.view = max(current.view, ballot)
        current.own_vote = self._state.identity.sealer.seal(
            Acceptance(self._rules.fingerprint, current.tip_hash, ballot, name)
        )
        current.votes.setdefault((ballot, name), {})[self._me] = current.own_vote
        self._own.has_news = True
        self._state.note_progress(now)
        return True

    def certify(self, now: float) -> bool:
        """A strict majority of acceptances with one ballot is the commit."""
        current = self._state.round
        for (ballot, name), seals in current.votes.items():
            if self._contacts.is_majority(len(seals)) and not self._proposals.is_out_of_reach(name, now):
                proposal = self._proposals.named(name)
                if proposal is not None:
                    manifest = proposal.value.manifest
                    self.take_decision(self.commit_of(MAJORITY, ballot, (), manifest, list(seals.values())), now)
                    return True
        return False

    def next_ballot(self, now: float) -> bool:
        """The leader is lost or nothing moves: look to the next one; if that is us, ask for promises.

        A leader that gives up says so by promising the next ballot. Without a majority in hearing nobody can be
        elected, and ballots stay where they are.
        """
        current = self._state.round
        if not self._leader_failed(now) or not self._liveness.hears_quorum:
            return False
        leaders = {self._leadership.leader_of((), current.view), self._leadership.leader_of((), current.view + 1)}
        current.view += 1
        current.progress_at = now
        if self._me in leaders and votes.can_promise(self._own.record, current.view):
            self.bind(votes.promise(self._own.record, current.view))
        if self._leadership.leader_of((), current.view) == self._me and self._own.record.promised == current.view:
            current.prepare = current.view
            if current.outcome is None:
                current.building = None
        return True

    def promise(self, now: float) -> bool:
        """A later leader asks: promise, unless the present one is heard and bytes move."""
        current = self._state.round
        if not current.asked:
            return False
        for ballot, peer in self._leadership.asking():
            if not votes.can_promise(self._own.record, ballot) or self._leadership.leader_of((), ballot) != peer:
                continue
            if current.view > self._own.record.promised or self._leader_failed(now):
                self.bind(votes.promise(self._own.record, ballot))
                current.view = max(current.view, ballot)
                current.progress_at = now
                return True
        return False

    def _make_manifest(self, outcome: Outcome, now: float) -> Manifest:
        members, wishes = self._members.next_members(now, self._ahead(outcome))
        return child_manifest(self._rules, self._state.tip, outcome, members, wishes)

    def _ahead(self, outcome: Outcome) -> frozenset[PeerId]:
        """Who has trained columns that the round does not hand out: if it leaves, then with the next, which does."""
        if self._rules.expert_rounds == 1:
            return frozenset()
        done = {piece.block - 1 for piece in outcome.slices}
        owners = {
            owner for column, some in enumerate(self._state.tip.ownership) if column not in done for owner in some
        }
        return frozenset(owners & {entry.peer for entry in outcome.roster})

    def commit_of(
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
            chosen = chosen[: len(self._state.electors) // 2 + 1]
        certificate = Certificate(
            self._state.round.tip_hash,
            kind,
            ballot,
            manifest_hash(manifest),
            heard,
            tuple(Seal(signed.author, signed.public_key, signed.signature) for signed in chosen),
        )
        return Commit(certificate, manifest)

    def _leader_failed(self, now: float) -> bool:
        """The leader of our view is lost or has given up, or the round should move and does not."""
        current = self._state.round
        if self._is_out(self._leadership.leader_of((), current.view), now):
            return True
        deadline = self._pace.deadline_seconds(current.view)
        if current.close_asked or not self._leadership.has_leader():
            return now - current.progress_at > deadline
        if current.ready_at is None:
            return False
        patience = 1.5 * max(self._pace.round_seconds, current.work.seconds)
        return now - max(current.ready_at + patience, current.progress_at) > deadline

    def _is_out(self, leader: PeerId, now: float) -> bool:
        """Whether the leader of our view can not lead: silent, given up, left behind, or without its own proposal."""
        current = self._state.round
        if leader == self._me:
            proposed = any(ballot == current.view for ballot, _ in self._own.record.proposed)
            waited = now - current.started_at > 2 * self._pace.heartbeat_seconds
            return proposed and waited and ((), current.view) not in current.proposals
        if self._contacts.is_silent(leader, now):
            return True
        contact = self._others.contacts.get(leader)
        if contact is None:
            return False
        status = contact.status
        if status.head == current.tip_hash:
            return status.ballots.promised > current.view
        return status.round <= current.tip.round and now - current.started_at > self._pace.deadline_seconds(
            current.view
        )

    def bind(self, record: VoteRecord) -> None:
        self._own.record = record
        self._state.out.append(Persist(record))

    def take_decision(self, commit: Commit, now: float) -> None:
        self._state.round.decided, self._state.round.reachable_at = commit, now
        self._state.round.failed.clear()
        self._state.note_progress(now)

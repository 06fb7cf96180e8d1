"""What the round's state machine takes from messages, and what it refuses.

Signatures were checked before; here the content is held against the round that we are in.
"""

from __future__ import annotations

from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import PeerId
from spes_p2p.sync.messages import (
    Acceptance,
    Commit,
    DegradedVote,
    Plan,
    Proposal,
    Report,
    Signed,
    Status,
    plan_hash,
)
from spes_p2p.sync.round_state import MAX_NEWCOMERS, Contact, CoreState
from spes_p2p.sync.rules import (
    check_certificate,
    check_child,
)


class Hearing(CoreState):
    """Fills the state from what others say."""

    def _hear(self, signed: Signed[Status], now: float) -> None:
        status = signed.value
        if status.peer == self.me or signed.author != status.peer or status.fingerprint != self.rules.fingerprint:
            return
        known = self.contacts.get(status.peer)
        if known is None and not self._has_room_for(status.peer):
            return
        if known is not None:
            last = known.status
            if (status.incarnation, status.sequence) <= (last.incarnation, last.sequence):
                return
            self.pace.observe_gap(now - known.at)
        voting_at = now if status.intent.can_vote or known is None else known.voting_at
        self.contacts[status.peer] = Contact(signed, now, voting_at)

    def _has_room_for(self, peer: PeerId) -> bool:
        if any(member.peer == peer for member in self.tip.members):
            return True
        strangers = len(self.contacts) - len(self.tip.members)
        return strangers < MAX_NEWCOMERS

    def _hear_plan(self, signed: Signed[Plan], now: float) -> None:
        plan, current = signed.value, self.round
        if plan.parent != current.head or signed.author != plan.leader or plan.fingerprint != self.rules.fingerprint:
            return
        if plan.leader not in self._elector:
            return
        if current.plan is not None:  # a total order, so that all end with one plan even if two leaders share a ballot
            mine = current.plan.value
            if (mine.ballot, plan_hash(mine)) >= (plan.ballot, plan_hash(plan)):
                return
        self._take_plan(signed, now)

    def _hear_report(self, signed: Signed[Report], now: float) -> None:
        report, current = signed.value, self.round
        if current.plan is None or report.plan != plan_hash(current.plan.value) or signed.author != report.reducer:
            return
        plan = current.plan.value
        if not 0 <= report.index < len(plan.slices):
            return
        piece = plan.slices[report.index]
        fits = report.reducer in piece.contributors and set(report.contributors) <= set(piece.contributors)
        if not fits or len(report.wire_hashes) != (piece.tiles if report.contributors else 0):
            return
        earlier = current.reports.get(report.index)
        if earlier is not None and (piece.key in current.staged or self.alive(earlier.value.reducer, now)):
            return
        current.reports[report.index] = signed
        current.failed.discard(piece.key)
        self._progress(now)

    def _hear_proposal(self, signed: Signed[Proposal], now: float) -> None:
        proposal, current = signed.value, self.round
        key = (proposal.heard, proposal.ballot)
        if proposal.parent != current.head or signed.author != proposal.leader or key in current.proposals:
            return
        if proposal.leader != self._leader_of(proposal.heard, proposal.ballot):
            return
        try:
            check_child(self.rules, current.tip, proposal.manifest)
        except RemoteProtocolError as error:
            self._note("refused", str(error), proposal.leader)
            return
        if len(proposal.wire_hashes) == len(proposal.manifest.slices):
            current.proposals[key] = signed
            current.failed.clear()
            self._progress(now)

    def _hear_vote(self, signed: Signed[Acceptance], now: float) -> None:
        vote, current = signed.value, self.round
        if (
            vote.parent == current.head
            and vote.fingerprint == self.rules.fingerprint
            and signed.author in self._elector
        ):
            ballot = current.votes.setdefault((vote.ballot, vote.manifest), {})
            if signed.author not in ballot:
                ballot[signed.author] = signed
                self._progress(now)

    def _hear_degraded_vote(self, signed: Signed[DegradedVote]) -> None:
        vote, current = signed.value, self.round
        fits = vote.parent == current.head and vote.fingerprint == self.rules.fingerprint
        if fits and signed.author in vote.heard and set(vote.heard) <= set(self._elector):
            current.degraded_votes.setdefault((vote.heard, vote.manifest), {})[signed.author] = signed

    def _hear_commit(self, commit: Commit, sender: PeerId, now: float) -> None:
        current, manifest = self.round, commit.manifest
        if manifest.round <= current.tip.round or current.decided is not None:
            return
        if manifest.parent != current.head:
            return  # rule `follow` asks for the headers
        try:
            check_certificate(current.tip, manifest, commit.certificate, self._check)
        except RemoteProtocolError as error:
            self._note("refused", str(error), sender)
            return
        current.decided = commit
        self._progress(now)

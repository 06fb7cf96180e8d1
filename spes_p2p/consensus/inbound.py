"""Takes in what others say of the round: plans, reports, proposals, votes, commits; and refuses what cannot be.

Signatures were checked before; here the content is held against the round that we are in. Each method says whether
there is something new in it that the rules should look at. What one peer can make us keep is bounded: of what nobody
is bound to, the oldest goes first, and comes again where its author still stands by it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from spes_p2p.consensus.child_checks import check_child, check_commit, check_newcomers, check_plan
from spes_p2p.consensus.content import Content, Envelope
from spes_p2p.consensus.leadership import Leadership
from spes_p2p.consensus.manifest import manifest_hash
from spes_p2p.consensus.messages import (
    Commit,
    Plan,
    Report,
    Signed,
    plan_hash,
)
from spes_p2p.consensus.part import Part
from spes_p2p.consensus.proposals import Proposals
from spes_p2p.consensus.round_plan import RoundPlan
from spes_p2p.consensus.slices import reducer_order
from spes_p2p.consensus.state import MOST_PLANS
from spes_p2p.consensus.statements import are_sane_shares, check_content
from spes_p2p.consensus.statuses import Statuses
from spes_p2p.consensus.timing import NEVER
from spes_p2p.consensus.voting import Voting
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import NO_HASH, PeerId

MAX_REASON = 64
"""Characters of the reason for which somebody was left out of a slice."""


@dataclass(eq=False)
class Inbound(Part):
    """Fills the state from messages."""

    _leadership: Leadership
    _proposals: Proposals
    _round_plan: RoundPlan
    _voting: Voting
    _statuses: Statuses

    def take(self, envelope: Envelope, now: float) -> bool:
        """Takes a message in; whether there is something new in it that the rules should look at."""
        new, liveness = False, self._liveness
        is_asking, is_answer = liveness.asking_since is not None, envelope.answers == self._own.life
        heard_at = NEVER if liveness.has_slept and not is_answer else now  # it may have waited here meanwhile
        for signed in envelope.statuses:
            new |= self._statuses.hear(signed, envelope.sender, heard_at, now)
        if is_asking and is_answer:
            liveness.answered.add(envelope.sender)
        for ready in envelope.ready:
            self._round_plan.hear_ready(ready)
        if envelope.plan is not None:
            new |= self._hear_plan(envelope.plan, now)
        for report in envelope.reports:
            new |= self._hear_report(report, now)
        for votes in envelope.votes:
            new |= self._voting.hear(votes, now)
        for content in envelope.contents:
            new |= self._hear_content(content, envelope.sender, now)
        if envelope.commit is not None:
            new |= self._hear_commit(envelope.commit, envelope.sender, now)
        return new

    def _hear_plan(self, signed: Signed[Plan], now: float) -> bool:
        plan, current = signed.value, self._state.round
        said = (plan.parent, plan.leader, plan.fingerprint)
        if said != (current.tip_hash, signed.author, self._rules.fingerprint) or not self._may_plan(plan):
            return False
        if current.plans_of.get(plan.leader, 0) >= MOST_PLANS:
            return False
        if current.plan is not None:  # a total order, so that all end with one plan even if two leaders share a ballot
            mine = current.plan.value
            if (mine.ballot, plan_hash(mine)) >= (plan.ballot, plan_hash(plan)):
                return False
        try:
            check_plan(self._rules, current.tip, plan)
        except RemoteProtocolError as error:
            current.plans_of[plan.leader] = current.plans_of.get(plan.leader, 0) + 1
            self._state.notify("refused", str(error), plan.leader)
            return True
        if not current.ready.keys() >= set(plan.roster) or not self._round_plan.has_quorum(plan, now):
            return False  # it comes again, with what its roster follows from
        current.plans_of[plan.leader] = current.plans_of.get(plan.leader, 0) + 1
        self._round_plan.take(signed, now)
        return True

    def _may_plan(self, plan: Plan) -> bool:
        """Whether its author leads the ballot that it says."""
        return plan.leader == self._leadership.leader_of(plan.ballot) and self._leadership.may_act(plan.ballot)

    def _hear_report(self, signed: Signed[Report], now: float) -> bool:
        """Takes the first report of a slice; another one only when nobody could give what the first promised."""
        report, current = signed.value, self._state.round
        if not self._is_of_our_plan(signed):
            return False
        if report.index in current.reports or report.reducer in current.empty_reports.get(report.index, {}):
            return False
        if not report.contributors:  # none are fit; the next in order tries, unless all were seen and none was fit
            current.empty_reports.setdefault(report.index, {})[report.reducer] = signed
            return True
        assert current.plan is not None
        current.reports[report.index] = signed
        current.seen[report.reducer] = now
        self._others.moving_in_vain.discard(report.reducer)
        current.failed.discard(current.plan.value.slices[report.index].key)
        self._state.note_progress(now)
        return True

    def _is_of_our_plan(self, signed: Signed[Report]) -> bool:
        """Whether another may report this of a slice of our plan."""
        report, current = signed.value, self._state.round
        if current.plan is None or report.plan != plan_hash(current.plan.value) or signed.author != report.reducer:
            return False
        plan = current.plan.value
        if report.parent != plan.parent:
            return False
        if not 0 <= report.index < len(plan.slices) or report.reducer == self._me:  # ours: of a life before a restart
            return False
        piece = plan.slices[report.index]
        used = tuple(peer for peer in piece.contributors if peer in report.contributors)
        fits = report.reducer in reducer_order(piece, self._state.electors)
        fits &= report.piece == replace(piece, reducer=report.reducer, contributors=used)
        if not fits or len(report.wire_hashes) != (piece.tiles if report.contributors else 0):
            return False
        if any(len(tile_hash) != len(NO_HASH) for tile_hash in report.wire_hashes) or not are_sane_shares(report):
            return False
        out = [peer for peer, _ in report.left_out]
        if len(set(out)) != len(out) or not set(out) <= set(piece.contributors):
            return False
        return all(len(why) <= MAX_REASON and why.isprintable() for _, why in report.left_out)

    def _hear_content(self, content: Content, sender: PeerId, now: float) -> bool:
        """What a proposal that we know stands for; one that does not follow from our tip is refused."""
        current, name = self._state.round, manifest_hash(content.manifest)
        if name not in self._proposals.lacks():
            return False
        try:
            check_child(self._rules, current.tip, content.manifest)
            check_newcomers(self._rules, current.tip, content.manifest)
        except RemoteProtocolError as error:
            current.refused.add(name)
            self._state.notify("refused", str(error), sender)
            return True
        try:
            self.check_content(content)
        except RemoteProtocolError as error:  # its hash does not say what it follows from: another may bring it whole
            self._state.notify("refused", str(error), sender)
            return False
        self._proposals.take(content, now)
        current.failed.clear()
        self._state.note_progress(now)
        return True

    def check_content(self, content: Content) -> None:
        """Raises RemoteProtocolError where a manifest is not what its statements make of our tip."""
        check_content(self._rules, self._state.tip, content)

    def _hear_commit(self, commit: Commit, sender: PeerId, now: float) -> bool:
        current, manifest = self._state.round, commit.manifest
        if sender == self._rules.organiser:
            self._others.told_round = manifest.round
        if manifest.parent != current.tip_hash or current.decided is not None:
            return False  # rule `follow` asks for the headers
        try:
            check_commit(self._rules, current.tip, commit, self._state.identity.check_signature)
        except RemoteProtocolError as error:
            self._state.notify("refused", str(error), sender)
            return True
        self._voting.take_decision(commit, now)
        return True

"""What the round's state machine takes from messages, and what it refuses.

Signatures were checked before; here the content is held against the round that we are in. Each method says whether
there is something new in it that the rules should look at. What one peer can make us keep is bounded: of what nobody
is bound to, the oldest goes first, and comes again where its author still stands by it.
"""

from __future__ import annotations

from typing import TypeVar

from spes_p2p.consensus.actions import Forget
from spes_p2p.consensus.bounds import MAX_UPLINK, is_sane_work
from spes_p2p.consensus.certificate import check_certificate
from spes_p2p.consensus.forks import has_quorum
from spes_p2p.consensus.membership import LINK_CLASSES
from spes_p2p.consensus.messages import (
    MAX_MEMBERS,
    Acceptance,
    Commit,
    DegradedVote,
    Plan,
    Proposal,
    Report,
    Signed,
    Status,
    manifest_hash,
    plan_hash,
)
from spes_p2p.consensus.round_state import CoreState
from spes_p2p.consensus.rules import check_child, check_newcomers, check_plan
from spes_p2p.consensus.slices import reducer_order
from spes_p2p.consensus.state import MAX_NEWCOMERS, MOST_PLANS, MOST_VOTES, Contact
from spes_p2p.consensus.votes import VoteRecord
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import NO_HASH, Hash, PeerId

MOST_BORROWED = 16
"""So many deadlines a round waits for bytes that move at others, by their word, while nothing comes of it here."""
NOBODY_AS_YET = -1
"""The incarnation of a peer that waits for another one."""
MAX_REASON = 200
"""Characters of the reason for which somebody was left out of a slice."""
Key = TypeVar("Key")
Vote = TypeVar("Vote")


class Hearing(CoreState):
    """Fills the state from what others say."""

    def _hear(self, signed: Signed[Status], sender: PeerId, now: float) -> bool:
        status = signed.value
        peer = status.peer
        if signed.author != peer or status.fingerprint != self.rules.fingerprint or not self._is_sane(status):
            return False
        if peer == self.me:
            return self._hear_of_ourselves(status)
        known = self.contacts.get(peer)
        if known is None:
            if not self._has_room_for(peer, now):
                return False
            self.contacts[peer] = Contact(signed, now, now if sender == peer else float("-inf"))
            self.round.missing = None
            self._heard_from(status, now)
            self._poked.add(peer)
            return True
        last = known.status
        mark, newest = (status.incarnation, status.sequence), (last.incarnation, last.sequence)
        if mark <= newest:
            known.is_old = sender == peer and mark < newest
            return False
        known.is_old = False
        before = (known.furthest or known.signed).value
        is_further = status.incarnation != before.incarnation or _binding(status) >= _binding(before)
        known.furthest = None if is_further else known.furthest or known.signed
        revived = not self.alive(peer, now)
        stirs = self._stirs(last, status)
        if sender == peer:
            self.pace.observe_gap(now - known.direct_at)
            known.direct_at = now
        known.signed, known.at = signed, now
        if _stand(status) != _stand(last):  # which proposals may be made hangs on it
            self.round.missing = None
        self._heard_from(status, now)
        if status.moved > last.moved and status.head == last.head == self.round.head and self._takes_part(status):
            self._moved_at(peer, now)
        if status.plan != last.plan or status.head != last.head or status.ballots.prepare != last.ballots.prepare:
            self._poked.add(peer)
        return revived or stirs

    def _stirs(self, last: Status, status: Status) -> bool:
        """Whether the rules need to look at once. Most of it concerns the leader; the rest waits for a tick."""
        current, ballots, before = self.round, status.ballots, last.ballots
        if status.round > current.tip.round or status.incarnation != last.incarnation or status.intent != last.intent:
            return True
        if self._leader_of(self.degraded_set, current.view) == self.me:
            return status.head != last.head or status.work.ready != last.work.ready or ballots != before
        if ballots.closing != before.closing and not current.close_asked:
            return True
        return ballots.prepare != before.prepare or ballots.promised != before.promised

    def _heard_from(self, status: Status, now: float) -> None:
        peer = status.peer
        self._gone.discard(peer)
        if status.work.ready:
            self._kept_waiting.discard(peer)
        if status.ballots.prepare >= 0:
            self.round.asked = True

    def _hear_of_ourselves(self, status: Status) -> bool:
        """What an earlier life of ours has said, from somebody who remembers it.

        It may be newer than what we say, where the clock was set back; or than what we know, where the disk was.
        """
        if status.life == self.life or status.incarnation < self.incarnation:
            return False
        if status.incarnation > self.incarnation:
            self._forget_record(status.incarnation)
            return True
        self._sequence = max(self._sequence, status.sequence)
        ballots, record = status.ballots, self.record
        voted = (ballots.promised, ballots.accepted) > (record.promised, record.accepted_ballot)
        if status.round > self.tip.round or (status.head == self.head and voted):
            self._forget_record(self.incarnation)
        return True

    def _forget_record(self, above: int) -> None:
        """Votes are not given twice: from now on we are a newcomer."""
        self._note("votes", "this peer's disk is older than what it has said before: it comes back as a newcomer")
        self.incarnation = NOBODY_AS_YET
        self._forget_votes()
        self.record = VoteRecord(self.head)
        self._out.append(Forget(above))

    def _takes_part(self, status: Status) -> bool:
        """Whether a round may wait for bytes that move at this peer: newcomers and archives take their own time."""
        return any(m.peer == status.peer and m.incarnation == status.incarnation for m in self.tip.members)

    def _moved_at(self, peer: PeerId, now: float) -> None:
        """Bytes move at a peer: neither it nor the leader is to be blamed, as long as something comes of it."""
        current = self.round
        if peer in self._moving_in_vain:
            return
        if current.borrowed > MOST_BORROWED * self.pace.deadline_seconds(0):
            self._moving_in_vain.add(peer)
            self._note("late", "it said for long that bytes move there, and nothing came of it", peer)
            return
        if peer in current.seen:
            current.seen[peer] = now
        if current.decided is None:
            current.borrowed += now - current.progress_at
            current.progress_at = now

    def _is_sane(self, status: Status) -> bool:
        """Nothing in it is longer or larger than it can be."""
        intent = status.intent
        return (
            len(status.head) == len(status.plan) == len(status.ballots.accepted_manifest) == len(NO_HASH)
            and max(len(status.reports), len(status.staged)) <= sum(self.rules.block_tiles)
            and max(len(intent.claims), len(intent.releases)) <= self.rules.num_columns
            and len(status.unheard) <= MAX_MEMBERS
            and status.round >= -1  # before genesis
            and is_sane_work(status.work)
            and intent.link_class in LINK_CLASSES
            and 0 <= intent.uplink_bytes_per_second <= MAX_UPLINK
        )

    def _has_room_for(self, peer: PeerId, now: float) -> bool:
        """Members always have; of strangers a silent one makes room for a new one."""
        named = {member.peer for member in self.tip.members}
        if peer in named:
            return True
        strangers = [other for other in self.contacts if other not in named]
        if len(strangers) < MAX_NEWCOMERS:
            return True
        longest = min(strangers, key=lambda other: self.contacts[other].at)
        if self.alive(longest, now):
            return False
        del self.contacts[longest]
        self.round.sent.pop(longest, None)
        return True

    def _hear_plan(self, signed: Signed[Plan], now: float) -> bool:
        plan, current = signed.value, self.round
        if plan.parent != current.head or signed.author != plan.leader or plan.fingerprint != self.rules.fingerprint:
            return False
        if not self._may_plan(plan):
            return False
        if current.plans_of.get(plan.leader, 0) >= MOST_PLANS:
            return False
        if current.plan is not None:  # a total order, so that all end with one plan even if two leaders share a ballot
            mine = current.plan.value
            if (mine.ballot, plan_hash(mine)) >= (plan.ballot, plan_hash(plan)):
                return False
        current.plans_of[plan.leader] = current.plans_of.get(plan.leader, 0) + 1
        try:
            check_plan(self.rules, current.tip, plan)
        except RemoteProtocolError as error:
            self._note("refused", str(error), plan.leader)
            return True
        self._take_plan(signed, now)
        return True

    def _may_plan(self, plan: Plan) -> bool:
        """Whether its author leads the ballot that it says, or those of us who are left."""
        if self.degraded_set and plan.leader == self._leader_of(self.degraded_set, 0):
            return self._is_near(plan.ballot)
        return plan.leader == self._leader_of((), plan.ballot) and self._may_act(plan.ballot)

    def _hear_report(self, signed: Signed[Report], now: float) -> bool:
        """Takes the first report of a slice; another one only when nobody could give what the first promised."""
        report, current = signed.value, self.round
        if current.plan is None or report.plan != plan_hash(current.plan.value) or signed.author != report.reducer:
            return False
        plan = current.plan.value
        if not 0 <= report.index < len(plan.slices) or report.reducer == self.me:  # ours: of a life before a restart
            return False
        piece = plan.slices[report.index]
        fits = report.reducer in reducer_order(piece) and set(report.contributors) <= set(piece.contributors)
        if not fits or len(report.wire_hashes) != (piece.tiles if report.contributors else 0):
            return False
        if any(len(tile_hash) != len(NO_HASH) for tile_hash in report.wire_hashes):
            return False
        out = [peer for peer, _ in report.left_out]
        if len(set(out)) != len(out) or not set(out) <= set(piece.contributors):
            return False
        if any(len(why) > MAX_REASON or not why.isprintable() for _, why in report.left_out):
            return False
        if report.index in current.reports or report.reducer in current.voids.get(report.index, {}):
            return False
        if not report.contributors:
            return self._take_void(signed)
        current.reports[report.index] = signed
        current.seen[report.reducer] = now
        self._moving_in_vain.discard(report.reducer)
        current.failed.discard(piece.key)
        current.missing = None
        self._progress(now)
        return True

    def _take_void(self, signed: Signed[Report]) -> bool:
        """A reducer found no values that are fit; the next in order tries, unless all were seen and none was fit."""
        report = signed.value
        voids = self.round.voids.setdefault(report.index, {})
        if report.reducer in voids:
            return False
        voids[report.reducer] = signed
        return True

    def _hear_proposal(self, signed: Signed[Proposal], now: float) -> bool:
        proposal, current = signed.value, self.round
        key = (proposal.heard, proposal.ballot)
        if proposal.parent != current.head or signed.author != proposal.leader or key in current.proposals:
            return False
        if proposal.leader != self._leader_of(proposal.heard, proposal.ballot) or proposal.ballot < 0:
            return False
        if proposal.accepted < -1 or (proposal.accepted >= 0 and not proposal.heard):
            return False
        if not proposal.heard and not self._is_near(proposal.ballot):
            return False
        if len(proposal.wire_hashes) != len(proposal.manifest.slices):
            return False
        try:
            check_child(self.rules, current.tip, proposal.manifest)
            check_newcomers(current.tip, proposal.manifest)
        except RemoteProtocolError as error:
            self._note("refused", str(error), proposal.leader)
            return True
        if not self._has_room_for_proposal(proposal):
            return False
        current.proposals[key] = signed
        current.failed.clear()
        current.missing = None
        if proposal.heard or self._may_act(proposal.ballot):
            self._progress(now)
        return True

    def _has_room_for_proposal(self, proposal: Proposal) -> bool:
        """Of one leader's the lowest ballot goes, unless somebody may need it: it was accepted, or is decided."""
        current, record = self.round, self.record
        bound = {s.ballots.accepted_manifest for s in self._electors_here() if s.ballots.accepted >= 0}
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

    def _hear_vote(self, signed: Signed[Acceptance], now: float) -> bool:
        vote, current = signed.value, self.round
        if vote.parent != current.head or vote.fingerprint != self.rules.fingerprint:
            return False
        if signed.author not in self._elector or signed.author == self.me:
            return False
        if vote.ballot < 0 or signed.author in current.votes.get((vote.ballot, vote.manifest), {}):
            return False
        kept = sorted(key for key, votes in current.votes.items() if signed.author in votes)
        if len(kept) >= MOST_VOTES:
            if vote.ballot < kept[0][0]:
                return False
            _drop(current.votes, kept[0], signed.author)
        current.votes.setdefault((vote.ballot, vote.manifest), {})[signed.author] = signed
        known = current.proposals.get(((), vote.ballot))
        if known is not None and manifest_hash(known.value.manifest) == vote.manifest:
            self._progress(now)
        return True

    def _hear_degraded_vote(self, signed: Signed[DegradedVote]) -> bool:
        vote, current = signed.value, self.round
        fits = vote.parent == current.head and vote.fingerprint == self.rules.fingerprint
        if not fits or signed.author not in vote.heard or not set(vote.heard) <= set(self._elector):
            return False
        if signed.author == self.me or len(set(vote.heard)) != len(vote.heard):
            return False
        known = current.degraded_votes.get((vote.heard, vote.manifest), {}).get(signed.author)
        if known is not None and known.value == vote:
            return False
        kept = [key for key, votes in current.degraded_votes.items() if signed.author in votes]
        if len(kept) >= MOST_VOTES:
            _drop(current.degraded_votes, kept[0], signed.author)
        current.degraded_votes.setdefault((vote.heard, vote.manifest), {})[signed.author] = signed
        return True

    def _hear_commit(self, commit: Commit, sender: PeerId, now: float) -> bool:
        current, manifest = self.round, commit.manifest
        if sender == self.rules.organiser:
            self.told_round = manifest.round
        if manifest.parent != current.head:
            return False  # rule `follow` asks for the headers
        name, known = commit.certificate.manifest, current.decided
        if known is not None and (has_quorum(known) or current.adopting or not has_quorum(commit)):
            return False
        if name in current.offered or self._is_out_of_reach(name, now):
            return False
        try:
            check_certificate(current.tip, manifest, commit.certificate, self._check, self.rules.organiser)
            check_child(self.rules, current.tip, manifest)
        except RemoteProtocolError as error:
            self._note("refused", str(error), sender)
            return True
        if has_quorum(commit):
            self._take_decision(commit, now)
        else:  # what others made without a quorum is taken by a rule of its own, or never
            if len(current.offered) >= MOST_VOTES:
                del current.offered[next(iter(current.offered))]
            current.offered[name] = commit
        return True


def _binding(status: Status) -> tuple[int, int, int]:
    return status.round, status.ballots.promised, status.ballots.accepted


def _stand(status: Status) -> tuple[int, Hash, int]:
    return status.incarnation, status.head, status.ballots.promised


def _drop(votes: dict[Key, dict[PeerId, Vote]], key: Key, author: PeerId) -> None:
    del votes[key][author]
    if not votes[key]:
        del votes[key]

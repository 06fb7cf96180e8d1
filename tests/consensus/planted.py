"""Faults planted in the rules by hand, each a small change of it: the explorer must catch every one of them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from spes_p2p.consensus.actions import Action, Send
from spes_p2p.consensus.forks import Line, Way
from spes_p2p.consensus.fragments import due_columns
from spes_p2p.consensus.machine import Consensus
from spes_p2p.consensus.membership import Member, is_majority
from spes_p2p.consensus.messages import (
    Ballots,
    Commit,
    Contribution,
    Manifest,
    Proposal,
    Signed,
    Status,
    manifest_hash,
)
from spes_p2p.consensus.rules import Outcome, child_manifest
from spes_p2p.consensus.votes import VoteRecord
from spes_p2p.consensus.voting import Content
from spes_p2p.ids import NO_HASH, PeerId
from spes_p2p.ownership.assign import Wish


class ForgetsVotes(Consensus):
    """An elector that forgets its promise and its acceptance in a restart."""

    def _resume(self, record: VoteRecord, now: float) -> None:
        return


class AcceptsBeforeStaging(Consensus):
    """An acceptance before all tiles of the new state are on disk."""

    def _rule_accept(self, now: float) -> bool:
        target = self._target()
        if target is not None and not target.value.heard:
            self.round.verified.add(manifest_hash(target.value.manifest))
        return super()._rule_accept(now)


class UsesBallotTwice(Consensus):
    """A leader that proposes again at the same ballot after a restart."""

    def _resume(self, record: VoteRecord, now: float) -> None:
        super()._resume(replace(record, proposed=()), now)


class AttemptInManifest(Consensus):
    """The ballot is part of the manifest: proposing the same again gives another hash."""

    def _content_to_propose(self, now: float) -> Content | None:
        content = super()._content_to_propose(now)
        if content is None:
            return None
        first, *others = content[0].members
        return replace(content[0], members=(replace(first, link_class=self.round.view % 2), *others)), content[1]


class LeaversDoNotCount(Consensus):
    """Electors that leave are no longer counted in the majority."""

    def _is_majority(self, count: int) -> bool:
        leaving = [p for p in self._elector if p in self.contacts and self.contacts[p].status.intent.leaving]
        return is_majority(count, len(self._elector) - len(leaving))


class AddsUpBallots(Consensus):
    """Acceptances of different ballots are added up."""

    def _rule_certify(self, now: float) -> bool:
        for ballot, name in list(self.round.votes):
            for (_, other), votes in list(self.round.votes.items()):
                if other == name:
                    self.round.votes[(ballot, name)] = votes | self.round.votes[(ballot, name)]
        return super()._rule_certify(now)


class PromisesWithoutReport(Consensus):
    """A promise does not say what was accepted before."""

    def _ballots(self) -> Ballots:
        ballots = super()._ballots()
        hidden = ballots.accepted < ballots.promised
        return replace(ballots, accepted=-1, accepted_manifest=NO_HASH) if hidden else ballots


class AddsDegradedVotes(Consensus):
    """A degraded vote counts as an acceptance."""

    def _rule_degraded_vote(self, now: float) -> bool:
        fired = super()._rule_degraded_vote(now)
        if fired:
            self._bind(replace(self.record, accepted=self.record.degraded))
        return fired


class ProposesWithoutPromises(Consensus):
    """A leader of a later ballot does not wait for a majority of promises."""

    def _leading(self) -> bool:
        leads = self._leader_of((), self.round.view) == self.me and self.record.promised == self.round.view
        return leads if not self.degraded_set else super()._leading()


class BreaksPromises(Consensus):
    """An elector accepts below what it promised."""

    def _rule_accept(self, now: float) -> bool:
        record = self.record
        self.record = replace(record, promised=max(0, record.accepted_ballot))
        fired = super()._rule_accept(now)
        if not fired:
            self.record = record
        return fired


class DoesNotWait(Consensus):
    """A minority goes on as soon as it suspects the others."""

    def _degraded_electors(self, now: float) -> tuple[PeerId, ...]:
        if self.liveness.hears_quorum or not self._can_vote() or self.round.decided:
            return ()
        live = self._live_electors(now)
        return tuple(sorted(p for p in live if p == self.me or self.contacts[p].status.head == self.head))


class TakesWhatAMinorityMade(Consensus):
    """A child that a minority made is taken as what a majority has decided is."""

    def _rule_take(self, now: float) -> bool:
        for commit in self.round.offered.values():
            self._take_decision(commit, now)
            return True
        return False

    def way_to(self, ours: Line, theirs: Line, now: float) -> Way:
        return super().way_to(ours, theirs, now) if ours else Way.MOVE


class ForgetsAcceptancesAlone(Consensus):
    """Those who go on without a quorum do not look at what they accepted."""

    def _highest_acceptance(self) -> Ballots:
        return Ballots() if self.degraded_set else super()._highest_acceptance()


class SleepsAsIfAwake(Consensus):
    """Time that the machine slept through counts as silence of the others."""

    def _notice_sleep(self, now: float) -> None:
        before = self.liveness.quorum_at
        super()._notice_sleep(now)
        self.liveness.quorum_at, self.liveness.asking_since = before, None


class GivesUpWhoReturns(Consensus):
    """A quorum that is heard again was lost all the same: its silence counts from when we came to our tip."""

    def _listen(self, now: float) -> bool:
        before = self.liveness.quorum_at
        changed = super()._listen(now)
        self.liveness.quorum_at = min(before, self.liveness.quorum_at)
        return changed


class NamesWhoIsBehind(Consensus):
    """Newcomers are named before they have caught up."""

    def _next_members(
        self, now: float, needed: Collection[PeerId] = ()
    ) -> tuple[tuple[Member, ...], dict[PeerId, Wish]]:
        kept = self.contacts
        here = {p: replace(c.signed, value=replace(c.status, head=self.head)) for p, c in kept.items()}
        self.contacts = {p: replace(c, signed=here[p]) if c.status.intent.joining else c for p, c in kept.items()}
        try:
            return super()._next_members(now, needed)
        finally:
            self.contacts = kept


class SignsForTheAbsent(Consensus):
    """Who makes a degraded child is not looked at again when one of them falls silent."""

    def _degraded_electors(self, now: float) -> tuple[PeerId, ...]:
        return self.degraded_set or super()._degraded_electors(now)


class TrustsItsDisk(Consensus):
    """What others remember of us is not listened to."""

    def _hear_of_ourselves(self, status: Status) -> bool:
        return False


class SpeaksBeforeWriting(Consensus):
    """Votes leave before they are on disk."""

    def _advance(self, now: float, tick: int = 0) -> list[Action]:
        actions = super()._advance(now, tick)
        said = [action for action in actions if isinstance(action, Send)]
        return said + [action for action in actions if not isinstance(action, Send)]


class IgnoresAcceptances(Consensus):
    """A new leader proposes what it likes, whatever the promises say."""

    def _bound(self) -> tuple[bool, Proposal | None]:
        return False, None


class NeverBlamesTheLeader(Consensus):
    """Nobody takes over from a leader that is lost."""

    def _leader_failed(self, now: float) -> bool:
        return False


class WaitsForEver(Consensus):
    """The wait for a lost majority begins anew with each message of anybody."""

    def _hear(self, signed: Signed[Status], sender: PeerId, now: float) -> bool:
        self.liveness.quorum_at = now
        return super()._hear(signed, sender, now)


class CountsWorkTwice(Consensus):
    """A leader counts a sequence more than a peer says that it used."""

    def _roster(self, now: float) -> tuple[Contribution, ...]:
        return tuple(replace(entry, sequences=entry.sequences + 1) for entry in super()._roster(now))


class NeverGivesUpAState(Consensus):
    """Who knows of a commit whose state is gone with all who had it asks for it for ever."""

    def _is_lost(self, commit: Commit, now: float) -> bool:
        return False


class TakesServersForTrainers(Consensus):
    """Newcomers that would only serve are named as members that train."""

    def _next_members(
        self, now: float, needed: Collection[PeerId] = ()
    ) -> tuple[tuple[Member, ...], dict[PeerId, Wish]]:
        members, wishes = super()._next_members(now, needed)
        known = {(member.peer, member.incarnation) for member in self.tip.members}
        return tuple(m if (m.peer, m.incarnation) in known else replace(m, trains=True) for m in members), wishes


class TakesWhatWasNotHandedOut(Consensus):
    """Moves columns as if every one of them were handed out in every round."""

    def _make_manifest(self, outcome: Outcome, now: float) -> Manifest:
        members, wishes = self._next_members(now)
        return child_manifest(replace(self.rules, expert_rounds=1), self.tip, outcome, members, wishes)

    def _due_columns(self, now: float) -> frozenset[int]:
        return due_columns(self.tip.ownership, self.tip.round + 1, self.rules.expert_rounds)

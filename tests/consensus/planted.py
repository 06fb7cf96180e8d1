"""Faults planted in the rules by hand, each a small change of one part: the explorer must catch every one of them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields, replace
from typing import Any

from spes_p2p.consensus import events as on
from spes_p2p.consensus.actions import Action, Send
from spes_p2p.consensus.contacts import Contacts
from spes_p2p.consensus.degraded import Degraded
from spes_p2p.consensus.forks import Line, Way
from spes_p2p.consensus.fragments import due_columns
from spes_p2p.consensus.leadership import Leadership
from spes_p2p.consensus.lifecycle import Lifecycle
from spes_p2p.consensus.machine import Consensus
from spes_p2p.consensus.members import Members
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
from spes_p2p.consensus.parts import Cast
from spes_p2p.consensus.proposals import Proposals
from spes_p2p.consensus.round_plan import RoundPlan
from spes_p2p.consensus.rules import Outcome, child_manifest
from spes_p2p.consensus.statuses import Statuses
from spes_p2p.consensus.votes import VoteRecord
from spes_p2p.consensus.voting import Content, Voting
from spes_p2p.ids import NO_HASH, PeerId
from spes_p2p.ownership.assign import OwnershipRequest


def machine_with(fault: type) -> type[Consensus]:
    """The state machine with `fault`, a part, in the place of the one that it changes; or itself, where it is one."""
    if issubclass(fault, Consensus):
        return fault
    [slot] = [slot.name for slot in fields(Cast) if issubclass(fault, getattr(Cast(), slot.name))]
    changed: dict[str, Any] = {slot: fault}
    cast = replace(Cast(), **changed)
    return type(fault.__name__, (Consensus,), {"CAST": cast})


class ForgetsVotes(Lifecycle):
    """An elector that forgets its promise and its acceptance in a restart."""

    def resume(self, record: VoteRecord, now: float) -> None:
        return


class AcceptsBeforeStaging(Voting):
    """An acceptance before all tiles of the new state are on disk."""

    def accept(self, now: float) -> bool:
        target = self._proposals.target()
        if target is not None and not target.value.heard:
            self._state.round.verified.add(manifest_hash(target.value.manifest))
        return super().accept(now)


class UsesBallotTwice(Lifecycle):
    """A leader that proposes again at the same ballot after a restart."""

    def resume(self, record: VoteRecord, now: float) -> None:
        super().resume(replace(record, proposed=()), now)


class AttemptInManifest(Voting):
    """The ballot is part of the manifest: proposing the same again gives another hash."""

    def _content_to_propose(self, now: float) -> Content | None:
        content = super()._content_to_propose(now)
        if content is None:
            return None
        first, *others = content[0].members
        return replace(content[0], members=(replace(first, link_class=self._state.round.view % 2), *others)), content[1]


class LeaversDoNotCount(Contacts):
    """Electors that leave are no longer counted in the majority."""

    def is_majority(self, count: int) -> bool:
        leaving = [
            p
            for p in self._state.electors
            if p in self._others.contacts and self._others.contacts[p].status.intent.leaving
        ]
        return is_majority(count, len(self._state.electors) - len(leaving))


class AddsUpBallots(Voting):
    """Acceptances of different ballots are added up."""

    def certify(self, now: float) -> bool:
        for ballot, name in list(self._state.round.votes):
            for (_, other), votes in list(self._state.round.votes.items()):
                if other == name:
                    self._state.round.votes[(ballot, name)] = votes | self._state.round.votes[(ballot, name)]
        return super().certify(now)


class PromisesWithoutReport(Leadership):
    """A promise does not say what was accepted before."""

    def own_ballots(self) -> Ballots:
        ballots = super().own_ballots()
        hidden = ballots.accepted < ballots.promised
        return replace(ballots, accepted=-1, accepted_manifest=NO_HASH) if hidden else ballots


class AddsDegradedVotes(Degraded):
    """A degraded vote counts as an acceptance."""

    def vote(self, now: float) -> bool:
        fired = super().vote(now)
        if fired:
            self._voting.bind(replace(self._own.record, accepted=self._own.record.degraded))
        return fired


class ProposesWithoutPromises(Leadership):
    """A leader of a later ballot does not wait for a majority of promises."""

    def leading(self) -> bool:
        leads = (
            self.leader_of((), self._state.round.view) == self._me
            and self._own.record.promised == self._state.round.view
        )
        return leads if not self._state.degraded_set else super().leading()


class BreaksPromises(Voting):
    """An elector accepts below what it promised."""

    def accept(self, now: float) -> bool:
        record = self._own.record
        self._own.record = replace(record, promised=max(0, record.accepted_ballot))
        fired = super().accept(now)
        if not fired:
            self._own.record = record
        return fired


class DoesNotWait(Degraded):
    """A minority goes on as soon as it suspects the others."""

    def electors(self, now: float) -> tuple[PeerId, ...]:
        if self._liveness.hears_quorum or not self._leadership.can_vote() or self._state.round.decided:
            return ()
        live = self._members.live_electors(now)
        return tuple(
            sorted(p for p in live if p == self._me or self._others.contacts[p].status.head == self._state.tip_hash)
        )


class TakesWhatAMinorityMade(Degraded):
    """A child that a minority made is taken as what a majority has decided is."""

    def take(self, now: float) -> bool:
        for commit in self._state.round.offered.values():
            self._voting.take_decision(commit, now)
            return True
        return False

    def way_to(self, ours: Line, theirs: Line, now: float) -> Way:
        return super().way_to(ours, theirs, now) if ours else Way.MOVE


class ForgetsAcceptancesAlone(Proposals):
    """Those who go on without a quorum do not look at what they accepted."""

    def highest_acceptance(self) -> Ballots:
        return Ballots() if self._state.degraded_set else super().highest_acceptance()


class SleepsAsIfAwake(Lifecycle):
    """Time that the machine slept through counts as silence of the others."""

    def notice_sleep(self, now: float) -> None:
        before = self._liveness.quorum_at
        super().notice_sleep(now)
        self._liveness.quorum_at, self._liveness.asking_since = before, None


class GivesUpWhoReturns(Consensus):
    """A quorum that is heard again was lost all the same: its silence counts from when we came to our tip."""

    def _listen(self, now: float) -> bool:
        liveness = self.state.liveness
        before = liveness.quorum_at
        changed = super()._listen(now)
        liveness.quorum_at = min(before, liveness.quorum_at)
        return changed


class NamesWhoIsBehind(Members):
    """Newcomers are named before they have caught up."""

    def next_members(
        self, now: float, needed: Collection[PeerId] = ()
    ) -> tuple[tuple[Member, ...], dict[PeerId, OwnershipRequest]]:
        kept = self._others.contacts
        here = {p: replace(c.signed, value=replace(c.status, head=self._state.tip_hash)) for p, c in kept.items()}
        self._others.contacts = {
            p: replace(c, signed=here[p]) if c.status.intent.joining else c for p, c in kept.items()
        }
        try:
            return super().next_members(now, needed)
        finally:
            self._others.contacts = kept


class SignsForTheAbsent(Degraded):
    """Who makes a degraded child is not looked at again when one of them falls silent."""

    def electors(self, now: float) -> tuple[PeerId, ...]:
        return self._state.degraded_set or super().electors(now)


class TrustsItsDisk(Statuses):
    """What others remember of us is not listened to."""

    def _hear_of_ourselves(self, status: Status) -> bool:
        return False


class SpeaksBeforeWriting(Consensus):
    """Votes leave before they are on disk."""

    def handle(self, event: on.Event, now: float) -> list[Action]:
        actions = super().handle(event, now)
        said = [action for action in actions if isinstance(action, Send)]
        return said + [action for action in actions if not isinstance(action, Send)]


class IgnoresAcceptances(Proposals):
    """A new leader proposes what it likes, whatever the promises say."""

    def bound(self) -> tuple[bool, Proposal | None]:
        return False, None


class NeverBlamesTheLeader(Voting):
    """Nobody takes over from a leader that is lost."""

    def _leader_failed(self, now: float) -> bool:
        return False


class WaitsForEver(Statuses):
    """The wait for a lost majority begins anew with each message of anybody."""

    def hear(self, signed: Signed[Status], sender: PeerId, now: float) -> bool:
        self._state.liveness.quorum_at = now
        return super().hear(signed, sender, now)


class CountsWorkTwice(RoundPlan):
    """A leader counts a sequence more than a peer says that it used."""

    def _roster(self, now: float) -> tuple[Contribution, ...]:
        return tuple(replace(entry, sequences=entry.sequences + 1) for entry in super()._roster(now))


class NeverGivesUpAState(Proposals):
    """Who knows of a commit whose state is gone with all who had it asks for it for ever."""

    def is_lost(self, commit: Commit, now: float) -> bool:
        return False


class TakesServersForTrainers(Members):
    """Newcomers that would only serve are named as members that train."""

    def next_members(
        self, now: float, needed: Collection[PeerId] = ()
    ) -> tuple[tuple[Member, ...], dict[PeerId, OwnershipRequest]]:
        members, wishes = super().next_members(now, needed)
        known = {(member.peer, member.incarnation) for member in self._state.tip.members}
        return tuple(m if (m.peer, m.incarnation) in known else replace(m, trains=True) for m in members), wishes


class MovesWhatWasNotHandedOut(Voting):
    """Moves columns as if every one of them were handed out in every round."""

    def _make_manifest(self, outcome: Outcome, now: float) -> Manifest:
        members, wishes = self._members.next_members(now)
        return child_manifest(replace(self._rules, expert_rounds=1), self._state.tip, outcome, members, wishes)


class HandsOutByTurnAlone(RoundPlan):
    """Hands out no column that an owner is about to lose."""

    def _due_columns(self, now: float) -> frozenset[int]:
        tip = self._state.tip
        return due_columns(tip.ownership, tip.round + 1, self._rules.expert_rounds)


class TakesWhatWasNotHandedOut(Consensus):
    """Both together: an owner takes a column over whose values it never got."""

    CAST = Cast(voting=MovesWhatWasNotHandedOut, round_plan=HandsOutByTurnAlone)

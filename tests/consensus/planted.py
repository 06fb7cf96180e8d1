"""Faults planted in the rules by hand, each a small change of one part: the explorer must catch every one of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

from spes_p2p.consensus import events as on
from spes_p2p.consensus.actions import Action, Send
from spes_p2p.consensus.content import Content
from spes_p2p.consensus.electorate import NIL
from spes_p2p.consensus.following import Following
from spes_p2p.consensus.inbound import Inbound
from spes_p2p.consensus.leadership import Leadership
from spes_p2p.consensus.lifecycle import Lifecycle
from spes_p2p.consensus.machine import Consensus
from spes_p2p.consensus.members import Members
from spes_p2p.consensus.membership import Admission
from spes_p2p.consensus.messages import QUORUM, Certificate, Commit, Declaration, Precommit, Seal, Signed, Status
from spes_p2p.consensus.parts import PartClasses
from spes_p2p.consensus.place import Place
from spes_p2p.consensus.renewing import Renewing, signed_renewal
from spes_p2p.consensus.round_plan import RoundPlan
from spes_p2p.consensus.rules import Outcome, child_manifest
from spes_p2p.consensus.statements import members_after
from spes_p2p.consensus.statuses import Statuses
from spes_p2p.consensus.turns import due_columns
from spes_p2p.consensus.vote_events import Verdict
from spes_p2p.consensus.vote_record import VoteRecord
from spes_p2p.consensus.voting import Voting
from spes_p2p.ids import Hash, PeerId


class ForgetsVotes(Lifecycle):
    """An elector that forgets its votes in a restart."""

    def resume(self, record: VoteRecord) -> None:
        return


class PrevotesBeforeStaging(Voting):
    """A vote before all tiles of the new state are on disk."""

    def _verdict(self, name: Hash) -> Verdict | None:
        return Verdict.FIT if name in self._state.round.contents else None


class UsesBallotTwice(Lifecycle):
    """A leader that proposes again at the same ballot after a restart."""

    def resume(self, record: VoteRecord) -> None:
        super().resume(replace(record, proposal=None))


class LeaversDoNotCount(Voting):
    """Electors that leave are no longer counted in the quorum."""

    def certify(self, now: float) -> bool:
        contacts = self._others.contacts
        leaving = [p for p in self._state.electors if p in contacts and contacts[p].status.intent.leaving]
        needed = (len(self._state.electors) - len(leaving)) // 2 + 1
        return _certified(self, needed, now, lambda vote: (vote.ballot, vote.value)) or super().certify(now)


class AddsUpBallots(Voting):
    """Precommits of different ballots are added up."""

    def certify(self, now: float) -> bool:
        quorum = self._state.electorate.quorum
        return _certified(self, quorum, now, lambda vote: vote.value) or super().certify(now)


def _certified(voting: Voting, needed: int, now: float, alike: Callable[[Precommit], object]) -> bool:
    """Decides for what so many precommits that are alike name."""
    tally = defaultdict(list)
    for signed in voting._state.round.vote.heard.precommits.values():
        if signed.value.value in voting._state.round.contents:
            tally[alike(signed.value)].append(signed)
    for votes in tally.values():
        if len(votes) >= needed:
            vote = votes[0].value
            content = voting._state.round.contents[vote.value]
            seals = tuple(Seal(signed.author, signed.public_key, signed.signature) for signed in votes)
            certificate = Certificate(vote.parent, QUORUM, vote.ballot, vote.value, seals)
            voting.take_decision(Commit(certificate, content.manifest), now)
            return True
    return False


class ForgetsLocks(Voting):
    """An elector does not write down what it is locked on."""

    def bind(self, record: VoteRecord) -> None:
        super().bind(replace(record, locked_ballot=-1, locked_value=NIL))


class ForgetsWhatItFetches(Lifecycle):
    """Who has room on its disk again, and is told so twice, begins anew what it has begun."""

    def disk_has_room(self, for_state: bool) -> None:
        super().disk_has_room(for_state)
        self._staging.forget()


class NamesWhoIsBehind(Members):
    """Newcomers are named before they have caught up."""

    def declarations(self, now: float) -> list[Signed[Declaration]]:
        here = self._state.tip_hash
        return [
            replace(signed, value=replace(signed.value, head=here)) if signed.value.intent.joining else signed
            for signed in super().declarations(now)
        ]

    def _would_join(self, said: Declaration) -> bool:
        return said.intent.joining and not said.intent.leaving


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


class NeverBlamesTheLeader(Leadership):
    """Nobody takes over from a leader that is lost."""

    def has_failed(self, now: float) -> bool:
        return False


class StaysWhereItIs(Following):
    """Nobody goes over to a history that goes before its own."""

    def _is_ahead(self, status: Status, place: Place, roll: int) -> bool:
        is_ours = status.round == self._state.tip.round + 1
        return is_ours and super()._is_ahead(status, place, roll)


class GrowsWhileItGoesOver(Leadership):
    """Who goes over to a heavier history votes on meanwhile."""

    def _yields(self) -> bool:
        return False


class NeverRenews(Renewing):
    """The organiser's node waits for ever."""

    def _is_due(self, admission: Admission, now: float) -> bool:
        return False


class StartsItsWaitAnew(Renewing):
    """Each word of an elector begins the wait for a renewal anew."""

    def _is_due(self, admission: Admission, now: float) -> bool:
        if any(self._contacts.alive(peer, now) for peer in self._state.electors if peer != self._me):
            self._others.short_since = now
        return super()._is_due(admission, now)


class RenewsWhereNobodyStands(Renewing):
    """The node does not step back to where somebody has a state."""

    def _step_back(self, admission: Admission, now: float) -> None:
        return


class NamesTheDead(Renewing):
    """A renewal names whoever was an elector, heard or not."""

    def _mutual(self, standing: dict[PeerId, frozenset[PeerId]]) -> list[PeerId]:
        return sorted(self._state.electors)


class RenewsTheState(Renewing):
    """A renewal counts work."""

    def renew(self, now: float) -> bool:
        before = self._state.round.decided
        renewed = super().renew(now)
        commit, sealer = self._state.round.decided, self._state.identity.organiser
        if commit is not None and commit is not before and sealer is not None and renewed:
            richer = replace(commit.manifest, tokens=commit.manifest.tokens + 8)
            self._state.round.decided = signed_renewal(richer, self._rules.organiser, sealer)
        return renewed


class BelievesLeaders(Inbound):
    """Whatever a leader proposes is taken for what follows from the words of others."""

    def check_content(self, content: Content) -> None:
        return


class CountsMore(Voting):
    """A leader counts a sequence more than a peer says that it used."""

    def built(self, now: float) -> Content | None:
        content = super().built(now)
        if content is None:
            return None
        made = content.manifest
        roster = tuple(replace(entry, sequences=entry.sequences + 1) for entry in made.roster)
        outcome = Outcome(roster, made.slices, made.wire_root, made.state_root, made.merge)
        _, wishes = members_after(self._state.tip, (signed.value for signed in content.statements.declarations))
        return replace(content, manifest=child_manifest(self._rules, self._state.tip, outcome, made.members, wishes))


class CountsWorkTwice(Consensus):
    """Both together: what a leader says of the work of others is committed."""

    PART_CLASSES = PartClasses(voting=CountsMore, inbound=BelievesLeaders)


class TakesServersForTrainers(Members):
    """Newcomers that would only serve are named as members that train."""

    def declarations(self, now: float) -> list[Signed[Declaration]]:
        return [
            replace(signed, value=replace(signed.value, intent=replace(signed.value.intent, serving=False)))
            for signed in super().declarations(now)
        ]


class MovesWhatWasNotHandedOut(Voting):
    """Moves columns as if every one of them were handed out in every round."""

    def built(self, now: float) -> Content | None:
        content = super().built(now)
        if content is None:
            return None
        made, rules = content.manifest, replace(self._rules, expert_rounds=1)
        outcome = Outcome(made.roster, made.slices, made.wire_root, made.state_root, made.merge)
        _, wishes = members_after(self._state.tip, (signed.value for signed in content.statements.declarations))
        return replace(content, manifest=child_manifest(rules, self._state.tip, outcome, made.members, wishes))


class HandsOutByTurnAlone(RoundPlan):
    """Hands out no column that an owner is about to lose."""

    def _due_columns(self, now: float) -> frozenset[int]:
        tip = self._state.tip
        return due_columns(tip.ownership, tip.round + 1, self._rules.expert_rounds)


class TakesWhatWasNotHandedOut(Consensus):
    """All together: an owner takes a column over whose values it never got."""

    PART_CLASSES = PartClasses(voting=MovesWhatWasNotHandedOut, round_plan=HandsOutByTurnAlone, inbound=BelievesLeaders)

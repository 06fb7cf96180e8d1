"""Attacks by who leads a ballot, or votes in it: parts of the consensus of a liar, each in the place of the honest one.

A leader chooses whom it plans with, which of the reports and words that it has heard it names, and whether it proposes
at all. It cannot make up what others did not sign: of attacks that try there is one of each kind.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from typing import Any

from spes_p2p.consensus.content import Content, Envelope
from spes_p2p.consensus.electorate import NIL
from spes_p2p.consensus.gossip import Gossip
from spes_p2p.consensus.machine import Consensus
from spes_p2p.consensus.manifest import Contribution, Manifest, Slice, manifest_hash
from spes_p2p.consensus.members import Members
from spes_p2p.consensus.messages import Declaration, Proposal, Report, Signed, Votes, declared
from spes_p2p.consensus.parts import PartClasses
from spes_p2p.consensus.reducing import Reducing
from spes_p2p.consensus.round_plan import RoundPlan
from spes_p2p.consensus.statements import content_of
from spes_p2p.consensus.voting import Voting
from spes_p2p.ids import PeerId, sha256

LATE_SHARE = 0.9
"""Of a leader's deadline, how much one lets pass that is late on purpose."""


def machine_with(part: type) -> type[Consensus]:
    """The state machine with `part` in the place of the one that it changes; or itself, where it is a machine.

    `part`: a fault that a test plants, or of a peer that lies.
    """
    if issubclass(part, Consensus):
        return part
    [slot] = [slot.name for slot in fields(PartClasses) if issubclass(part, getattr(PartClasses(), slot.name))]
    changed: dict[str, Any] = {slot: part}
    classes = replace(PartClasses(), **changed)
    return type(part.__name__, (Consensus,), {"PART_CLASSES": classes})


class LeavesOneOut(RoundPlan):
    """Plans without one of those who handed in."""

    def _roster(self, now: float) -> tuple[Contribution, ...]:
        roster = super()._roster(now)
        victim = next((entry for entry in roster if entry.peer != self._me), None)
        return tuple(entry for entry in roster if entry != victim)


class CountsItselfAlone(RoundPlan):
    """Plans with nobody else: the shared parameters become what it has trained, whatever all others did."""

    def _roster(self, now: float) -> tuple[Contribution, ...]:
        return tuple(entry for entry in super()._roster(now) if entry.peer == self._me)


class ClosesAtOnce(CountsItselfAlone):
    """The same before others have come to anything: closes the round as it begins, and waits for nobody."""

    def _should_close(self, now: float) -> bool:
        return True

    def _all_stopped(self, now: float) -> bool:
        return self._state.round.work.ready


class LosesColumns(Reducing):
    """Leaves the columns of others out, as if nobody had values for them."""

    def _resolved_slices(self, now: float) -> tuple[Signed[Report], ...] | None:
        chosen = super()._resolved_slices(now)
        return chosen and tuple(signed for signed in chosen if self._is_kept(signed.value.piece))

    def _is_kept(self, piece: Slice) -> bool:
        return piece.block == 0 or self._me in piece.contributors


class LosesAll(LosesColumns):
    """Leaves everything out: a round in which nobody has trained."""

    def _is_kept(self, piece: Slice) -> bool:
        return False


class DropsElector(Members):
    """Has not heard one of the electors."""

    def declarations(self, now: float) -> list[Signed[Declaration]]:
        victim = min(peer for peer in self._state.electors if peer != self._me)
        return [signed for signed in super().declarations(now) if signed.author != victim]


class DropsMembers(Members):
    """Has heard none of those who have no vote."""

    def declarations(self, now: float) -> list[Signed[Declaration]]:
        return [signed for signed in super().declarations(now) if signed.author in self._state.electors]


class KeepsTheDead(Members):
    """Has heard everybody who ever was."""

    def declarations(self, now: float) -> list[Signed[Declaration]]:
        living = {signed.author: signed for signed in super().declarations(now)}
        return [*({peer: declared(one.signed) for peer, one in self._others.contacts.items()} | living).values()]


class _Alters(Voting):
    """Writes something else into the manifest than follows from the words beside it."""

    def built(self, now: float) -> Content | None:
        content = super().built(now)
        return None if content is None else replace(content, manifest=self._altered(content.manifest))

    def _altered(self, made: Manifest) -> Manifest:
        raise NotImplementedError


class TakesColumns(_Alters):
    """Gives itself all columns."""

    def _altered(self, made: Manifest) -> Manifest:
        return replace(made, ownership=((self._me,),) * len(made.ownership))


class LeadsAlways(_Alters):
    """Says of all others that they cannot be dialled, so that it leads first."""

    def _altered(self, made: Manifest) -> Manifest:
        members = (replace(member, link_class=int(member.peer != self._me)) for member in made.members)
        return replace(made, members=tuple(members))


class LongRounds(_Alters):
    """Has the next round last ten times as long."""

    def _altered(self, made: Manifest) -> Manifest:
        return replace(made, steps_per_round=10 * made.steps_per_round)


class OtherState(_Alters):
    """Names a state that nobody can compute."""

    def _altered(self, made: Manifest) -> Manifest:
        return replace(made, state_root=sha256(b"of its own making"))


class TwoFaces(Gossip):
    """Proposes one manifest to half of the electors and another one, which is as good, to the others."""

    def envelope(self, peer: PeerId, beat_at: float | None, newcomers: Collection[PeerId]) -> Envelope:
        honest = super().envelope(peer, beat_at, newcomers)
        named = [votes.proposal for votes in honest.votes if votes.proposal and votes.proposal.author == self._me]
        order = self._state.electorate.order
        if not named or peer not in order[::2]:
            return honest
        other = self._other(self._proposals.named(named[0].value.value))
        if other is None:
            return honest
        name = manifest_hash(other.manifest)
        proposal = self._state.identity.sealer.seal(replace(named[0].value, value=name))
        return replace(honest, votes=tuple(_turned(votes, proposal) for votes in honest.votes), contents=(other,))

    def _other(self, content: Content | None) -> Content | None:
        """The same without the work of one of the others, or without one who has no vote."""
        if content is None or not content.statements.declarations:
            return None
        said, made = content.statements, content.manifest
        words = said.declarations[:-1] if said.declarations[-1].author != self._me else said.declarations[1:]
        tip, rules = self._state.tip, self._state.rules
        return content_of(rules, tip, replace(said, declarations=words), made.state_root, made.merge)


def _turned(votes: Votes, proposal: Signed[Proposal]) -> Votes:
    is_its = votes.proposal is not None and votes.proposal.author == proposal.author
    return replace(votes, proposal=proposal, prevote=None, precommit=None) if is_its else votes


class TwoVotes(Gossip):
    """Votes for what is proposed before half of the electors, and before the others for nothing."""

    def envelope(self, peer: PeerId, beat_at: float | None, newcomers: Collection[PeerId]) -> Envelope:
        honest = super().envelope(peer, beat_at, newcomers)
        if peer in self._state.electorate.order[::2]:
            return honest
        return replace(honest, votes=tuple(map(self._turned, honest.votes)))

    def _turned(self, votes: Votes) -> Votes:
        seal, mine = self._state.identity.sealer.seal, self._me
        prevote, precommit = votes.prevote, votes.precommit
        if prevote is not None and prevote.author == mine:
            prevote = seal(replace(prevote.value, value=NIL))
        if precommit is not None and precommit.author == mine:
            precommit = seal(replace(precommit.value, value=NIL))
        return replace(votes, prevote=prevote, precommit=precommit)


class Silent(Voting):
    """Proposes nothing."""

    def built(self, now: float) -> Content | None:
        return None


class Late(Voting):
    """Proposes when its deadline is all but over."""

    def built(self, now: float) -> Content | None:
        content, current = super().built(now), self._state.round
        deadline = self._pace.deadline_seconds(current.vote.ballot)
        return content if now - current.progress_at > LATE_SHARE * deadline else None


class NeverCloses(RoundPlan):
    """Lets the round go on, however many are READY."""

    def close(self, now: float) -> bool:
        return False


LEADERS: Mapping[str, type] = {
    "leaves-one-out": LeavesOneOut,
    "counts-itself-alone": CountsItselfAlone,
    "closes-at-once": ClosesAtOnce,
    "loses-columns": LosesColumns,
    "loses-all": LosesAll,
    "drops-elector": DropsElector,
    "drops-members": DropsMembers,
    "keeps-the-dead": KeepsTheDead,
    "takes-columns": TakesColumns,
    "leads-always": LeadsAlways,
    "long-rounds": LongRounds,
    "other-state": OtherState,
    "two-faces": TwoFaces,
    "two-votes": TwoVotes,
    "silent": Silent,
    "late": Late,
    "never-closes": NeverCloses,
}
"""The part that lies, by the name of the attack."""

"""Faults put into the vote by hand; each must be found by the search."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from spes_p2p.consensus.electorate import NIL, AnyVote, Electorate
from spes_p2p.consensus.heard_votes import HeardVotes
from spes_p2p.consensus.messages import Polka, Proposal, Sealer, Signed
from spes_p2p.consensus.tendermint import Tendermint
from spes_p2p.consensus.vote_events import Step
from spes_p2p.consensus.vote_record import VoteRecord
from spes_p2p.ids import Hash, PeerId


class ForgetsItsLock(Tendermint):
    """It comes back unlocked."""

    @classmethod
    def begin(
        cls, me: PeerId, electorate: Electorate, fingerprint: Hash, record: VoteRecord, sealer: Sealer
    ) -> Tendermint:
        unlocked = replace(record, locked_ballot=-1, locked_value=NIL)
        return super().begin(me, electorate, fingerprint, unlocked, sealer)


class VotesTwice(Tendermint):
    """It comes back without its newest votes."""

    @classmethod
    def begin(
        cls, me: PeerId, electorate: Electorate, fingerprint: Hash, record: VoteRecord, sealer: Sealer
    ) -> Tendermint:
        return super().begin(me, electorate, fingerprint, replace(record, prevote=None, precommit=None), sealer)


class PrecommitsWithoutPolka(Tendermint):
    """Its own prevote is enough for it."""

    def _rule_precommit(self) -> bool:
        prevote = self.vote.record.prevote
        if self.vote.step is not Step.PREVOTE or prevote is None or prevote.value.value == NIL:
            return super()._rule_precommit()
        self.own.lock(Polka(self.vote.ballot, prevote.value.value, (prevote,)))
        self.own.precommit(prevote.value.value)
        return True


class PrecommitsWithoutTiles(Tendermint):
    """It takes the word of a quorum for what is on its own disk."""

    def _has(self, value: Hash) -> bool:
        return True


class UnlocksForAnyPolka(VoteRecord):
    """A polka of any ballot lifts the lock."""

    def allows(self, proposal: Proposal) -> bool:
        return self.locked_ballot == -1 or proposal.polka is not None or self.locked_value == proposal.value


class SmallQuorum(Electorate):
    @property
    def quorum(self) -> int:
        return super().quorum - 1


class _Hearing(Tendermint):
    """An elector that hears in its own way."""

    heard_class = HeardVotes

    @classmethod
    def begin(
        cls, me: PeerId, electorate: Electorate, fingerprint: Hash, record: VoteRecord, sealer: Sealer
    ) -> Tendermint:
        elector = super().begin(me, electorate, fingerprint, record, sealer)
        elector.vote.heard = cls.heard_class(electorate, fingerprint, record.parent)
        elector.own.resume(record)
        return elector


class _CountingNil(HeardVotes):
    def _quorums(self, kept: dict[PeerId, Signed[AnyVote]]) -> Iterator[list[Signed[AnyVote]]]:
        yield from super()._quorums(kept)
        for vote in kept.values():
            same = [other for other in kept.values() if other.value.ballot == vote.value.ballot]
            fits = [other for other in same if other.value.value in (NIL, vote.value.value)]
            if vote.value.value != NIL and len(fits) >= self.electorate.quorum:
                yield sorted(fits, key=lambda signed: signed.value.value == NIL)


class CountsNil(_Hearing):
    """A vote for nil is one for any value."""

    heard_class = _CountingNil


class _OfAnyBallot(HeardVotes):
    def is_good(self, polka: Polka) -> bool:
        ballots = {signed.value.ballot for signed in polka.prevotes}
        return any(super(_OfAnyBallot, self).is_good(replace(polka, ballot=ballot)) for ballot in ballots)


class TakesAPolkaOfAnotherBallot(_Hearing):
    """It does not look of which ballot the prevotes of a polka are."""

    heard_class = _OfAnyBallot


class _CountingHere(HeardVotes):
    def passed(self, ballot: int, step: int) -> bool:
        kept = self.prevotes if step == Step.PREVOTE else self.precommits
        return sum(vote.value.ballot == ballot for vote in kept.values()) >= self.electorate.quorum


class CountsOnlyThisBallot(_Hearing):
    """Whoever has gone on to another ballot is as good as silent."""

    heard_class = _CountingHere

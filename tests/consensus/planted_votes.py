"""Faults put into the vote by hand; each must be found by the search."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from spes_p2p.consensus.heard_votes import HeardVotes
from spes_p2p.consensus.messages import Sealer, Signed
from spes_p2p.consensus.own_votes import OwnVotes
from spes_p2p.consensus.tendermint import Tendermint
from spes_p2p.consensus.vote_events import Step
from spes_p2p.consensus.vote_messages import NIL, AnyVote, Electorate, Polka, Proposal
from spes_p2p.consensus.vote_record import VoteRecord
from spes_p2p.ids import Hash, PeerId


class ForgetsItsLock(Tendermint):
    """It comes back unlocked."""

    def __init__(
        self, me: PeerId, electorate: Electorate, fingerprint: Hash, record: VoteRecord, sealer: Sealer
    ) -> None:
        super().__init__(me, electorate, fingerprint, replace(record, locked_ballot=-1, locked_value=NIL), sealer)


class VotesTwice(Tendermint):
    """It comes back without its newest votes."""

    def __init__(
        self, me: PeerId, electorate: Electorate, fingerprint: Hash, record: VoteRecord, sealer: Sealer
    ) -> None:
        super().__init__(me, electorate, fingerprint, replace(record, prevote=None, precommit=None), sealer)


class PrecommitsWithoutPolka(Tendermint):
    """Its own prevote is enough for it."""

    def _rule_precommit(self) -> bool:
        prevote = self.own.record.prevote
        if self.own.step is not Step.PREVOTE or prevote is None or prevote.value.value == NIL:
            return super()._rule_precommit()
        self.own.lock(Polka(self.own.ballot, prevote.value.value, (prevote,)))
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

    def __init__(
        self, me: PeerId, electorate: Electorate, fingerprint: Hash, record: VoteRecord, sealer: Sealer
    ) -> None:
        super().__init__(me, electorate, fingerprint, record, sealer)
        self.heard = self.heard_class(electorate, fingerprint, record.parent)
        self.own = OwnVotes(record, self.heard, sealer)


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

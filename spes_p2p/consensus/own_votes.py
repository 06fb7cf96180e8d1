"""What an elector says of the child of one parent, and the record that binds it."""

from __future__ import annotations

from spes_p2p.consensus import vote_record
from spes_p2p.consensus.messages import Polka, Precommit, Prevote, Proposal, Sealer, Votes
from spes_p2p.consensus.vote import Vote
from spes_p2p.consensus.vote_events import StartDeadline, Step
from spes_p2p.consensus.vote_record import VoteRecord, ballot_of
from spes_p2p.ids import Hash


class OwnVotes:
    """Writes each word of ours into the record, and among what was heard. What may be said is decided elsewhere."""

    def __init__(self, vote: Vote, sealer: Sealer) -> None:
        self._vote, self._sealer = vote, sealer
        self._names = vote.heard.fingerprint, vote.heard.parent

    def resume(self, record: VoteRecord) -> None:
        """Goes on from what is on disk: in the newest ballot in which something was said."""
        vote = self._vote
        vote.record, vote.ballot = record, record.ballot
        said = ((ballot_of(record.prevote), Step.PREVOTE), (ballot_of(record.precommit), Step.PRECOMMIT))
        vote.step = max((step for ballot, step in said if ballot == vote.ballot), default=Step.PROPOSE)
        vote.heard.take(Votes(record.prevote, record.precommit, record.proposal, record.valid))

    def start_ballot(self, ballot: int) -> None:
        """Lines 11 to 13 of Algorithm 1."""
        vote = self._vote
        vote.ballot, vote.step = ballot, Step.PROPOSE
        vote.asked = {one for one in vote.asked if not isinstance(one, StartDeadline) or one.ballot >= ballot}

    def propose(self, value: Hash, polka: Polka | None) -> None:
        """Once a ballot."""
        signed = self._sealer.seal(Proposal(*self._names, self._vote.ballot, value, polka))
        self._vote.record = vote_record.propose(self._vote.record, signed)
        self._vote.heard.take(Votes(proposal=signed))

    def prevote(self, value: Hash) -> None:
        """Once a ballot."""
        signed = self._sealer.seal(Prevote(*self._names, self._vote.ballot, value))
        self._vote.record = vote_record.prevote(self._vote.record, signed)
        self._vote.step = Step.PREVOTE
        self._vote.heard.take(Votes(prevote=signed))

    def precommit(self, value: Hash) -> None:
        """Once a ballot; a value is locked first."""
        signed = self._sealer.seal(Precommit(*self._names, self._vote.ballot, value))
        self._vote.record = vote_record.precommit(self._vote.record, signed)
        self._vote.step = Step.PRECOMMIT
        self._vote.heard.take(Votes(precommit=signed))

    def lock(self, polka: Polka) -> None:
        self._vote.record = vote_record.lock(self._vote.record, polka)

    def take_valid(self, polka: Polka) -> None:
        self._vote.record = vote_record.take_valid(self._vote.record, polka)

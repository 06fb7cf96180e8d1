"""What an elector says of the child of one parent: its ballot and step, and the record that binds it."""

from __future__ import annotations

import copy

from spes_p2p.consensus import vote_record
from spes_p2p.consensus.heard_votes import HeardVotes
from spes_p2p.consensus.messages import Sealer
from spes_p2p.consensus.vote_events import Step
from spes_p2p.consensus.vote_messages import Polka, Precommit, Prevote, Proposal, Votes
from spes_p2p.consensus.vote_record import VoteRecord, ballot_of
from spes_p2p.ids import Hash


class OwnVotes:
    """Writes each word of ours into the record, and among what was heard. What may be said is decided elsewhere."""

    def __init__(self, record: VoteRecord, heard: HeardVotes, sealer: Sealer) -> None:
        self._heard, self._sealer = heard, sealer
        self.resume(record)

    def copy(self, heard: HeardVotes) -> OwnVotes:
        """One that goes its own way."""
        other = copy.copy(self)
        other._heard = heard
        return other

    def resume(self, record: VoteRecord) -> None:
        """Goes on from what is on disk: in the newest ballot in which something was said."""
        self.record = record
        self.ballot = record.ballot
        said = ((ballot_of(record.prevote), Step.PREVOTE), (ballot_of(record.precommit), Step.PRECOMMIT))
        self.step = max((step for ballot, step in said if ballot == self.ballot), default=Step.PROPOSE)
        self._heard.take(Votes(record.prevote, record.precommit, record.proposal, record.valid))

    def start_ballot(self, ballot: int) -> None:
        """Lines 11 to 13 of Algorithm 1."""
        self.ballot, self.step = ballot, Step.PROPOSE

    def propose(self, value: Hash, polka: Polka | None) -> None:
        """Once a ballot."""
        proposal = Proposal(self._heard.fingerprint, self.record.parent, self.ballot, value, polka)
        signed = self._sealer.seal(proposal)
        self.record = vote_record.propose(self.record, signed)
        self._heard.take(Votes(proposal=signed))

    def prevote(self, value: Hash) -> None:
        """Once a ballot."""
        signed = self._sealer.seal(Prevote(self._heard.fingerprint, self.record.parent, self.ballot, value))
        self.record = vote_record.prevote(self.record, signed)
        self.step = Step.PREVOTE
        self._heard.take(Votes(prevote=signed))

    def precommit(self, value: Hash) -> None:
        """Once a ballot; a value is locked first."""
        signed = self._sealer.seal(Precommit(self._heard.fingerprint, self.record.parent, self.ballot, value))
        self.record = vote_record.precommit(self.record, signed)
        self.step = Step.PRECOMMIT
        self._heard.take(Votes(precommit=signed))

    def lock(self, polka: Polka) -> None:
        self.record = vote_record.lock(self.record, polka)

    def take_valid(self, polka: Polka) -> None:
        self.record = vote_record.take_valid(self.record, polka)

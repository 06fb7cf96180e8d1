"""What an elector has bound itself to for the child of one manifest, as pure transitions.

A record is on disk (fsynced) before a vote or proposal in it leaves, and is never deleted: who comes back to the same
parent goes on from it. Who has lost its record takes a new incarnation, which has no vote.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from spes_p2p.consensus.content import Content
from spes_p2p.consensus.electorate import NIL
from spes_p2p.consensus.messages import Polka, Precommit, Prevote, Proposal, Signed
from spes_p2p.errors import LocalProtocolError
from spes_p2p.ids import Hash


@dataclass(frozen=True)
class VoteRecord:
    """The newest own proposal and votes, the lock, and the valid value with the polka that shows it.

    Earlier ones need not be kept: an elector never goes back to a ballot. `valid` is never older than the lock.
    `backed` is the newest own prevote for a value: whoever votes for it has it. `contents` are those of all that is
    `pinned`, as far as they are known.
    """

    parent: Hash
    proposal: Signed[Proposal] | None = None
    prevote: Signed[Prevote] | None = None
    precommit: Signed[Precommit] | None = None
    backed: Signed[Prevote] | None = None
    locked_ballot: int = -1
    locked_value: Hash = NIL
    valid: Polka | None = None
    contents: tuple[Content, ...] = ()

    @property
    def ballot(self) -> int:
        """The newest ballot in which something was said."""
        return max(0, ballot_of(self.proposal), ballot_of(self.prevote), ballot_of(self.precommit))

    @property
    def valid_ballot(self) -> int:
        return self.valid.ballot if self.valid else -1

    def allows(self, proposal: Proposal) -> bool:
        """Lines 23 and 29: no lock, the locked value, or a polka that is not older than the lock."""
        return self.locked_ballot <= proposal.polka_ballot or self.locked_value == proposal.value

    @property
    def pinned(self) -> frozenset[Hash]:
        """The values whose tiles must stay on disk: a certificate may need them, or may have been made of our vote."""
        valid = self.valid.value if self.valid else NIL
        backed = self.backed.value.value if self.backed else NIL
        return frozenset({self.locked_value, valid, backed} - {NIL})


def ballot_of(signed: Signed[Proposal] | Signed[Prevote] | Signed[Precommit] | None) -> int:
    """-1 where nothing was said."""
    return -1 if signed is None else signed.value.ballot


def propose(record: VoteRecord, proposal: Signed[Proposal]) -> VoteRecord:
    """One proposal a ballot, ever, and before the own vote in it."""
    ballot = proposal.value.ballot
    _check_parent(record, proposal.value)
    if ballot <= max(ballot_of(record.proposal), ballot_of(record.prevote), ballot_of(record.precommit)):
        raise LocalProtocolError(f"ballot {ballot} is too late for a proposal of ours: {_told(record)}")
    return replace(record, proposal=proposal)


def prevote(record: VoteRecord, vote: Signed[Prevote]) -> VoteRecord:
    """One prevote a ballot, ever, and none in a ballot that is over for us."""
    ballot = vote.value.ballot
    _check_parent(record, vote.value)
    if ballot <= max(ballot_of(record.prevote), ballot_of(record.precommit)) or ballot < ballot_of(record.proposal):
        raise LocalProtocolError(f"ballot {ballot} is too late for a prevote of ours: {_told(record)}")
    return replace(record, prevote=vote, backed=record.backed if vote.value.value == NIL else vote)


def precommit(record: VoteRecord, vote: Signed[Precommit]) -> VoteRecord:
    """One precommit a ballot, ever; one for a value only where it was locked in this ballot."""
    ballot, value = vote.value.ballot, vote.value.value
    _check_parent(record, vote.value)
    if ballot <= ballot_of(record.precommit) or ballot < record.ballot:
        raise LocalProtocolError(f"ballot {ballot} is too late for a precommit of ours: {_told(record)}")
    if value != NIL and (record.locked_ballot, record.locked_value) != (ballot, value):
        raise LocalProtocolError(f"a precommit in ballot {ballot} of a value that is not locked there")
    return replace(record, precommit=vote)


def lock(record: VoteRecord, polka: Polka) -> VoteRecord:
    """Locks a value that has a polka in a later ballot than the present lock. It is the valid value too."""
    if polka.ballot <= record.locked_ballot:
        raise LocalProtocolError(f"a lock of ballot {record.locked_ballot} cannot go back to ballot {polka.ballot}")
    locked = replace(record, locked_ballot=polka.ballot, locked_value=polka.value)
    return locked if polka.ballot <= record.valid_ballot else replace(locked, valid=polka)


def take_valid(record: VoteRecord, polka: Polka) -> VoteRecord:
    """Notes a value that could be proposed again."""
    if polka.ballot <= record.valid_ballot:
        raise LocalProtocolError(f"a valid value of ballot {record.valid_ballot} is newer than {polka.ballot}")
    return replace(record, valid=polka)


def _check_parent(record: VoteRecord, message: Proposal | Prevote | Precommit) -> None:
    if message.parent != record.parent:
        raise LocalProtocolError("a vote for the child of another parent than the record's")


def _told(record: VoteRecord) -> str:
    said = (ballot_of(record.proposal), ballot_of(record.prevote), ballot_of(record.precommit))
    return "the newest are proposal {}, prevote {}, precommit {}".format(*said)

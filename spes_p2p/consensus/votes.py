"""The voting record of one elector for the child of one manifest: single-decree Paxos, as pure transitions.

Every transition returns the record that must be on disk (fsynced) before anything that follows from it leaves. A peer
that comes back without its record must take a new incarnation, which makes it a newcomer without a vote.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from spes_p2p.consensus.messages import DegradedVote, Proposal, Signed, manifest_hash
from spes_p2p.errors import LocalProtocolError
from spes_p2p.ids import NO_HASH, Hash


@dataclass(frozen=True)
class VoteRecord:
    """All that an elector has bound itself to for the child of `parent`.

    `promised`: no acceptance below this ballot any more. `accepted`: the proposal accepted at the highest ballot.
    `proposed`: (ballot, manifest hash) of own proposals; one a ballot, ever. `degraded`: the last degraded proposal
    that it signed; `degraded_votes`: where it led that set, the votes of all in it, ours too: the certificate.
    """

    parent: Hash
    promised: int = 0
    accepted: Signed[Proposal] | None = None
    proposed: tuple[tuple[int, Hash], ...] = ()
    degraded: Signed[Proposal] | None = None
    degraded_votes: tuple[Signed[DegradedVote], ...] = ()

    @property
    def accepted_ballot(self) -> int:
        return self.accepted.value.ballot if self.accepted else -1

    @property
    def accepted_hash(self) -> Hash:
        return manifest_hash(self.accepted.value.manifest) if self.accepted else NO_HASH


def can_promise(record: VoteRecord, ballot: int) -> bool:
    """A promise is for a ballot above all promised and accepted ones."""
    return ballot > record.promised


def promise(record: VoteRecord, ballot: int) -> VoteRecord:
    """Binds the elector to accept nothing below `ballot`."""
    if not can_promise(record, ballot):
        raise LocalProtocolError(f"ballot {ballot} is not above the promised {record.promised}")
    return replace(record, promised=ballot)


def can_accept(record: VoteRecord, proposal: Proposal) -> bool:
    """A proposal below the promise is refused, and so is a second content at one ballot."""
    if proposal.ballot < record.promised or proposal.parent != record.parent or proposal.heard:
        return False
    if proposal.ballot == record.accepted_ballot:
        return manifest_hash(proposal.manifest) == record.accepted_hash
    return proposal.ballot > record.accepted_ballot


def accept(record: VoteRecord, proposal: Signed[Proposal]) -> VoteRecord:
    """Binds the elector to `proposal` as its highest acceptance."""
    if not can_accept(record, proposal.value):
        raise LocalProtocolError(f"ballot {proposal.value.ballot} can not be accepted after {record.promised}")
    return replace(record, promised=proposal.value.ballot, accepted=proposal)


def can_propose(record: VoteRecord, ballot: int, manifest: Hash) -> bool:
    """One proposal a ballot, ever."""
    return all(manifest == earlier for at, earlier in record.proposed if at == ballot)


def propose(record: VoteRecord, ballot: int, manifest: Hash) -> VoteRecord:
    """Notes an own proposal, so that a restarted leader never makes another at the same ballot."""
    if not can_propose(record, ballot, manifest):
        raise LocalProtocolError(f"ballot {ballot} already has another proposal of ours")
    return replace(record, proposed=(*record.proposed, (ballot, manifest)))


def vote_degraded(
    record: VoteRecord, proposal: Signed[Proposal], votes: tuple[Signed[DegradedVote], ...] = ()
) -> VoteRecord:
    """Notes a degraded vote; it is kept apart from acceptances and never reported in a promise.

    The leader of a degraded set signs last and brings all `votes`: it has decided, once and for all.
    """
    if record.degraded_votes:
        raise LocalProtocolError("a degraded certificate was signed already")
    return replace(record, degraded=proposal, degraded_votes=votes)

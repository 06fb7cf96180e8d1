"""The newest that each elector was heard to say of the child of one parent, and what a quorum of it amounts to.

One prevote, one precommit and one proposal of each elector are kept, whatever anybody sends. That is enough: who has
gone on to a later ballot counts as one that has passed the earlier ones (`passed`), a polka or certificate that was
seen is kept by who saw it, and one that nobody saw is made again in a later ballot.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from spes_p2p.consensus.electorate import MAX_BALLOT, NIL, AnyVote, Electorate, is_polka, make_polka
from spes_p2p.consensus.messages import Polka, Precommit, Prevote, Proposal, Signed, Votes
from spes_p2p.consensus.vote_record import VoteRecord, ballot_of
from spes_p2p.ids import Hash, PeerId

AnyWord = TypeVar("AnyWord", Prevote, Precommit, Proposal)


@dataclass
class HeardVotes:
    """Fills itself from messages whose signatures were checked; counts. Decides nothing.

    `polka` is the newest; `liars` are those who have said two things in one ballot.
    """

    electorate: Electorate
    fingerprint: Hash
    parent: Hash
    prevotes: dict[PeerId, Signed[Prevote]] = field(default_factory=dict)
    precommits: dict[PeerId, Signed[Precommit]] = field(default_factory=dict)
    proposals: dict[PeerId, Signed[Proposal]] = field(default_factory=dict)
    polka: Polka | None = None
    liars: set[PeerId] = field(default_factory=set)

    def copy(self) -> HeardVotes:
        """An independent copy."""
        return replace(
            self,
            prevotes=dict(self.prevotes),
            precommits=dict(self.precommits),
            proposals=dict(self.proposals),
            liars=set(self.liars),
        )

    def take(self, votes: Votes) -> None:
        """Takes in what is in order and new; a polka's prevotes are votes like others."""
        if votes.proposal is not None:
            self._take_proposal(votes.proposal)
        if votes.polka is not None:
            self._take_polka(votes.polka)
        if votes.prevote is not None:
            self._take_vote(votes.prevote, self.prevotes)
        if votes.precommit is not None:
            self._take_vote(votes.precommit, self.precommits)
        for prevotes in self._quorums(self.prevotes):
            self._keep(make_polka(prevotes, self.electorate))

    def is_news(self, votes: Votes) -> bool:
        """Whether `take` would change anything: what is known may be repeated by anybody, thousands of times."""
        proposal = votes.proposal if votes.proposal is not None and self._is_proposal(votes.proposal) else None
        carried = (votes.polka, proposal.value.polka if proposal is not None else None)
        polkas = [polka for polka in carried if polka is not None and self.is_good(polka)]
        prevotes = (votes.prevote, *(signed for polka in polkas for signed in polka.prevotes))
        return (
            any(self.polka is None or polka.ballot > self.polka.ballot for polka in polkas)
            or any(self._is_new(signed, self.prevotes) for signed in prevotes)
            or self._is_new(votes.precommit, self.precommits)
            or self._is_new(proposal, self.proposals)
        )

    def _is_new(self, signed: Signed[AnyWord] | None, kept: Mapping[PeerId, Signed[AnyWord]]) -> bool:
        """Whether it is the newest of its author, or the first that shows that its author lies."""
        if signed is None or not self._is_in_order(signed):
            return False
        known = kept.get(signed.author)
        if known is None or known.value.ballot != signed.value.ballot:
            return ballot_of(known) < signed.value.ballot
        return signed.author not in self.liars and _says(known) != _says(signed)

    def _take_vote(self, signed: Signed[AnyVote], kept: dict[PeerId, Signed[AnyVote]]) -> None:
        """The newest of its author; of two in one ballot the first: its author lies."""
        if not self._is_in_order(signed):
            return
        known = kept.get(signed.author)
        if known is not None and known.value.ballot == signed.value.ballot and known.value != signed.value:
            self.liars.add(signed.author)
        if ballot_of(known) < signed.value.ballot:
            kept[signed.author] = signed

    def has_more_of(self, elector: PeerId, record: VoteRecord) -> bool:
        """Whether words of this elector were heard that its record does not know."""
        heard = (self.prevotes.get(elector), self.precommits.get(elector), self.proposals.get(elector))
        return heard != (record.prevote, record.precommit, record.proposal) or elector in self.liars

    def forget(self, elector: PeerId, prevote: Signed[Prevote] | None) -> None:
        """Treats all that this elector said as unsaid. No polka may contain a later prevote of it than this one."""
        for kept in (self.prevotes, self.precommits, self.proposals):
            kept.pop(elector, None)
        later = self.polka if self.polka is not None and self.polka.ballot > ballot_of(prevote) else None
        if later is not None and any(signed.author == elector for signed in later.prevotes):
            self.polka = None

    def _take_proposal(self, signed: Signed[Proposal]) -> None:
        proposal = signed.value
        if not self._is_proposal(signed):
            return
        known = self.proposals.get(signed.author)
        if known is not None and known.value.ballot == proposal.ballot and _says(known) != _says(signed):
            self.liars.add(signed.author)
        if proposal.polka is not None:
            self._take_polka(proposal.polka)
        if ballot_of(known) < proposal.ballot:
            self.proposals[signed.author] = signed

    def _is_proposal(self, signed: Signed[Proposal]) -> bool:
        """Whether it is by who leads its ballot, and its polka, if it has one, is for its value in an earlier one."""
        proposal, polka = signed.value, signed.value.polka
        if not self._is_in_order(signed) or signed.author != self.electorate.leader(proposal.ballot):
            return False
        is_older = polka is None or (polka.value == proposal.value and polka.ballot < proposal.ballot)
        return is_older and (polka is None or self.is_good(polka))

    def is_good(self, polka: Polka) -> bool:
        return is_polka(polka, self.electorate, self.fingerprint, self.parent)

    def _take_polka(self, polka: Polka) -> None:
        if not self.is_good(polka):
            return
        for signed in polka.prevotes:
            self._take_vote(signed, self.prevotes)
        self._keep(polka)

    def _keep(self, polka: Polka) -> None:
        if self.polka is None or polka.ballot > self.polka.ballot:
            self.polka = polka

    def _is_in_order(self, signed: Signed[Proposal] | Signed[Prevote] | Signed[Precommit]) -> bool:
        message = signed.value
        here = message.fingerprint == self.fingerprint and message.parent == self.parent
        return here and signed.author in self.electorate.order and 0 <= message.ballot < MAX_BALLOT

    # ---------------------------------------------------------------- counting

    def proposal_at(self, ballot: int) -> Signed[Proposal] | None:
        signed = self.proposals.get(self.electorate.leader(ballot))
        return signed if ballot_of(signed) == ballot else None

    def certificate(self) -> tuple[Signed[Precommit], ...]:
        """Precommits of a quorum for one value, as many as needed; empty without."""
        for votes in self._quorums(self.precommits):
            return tuple(sorted(votes, key=lambda signed: signed.author)[: self.electorate.quorum])
        return ()

    def nil_quorum(self, kept: dict[PeerId, Signed[AnyVote]], ballot: int) -> bool:
        """Whether a quorum voted nil in this ballot; `kept` are all prevotes or all precommits."""
        nil = [vote for vote in kept.values() if (vote.value.ballot, vote.value.value) == (ballot, NIL)]
        return len(nil) >= self.electorate.quorum

    def passed(self, ballot: int, step: int) -> bool:
        """Whether a quorum has prevoted (1) or precommitted (2) in this ballot, or gone on to a later one."""
        mark = (ballot, step)
        return sum(self._newest(peer) >= mark for peer in self.electorate.order) >= self.electorate.quorum

    def reached(self) -> int:
        """The newest ballot in which an elector that does not lie is surely; -1 without."""
        newest: dict[PeerId, int] = {}
        for heard in (self.precommits, self.prevotes, self.proposals):  # asked often, mostly before anybody votes
            for peer, signed in heard.items():
                newest[peer] = max(signed.value.ballot, newest.get(peer, -1))
        believed = self.electorate.believed
        return sorted(newest.values(), reverse=True)[believed - 1] if len(newest) >= believed else -1

    def _newest(self, peer: PeerId) -> tuple[int, int]:
        """(newest ballot, 2 where it precommitted there, 1 where it prevoted, 0 where it only proposed)."""
        ballot, step = ballot_of(self.precommits.get(peer)), 2
        if (prevoted := ballot_of(self.prevotes.get(peer))) > ballot:
            ballot, step = prevoted, 1
        if (proposed := ballot_of(self.proposals.get(peer))) > ballot:
            ballot, step = proposed, 0
        return ballot, step

    def _quorums(self, kept: dict[PeerId, Signed[AnyVote]]) -> Iterator[list[Signed[AnyVote]]]:
        """Votes of a quorum for one value in one ballot; nil is no value."""
        tally: dict[tuple[int, Hash], list[Signed[AnyVote]]] = defaultdict(list)
        for vote in kept.values():
            tally[vote.value.ballot, vote.value.value].append(vote)
        for (_, value), votes in tally.items():
            if value != NIL and len(votes) >= self.electorate.quorum:
                yield votes


def _says(signed: Signed[Prevote] | Signed[Precommit] | Signed[Proposal]) -> tuple[Hash, int]:
    """What an elector may say once in a ballot, by the value and the ballot of the polka that came with it, or -1."""
    said = signed.value
    return said.value, said.polka_ballot if isinstance(said, Proposal) else -1

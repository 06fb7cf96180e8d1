"""What electors say to each other to decide the child of one manifest, in the words of Tendermint (arXiv 1807.04938).

Frozen dataclasses. A height of the paper is the child of a parent manifest, a round of the paper is a ballot, a value
is the hash of a manifest. Votes and proposals travel as `Signed`; whoever takes them in has checked the signatures,
those inside a polka too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from spes_p2p.consensus.messages import Signed
from spes_p2p.ids import NO_HASH, Hash, PeerId

NIL = NO_HASH
"""A vote for no value."""
MAX_BALLOT = 2**31


class Faults(Enum):
    """What electors may do wrong: `swarm.faults`."""

    CRASH = "crash"
    """They stop, lose messages and come back with their record. One that lies can break agreement."""
    BYZANTINE = "byzantine"
    """Fewer than a third of them may do anything at all."""


@dataclass(frozen=True)
class Electorate:
    """The electors of one parent, in the order in which they lead ballots 0, 1, ..., and what is a quorum of them."""

    order: tuple[PeerId, ...]
    faults: Faults

    @property
    def quorum(self) -> int:
        """2f + 1 in the paper. Any two quorums share an elector that does not lie."""
        share = 2 * len(self.order) // 3 if self.faults is Faults.BYZANTINE else len(self.order) // 2
        return share + 1

    @property
    def believed(self) -> int:
        """f + 1 in the paper: so many that one of them does not lie. Where nobody lies, one."""
        return len(self.order) - self.quorum + 1 if self.faults is Faults.BYZANTINE else 1

    def leader(self, ballot: int) -> PeerId:
        return self.order[ballot % len(self.order)]


@dataclass(frozen=True)
class Prevote:
    """The first vote of an elector in a ballot: for the proposed value, or nil."""

    fingerprint: Hash
    parent: Hash
    ballot: int
    value: Hash


@dataclass(frozen=True)
class Precommit:
    """The second vote of an elector in a ballot: for a value that has a polka there, or nil.

    A quorum of them for one value is the certificate.
    """

    fingerprint: Hash
    parent: Hash
    ballot: int
    value: Hash


AnyVote = TypeVar("AnyVote", Prevote, Precommit)


@dataclass(frozen=True)
class Polka:
    """A quorum of prevotes for one value in one ballot."""

    ballot: int
    value: Hash
    prevotes: tuple[Signed[Prevote], ...]


@dataclass(frozen=True)
class Proposal:
    """The leader of a ballot asks for a value. `polka` is of an earlier ballot; a *first* proposal has none."""

    fingerprint: Hash
    parent: Hash
    ballot: int
    value: Hash
    polka: Polka | None = None

    @property
    def polka_ballot(self) -> int:
        """validRound in the paper; -1 in a first proposal."""
        return self.polka.ballot if self.polka else -1


@dataclass(frozen=True)
class Votes:
    """All that an elector tells of a vote: its own newest votes, the newest proposal and the newest polka it knows.

    It may be lost, repeated and overtaken: a later one says all that still matters of an earlier one.
    """

    prevote: Signed[Prevote] | None = None
    precommit: Signed[Precommit] | None = None
    proposal: Signed[Proposal] | None = None
    polka: Polka | None = None


@dataclass(frozen=True)
class Equivocation:
    """Two messages of one elector in one ballot, of which an honest one sends a single one: proof that it lies."""

    first: Signed[Prevote] | Signed[Precommit] | Signed[Proposal]
    second: Signed[Prevote] | Signed[Precommit] | Signed[Proposal]


def is_polka(polka: Polka, electorate: Electorate, fingerprint: Hash, parent: Hash) -> bool:
    """Whether these are prevotes of a quorum of different electors, all for this value in this ballot."""
    wanted = Prevote(fingerprint, parent, polka.ballot, polka.value)
    authors = {signed.author for signed in polka.prevotes if signed.value == wanted}
    fits = len(authors) == len(polka.prevotes) and authors <= set(electorate.order)
    return fits and len(authors) >= electorate.quorum and polka.value != NIL and 0 <= polka.ballot < MAX_BALLOT


def make_polka(prevotes: Sequence[Signed[Prevote]], electorate: Electorate) -> Polka:
    """As many prevotes as needed, in a fixed order."""
    chosen = sorted(prevotes, key=lambda signed: signed.author)[: electorate.quorum]
    return Polka(chosen[0].value.ballot, chosen[0].value.value, tuple(chosen))

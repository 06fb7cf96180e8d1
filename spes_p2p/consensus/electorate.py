"""Who votes on the child of one manifest, in the words of Tendermint (arXiv 1807.04938), and what is a quorum of them.

A height of the paper is the child of a parent manifest, a round of the paper is a ballot, a value is the hash of a
manifest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from spes_p2p.consensus.messages import Polka, Precommit, Prevote, Signed
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
class SealRule:
    """Whose seals commit a manifest of a run: what its electors may do wrong says how many, and its organiser alone."""

    organiser: PeerId
    faults: Faults = Faults.CRASH


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
        return self.order[ballot % len(self.order)] if self.order else PeerId("")


AnyVote = TypeVar("AnyVote", Prevote, Precommit)


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

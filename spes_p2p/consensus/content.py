"""What electors vote on: a manifest with the signed statements that it follows from; and what travels between peers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from spes_p2p.consensus.manifest import Manifest
from spes_p2p.consensus.membership import Roll
from spes_p2p.consensus.messages import (
    Accusation,
    Commit,
    DecayOrder,
    Declaration,
    Plan,
    Precommit,
    Prevote,
    Proposal,
    Report,
    Signed,
    Status,
    Verdict,
    Votes,
)
from spes_p2p.ids import Hash, PeerId


def joined_hashes(reports: Iterable[Signed[Report]]) -> tuple[bytes, ...]:
    """Of each reported slice the hashes of its tiles, joined."""
    return tuple(b"".join(signed.value.wire_hashes) for signed in reports)


@dataclass(frozen=True)
class Equivocation:
    """Two messages of one elector in one ballot, of which an honest one sends a single one: proof that it lies.

    One of the three is a pair, the others are empty.
    """

    prevotes: tuple[Signed[Prevote], ...] = ()
    precommits: tuple[Signed[Precommit], ...] = ()
    proposals: tuple[Signed[Proposal], ...] = ()

    @property
    def author(self) -> PeerId:
        return self.both[0].author

    @property
    def both(self) -> tuple[Signed[Prevote] | Signed[Precommit] | Signed[Proposal], ...]:
        return (*self.prevotes, *self.precommits, *self.proposals)

    def is_proof(self, fingerprint: Hash) -> bool:
        """Whether they are of one author, run and ballot, and differ. Signatures were checked before."""
        if sorted(map(len, (self.prevotes, self.precommits, self.proposals))) != [0, 0, 2]:
            return False
        one, other = self.both
        is_same_place = _place(one) == _place(other) and one.value.fingerprint == fingerprint
        return is_same_place and says(one) != says(other)


def _place(signed: Signed[Prevote] | Signed[Precommit] | Signed[Proposal]) -> tuple[PeerId, Hash, Hash, int]:
    return signed.author, signed.value.fingerprint, signed.value.parent, signed.value.ballot


def says(signed: Signed[Prevote] | Signed[Precommit] | Signed[Proposal]) -> tuple[Hash, int]:
    """What an elector may say once in a ballot, by the value and the ballot of the polka that came with it, or -1."""
    said = signed.value
    return said.value, said.polka_ballot if isinstance(said, Proposal) else -1


@dataclass(frozen=True)
class Statements:
    """What a manifest follows from beside its parent: slices from `reports` in their order, the next members and what
    they own from `declarations`, one each, the roster from these and, where somebody says something else by now,
    `ready`. `decay` is beside the manifest that takes it up, and later ones do without; so is `roll`. Who is banned
    from now on follows from `accusations`, from `equivocations` and, as what came of audits does, from `verdicts`.
    """

    ready: tuple[Signed[Declaration], ...]
    reports: tuple[Signed[Report], ...]
    declarations: tuple[Signed[Declaration], ...]
    decay: Signed[DecayOrder] | None = None
    roll: Signed[Roll] | None = None
    accusations: tuple[Signed[Accusation], ...] = ()
    verdicts: tuple[Signed[Verdict], ...] = ()
    equivocations: tuple[Equivocation, ...] = ()


@dataclass(frozen=True)
class Content:
    """A manifest that is voted on, and what its signers said that it follows from (see `statements`)."""

    manifest: Manifest
    statements: Statements

    @cached_property
    def wire_hashes(self) -> tuple[bytes, ...]:
        """Of each slice the hashes of its tiles, joined."""
        return joined_hashes(self.statements.reports)


@dataclass(frozen=True)
class Envelope:
    """One message between two peers: the sender's status and what the receiver lacks.

    `ready` is what the roster of `plan` follows from. `answers` is the life of the receiver that the sender has heard,
    0 for none.
    """

    sender: PeerId
    statuses: tuple[Signed[Status], ...] = ()
    plan: Signed[Plan] | None = None
    ready: tuple[Signed[Declaration], ...] = ()
    reports: tuple[Signed[Report], ...] = ()
    accusations: tuple[Signed[Accusation], ...] = ()
    verdicts: tuple[Signed[Verdict], ...] = ()
    votes: tuple[Votes, ...] = ()
    contents: tuple[Content, ...] = ()
    commit: Commit | None = None
    answers: int = 0
    equivocations: tuple[Equivocation, ...] = ()

    @property
    def has_news(self) -> bool:
        """Whether it tells of more than how peers stand."""
        seldom = (self.accusations, self.verdicts, self.equivocations)
        return any((self.plan, self.reports, self.votes, self.contents, self.commit, *seldom))

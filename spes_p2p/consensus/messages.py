"""What peers say to each other: frozen dataclasses, packed by `spes_p2p.wire`. No behaviour beyond hashing and signing.

The durable ones are `Manifest` (what a round decided) and `Certificate` (that it is decided). The others serve one
round and are forgotten with it. A message that must be trusted travels as `Signed`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

from spes_p2p.consensus.manifest import Contribution, Manifest, Slice, content_hash
from spes_p2p.ids import NO_HASH, Hash, PeerId, sha256
from spes_p2p.wire import pack

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


GENESIS = "genesis"
QUORUM = "quorum"
RENEWAL = "renewal"


@dataclass(frozen=True)
class Seal:
    """One signature of a certificate, with the key that checks it (libp2p ids are hashes of RSA keys)."""

    peer: PeerId
    public_key: bytes
    signature: bytes


@dataclass(frozen=True)
class Certificate:
    """The commit of a manifest: precommits of a quorum, or the organiser's signature alone, in ballot 0."""

    parent: Hash
    kind: str
    ballot: int
    manifest: Hash
    seals: tuple[Seal, ...]


@dataclass(frozen=True)
class Prevote:
    """The first vote of an elector in a ballot: for the proposed value, a manifest by its hash, or nil."""

    fingerprint: Hash
    parent: Hash
    ballot: int
    value: Hash


@dataclass(frozen=True)
class Precommit:
    """The second vote of an elector in a ballot: for a value that has a polka there, or nil.

    These bytes, signed by a quorum for one value, are its certificate.
    """

    fingerprint: Hash
    parent: Hash
    ballot: int
    value: Hash


@dataclass(frozen=True)
class Renewal:
    """What the organiser signs alone where a quorum is lost: `manifest` differs from `parent` in its electors only."""

    fingerprint: Hash
    parent: Hash
    manifest: Hash


@dataclass(frozen=True)
class DecayOrder:
    """What the organiser signs to let the learning rate fall over `steps` steps, from the next manifest on."""

    fingerprint: Hash
    steps: int


@dataclass(frozen=True)
class Work:
    """How far a peer has trained since the last commit that counted it.

    `ready_in_seconds` is when a running step will be done (0 when ready); `expected_tokens` what it means to train in a
    whole round; `seconds` how long it trained in this round.
    """

    ready: bool = False
    tokens: int = 0
    steps: int = 0
    sequences: int = 0
    seconds: float = 0.0
    ready_in_seconds: float = 0.0
    expected_tokens: int = 0


@dataclass(frozen=True)
class Intent:
    """What a peer wants: to take part, to leave, which columns; and what it can offer.

    `serving`: it takes part without training: it reduces, holds and votes.
    """

    joining: bool = False
    leaving: bool = False
    max_columns: int = 0
    claims: tuple[int, ...] = ()
    releases: tuple[int, ...] = ()
    link_class: int = 0
    uplink_bytes_per_second: int = 0
    can_vote: bool = True
    serving: bool = False


@dataclass(frozen=True)
class Ballots:
    """An elector's voting state for the child of its head, as far as it is on disk; -1 for none.

    `prevoted` and `precommitted` are the newest ballots of its votes, `polka` that of the newest polka whose state it
    has. `closing` is the ballot as whose leader it closes the round.
    """

    prevoted: int = -1
    precommitted: int = -1
    polka: int = -1
    closing: int = -1


@dataclass(frozen=True)
class Declaration:
    """The part of a status that manifests follow from: what a peer trained on top of `head`, and what it wants.

    It is small whatever else the status says, of which it has but the hash, `rest`; the signature under the status is
    that under this (see `signing_bytes`), so it travels alone where the rest does not matter.
    """

    fingerprint: Hash
    peer: PeerId
    incarnation: int
    sequence: int
    head: Hash
    work: Work
    intent: Intent
    rest: Hash

    @property
    def mark(self) -> tuple[int, int]:
        """Of two of one peer the one with the higher mark is newer."""
        return self.incarnation, self.sequence


@dataclass(frozen=True)
class Status:
    """What every peer keeps telling. A later `sequence` of the same incarnation replaces the earlier one.

    `round` and `head` name the manifest that it stands on, `counted` and `roll` are what that has counted and the
    number of its roll; everything below is about the child of `head`.
    `plan`, `reports` (one byte a slice of the plan) and `proposal` (the newest ballot) say what it has, so that others
    send what it lacks; `lacks` names manifests whose content it needs; `staged` (one byte a slice) says which slices it
    can serve. `unheard` are electors that do not reach it themselves, `silent` trusted members that it does not hear at
    all. `moved` grows while bytes of this round move at it. `life` tells one life of its process from another. Others
    than their author pass on its `declaration` alone.
    """

    fingerprint: Hash
    peer: PeerId
    incarnation: int
    sequence: int
    round: int
    head: Hash
    work: Work
    intent: Intent
    ballots: Ballots
    plan: Hash = NO_HASH
    reports: bytes = b""
    staged: bytes = b""
    proposal: int = -1
    lacks: tuple[Hash, ...] = ()
    unheard: tuple[PeerId, ...] = ()
    moved: int = 0
    life: int = 0
    counted: int = 0
    roll: int = 0
    silent: tuple[PeerId, ...] = ()

    @property
    def mark(self) -> tuple[int, int]:
        """Of two words of one peer the one with the higher mark is newer."""
        return self.incarnation, self.sequence

    @cached_property
    def declaration(self) -> Declaration:
        rest = (
            self.round, self.ballots, self.plan, self.reports, self.staged, self.proposal, self.lacks, self.unheard,
            self.moved, self.life, self.counted, self.roll, self.silent,
        )  # fmt: skip
        return Declaration(
            self.fingerprint, self.peer, self.incarnation, self.sequence, self.head, self.work, self.intent,
            sha256(pack(rest)),
        )  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """The leader's advice on how to reduce a round; never voted on. A plan of a higher ballot replaces it."""

    fingerprint: Hash
    parent: Hash
    ballot: int
    leader: PeerId
    roster: tuple[Contribution, ...]
    slices: tuple[Slice, ...]


def plan_hash(plan: Plan) -> Hash:
    """The name of a plan: what streams of contributions are asked by."""
    return content_hash(plan)


LOST = "lost"
"""Reason of a contributor that a reducer could not reach: another reducer may."""


@dataclass(frozen=True)
class Report:
    """A reducer's word that a slice is reduced: whose values went in and the hash of each tile that it now serves.

    `piece` is slice `index` of `plan` with its reducer and those whose values went in. `left_out` names contributors
    that were lost or refused, with the reason. Without contributors and hashes it is a void report: this reducer has no
    values that are fit, the next in order tries. `shares`: of each contributor how much of what it gave counted, of
    `SHARE`; empty where all are trusted.
    """

    parent: Hash
    plan: Hash
    index: int
    piece: Slice
    wire_hashes: tuple[Hash, ...]
    left_out: tuple[tuple[PeerId, str], ...] = ()
    shares: tuple[int, ...] = ()

    @property
    def reducer(self) -> PeerId:
        return self.piece.reducer

    @property
    def contributors(self) -> tuple[PeerId, ...]:
        return self.piece.contributors


@dataclass(frozen=True)
class Signed(Generic[T_co]):
    """A message with its author's signature over (type name, packed message)."""

    value: T_co
    author: PeerId
    public_key: bytes
    signature: bytes


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


class Sealer(Protocol):
    """Signs messages with this peer's key. Explorers use one that signs nothing but keeps the author."""

    def seal(self, value: T) -> Signed[T]: ...


@dataclass(frozen=True)
class Commit:
    """A certificate with the manifest that it commits."""

    certificate: Certificate
    manifest: Manifest


def declared(signed: Signed[Status]) -> Signed[Declaration]:
    """The part of a status that manifests follow from, under the same signature."""
    return Signed(signed.value.declaration, signed.author, signed.public_key, signed.signature)


def signing_bytes(value: Any) -> bytes:
    """The bytes that a signature covers: the type keeps one kind of message from being read as another.

    Those of a status are its declaration's, which has the hash of the rest.
    """
    said = value.declaration if isinstance(value, Status) else value
    return pack((type(said).__name__, said))

"""What a round decided: the manifest, whose hash names the committed state. No behaviour beyond hashing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from spes_p2p.consensus.membership import Member, Roll, trainers
from spes_p2p.data.leases import Leases
from spes_p2p.ids import Hash, PeerId, sha256
from spes_p2p.ownership.assign import Ownership
from spes_p2p.wire import pack

WIRE_VERSION = 11
SHARE = 1000
"""All of it, where a share is told as an integer."""


@dataclass(frozen=True, order=True)
class Contribution:
    """One roster entry: the uncounted work that a peer brings into a round.

    `tokens` is its weight, `steps` its inner steps, `sequences` how many leased sequences it used, from the front.
    """

    peer: PeerId
    tokens: int
    steps: int
    sequences: int


@dataclass(frozen=True)
class Slice:
    """At most `slice_tiles` whole tiles of one block that are reduced together by one peer.

    `first_tile` counts through all tiles of the run. In a plan, `contributors` are those whose values should go in; in
    a manifest, those whose values did.
    """

    block: int
    first_tile: int
    tiles: int
    reducer: PeerId
    contributors: tuple[PeerId, ...]

    @property
    def key(self) -> tuple[int, int]:
        return (self.first_tile, self.tiles)

    @property
    def tile_ids(self) -> range:
        return range(self.first_tile, self.first_tile + self.tiles)


@dataclass(frozen=True, order=True)
class Credit:
    """How much of what a stranger gave counted, of `SHARE`: in the newest round that had something of it, and on
    average over its rounds, of which newer ones weigh more."""

    peer: PeerId
    share: int
    average: int


@dataclass(frozen=True)
class Merge:
    """The merge warm-up of a round: alpha (an fp32 value) and neighbours[layer][expert]."""

    alpha: float
    neighbours: tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True)
class Decay:
    """The learning rate falls to its lowest over `steps` global steps from `begin_step` on."""

    begin_step: int
    steps: int


@dataclass(frozen=True)
class Manifest:
    """What a round decided, content only; nothing about the attempt. Its hash names the committed state.

    `counted` is what its chain has counted of trusted peers (see `place`).
    `column_rounds[e]` is the round that brought column e its present version: its staleness is `round` minus that.
    `ownership`, `members`, `leases` and `steps_per_round` are for the next round. `decay`, once there, stays. `roll` is
    the organiser's newest that a round has taken up, None where there is none yet. `strangers` is how
    much of what strangers gave counted, of those who are members, sorted.
    """

    wire_version: int
    fingerprint: Hash
    round: int
    parent: Hash
    step: int
    tokens: int
    counted: int
    roster: tuple[Contribution, ...]
    slices: tuple[Slice, ...]
    wire_root: Hash
    state_root: Hash
    merge: Merge | None
    members: tuple[Member, ...]
    ownership: Ownership
    column_rounds: tuple[int, ...]
    leases: Leases
    steps_per_round: int
    decay: Decay | None
    roll: Roll | None
    strangers: tuple[Credit, ...] = ()

    @cached_property
    def training(self) -> frozenset[tuple[PeerId, int]]:
        """Who trains in the next round, each in its incarnation."""
        return frozenset((member.peer, member.incarnation) for member in trainers(self.members))

    def credit_of(self, peer: PeerId) -> tuple[float, float] | None:
        """How much of what a stranger gave counted, from 0 to 1: lately, and on average; None of anybody else."""
        found = next((credit for credit in self.strangers if credit.peer == peer), None)
        return None if found is None else (found.share / SHARE, found.average / SHARE)

    def tile_ids_of(self, peer: PeerId) -> frozenset[int]:
        """Tiles that its values went into."""
        return frozenset(tile_id for piece in self.slices if peer in piece.contributors for tile_id in piece.tile_ids)


def manifest_hash(manifest: Manifest) -> Hash:
    """The name of a manifest."""
    return content_hash(manifest)


def content_hash(value: Any) -> Hash:
    """SHA-256 of the packed value, kept with the (immutable) value."""
    known: Hash | None = value.__dict__.get("_content_hash")
    if known is None:
        known = sha256(pack(value))
        object.__setattr__(value, "_content_hash", known)
    return known

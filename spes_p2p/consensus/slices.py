"""Who reduces what in a round: a pure function of roster, ownership and links, the same on every peer.

There is one idea: a slice has contributors and one reducer, and everybody receives it. Shared parameters have the
whole roster as contributors, an expert column has its owners. Groups for large swarms will be one more branch here.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from spes_p2p.consensus.manifest import Slice
from spes_p2p.consensus.turns import Ranges
from spes_p2p.consensus.weights import FEWEST
from spes_p2p.ids import Hash, PeerId, sha256
from spes_p2p.ownership.assign import Ownership


@dataclass(frozen=True)
class Turn:
    """What of the state a round brings: columns, and shared tiles; None for all."""

    columns: Collection[int] | None = None
    shared: Ranges | None = None


@dataclass(frozen=True)
class Reach:
    """Who can be dialled, as far as that matters to who reduces.

    `private` peers cannot: they reduce only what they alone contribute to, and what is of several of them goes to
    `helpers`, who can be dialled and contribute nothing themselves. `servers` can be dialled, train nothing, and get
    their share of all that has several contributors.
    """

    private: Collection[PeerId] = ()
    helpers: Sequence[PeerId] = ()
    servers: Sequence[PeerId] = ()


ALL, ANYBODY = Turn(), Reach()


def plan_slices(
    roster: Sequence[PeerId],
    ownership: Ownership,
    uplinks: Mapping[PeerId, int],
    block_tiles: Sequence[int],
    slice_tiles: int,
    turn: Turn = ALL,
    reach: Reach = ANYBODY,
) -> tuple[Slice, ...]:
    """All slices of a round, in block order.

    `roster` is in protocol order (it is the order of summation). `block_tiles[b]` is the number of tiles of block b
    (0 is shared, 1 + e is column e). Reducers get slices in proportion to `uplinks` (bytes a second; missing ones count
    as the median of the others). A column without an owner in the roster has no slice: nobody has values for it.
    """
    slices: list[Slice] = []
    usual = sorted(uplinks.values())[(len(uplinks) - 1) // 2] if uplinks else 1
    first_tile = 0
    for block, tiles in enumerate(block_tiles):
        owners = None if block == 0 else ownership[block - 1]
        contributors = tuple(peer for peer in roster if owners is None or peer in owners)
        if contributors and (block == 0 or turn.columns is None or block - 1 in turn.columns):
            reducers = tuple(peer for peer in contributors if peer not in reach.private)
            if len(contributors) > 1:
                reducers = (*reducers, *reach.servers) or tuple(reach.helpers)
            reducers = reducers or contributors
            shares = [max(1, uplinks.get(peer, usual)) for peer in reducers]
            due = ((0, tiles),) if block or turn.shared is None else turn.shared
            for place, (offset, number) in enumerate(due, 2 * block):
                cuts = list(_cut(number, slice_tiles, len(reducers)))
                slices += [
                    Slice(block, first_tile + offset + start, count, reducer, contributors)
                    for (start, count), reducer in zip(cuts, _deal(reducers, shares, len(cuts), place), strict=True)
                ]
        first_tile += tiles
    return tuple(slices)


@dataclass(frozen=True)
class Column:
    """Slices of one expert column with the hashes of their tiles, joined."""

    pieces: tuple[Slice, ...]
    hashes: tuple[bytes, ...]

    @property
    def block(self) -> int:
        return self.pieces[0].block

    @cached_property
    def name(self) -> Hash:
        """Of these very values, whoever reported them."""
        return sha256(self.block.to_bytes(4, "big"), *self.hashes)

    @property
    def contributors(self) -> tuple[PeerId, ...]:
        """Of any of its slices, sorted."""
        return tuple(sorted({peer for piece in self.pieces for peer in piece.contributors}))

    @property
    def has_few(self) -> bool:
        """Whether too few contributed to it to be compared."""
        return any(len(piece.contributors) < FEWEST for piece in self.pieces)


def columns_of_few(slices: Iterable[tuple[Slice, bytes]]) -> tuple[Column, ...]:
    """The columns of few contributors among slices and the hashes of their tiles."""
    found: dict[int, list[tuple[Slice, bytes]]] = {}
    for piece, hashes in slices:
        if piece.block:
            found.setdefault(piece.block, []).append((piece, hashes))
    columns = (Column(tuple(p for p, _ in some), tuple(h for _, h in some)) for some in found.values())
    return tuple(column for column in columns if column.has_few)


def reducer_order(piece: Slice) -> tuple[PeerId, ...]:
    """Who reduces a slice if those before are lost: its reducer, then the other contributors in turn."""
    if piece.reducer not in piece.contributors:
        return (piece.reducer, *piece.contributors)
    at = piece.contributors.index(piece.reducer)
    return piece.contributors[at:] + piece.contributors[:at]


def _cut(tiles: int, slice_tiles: int, reducers: int) -> Iterator[tuple[int, int]]:
    """(start, count) of each slice: small enough that every reducer can get one, never above `slice_tiles`."""
    size = max(1, min(slice_tiles, -(-tiles // reducers)))
    for start in range(0, tiles, size):
        yield start, min(size, tiles - start)


def _deal(peers: Sequence[PeerId], shares: Sequence[int], slices: int, place: int) -> Iterator[PeerId]:
    """Who reduces each of the slices of a range of tiles: in proportion to their shares, evenly mixed; exact integers.

    The slices are evenly spaced points, in a mixed order, on a line that the peers divide. So where measured shares
    change a little few slices get another reducer, which would not know what the one before has kept of their means.
    The points of each range (the `place`-th) lie elsewhere, or short ones would all go to the same peers.
    """
    ends, shift = list(itertools.accumulate(shares)), (place + 1) * _GOLDEN % _PLACES
    step = _mixing_step(max(1, slices))
    for at in range(slices):
        point = at * step % slices * _PLACES + shift
        yield peers[bisect.bisect_right(ends, point * ends[-1] // (slices * _PLACES))]


def _mixing_step(number: int) -> int:
    """Coprime to `number` and near its golden section: multiples of it, modulo `number`, take turns all over it."""
    return next(step for step in range(max(1, number * _GOLDEN // _PLACES), number + 1) if math.gcd(step, number) == 1)


_PLACES = 2**16
_GOLDEN = 40503
"""Of _PLACES, at the golden section: multiples of it, modulo _PLACES, lie far from each other."""

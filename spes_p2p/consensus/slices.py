"""Who reduces what in a round: a pure function of roster, ownership and links, the same on every peer.

There is one idea: a slice has contributors and one reducer, and everybody receives it. Shared parameters have the
whole roster as contributors, an expert column has its owners. Groups for large swarms will be one more branch here.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from spes_p2p.consensus.manifest import Slice
from spes_p2p.consensus.turns import Ranges
from spes_p2p.ids import PeerId
from spes_p2p.ownership.assign import Ownership


@dataclass(frozen=True)
class Turn:
    """What of the state a round brings: columns, and shared tiles; None for all."""

    columns: Collection[int] | None = None
    shared: Ranges | None = None


@dataclass(frozen=True)
class Reach:
    """Who may reduce, and who can be dialled.

    Only `electors` (None: all) reduce what several contribute to; of whom nobody else contributes hands out its own.
    `private` peers cannot be dialled: what is of several of them goes to `helpers`, electors who can and contribute
    nothing themselves. `servers` are those of them who train nothing, and get their share of all that has several
    contributors. Of what `strangers` alone contribute to nothing is made.
    """

    electors: Collection[PeerId] | None = None
    private: Collection[PeerId] = ()
    helpers: Sequence[PeerId] = ()
    servers: Sequence[PeerId] = ()
    strangers: Collection[PeerId] = ()

    def reducers(self, contributors: tuple[PeerId, ...]) -> tuple[PeerId, ...]:
        """Among whom a block with these contributors is dealt."""
        if len(contributors) == 1:
            return contributors
        able = tuple(peer for peer in contributors if self.electors is None or peer in self.electors)
        dialled = tuple(peer for peer in able if peer not in self.private)
        return (*dialled, *self.servers) or tuple(self.helpers) or able or tuple(sorted(self.electors or contributors))


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
        is_due = block == 0 or turn.columns is None or block - 1 in turn.columns
        if is_due and not set(contributors) <= set(reach.strangers):
            reducers = reach.reducers(contributors)
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


def reducer_order(piece: Slice, electors: Collection[PeerId]) -> tuple[PeerId, ...]:
    """Who reduces a slice if those before are lost: its reducer, then in turn the electors that contribute, or others.

    What only one contributes to nobody else can hand out.
    """
    if piece.contributors == (piece.reducer,):
        return piece.contributors
    at = bisect.bisect(piece.contributors, piece.reducer)
    others = [peer for peer in piece.contributors[at:] + piece.contributors[:at] if peer != piece.reducer]
    able = [peer for peer in others if peer in electors] or [p for p in sorted(electors) if p != piece.reducer]
    return (piece.reducer, *able)


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

"""Who may train on which part of the data: a pure function from one commit's leases to the next.

The training data is one endless stream of sequences, numbered by position (see `order.py` for what stands where). A
lease is a tuple of ranges of positions; a cursor splits the stream into what was handed out and what was not. Every
position below the cursor is used, held by exactly one member, or returned and waiting to be leased again. It leaves
out what a position holds, and what to ask for: `demand` must come from counted use, since it is believed here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from spes_p2p.ids import PeerId

Range = tuple[int, int]
"""Stream positions `start <= position < stop`."""

Ranges = tuple[Range, ...]
"""Positions in the order in which they are trained on; not always ascending."""


@dataclass(frozen=True)
class Leases:
    """The data part of a manifest. Raises ValueError when a position is held twice or was never handed out."""

    cursor: int = 0
    """First position that nobody was given yet."""
    returned: Ranges = ()
    """Given back unused, ascending; leased again before the cursor moves."""
    held: tuple[tuple[PeerId, Ranges], ...] = ()
    """What each member holds and has not used yet, sorted by peer."""

    def __post_init__(self) -> None:
        peers = [peer for peer, _ in self.held]
        if peers != sorted(set(peers)):
            raise ValueError("the holders of leases are not sorted, or one is named twice")
        spans = sorted([*self.returned, *(span for _, ranges in self.held for span in ranges)])
        end = 0
        for start, stop in spans:
            if not end <= start < stop:
                raise ValueError(f"leased range ({start}, {stop}) is empty or overlaps another one")
            end = stop
        if end > self.cursor:
            raise ValueError(f"position {end - 1} is leased but the cursor stands at {self.cursor}")

    def of(self, peer: PeerId) -> Ranges:
        """The ranges that `peer` holds, () for a stranger."""
        return dict(self.held).get(peer, ())


def count(ranges: Iterable[Range]) -> int:
    """Number of positions in `ranges`."""
    return sum(stop - start for start, stop in ranges)


def take(ranges: Ranges, number: int) -> tuple[Ranges, Ranges]:
    """The first `number` positions of `ranges` (all of them if there are fewer) and the rest, both in order."""
    missing = max(0, number)
    for index, (start, stop) in enumerate(ranges):
        if missing < stop - start:
            cut = start + missing
            front = ((start, cut),) if missing else ()
            return ranges[:index] + front, ((cut, stop), *ranges[index + 1 :])
        missing -= stop - start
    return ranges, ()


def joined(ranges: Iterable[Range]) -> Ranges:
    """The same positions in the same order, with neighbours that touch made one range."""
    result: list[Range] = []
    for start, stop in ranges:
        if result and result[-1][1] == start:
            result[-1] = (result[-1][0], stop)
        else:
            result.append((start, stop))
    return tuple(result)


def next_leases(
    leases: Leases,
    used: Mapping[PeerId, int],
    members: Collection[PeerId],
    demand: Mapping[PeerId, int],
    block_sequences: int,
) -> Leases:
    """The leases after a commit, the same at every peer whatever the order of the mappings.

    Args:
        used: sequences counted in this commit, from the front of what each peer holds; too many count as all.
        members: who may hold leases from now on; all others give back what they have not used.
        demand: sequences that each member is expected to use in a round. It is topped up in whole blocks until it holds
            twice that, and never less than one block. What it holds beyond that it keeps.
        block_sequences: positions of one block; blocks start at multiples of it.
    """
    if block_sequences < 1:
        raise ValueError(f"block_sequences is {block_sequences}, but must be at least 1")
    staying = set(members)
    unused = {peer: take(ranges, used.get(peer, 0))[1] for peer, ranges in leases.held}
    given_back = (span for peer, ranges in unused.items() if peer not in staying for span in ranges)
    returned = joined(sorted([*leases.returned, *given_back]))
    cursor = leases.cursor
    held = []
    for peer in sorted(staying):
        ranges = unused.get(peer, ())
        missing = max(2 * demand.get(peer, 0), block_sequences) - count(ranges)
        again, returned = _from_returned(returned, missing, block_sequences)
        missing -= count(again)
        fresh = -(-max(0, missing) // block_sequences) * block_sequences
        new = ((cursor, cursor + fresh),) if fresh else ()
        cursor += fresh
        held.append((peer, joined(ranges + again + new)))
    return Leases(cursor, returned, tuple(held))


def _from_returned(returned: Ranges, missing: int, block_sequences: int) -> tuple[Ranges, Ranges]:
    """What of `returned` covers `missing` positions, cut only where a block ends, and what stays."""
    taken: list[Range] = []
    while missing > 0 and returned:
        start, stop = returned[0]
        block_end = -(-(start + missing) // block_sequences) * block_sequences
        piece, returned = take(returned, min(stop, block_end) - start)
        taken += piece
        missing -= count(piece)
    return tuple(taken), returned

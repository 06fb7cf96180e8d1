"""Which pieces a peer keeps for the others, so that the run's data outlives whoever brought it.

What will be trained on next lies at a number of peers, as far as their disks allow: a peer with room takes spans of
the stream that too few have, of the next ones the rarest first, and its own lot decides between equals, so that not all
take the same. A dataset that fits on this disk is kept as a whole. Decides only; who fetches is `peer/data_supply.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from spes_p2p.data.feed import Feed
from spes_p2p.data.held import MOST_SPANS, Held
from spes_p2p.data.leases import Leases, count
from spes_p2p.data.memmap import TokenSequences
from spes_p2p.data.order import MixedOrder, Order
from spes_p2p.data.pieces import PieceGrid
from spes_p2p.ids import PeerId

SPAN_PIECES = 32
"""Least number of pieces in a span, roughly; as many as one answer brings."""
NEAR_SPANS = 64
"""How many of the next spans with too few copies are compared."""


class Spans:
    """The stream of sequences, cut into spans of equal length; they go on through all epochs."""

    def __init__(self, grid: PieceGrid, order: Order | MixedOrder, sequences: TokenSequences) -> None:
        self._grid, self._order, self._sequences = grid, order, sequences
        length = sequences.sequence_length
        least = SPAN_PIECES // (1 + length // grid.piece_tokens)
        self.sequences = max(1, least, -(-order.sequences // MOST_SPANS))
        spans = -(-order.sequences // self.sequences)
        self.ahead = -(-spans // 8) * 8
        """So many are looked at: an epoch, in whole bytes of bits."""

    def first(self, leases: Leases) -> int:
        """Where what is leased and not trained on yet begins, about: one who pauses may hold what is older."""
        outstanding = count(leases.returned) + sum(count(ranges) for _, ranges in leases.held)
        return max(0, leases.cursor - outstanding) // self.sequences

    def pieces(self, span: int) -> NDArray[np.int64]:
        positions = np.arange(span * self.sequences, (span + 1) * self.sequences, dtype=np.int64)
        starts = self._sequences.starts(self._order.sequences_at(positions))
        return self._grid.of_tokens(starts, self._sequences.sequence_length)


@dataclass(frozen=True)
class Wanted:
    """Pieces to fetch, of which spans, and who says that it has these; nobody where that is not known of anybody."""

    pieces: tuple[int, ...]
    spans: tuple[int, ...]
    holders: tuple[PeerId, ...]


class Copies:
    """What this peer keeps beside what it trains on. `look` and `next` by one thread at a time.

    `wanted`: peers that should have each span; 0: this peer keeps nothing for others.
    """

    def __init__(self, feed: Feed, spans: Spans, me: PeerId, wanted: int) -> None:
        self._feed, self._spans, self._wanted = feed, spans, wanted
        self._me = me
        self._first = 0
        self._others: dict[PeerId, Held] = {}
        self._counted: frozenset[PeerId] = frozenset()
        self._copies = np.zeros(spans.ahead, np.int64)
        self._kept: dict[int, NDArray[np.int64]] = {}
        """Spans for which this peer has made room, with their pieces."""
        self._uses = np.zeros(feed.grid.total, np.uint16)  # pages that are never touched take no memory
        """Of each piece: spans that are kept and have it."""
        self._room_taken = 0
        self._whole: set[int] = set()
        self._put_off: set[int] = set()
        self.held = Held()
        """What others are told."""

    @property
    def fits(self) -> bool:
        """The whole dataset has room here, so that nothing is ever pushed out."""
        return self._feed.cache.capacity >= self._feed.grid.total

    def look(self, leases: Leases, others: Mapping[PeerId, Held], counted: Collection[PeerId]) -> None:
        """What is trained on next by now, and what the others have; `counted`: those of them that count as copies."""
        self._first = self._spans.first(leases)
        self._others, self._counted = dict(others), frozenset(counted)
        spans = range(self._first, self._first + self._spans.ahead)
        self._copies = np.zeros(len(spans), np.int64)
        for peer in counted:
            self._copies += _bits(others[peer], spans)
        for span in [span for span in self._kept if span not in spans or self.held.whole]:
            self._drop(span)
        self._trim()
        has = self._feed.cache.has
        self._whole = {span for span, pieces in self._kept.items() if has(pieces).all()}
        self._put_off.clear()
        self._tell()

    def put_off(self, wanted: Wanted) -> None:
        """They could not be had now: others come first, until the next look."""
        self._put_off.update(wanted.spans)

    def next(self, most: int) -> Wanted | None:
        """The next pieces to fetch, at most so many; None where there is nothing to do, or no room.

        No pieces at all: what was looked at is here already, and there is more to look at.
        """
        pieces: list[int] = []
        spans: list[int] = []
        holders: tuple[PeerId, ...] = ()
        looked_at = 0
        for span in islice(self._candidates(), NEAR_SPANS):  # each takes milliseconds
            looked_at += 1
            able, missing = self._holders(span), self._missing(span)
            if missing is None or (pieces and able != holders):
                break
            holders = able
            spans += [span] if missing else []
            pieces += missing
            if len(pieces) >= most:
                break
        self._tell()
        if not pieces and looked_at < NEAR_SPANS:
            pieces, holders = self._rest(most), ()
            if not pieces:
                return None
        return Wanted(tuple(dict.fromkeys(pieces))[:most], tuple(spans), holders)

    def _missing(self, span: int) -> list[int] | None:
        """What this peer lacks of a span, for which there is room from now on; None where there is none."""
        pieces = self._kept.get(span)
        if pieces is None:
            pieces = self._spans.pieces(span)
            if not self._make_room(span, pieces):
                return None
        missing: list[int] = pieces[~self._feed.cache.has(pieces)].tolist()
        if not missing:
            self._whole.add(span)
        return missing

    def _rest(self, most: int) -> list[int]:
        """What no span has: held-out sequences, and the end of the data."""
        if not self.fits or not self._wanted or self.held.whole:
            return []
        total, has = self._feed.grid.total, self._feed.cache.has
        absent: list[int] = np.flatnonzero(~has(np.arange(total)))[:most].tolist()
        return absent

    def _candidates(self) -> Iterator[int]:
        """Spans that this peer lacks, in the order in which it takes them."""
        if not self._wanted or self.held.whole:
            return
        mine = np.fromiter((span - self._first for span in self._whole), np.int64, len(self._whole))
        absent = np.ones(len(self._copies), bool)
        absent[mine] = False
        absent[[span - self._first for span in self._put_off]] = False
        scarce = np.flatnonzero(absent & (self._copies < self._wanted))
        while len(scarce):
            near, scarce = scarce[:NEAR_SPANS], scarce[NEAR_SPANS:]
            yield from self._rarest(near)
        if self.fits:
            yield from self._rarest(np.flatnonzero(absent & (self._copies >= self._wanted)))

    def _rarest(self, offsets: NDArray[np.int64]) -> list[int]:
        spans: list[int] = (offsets + self._first).tolist()
        return sorted(spans, key=lambda span: (int(self._copies[span - self._first]), _lot(self._me, span)))

    def _holders(self, span: int) -> tuple[PeerId, ...]:
        return tuple(sorted(peer for peer, held in self._others.items() if held.has(span)))

    # ---- room ----

    def _make_room(self, span: int, pieces: NDArray[np.int64]) -> bool:
        new = int((self._uses[pieces] == 0).sum())
        if not self.fits and self._room_taken + new > self._feed.spare:
            for surplus in [kept for kept in self._whole if self._is_surplus(kept)][:1]:
                self._whole.remove(surplus)
                self._drop(surplus)
                return self._make_room(span, pieces)
            return False
        self._kept[span] = pieces
        self._uses[pieces] += 1
        self._room_taken += new
        self._protect()
        return True

    def _trim(self) -> None:
        """Training needs more room than it did, or the disk is full: what comes last goes first."""
        for span in sorted(self._kept, reverse=True):
            if self.fits or self._room_taken <= self._feed.spare:
                break
            self._drop(span)
        self._protect()

    def _drop(self, span: int) -> None:
        pieces = self._kept.pop(span)
        self._uses[pieces] -= 1
        self._room_taken -= int((self._uses[pieces] == 0).sum())

    def _is_surplus(self, span: int) -> bool:
        """Whether enough other peers have the span and drew a lower lot, so that not all drop it at once."""
        mine = _lot(self._me, span)
        able = (peer for peer in self._counted if self._others[peer].has(span))
        return sum(_lot(peer, span) < mine for peer in able) >= self._wanted

    def _protect(self) -> None:
        if not self.fits:
            self._feed.keep(np.flatnonzero(self._uses))

    def _tell(self) -> None:
        bits = np.zeros(len(self._copies), bool)
        bits[[span - self._first for span in self._whole]] = True
        whole = self._feed.cache.held >= self._feed.grid.total
        self.held = Held(self._first, np.packbits(bits).tobytes(), whole)


def _lot(peer: PeerId, span: int) -> bytes:
    return hashlib.sha256(peer.encode() + span.to_bytes(8, "big")).digest()


def _bits(held: Held, spans: Sequence[int]) -> NDArray[np.int64]:
    """1 for each of these neighbouring spans that it has."""
    if held.whole:
        return np.ones(len(spans), np.int64)
    found = np.zeros(len(spans), np.int64)
    bits = np.unpackbits(np.frombuffer(held.bits, np.uint8))
    skip = spans[0] - held.first
    bits = bits[max(0, skip) :]
    at = max(0, -skip)
    found[at : at + len(bits)] = bits[: max(0, len(spans) - at)]
    return found

"""Optimizer moments that a peer hands over: kept on disk for the new owners of its columns, as long as they may ask.

Nothing is decided here. What is offered stands until the next offer; it is lost with a restart, and then the new owner
begins with fresh moments.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Set
from dataclasses import dataclass, replace
from pathlib import Path

from spes_p2p.exchange import requests
from spes_p2p.ids import Hash, PeerId
from spes_p2p.state.layout import VALUE_BYTES, Layout
from spes_p2p.state.moments import Moments
from spes_p2p.state.version import bytes_of, on_disk


@dataclass(frozen=True)
class MomentsHead:
    """Goes before the bytes of moments: how many steps they have seen. 0: there are none, do not ask again."""

    steps: int


@dataclass(frozen=True)
class _Offer:
    heads: frozenset[Hash]
    columns: dict[int, Moments]
    taken: dict[int, set[PeerId]]


class MomentStore:
    """One offer at a time, in `directory`. Written by the trainer's thread, read by any."""

    def __init__(self, directory: Path, layout: Layout) -> None:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        self._directory = directory
        self._layout = layout
        self._offer = _Offer(frozenset(), {}, {})
        self._count = 0

    def offer(self, head: Hash, moments: Iterable[tuple[int, Moments]]) -> None:
        """Replaces the offer by (column, its moments) as they are after training on top of manifest `head`.

        Without arrays and steps: the column is owned, but was never trained. Maps of the earlier offer stay good.
        """
        self._count += 1
        folder = self._directory / f"{self._count:08d}"
        columns = {column: self._kept(folder, column, one) for column, one in moments}
        self._offer = _Offer(frozenset({head}), columns, {})  # at once: readers see the one or the other
        for older in self._directory.iterdir():
            if older != folder:
                shutil.rmtree(older)

    def _kept(self, folder: Path, column: int, moments: Moments) -> Moments:
        if not moments.steps:
            return moments
        mean = on_disk(folder / f"column-{column:05d}.mean", moments.mean)
        return Moments(moments.steps, mean, on_disk(folder / f"column-{column:05d}.square", moments.square))

    def stands(self, head: Hash) -> None:
        """Nothing was trained since: what is offered is as good on top of `head`."""
        self._offer = replace(self._offer, heads=self._offer.heads | {head})

    def note_taken(self, head: Hash, column: int, peer: PeerId) -> None:
        """That peer has taken over, or given up, this column."""
        if head in self._offer.heads and 0 <= column < self._layout.num_columns:
            self._offer.taken.setdefault(column, set()).add(peer)

    def on_offer(self, column: int) -> Moments:
        """Those of a column on offer. They stay good after it."""
        return self._offer.columns[column]

    def taken(self, column: int) -> Set[PeerId]:
        """Who has said so of a column on offer."""
        return self._offer.taken.get(column, set())

    def clear(self) -> None:
        """Nothing is offered any more."""
        if self._offer.columns:
            self._offer = _Offer(frozenset(), {}, {})
            for folder in self._directory.iterdir():
                shutil.rmtree(folder)

    def serve(self, head: Hash, first_tile: int, count: int) -> tuple[MomentsHead, bytes] | None:
        """Means, then squares, of consecutive tiles of one column; None where they are not on offer, or too many.

        Anybody may ask, and they are copied together.
        """
        offer, tiles = self._offer, self._layout.consecutive(first_tile, count)
        size_bytes = 2 * VALUE_BYTES * sum(tile.size for tile in tiles)
        if head not in offer.heads or not tiles or (len(tiles) > 1 and size_bytes > requests.MAX_JOINED_BYTES):
            return None
        moments = offer.columns.get(tiles[0].block - 1)
        if moments is None or not moments.steps:
            return None if moments is None else (MomentsHead(0), b"")
        part = slice(tiles[0].start, tiles[-1].stop)
        return MomentsHead(moments.steps), b"".join(bytes_of(values[part]) for values in (moments.mean, moments.square))

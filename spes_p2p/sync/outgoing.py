"""What a peer brings into a round, as it leaves the machine: values with the fp32 codec, else encoded changes.

Joins the snapshot of what was trained, the committed values that it was trained on, and what lossy codecs left unsent
before. Who asks for what, and what a round counts, is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np

from spes_p2p.codecs.sizes import Codec
from spes_p2p.errors import StateError
from spes_p2p.ids import Hash
from spes_p2p.state.layout import BlockSource, Layout, Tile, Values
from spes_p2p.state.version import bytes_of
from spes_p2p.sync.coding import encoded_change
from spes_p2p.sync.inputs import Inputs
from spes_p2p.sync.residuals import Residuals


class Outgoing:
    """`committed(head)` gives the state of a manifest, or None where it is not the tip's. Used from several threads."""

    def __init__(
        self,
        layout: Layout,
        inputs: Inputs,
        residuals: Residuals,
        committed: Callable[[Hash], BlockSource | None],
    ) -> None:
        self._layout = layout
        self._inputs = inputs
        self._residuals = residuals
        self._committed = committed

    def own(self, parent: Hash, first_tile: int, count: int) -> Values | None:
        """Own values of consecutive tiles of a block for a slice that this peer reduces itself; None without any."""
        values = self._inputs.values(parent, first_tile, count)
        if values is None or self._codec(first_tile) == "fp32":
            return values
        whole = np.array(values)
        for tile, part in self._parts(first_tile, count):
            kept = self._residuals.values("sent", tile.id)
            if kept is not None:
                np.add(whole[part], kept, out=whole[part])
        return whole

    def serve(self, parent: Hash, first_tile: int, count: int) -> memoryview | bytes | None:
        """The bytes for another reducer; what they leave out is kept for the next round, if this one counts them."""
        values = self._inputs.values(parent, first_tile, count)
        if values is None:
            return None
        codec = self._codec(first_tile)
        if codec == "fp32":
            return bytes_of(values)
        committed = self._committed(parent)
        if committed is None:
            return None
        try:
            before = committed.block(self._layout.tiles[first_tile].block)
        except StateError:  # the round is over in this moment
            return None
        sent: list[bytes] = []
        for tile, part in self._parts(first_tile, count):
            kept = self._residuals.values("sent", tile.id)
            data, left = encoded_change(codec, values[part], before[tile.start : tile.stop], kept)
            self._residuals.stage(parent, "sent", tile.id, left)
            sent.append(data)
        return b"".join(sent)

    def _codec(self, first_tile: int) -> Codec:
        return self._layout.codec_of(self._layout.tiles[first_tile].block)

    def _parts(self, first_tile: int, count: int) -> list[tuple[Tile, slice]]:
        """The tiles, each with its place in their joined values."""
        tiles = self._layout.tiles[first_tile : first_tile + count]
        return [(tile, slice(tile.start - tiles[0].start, tile.stop - tiles[0].start)) for tile in tiles]


class Masters:
    """The committed state as a peer trains on from it: a column that it owns alone is ahead of what the others have."""

    def __init__(self, layout: Layout, committed: BlockSource, residuals: Residuals, columns: Collection[int]) -> None:
        """`columns`: those with this peer as their one owner."""
        self._layout = layout
        self._committed = committed
        self._residuals = residuals
        self._columns = columns

    def block(self, index: int) -> Values:
        committed = self._committed.block(index)
        if index - 1 not in self._columns:
            return committed
        ahead: Values | None = None
        for tile in self._layout.tiles_of(index):
            kept = self._residuals.values("handed", tile.id)
            if kept is not None:
                ahead = np.array(committed) if ahead is None else ahead
                ahead[tile.start : tile.stop] += kept
        return committed if ahead is None else ahead

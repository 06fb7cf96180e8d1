"""What a peer brings into a round, as it leaves the machine: values with the fp32 codec, else encoded changes.

Joins the snapshot of what was trained, the committed values that it was trained on, and what lossy codecs left unsent
before. Who asks for what, and what a round counts, is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from spes_p2p.codecs.sizes import Codec
from spes_p2p.consensus.manifest import Manifest
from spes_p2p.consensus.membership import LINK_PUBLIC, trainers
from spes_p2p.consensus.rules import RunRules
from spes_p2p.errors import RemoteProtocolError, TileDamaged
from spes_p2p.ids import Hash, PeerId, short
from spes_p2p.state.layout import BlockSource, Layout, Tile, Values
from spes_p2p.state.version import Version, bytes_of
from spes_p2p.sync.coding import encoded_change
from spes_p2p.sync.slice_mean import parts_of
from spes_p2p.sync.surroundings import PeerContext


class Outgoing:
    """What one peer brings into a round. Used from several threads."""

    def __init__(self, context: PeerContext) -> None:
        self._layout = context.layout
        self._inputs, self._residuals = context.disk.inputs, context.disk.residuals
        self._committed = context.committed

    def own(self, parent: Hash, first_tile: int, count: int) -> Values | None:
        """Own values of consecutive tiles of a block for a slice that this peer reduces itself; None without any."""
        values = self._inputs.values(parent, first_tile, count)
        if values is None or self._codec(first_tile) == "fp32":
            return values
        whole = np.array(values)
        for tile, part in self._parts(first_tile, count):
            kept = self._residuals.unsent(tile.id)
            if kept is not None:
                np.add(whole[part], kept, out=whole[part])
        return whole

    def serve(self, parent: Hash, first_tile: int, count: int) -> memoryview | bytes | None:
        """The bytes for another reducer; what they leave out is kept for the next round, if this one counts them."""
        values = self._inputs.values(parent, first_tile, count)
        if values is None:
            return None
        if self._codec(first_tile) == "fp32":
            return bytes_of(values)
        committed = self._committed(parent)
        if committed is None:
            return None
        try:
            return b"".join(
                self._encoded(committed, parent, values[part], tile) for tile, part in self._parts(first_tile, count)
            )
        except TileDamaged:  # what is made of it would be another change than what was trained
            return None

    def _encoded(self, committed: Version, parent: Hash, values: Values, tile: Tile) -> bytes:
        """The change of a tile as it travels; what it leaves out is staged. Raises TileDamaged."""
        codec, unsent = self._layout.codec_of(tile.block), self._residuals.unsent(tile.id)
        data, left = encoded_change(codec, values, committed.sound_values(tile.id), unsent)
        self._residuals.stage(parent, "sent", tile.id, left)
        return data

    def _codec(self, first_tile: int) -> Codec:
        return self._layout.codec_of(self._layout.tiles[first_tile].block)

    def _parts(self, first_tile: int, count: int) -> list[tuple[Tile, slice]]:
        """The tiles, each with its place in their joined values."""
        tiles = self._layout.tiles[first_tile : first_tile + count]
        return list(zip(tiles, parts_of(tiles), strict=True))


def check_asker(layout: Layout, rules: RunRules, tip: Manifest, caller: PeerId, first_tile: int, count: int) -> None:
    """Raises RemoteProtocolError for more than a slice, and where encoding it is of no use to `caller`."""
    if not 0 <= first_tile < layout.num_model_tiles or not 0 < count <= rules.slice_tiles:
        raise RemoteProtocolError(f"{count} tiles from {first_tile} on were requested, which are not within one slice")
    block = layout.tiles[first_tile].block
    members = tuple(member.peer for member in tip.members)
    hidden = {member.peer for member in tip.members if member.link_class != LINK_PUBLIC}
    owners = tip.ownership[block - 1] if block else members
    reducers = {*owners, *(set(members) - {member.peer for member in trainers(tip.members)})}
    if set(owners) <= hidden:  # those who cannot be dialled may have a helper
        reducers = set(members)
    if layout.codec_of(block) != "fp32" and caller not in reducers:
        raise RemoteProtocolError(f"{short(caller)} does not reduce block {block}")


class TrainingBase:
    """The committed state as a peer trains on from it: a column that it owns alone is ahead of what the others have.

    Stays the same when the residuals have gone on to a later manifest.
    """

    def __init__(self, layout: Layout, committed: BlockSource, ahead: Callable[[int], Values | None]) -> None:
        """`ahead`: see `Residuals.ahead`."""
        self._layout = layout
        self._committed = committed
        self._ahead = ahead

    def block(self, index: int) -> Values:
        committed = self._committed.block(index)
        masters: Values | None = None
        for tile in self._layout.tiles_of(index):
            ahead = self._ahead(tile.id)
            if ahead is not None:
                masters = np.array(committed) if masters is None else masters
                masters[tile.start : tile.stop] += ahead
        return committed if masters is None else masters

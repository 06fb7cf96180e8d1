"""What a peer brings into a round, as it leaves the machine: values with the fp32 codec, else encoded changes.

Joins the snapshot of what was trained, the committed values that it was trained on, and what lossy codecs left unsent
before. Who asks for what, and what a round counts, is decided elsewhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from spes_p2p.codecs.sizes import Codec
from spes_p2p.consensus.manifest import Manifest
from spes_p2p.consensus.membership import LINK_PUBLIC, trainers
from spes_p2p.consensus.rules import RunRules
from spes_p2p.errors import RemoteProtocolError, TileDamaged
from spes_p2p.files import remove_folder
from spes_p2p.ids import NO_HASH, Hash, PeerId, short
from spes_p2p.state.hashes import hash_tile
from spes_p2p.state.layout import BlockSource, Layout, Tile, Values
from spes_p2p.state.tile_area import TileArea
from spes_p2p.state.version import Version, bytes_of
from spes_p2p.swarm.ports import Blob
from spes_p2p.sync.audit import commitment_to, opening_of
from spes_p2p.sync.coding import encoded_change
from spes_p2p.sync.inputs import Snapshot
from spes_p2p.sync.slice_mean import parts_of, sent_values
from spes_p2p.sync.surroundings import PeerContext


class _CommittedTo:
    """What a peer has committed to on top of `parent`: by block the hashes of its tiles, joined; encoded ones lie in
    `area`, whose folder is its own."""

    def __init__(self, parent: Hash, area: TileArea) -> None:
        self.parent = parent
        self.hashes: dict[int, bytes] = {}
        self._area = area
        self.folder = area.folder
        if area.folder.exists():
            remove_folder(area.folder)

    def add(self, block: int, tiles: Iterable[tuple[Tile, memoryview, bool]]) -> None:
        found: list[Hash] = []
        for tile, data, is_kept in tiles:
            found.append(hash_tile(data))
            if is_kept:
                self._area.write(tile, data, found[-1])
        if found:
            self.hashes[block] = b"".join(found)

    def encoded(self, tile_ids: Iterable[int]) -> bytes | None:
        """Encoded tiles, joined; None where they are not there."""
        try:
            return b"".join(self._area.tile(tile_id) for tile_id in tile_ids)
        except (KeyError, OSError, ValueError):
            return None


class Outgoing:
    """What one peer brings into a round. Used from several threads."""

    def __init__(self, context: PeerContext) -> None:
        self._layout = context.layout
        self._inputs, self._residuals = context.disk.inputs, context.disk.residuals
        self._committed = context.committed
        self._is_audited = context.rules.audited_share > 0
        """Nothing leaves that was not committed to."""
        self._commitments: tuple[_CommittedTo, ...] = ()
        """The newest first, and for auditors that of the round before."""

    def own(self, parent: Hash, first_tile: int, count: int) -> Values | None:
        """Own values of consecutive tiles of a block for a slice that this peer reduces itself; None without any."""
        values = self._inputs.values(parent, first_tile, count)
        if values is None or self._codec(first_tile) == "fp32":
            return values
        if self._is_audited and not self._residuals.is_sole(first_tile):
            return self._as_sent(parent, first_tile, count)
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
        if self._is_audited:
            known = self._commitment(parent)
            return known.encoded(range(first_tile, first_tile + count)) if known else None
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

    def _as_sent(self, parent: Hash, first_tile: int, count: int) -> Values | None:
        """Own values as other reducers get them."""
        data, committed = self.serve(parent, first_tile, count), self._committed(parent)
        if data is None or committed is None:
            return None
        tiles = self._layout.tiles[first_tile : first_tile + count]
        before = committed.block(tiles[0].block)[tiles[0].start : tiles[-1].stop]
        return sent_values(self._layout, tiles, memoryview(data), before)

    def commit(self, parent: Hash) -> Hash:
        """Fixes what leaves this machine of the snapshot on top of `parent`; the commitment to it (see `sync.audit`).

        NO_HASH where nobody asks for one. A block with a damaged base is left out. Raises StorageFull.
        """
        committed, snapshot = self._committed(parent), self._inputs.snapshot
        if not self._is_audited or committed is None or snapshot.parent != parent:
            return NO_HASH
        others = [known for known in self._commitments if known.parent != parent and self._inputs.keeps_earlier][:1]
        taken = {known.folder for known in others}
        folder = next(folder for folder in self._inputs.folders_beside if folder not in taken)
        made = _CommittedTo(parent, TileArea(folder, self._layout, encoded=True))
        for block in snapshot.blocks:
            with contextlib.suppress(TileDamaged):
                made.add(block, self._leaving(committed, snapshot, block))
        self._commitments = (made, *others)
        return commitment_to(made.hashes)

    def _leaving(self, committed: Version, snapshot: Snapshot, block: int) -> Iterator[tuple[Tile, memoryview, bool]]:
        """Each tile of a block as it leaves, and whether that must be kept: the snapshot has what is fp32."""
        first = self._layout.tiles_of(block)[0].id
        is_plain = self._codec(first) == "fp32"
        if not is_plain and self._residuals.is_sole(first):
            return  # nobody else reduces it
        for tile in self._layout.tiles_of(block):
            values = snapshot.block(block)[tile.start : tile.stop]
            if is_plain:
                yield tile, bytes_of(values), False
            else:
                yield tile, memoryview(self._encoded(committed, snapshot.parent, values, tile)), True

    def shown(self, parent: Hash, first_tile: int, count: int) -> Blob | None:
        """The same, with what shows that the values are those that this peer has committed to, where it has."""
        data = self.serve(parent, first_tile, count)
        known, block = self._commitment(parent), self._layout.tiles[first_tile].block
        is_known = known is not None and block in known.hashes
        return None if data is None else Blob(data, opening_of(known.hashes, block) if known and is_known else b"")

    def _commitment(self, parent: Hash) -> _CommittedTo | None:
        return next((known for known in self._commitments if known.parent == parent), None)

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
    if set(owners) <= hidden or rules.audited_share:  # those who cannot be dialled may have a helper
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

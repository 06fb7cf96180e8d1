"""Tiles of a version in the making, as they lie on disk: block files in a folder with the tiles written so far."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spes_p2p.errors import LocalProtocolError, StateError
from spes_p2p.files import link_or_copy, reserve, storing, sync, write_at
from spes_p2p.ids import Hash
from spes_p2p.state.layout import VALUE_BYTES, Layout, Tile
from spes_p2p.state.version import DTYPE, TileFiles, Version, bytes_of

TileData = NDArray[np.float32] | bytes | memoryview
"""Values of one tile: flat fp32, or their little-endian bytes."""


class TileArea(TileFiles):
    """Block files in one folder with the tiles that were written so far: values, or what is handed out of them."""

    def __init__(
        self, folder: Path, layout: Layout, hashes: dict[int, Hash] | None = None, encoded: bool = False
    ) -> None:
        super().__init__(folder, layout, encoded)
        self.hashes = hashes or {}
        self._ids = {tile_hash: tile_id for tile_id, tile_hash in self.hashes.items()}
        self._files = {layout.tiles[tile_id].block for tile_id in self.hashes}
        self._filled: set[int] = set()
        self._lock = threading.Lock()

    def write(self, tile: Tile, data: memoryview, tile_hash: Hash) -> None:
        with self._lock:
            if tile.block not in self._files:
                with storing(self.folder, 0):
                    self.folder.mkdir(exist_ok=True)
                reserve(self.block_path(tile.block), self._block_bytes(tile.block))
                self._files.add(tile.block)
        write_at(self.block_path(tile.block), self._offset(tile), data)
        self.hashes[tile.id] = tile_hash
        self._ids[tile_hash] = tile.id
        self._filled.discard(tile.id)

    def fill(self, block: int, missing: Callable[[int], memoryview]) -> None:
        """Completes a block file with the bytes that `missing(tile id)` gives for the tiles not written."""
        for tile in self.layout.tiles_of(block):
            if tile.id not in self.hashes and tile.id not in self._filled:
                write_at(self.block_path(block), tile.start * VALUE_BYTES, missing(tile.id))
                self._filled.add(tile.id)

    def has_block(self, block: int) -> bool:
        return block in self._files

    def find(self, tile_hash: Hash) -> memoryview | None:
        tile_id = self._ids.get(tile_hash, -1)
        return self.tile(tile_id) if self.hashes.get(tile_id) == tile_hash else None

    def forget(self, tile_ids: Iterable[int]) -> None:
        for tile_id in tile_ids:
            self.hashes.pop(tile_id, None)
        needed = {self.layout.tiles[tile_id].block for tile_id in self.hashes}
        for block in self._files - needed:
            self._files.discard(block)
            self._maps.pop(block, None)
            self._filled.difference_update(self.layout.tile_ids_of(block))
            self.block_path(block).unlink()

    def sync(self) -> None:
        for block in self._files:
            sync(self.block_path(block))


class Areas:
    """The three areas of a staging over a parent version: what is handed out (`wire`), what encoded tiles of it stand
    for (`decoded`), and values of the new state that are another thing than both (`state`)."""

    def __init__(
        self, layout: Layout, parent: Version | None, state: TileArea, wire: TileArea, decoded: TileArea
    ) -> None:
        self._layout = layout
        self._parent = parent
        self.state, self.wire, self.decoded = state, wire, decoded

    def is_plain(self, block: int) -> bool:
        """Whether the values of the new state are what is handed out, but for a merge."""
        return self._layout.codec_of(block) == "fp32" and not self._layout.has_momentum

    def values_of(self, block: int) -> TileArea:
        """Where the values are that wire tiles of a block stand for."""
        return self.wire if self.is_plain(block) else self.decoded

    def values_of_tile(self, tile_id: int) -> TileArea:
        return self.values_of(self._layout.tiles[tile_id].block)

    def before_merge(self, tile_id: int) -> memoryview:
        """The bytes of a tile by what was handed out, else the parent's."""
        area = self.values_of_tile(tile_id)
        return area.tile(tile_id) if tile_id in area.hashes else self.parent_tile(tile_id)

    def parent_tile(self, tile_id: int) -> memoryview:
        """The bytes of a tile of the parent version. Raises TileDamaged, StateError where there is no parent."""
        if self._parent is None:
            raise StateError(f"tile {tile_id} was not staged", fix="fetch it from another peer")
        return self._parent.sound_tile(tile_id)

    def state_hash(self, tile_id: int) -> Hash:
        """Of a tile of the new state, once all blocks are complete."""
        staged = self.state.hashes.get(tile_id) or self.values_of_tile(tile_id).hashes.get(tile_id)
        if staged is None:
            assert self._parent is not None  # `complete` has refused the rest
            return self._parent.tile_hashes[tile_id]
        return staged

    def complete(self, block: int) -> None:
        """Makes the block file of the new state whole. Raises StateError where a tile has no value at all."""
        path = self.state.block_path(block)
        if self.state.has_block(block):
            self.state.fill(block, self.before_merge)
            return
        path.unlink(missing_ok=True)  # of a finish() that did not come to its end
        area = self.values_of(block)
        if area.has_block(block):
            area.fill(block, self.before_merge)
            link_or_copy(area.block_path(block), path)
        elif self._parent is not None:
            link_or_copy(self._parent.block_path(block), path)
        elif self._layout.blocks[block].size == 0:
            path.touch()
        else:
            raise StateError(f"block {block} was not staged", fix="fetch its tiles first")


def tile_bytes(tile: Tile, data: TileData, size: int) -> memoryview:
    """Checked bytes of one tile. Raises LocalProtocolError."""
    if isinstance(data, np.ndarray):
        if data.dtype != DTYPE:
            raise LocalProtocolError(f"tile {tile.id} was given as {data.dtype}, not as little-endian fp32")
        data = bytes_of(np.ascontiguousarray(data).reshape(-1))
    view = memoryview(data).cast("B")
    if len(view) != size:
        raise LocalProtocolError(f"tile {tile.id} has {size} bytes, but {len(view)} were given")
    return view

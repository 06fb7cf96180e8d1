"""A version in the making: tiles come in any order, `finish` completes and syncs it, `publish` shows it to the store.

Two kinds of tiles are staged. Wire tiles are what the round hands out, values with the fp32 codec and encoded changes
with others; they stay readable for serving. State tiles are values of the new state that differ from what was handed
out: made by the merge, or fetched by hash. What is in neither keeps the parent's value. What encoded tiles stand for
lies in an area of its own until the version is published. Block files are shared by hard links wherever they are equal:
an untouched block with the parent version, an unmerged one with the area of its values. All writes are whole tiles and
may come from several threads. Which tiles a round needs, whether their hashes are the right ones, and how they are
decoded, is decided elsewhere. Where the run has an outer optimizer, a wire tile stands for two tiles of the new state:
its values after the outer step, and their momentum; both lie in the same area as what encoded tiles stand for.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spes_p2p.errors import LocalProtocolError, StateError, StorageFull
from spes_p2p.files import link_or_copy, remove_folder, reserve, storing, sync, write_at, write_whole
from spes_p2p.ids import NO_HASH, Hash
from spes_p2p.state.hashes import hash_tile
from spes_p2p.state.layout import VALUE_BYTES, Layout, Tile, Values
from spes_p2p.state.version import (
    DTYPE,
    HASHES_FILE,
    WIRE_FOLDER,
    Version,
    block_file,
    bytes_of,
    map_block,
    map_bytes,
)

TileData = NDArray[np.float32] | bytes | memoryview
"""Values of one tile: flat fp32, or their little-endian bytes."""
_DECODED_FOLDER = "decoded"


class TileArea:
    """Block files in one folder with the tiles that were written so far: values, or what is handed out of them."""

    def __init__(
        self, folder: Path, layout: Layout, hashes: dict[int, Hash] | None = None, encoded: bool = False
    ) -> None:
        self.folder = folder
        self.layout = layout
        self.hashes = hashes or {}
        self._ids = {tile_hash: tile_id for tile_id, tile_hash in self.hashes.items()}
        self._files = {layout.tiles[tile_id].block for tile_id in self.hashes}
        self._filled: set[int] = set()
        self._maps: dict[int, Values] = {}
        self._encoded = encoded
        self._lock = threading.Lock()

    def path(self, block: int) -> Path:
        return self.folder / block_file(block)

    def write(self, tile: Tile, data: memoryview, tile_hash: Hash) -> None:
        with self._lock:
            if tile.block not in self._files:
                with storing(self.folder, 0):
                    self.folder.mkdir(exist_ok=True)
                reserve(self.path(tile.block), self._block_bytes(tile.block))
                self._files.add(tile.block)
        write_at(self.path(tile.block), self._offset(tile), data)
        self.hashes[tile.id] = tile_hash
        self._ids[tile_hash] = tile.id
        self._filled.discard(tile.id)

    def fill(self, block: int, missing: Callable[[int], memoryview]) -> None:
        """Completes a block file with the bytes that `missing(tile id)` gives for the tiles not written."""
        for tile in self.layout.tiles_of(block):
            if tile.id not in self.hashes and tile.id not in self._filled:
                write_at(self.path(block), tile.start * VALUE_BYTES, missing(tile.id))
                self._filled.add(tile.id)

    def has_block(self, block: int) -> bool:
        return block in self._files

    def block(self, block: int) -> Values:
        if block not in self._maps:
            self._maps[block] = map_block(self.path(block), self.layout.blocks[block].size)
        return self._maps[block]

    def tile(self, tile_id: int) -> memoryview:
        tile = self.layout.tiles[tile_id]
        if not self._encoded:
            return bytes_of(self.block(tile.block)[tile.start : tile.stop])
        start = self._offset(tile)
        return map_bytes(self.path(tile.block), self._block_bytes(tile.block))[start : start + self.tile_bytes(tile)]

    def tile_bytes(self, tile: Tile) -> int:
        """Length of a tile here."""
        return self.layout.wire_bytes(tile) if self._encoded else tile.size * VALUE_BYTES

    def _offset(self, tile: Tile) -> int:
        return self.layout.wire_offset(tile) if self._encoded else tile.start * VALUE_BYTES

    def _block_bytes(self, block: int) -> int:
        return self.layout.wire_block_bytes(block) if self._encoded else self.layout.blocks[block].size * VALUE_BYTES

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
            self.path(block).unlink()

    def sync(self) -> None:
        for block in self._files:
            sync(self.path(block))


class Staging:
    """What `StateStore.stage` returns. Raises StorageFull from any write when the disk is full, and is gone then."""

    def __init__(
        self,
        folder: Path,
        round: int,
        layout: Layout,
        parent: Version | None,
        publish: Callable[[Staging], Version],
        finished: Version | None = None,
    ) -> None:
        """`finished`: what a folder from before a restart holds."""
        self.folder = folder
        self.round = round
        self.layout = layout
        self.parent = parent
        self._publish = publish
        self._finished = finished
        self._resumed = finished is not None
        self._open = True
        self._full: StorageFull | None = None
        self._closing = threading.Lock()
        self._sound: set[int] = set()
        """Blocks of the parent that were hashed."""
        (folder / WIRE_FOLDER).mkdir(parents=True, exist_ok=True)
        self._state = TileArea(folder, layout)
        wire_hashes = finished.wire_hashes if finished else ()
        known = {tile_id: tile_hash for tile_id, tile_hash in enumerate(wire_hashes) if tile_hash != NO_HASH}
        self._wire = TileArea(folder / WIRE_FOLDER, layout, known, encoded=True)
        if self._resumed:
            shutil.rmtree(folder / _DECODED_FOLDER, ignore_errors=True)
        self._decoded = TileArea(folder / _DECODED_FOLDER, layout)

    def write_tile(
        self,
        tile_id: int,
        data: TileData,
        tile_hash: Hash | None = None,
        values: Values | None = None,
        momentum: Values | None = None,
    ) -> Hash:
        """Stages what the round hands out for a tile; again for a tile that was done again. Its wire hash.

        `tile_hash`: the hash where the caller has just computed it from the same bytes. `values`: the new values of the
        tile, where they are not just these bytes: the codec is not fp32, or there is an outer optimizer, which also
        gives their `momentum`.
        """
        if not self._is_plain(self.layout.tiles[tile_id].block):
            if values is None or (momentum is None) is self.layout.has_momentum:
                raise LocalProtocolError(f"tile {tile_id} was staged without what its bytes stand for")
            if momentum is not None:
                self._write(self._decoded, self.layout.momentum_tile(tile_id), momentum, None)
            self._write(self._decoded, tile_id, values, None)
        return self._write(self._wire, tile_id, data, tile_hash)

    def write_state(self, tile_id: int, data: TileData, tile_hash: Hash | None = None) -> Hash:
        """Stages a tile of the new state that differs from the wire: merged, or fetched. Its state hash."""
        return self._write(self._state, tile_id, data, tile_hash)

    def has(self, tile_id: int) -> bool:
        """True when the tile was staged, of either kind (all of them, where this was finished before a restart)."""
        return self._resumed or self.has_wire(tile_id) or tile_id in self._state.hashes

    @property
    def is_gone(self) -> bool:
        """Whether it was published or discarded, by a full disk too: nothing can be staged here any more."""
        return self._full is not None or not self._open

    @property
    def begun(self) -> bool:
        """Whether any tile was staged."""
        return bool(self._state.hashes or self._wire.hashes)

    def has_wire(self, tile_id: int) -> bool:
        """True when the wire tile was staged, and what it stands for is here."""
        return tile_id in self._wire.hashes and tile_id in self._values_of(tile_id).hashes

    def wire_hash(self, tile_id: int) -> Hash:
        """The wire hash of a tile, NO_HASH where it was not staged."""
        return self._wire.hashes.get(tile_id, NO_HASH)

    def find(self, tile_hash: Hash) -> memoryview | None:
        """The staged bytes with this wire or state hash, or None."""
        found = self._wire.find(tile_hash) or self._state.find(tile_hash)
        return self._finished.find(tile_hash) if found is None and self._finished else found

    def block(self, index: int) -> Values:
        """A block as it is before the merge: staged wire tiles, the parent's values elsewhere. Read-only.

        Raises TileDamaged where the parent's are not what they should be.
        """
        area = self._area(index)
        with self._room_or_gone():
            if area.has_block(index):
                area.fill(index, self._before)
                return area.block(index)
        if self.parent is None:
            raise StateError(f"block {index} of round {self.round} was not staged", fix="fetch its tiles first")
        if index not in self._sound:
            for tile in self.layout.tiles_of(index):
                self.parent.sound_tile(tile.id)
            self._sound.add(index)
        return self.parent.block(index)

    def forget(self, tile_ids: Iterable[int]) -> None:
        """Takes staged wire tiles back: these tiles keep the parent's values."""
        self._check_writable()
        forgotten = tuple(tile_ids)
        self._wire.forget(forgotten)
        if self.layout.has_momentum:
            self._decoded.forget(map(self.layout.momentum_tile, forgotten))
        self._decoded.forget(forgotten)

    def finish(self) -> tuple[Hash, ...]:
        """Completes all blocks, syncs them to disk, and returns the state hash of every tile.

        A finished staging survives a restart (`StateStore.staged`). Raises StateError where a tile has no value at all.
        """
        self._check_writable()
        with self._room_or_gone():
            for block in self.layout.blocks:
                self._complete(block.index)
            for area in (self._state, self._decoded, self._wire):
                area.sync()
            tile_ids = range(len(self.layout.tiles))
            write_whole(self._wire.folder / HASHES_FILE, b"".join(self.wire_hash(tile_id) for tile_id in tile_ids))
            write_whole(self.folder / HASHES_FILE, b"".join(self._state_hash(tile_id) for tile_id in tile_ids))
            sync(self.folder.parent)
        self._finished = Version(self.folder, self.round, self.layout)
        return self._finished.tile_hashes

    def reopen(self, keep_state: bool = True) -> None:
        """Lets tiles be written after finish; `keep_state=False` forgets the state tiles, where wire tiles change."""
        self._check_open()
        if self._resumed:
            self._recall_state_tiles()
        (self.folder / HASHES_FILE).unlink(missing_ok=True)
        sync(self.folder)
        self._finished = None
        if not keep_state:
            self._state.forget(tuple(self._state.hashes))
        for block in self.layout.blocks:
            if not self._state.has_block(block.index):
                self._state.path(block.index).unlink(missing_ok=True)

    @property
    def finished(self) -> Version | None:
        """The staged version as it will be published, once `finish` was called."""
        return self._finished

    def publish(self) -> Version:
        """Makes the finished staging the store's version of its round, at once; this object ends."""
        self._check_open()
        if self._finished is None:
            raise LocalProtocolError(f"the staging of round {self.round} is not finished", fix="call finish() first")
        shutil.rmtree(self._decoded.folder, ignore_errors=True)
        version = self._publish(self)
        self._open = False
        return version

    def discard(self) -> None:
        """Removes everything staged. Harmless when it is gone already."""
        with self._closing:
            if self._open:
                self._open = False
                remove_folder(self.folder)

    def _write(self, area: TileArea, tile_id: int, data: TileData, tile_hash: Hash | None) -> Hash:
        self._check_writable()
        tile = self.layout.tiles[tile_id]
        view = _tile_bytes(tile, data, area.tile_bytes(tile))
        tile_hash = tile_hash or hash_tile(view)
        with self._room_or_gone():
            area.write(tile, view, tile_hash)
        return tile_hash

    def _is_plain(self, block: int) -> bool:
        """Whether the values of the new state are what is handed out, but for a merge."""
        return self.layout.codec_of(block) == "fp32" and not self.layout.has_momentum

    def _area(self, block: int) -> TileArea:
        """Where the values are that wire tiles of a block stand for."""
        return self._wire if self._is_plain(block) else self._decoded

    def _values_of(self, tile_id: int) -> TileArea:
        return self._area(self.layout.tiles[tile_id].block)

    def _before(self, tile_id: int) -> memoryview:
        area = self._values_of(tile_id)
        return area.tile(tile_id) if tile_id in area.hashes else self.parent_tile(tile_id)

    def parent_tile(self, tile_id: int) -> memoryview:
        """The bytes of a tile of the parent version. Raises TileDamaged, StateError where there is no parent."""
        if self.parent is None:
            raise StateError(f"tile {tile_id} of round {self.round} was not staged", fix="fetch it from another peer")
        return self.parent.sound_tile(tile_id)

    def _state_hash(self, tile_id: int) -> Hash:
        staged = self._state.hashes.get(tile_id) or self._values_of(tile_id).hashes.get(tile_id)
        return staged or _present(self.parent).tile_hashes[tile_id]

    def _recall_state_tiles(self) -> None:
        """After a restart: the state tiles are those that are neither the wire's nor the parent's."""
        gone = LocalProtocolError(f"round {self.round} was staged on a state that is gone", fix="stage it anew")
        if self._finished is None or self.parent is None:
            raise gone
        before = (self._values_of(at).hashes.get(at) or parents for at, parents in enumerate(self.parent.tile_hashes))
        both = enumerate(zip(self._finished.tile_hashes, before))
        changed = {at: ours for at, (ours, other) in both if ours != other}
        blocks = {self.layout.tiles[tile_id].block for tile_id in changed}
        if any(self._state.path(block).stat().st_nlink > 1 for block in blocks):  # not ours alone: never write there
            raise gone
        self._state = TileArea(self.folder, self.layout, changed)
        self._resumed = False

    def _complete(self, block: int) -> None:
        path = self._state.path(block)
        if self._state.has_block(block):
            self._state.fill(block, self._before)
            return
        path.unlink(missing_ok=True)  # of a finish() that did not come to its end
        area = self._area(block)
        if area.has_block(block):
            area.fill(block, self._before)
            link_or_copy(area.path(block), path)
        elif self.parent is not None:
            link_or_copy(self.parent.block_path(block), path)
        elif self.layout.blocks[block].size == 0:
            path.touch()
        else:
            raise StateError(f"block {block} of round {self.round} was not staged", fix="fetch its tiles first")

    @contextmanager
    def _room_or_gone(self) -> Iterator[None]:
        """What other threads meet after the disk was full is the same StorageFull, not its consequences."""
        try:
            yield
        except StorageFull as error:
            self._full = self._full or error
            self.discard()
            raise
        except FileNotFoundError:
            if self._full is not None:
                raise self._full from None
            raise

    def _check_open(self) -> None:
        if self._full is not None:
            raise self._full
        if not self._open:
            raise LocalProtocolError(f"the staging of round {self.round} is published or discarded")

    def _check_writable(self) -> None:
        self._check_open()
        if self._finished is not None:
            raise LocalProtocolError(f"the staging of round {self.round} is finished", fix="call reopen() first")


def _present(parent: Version | None) -> Version:
    assert parent is not None  # _complete has refused the rest
    return parent


def _tile_bytes(tile: Tile, data: TileData, size: int) -> memoryview:
    if isinstance(data, np.ndarray):
        if data.dtype != DTYPE:
            raise LocalProtocolError(f"tile {tile.id} was given as {data.dtype}, not as little-endian fp32")
        data = bytes_of(np.ascontiguousarray(data).reshape(-1))
    view = memoryview(data).cast("B")
    if len(view) != size:
        raise LocalProtocolError(f"tile {tile.id} has {size} bytes, but {len(view)} were given")
    return view

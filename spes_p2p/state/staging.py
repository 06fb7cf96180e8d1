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

from spes_p2p.errors import LocalProtocolError, StateError, StorageFull
from spes_p2p.files import remove_folder, sync, write_whole
from spes_p2p.ids import NO_HASH, Hash
from spes_p2p.state.hashes import hash_tile
from spes_p2p.state.layout import Layout, Values
from spes_p2p.state.tile_area import Areas, TileArea, TileData, tile_bytes
from spes_p2p.state.version import HASHES_FILE, WIRE_FOLDER, Version

_DECODED_FOLDER = "decoded"
_ASIDE_FOLDER = "aside"


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
        outlives: bool = False,
    ) -> None:
        """`finished`: what a folder from before a restart holds. `outlives`: see `StateStore.stage`."""
        self.folder = folder
        self.round = round
        self.layout = layout
        self.parent = parent
        self._publish = publish
        self.outlives = outlives
        self.finished = finished
        """The version as it will be published, once `finish` was called."""
        self._resumed = finished is not None
        self._open = True
        self._full: StorageFull | None = None
        self._closing = threading.Lock()
        self._sound: set[int] = set()
        """Blocks of the parent that were hashed."""
        (folder / WIRE_FOLDER).mkdir(parents=True, exist_ok=True)
        wire_hashes = finished.wire.hashes if finished else ()
        known = {tile_id: tile_hash for tile_id, tile_hash in enumerate(wire_hashes) if tile_hash != NO_HASH}
        wire = TileArea(folder / WIRE_FOLDER, layout, known, encoded=True)
        self._aside = TileArea(folder / _ASIDE_FOLDER, layout, encoded=True)
        """Wire tiles that were taken back: others, or a later proposal, may want them yet."""
        if self._resumed:
            self._remove_spare_areas()
        self.areas = Areas(layout, parent, TileArea(folder, layout), wire, TileArea(folder / _DECODED_FOLDER, layout))

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
        if not self.areas.is_plain(self.layout.tiles[tile_id].block):
            if values is None or (momentum is None) is self.layout.has_momentum:
                raise LocalProtocolError(f"tile {tile_id} was staged without the values that its bytes encode")
            if momentum is not None:
                self._write(self.areas.decoded, self.layout.momentum_tile(tile_id), momentum, None)
            self._write(self.areas.decoded, tile_id, values, None)
        return self._write(self.areas.wire, tile_id, data, tile_hash)

    def write_state(self, tile_id: int, data: TileData, tile_hash: Hash | None = None) -> Hash:
        """Stages a tile of the new state that differs from the wire: merged, or fetched. Its state hash."""
        return self._write(self.areas.state, tile_id, data, tile_hash)

    def has(self, tile_id: int) -> bool:
        """True when the tile was staged, of either kind (all of them, where this was finished before a restart)."""
        return self._resumed or self.has_wire(tile_id) or tile_id in self.areas.state.hashes

    @property
    def is_gone(self) -> bool:
        """Whether it was published or discarded, by a full disk too: nothing can be staged here any more."""
        return self._full is not None or not self._open

    @property
    def begun(self) -> bool:
        """Whether any tile was staged."""
        return bool(self.areas.state.hashes or self.areas.wire.hashes)

    def has_wire(self, tile_id: int) -> bool:
        """True when the wire tile was staged, and what it stands for is here."""
        return tile_id in self.areas.wire.hashes and tile_id in self.areas.values_of_tile(tile_id).hashes

    def wire_hash(self, tile_id: int) -> Hash:
        """The wire hash of a tile, NO_HASH where it was not staged."""
        return self.areas.wire.hashes.get(tile_id, NO_HASH)

    def find(self, tile_hash: Hash) -> memoryview | None:
        """The staged bytes with this wire or state hash, or None."""
        found = (area.find(tile_hash) for area in (self.areas.wire, self.areas.state, self._aside))
        first = next((data for data in found if data is not None), None)
        return self.finished.find(tile_hash) if first is None and self.finished else first

    def block(self, index: int) -> Values:
        """A block as it is before the merge: staged wire tiles, the parent's values elsewhere. Read-only.

        Raises TileDamaged where the parent's are not what they should be.
        """
        area = self.areas.values_of(index)
        with self._room_or_gone():
            if area.has_block(index):
                area.fill(index, self.areas.before_merge)
                return area.block(index)
        if self.parent is None:
            raise StateError(f"block {index} of round {self.round} was not staged", fix="fetch its tiles first")
        if index not in self._sound:
            for tile in self.layout.tiles_of(index):
                self.parent.sound_tile(tile.id)
            self._sound.add(index)
        return self.parent.block(index)

    def forget(self, tile_ids: Iterable[int]) -> None:
        """Takes staged wire tiles back: these tiles keep the parent's values. `find` goes on finding them."""
        self._check_writable()
        forgotten = tuple(tile_ids)
        with self._room_or_gone():
            for tile_id in forgotten:
                if tile_hash := self.areas.wire.hashes.get(tile_id):
                    self._aside.write(self.layout.tiles[tile_id], self.areas.wire.tile(tile_id), tile_hash)
        self.areas.wire.forget(forgotten)
        if self.layout.has_momentum:
            self.areas.decoded.forget(map(self.layout.momentum_tile, forgotten))
        self.areas.decoded.forget(forgotten)

    def finish(self) -> tuple[Hash, ...]:
        """Completes all blocks, syncs them to disk, and returns the state hash of every tile.

        A finished staging survives a restart (`StateStore.staged`). Raises StateError where a tile has no value at all.
        """
        self._check_writable()
        with self._room_or_gone():
            for block in self.layout.blocks:
                self.areas.complete(block.index)
            for area in (self.areas.state, self.areas.decoded, self.areas.wire):
                area.sync()
            tile_ids = range(len(self.layout.tiles))
            write_whole(self.areas.wire.folder / HASHES_FILE, b"".join(self.wire_hash(tile_id) for tile_id in tile_ids))
            write_whole(self.folder / HASHES_FILE, b"".join(self.areas.state_hash(tile_id) for tile_id in tile_ids))
            sync(self.folder.parent)
        self.finished = Version(self.folder, self.round, self.layout)
        return self.finished.tile_hashes

    def reopen(self, keep_state: bool = True) -> None:
        """Lets tiles be written after finish; `keep_state=False` forgets the state tiles, where wire tiles change."""
        self._check_open()
        if self._resumed:
            # after a restart: the state tiles are those that are neither the wire's nor the parent's
            gone = LocalProtocolError(f"round {self.round} was staged on a state that is gone", fix="stage it again")
            if self.finished is None or self.parent is None:
                raise gone
            before = (
                self.areas.values_of_tile(at).hashes.get(at) or parents
                for at, parents in enumerate(self.parent.tile_hashes)
            )
            both = enumerate(zip(self.finished.tile_hashes, before))
            changed = {at: ours for at, (ours, other) in both if ours != other}
            paths = {self.areas.state.block_path(self.layout.tiles[tile_id].block) for tile_id in changed}
            if any(path.stat().st_nlink > 1 for path in paths):  # not ours alone: never write there
                raise gone
            self.areas.state = TileArea(self.folder, self.layout, changed)
            self._resumed = False
        (self.folder / HASHES_FILE).unlink(missing_ok=True)
        sync(self.folder)
        self.finished = None
        if not keep_state:
            self.areas.state.forget(tuple(self.areas.state.hashes))
        for block in self.layout.blocks:
            if not self.areas.state.has_block(block.index):
                self.areas.state.block_path(block.index).unlink(missing_ok=True)

    def publish(self) -> Version:
        """Makes the finished staging the store's version of its round, at once; this object ends."""
        self._check_open()
        if self.finished is None:
            raise LocalProtocolError(f"the staging of round {self.round} is not finished", fix="call finish() first")
        self._remove_spare_areas()
        version = self._publish(self)
        self._open = False
        return version

    def discard(self) -> None:
        """Removes everything staged. Harmless when it is gone already."""
        with self._closing:
            if self._open:
                self._open = False
                remove_folder(self.folder)

    def _remove_spare_areas(self) -> None:
        for name in (_DECODED_FOLDER, _ASIDE_FOLDER):
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def _write(self, area: TileArea, tile_id: int, data: TileData, tile_hash: Hash | None) -> Hash:
        self._check_writable()
        tile = self.layout.tiles[tile_id]
        view = tile_bytes(tile, data, area.tile_bytes(tile))
        tile_hash = tile_hash or hash_tile(view)
        with self._room_or_gone():
            area.write(tile, view, tile_hash)
        return tile_hash

    @contextmanager
    def _room_or_gone(self) -> Iterator[None]:
        """After a full disk, raises the same StorageFull in other threads instead of errors that follow from it."""
        try:
            yield
        except StorageFull as error:
            self._full = self._full or error
            self.discard()
            raise
        except (FileNotFoundError, FileExistsError):  # mkdir of a folder that is removed meanwhile raises either
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
        if self.finished is not None:
            raise LocalProtocolError(f"the staging of round {self.round} is finished", fix="call reopen() first")

"""One complete version of the state in a folder, memory-mapped and read-only.

The folder is a round of the store, a finished staging area or a checkpoint; they all look the same:

    block-00000.f32     the shared block, little-endian fp32; block-%05d.f32 for column block - 1
    hashes.bin          the state hash of every tile, one after the other
    wire/               (while the round and its successor run) what was handed out in the round, before merge
        block-%05d.f32  with the fp32 codec, the same inode as above where the merge changed nothing; else encoded tiles
        hashes.bin      the wire hash of every tile, zeros where a tile was not handed out

Nothing new is ever written here; `staging` makes new versions and `store` keeps the list of them. Only `mend` writes:
the bytes that a damaged tile had. It writes in place, since block files are shared by hard links between versions,
stagings and checkpoints, and all who share a file list the same hash for a tile of it: so it is mended for all of them,
and for every map of it that is open.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from itertools import groupby
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spes_p2p.errors import LocalProtocolError, StateError, StorageFull, TileDamaged
from spes_p2p.files import link_or_copy, reserve, storing, write_at, write_into
from spes_p2p.ids import HASH_BYTES, NO_HASH, Hash, short
from spes_p2p.state.hashes import HASH_THREADS, hash_tile, split_hashes
from spes_p2p.state.layout import VALUE_BYTES, Layout, Tile, Values
from spes_p2p.state.maps import map_file

HASHES_FILE = "hashes.bin"
WIRE_FOLDER = "wire"
DTYPE = np.dtype("<f4")
_REPAIR = "start the peer again while others of the run are up, to fetch the tile again from them"


def block_file(block: int) -> str:
    """The file name of a block."""
    return f"block-{block:05d}.f32"


def on_disk(path: Path, values: Values) -> Values:
    """The same values, written to `path`, whose folder is made, and mapped; a copy in memory where the disk is full.

    Read-only in either case.
    """
    kept = np.ascontiguousarray(values, DTYPE)
    try:
        with storing(path, kept.nbytes):
            path.parent.mkdir(parents=True, exist_ok=True)
        reserve(path, kept.nbytes)
        write_at(path, 0, bytes_of(kept))
    except StorageFull:
        path.unlink(missing_ok=True)
        held = np.array(kept)
        held.flags.writeable = False
        return held
    return map_block(path, kept.size)


def map_block(path: Path, size: int) -> Values:
    """The `size` values of a block file as a read-only map, shape [size]."""
    return map_file(path, size * VALUE_BYTES).view(DTYPE)


def bytes_of(values: Values) -> memoryview:
    """The bytes of contiguous values, without a copy."""
    return values.data.cast("B") if values.size else memoryview(b"")


class TileFiles:
    """The tiles in the block files of a folder, mapped: their values, or what a round hands out (`encoded`)."""

    def __init__(self, folder: Path, layout: Layout, encoded: bool = False) -> None:
        self.folder = folder
        self.layout = layout
        self._encoded = encoded
        self._maps: dict[int, NDArray[np.uint8]] = {}

    def block_path(self, index: int) -> Path:
        """The file of a block."""
        return self.folder / block_file(index)

    def block(self, index: int) -> Values:
        """The values of a block, read-only, shape [block size]; stays good when the file goes."""
        return self._mapped(index).view(DTYPE)

    def tile(self, tile_id: int) -> memoryview:
        """The bytes of a tile."""
        tile = self.layout.tiles[tile_id]
        start = self._offset(tile)
        return self._mapped(tile.block)[start : start + self.tile_bytes(tile)].data

    def tile_bytes(self, tile: Tile) -> int:
        """Length of a tile here."""
        return self.layout.wire_bytes(tile) if self._encoded else tile.size * VALUE_BYTES

    def _offset(self, tile: Tile) -> int:
        return self.layout.wire_offset(tile) if self._encoded else tile.start * VALUE_BYTES

    def _block_bytes(self, block: int) -> int:
        return self.layout.wire_block_bytes(block) if self._encoded else self.layout.blocks[block].size * VALUE_BYTES

    def _mapped(self, index: int) -> NDArray[np.uint8]:
        if index not in self._maps:
            self._maps[index] = map_file(self.block_path(index), self._block_bytes(index))
        return self._maps[index]


class WireTiles(TileFiles):
    """What a round handed out, in the folder `wire` of its version."""

    @cached_property
    def hashes(self) -> tuple[Hash, ...]:
        """The wire hash of each tile; NO_HASH for tiles that the round did not hand out (or dropped since)."""
        try:
            return _read_hashes(self.folder / HASHES_FILE, self.layout)
        except StateError:  # dropped, or unreadable: others hand these tiles out as well
            return (NO_HASH,) * len(self.layout.tiles)

    def find(self, tile_hash: Hash) -> memoryview | None:
        """The bytes with this hash, or None. They are hashed first."""
        tile_id = self._by_hash.get(tile_hash, -1)
        if tile_id < 0:
            return None
        tile = self.layout.tiles[tile_id]
        try:
            with open(self.block_path(tile.block), "rb") as file:  # as in `Version.sound_tile`
                found = os.pread(file.fileno(), self.tile_bytes(tile), self._offset(tile))
            if len(found) < self.tile_bytes(tile):
                return None
            data = self.tile(tile_id)
        except (OSError, ValueError):  # its file is gone, or was cut short
            return None
        return data if hash_tile(data) == tile_hash else None

    def holds(self, tile_hash: Hash) -> bool:
        """Whether this is the hash of one of these tiles; nothing is read."""
        return tile_hash in self._by_hash

    @cached_property
    def _by_hash(self) -> dict[Hash, int]:
        return {tile_hash: at for at, tile_hash in enumerate(self.hashes) if tile_hash != NO_HASH}


class Version(TileFiles):
    """Read access to one version. Raises StateError where a file is missing or has the wrong length."""

    def __init__(self, folder: Path, round: int, layout: Layout) -> None:
        super().__init__(folder, layout)
        self.round = round
        self.wire = WireTiles(folder / WIRE_FOLDER, layout, encoded=True)
        self._files: dict[int, tuple[int, int]] = {}
        for block in layout.blocks:
            _check_length(folder / block_file(block.index), block.size * VALUE_BYTES)
            self._files[block.index] = _identity(os.stat(folder / block_file(block.index)))
            self._mapped(block.index)  # at once: another history's version may take the folder's place
        self._hashes_file = _identity(os.stat(folder / HASHES_FILE)) if (folder / HASHES_FILE).is_file() else None
        self.tile_hashes = _read_hashes(folder / HASHES_FILE, layout)
        self.root = layout.root_of(self.tile_hashes)
        self.damaged: set[int] = set()
        """Tiles known to be damaged and not mended yet: nobody may take their bytes for what they should be."""

    def sound_tile(self, tile_id: int) -> memoryview:
        """The bytes of a tile of the state, hashed first: damage must not spread. Raises TileDamaged.

        The file is read before the map is: where the disk cannot, that would end the process with SIGBUS.
        """
        tile = self.layout.tiles[tile_id]
        try:
            with self._opened(tile.block, os.O_RDONLY) as descriptor:
                found = hash_tile(self.tile(tile_id)) if descriptor is None else _hash_in(descriptor, tile)
        except OSError as error:  # too many open files say nothing of this one
            found = hash_tile(self.tile(tile_id)) if error.errno in (errno.EMFILE, errno.ENFILE) else None
        if found != self.tile_hashes[tile_id]:
            self.damaged.add(tile_id)
            raise self.damage(tile_id)
        return self.tile(tile_id)

    def sound_values(self, tile_id: int) -> Values:
        """The same as flat fp32."""
        return np.frombuffer(self.sound_tile(tile_id), DTYPE)

    def find(self, tile_hash: Hash) -> memoryview | None:
        """The bytes with this state or wire hash, or None. They are hashed first: a disk may have changed them."""
        tile_id = self._by_hash.get(tile_hash)
        if tile_id is None:
            return self.wire.find(tile_hash)
        try:
            return self.sound_tile(tile_id)
        except TileDamaged:
            return None

    def holds(self, tile_hash: Hash) -> bool:
        """Whether this is the state hash of one of its tiles; nothing is read."""
        return tile_hash in self._by_hash

    def is_sound(self, tile_id: int) -> bool:
        """Whether a state tile on disk hashes to what it should; also True where the version was dropped."""
        return not self.unsound((tile_id,))

    def unsound(self, tile_ids: Iterable[int]) -> list[int]:
        """Which of these state tiles on disk do not hash to what they should: none where the version was dropped.

        Reads the files: where the disk cannot, a map would end the process with SIGBUS.
        """
        found: list[int] = []
        tiles = [self.layout.tiles[tile_id] for tile_id in tile_ids]
        for block, some in groupby(tiles, key=lambda tile: tile.block):
            here = list(some)
            try:
                with self._opened(block, os.O_RDONLY) as descriptor:
                    if descriptor is not None:
                        found += [one.id for one in here if _hash_in(descriptor, one) != self.tile_hashes[one.id]]
            except OSError:
                found += [one.id for one in here]
        return found

    def damaged_tiles(self) -> Iterator[int]:
        """Ids of the state tiles whose bytes no longer hash to what they should; reads everything."""
        with ThreadPoolExecutor(HASH_THREADS) as pool:
            sound = pool.map(self.is_sound, range(len(self.layout.tiles)))
            yield from (tile_id for tile_id, is_sound in enumerate(sound) if not is_sound)

    def damage(self, tile_id: int) -> TileDamaged:
        """The error that names a damaged tile and its file."""
        tile = self.layout.tiles[tile_id]
        return TileDamaged(
            f"{self.block_path(tile.block)}: tile {tile_id} (values {tile.start} to {tile.stop} of the block) "
            f"does not hash to {self.tile_hashes[tile_id].hex()[:10]}",
            fix=_REPAIR,
        )

    def verify(self) -> None:
        """Hashes everything again. Raises TileDamaged naming the first damaged tile and its file."""
        for tile_id in self.damaged_tiles():
            raise self.damage(tile_id)

    def mend(self, tile_id: int, data: bytes | memoryview) -> None:
        """Puts the bytes of a damaged tile back, durably, for all who share the file. Raises StorageFull."""
        if hash_tile(data) != self.tile_hashes[tile_id]:
            raise LocalProtocolError(
                f"tile {tile_id} of round {self.round} cannot be repaired with bytes of another hash"
            )
        tile = self.layout.tiles[tile_id]
        with self._opened(tile.block, os.O_WRONLY) as descriptor:
            if descriptor is not None:
                with storing(self.block_path(tile.block), len(data)):
                    write_into(descriptor, tile.start * VALUE_BYTES, data)
                    os.fsync(descriptor)
        self.damaged.discard(tile_id)

    def files(self) -> tuple[Path, ...]:
        """All that this version is, on disk."""
        names = (*(block_file(block.index) for block in self.layout.blocks), HASHES_FILE)
        return tuple(self.folder / name for name in names)

    def link_into(self, directory: Path) -> tuple[str, ...]:
        """Hard-links (copies across devices) this version's files into a folder that exists; their names.

        Raises StateError where the version of another history has taken the folder's place, or it was dropped: the
        files there may be of either then.
        """
        try:
            for path in self.files():
                link_or_copy(path, directory / path.name)
            is_ours = _identity(os.stat(self.folder / HASHES_FILE)) == self._hashes_file
        except FileNotFoundError:
            is_ours = False
        if not is_ours:  # nothing brings it back: what was linked before this look was ours where it still is
            raise StateError(f"{self.folder} no longer holds state {short(self.root)}", fix="use a newer state")
        return tuple(path.name for path in self.files())

    @cached_property
    def _by_hash(self) -> dict[Hash, int]:
        return {tile_hash: tile_id for tile_id, tile_hash in enumerate(self.tile_hashes)}

    @contextmanager
    def _opened(self, block: int, flags: int) -> Iterator[int | None]:
        """A descriptor of a block's file, for sure of this version's: None where that is not at its place any more."""
        try:
            descriptor = os.open(self.block_path(block), flags)
        except FileNotFoundError:
            yield None
            return
        try:
            yield descriptor if _identity(os.fstat(descriptor)) == self._files[block] else None
        finally:
            os.close(descriptor)


def _hash_in(descriptor: int, tile: Tile) -> Hash | None:
    """Of a tile's bytes in the file of its block; None where the disk cannot read them."""
    try:
        return hash_tile(os.pread(descriptor, tile.size * VALUE_BYTES, tile.start * VALUE_BYTES))
    except OSError:
        return None


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _check_length(path: Path, expected_bytes: int) -> None:
    if not path.is_file():
        raise StateError(f"{path} is missing", fix=_REPAIR)
    if path.stat().st_size != expected_bytes:
        raise StateError(f"{path} has {path.stat().st_size} bytes instead of {expected_bytes}", fix=_REPAIR)


def _read_hashes(path: Path, layout: Layout) -> tuple[Hash, ...]:
    _check_length(path, len(layout.tiles) * HASH_BYTES)
    return split_hashes(path.read_bytes())

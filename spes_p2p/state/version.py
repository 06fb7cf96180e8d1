"""One complete version of the state in a folder, memory-mapped and read-only.

The folder is a round of the store, a finished staging area or a checkpoint; they all look the same:

    block-00000.f32     the shared block, little-endian fp32; block-%05d.f32 for column block - 1
    hashes.bin          the state hash of every tile, one after the other
    wire/               (while the round and its successor run) what was handed out in the round, before merge
        block-%05d.f32  the same inode as above where the merge changed nothing
        hashes.bin      the wire hash of every tile, zeros where a tile was not handed out

Nothing is ever written here; `staging` makes new versions and `store` keeps the list of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np

from spes_p2p.errors import StateError
from spes_p2p.ids import NO_HASH, Hash
from spes_p2p.state.files import link_or_copy
from spes_p2p.state.hashes import HASH_BYTES, hash_tiles, split_hashes
from spes_p2p.state.layout import VALUE_BYTES, Layout, Values

HASHES_FILE = "hashes.bin"
WIRE_FOLDER = "wire"
DTYPE = np.dtype("<f4")
_REPAIR = (
    "fetch the tile again from another peer (join --resume does), or remove the folder to fall back to an older one"
)


def block_file(block: int) -> str:
    """The file name of a block."""
    return f"block-{block:05d}.f32"


def map_block(path: Path, size: int) -> Values:
    """The `size` values of a block file as a read-only map, shape [size]."""
    if size == 0:  # an empty file cannot be mapped
        return np.empty(0, DTYPE)
    return np.memmap(path, DTYPE, mode="r", shape=(size,))


def bytes_of(values: Values) -> memoryview:
    """The bytes of contiguous values, without a copy."""
    return values.data.cast("B") if values.size else memoryview(b"")


class Version:
    """Read access to one version. Raises StateError where a file is missing or has the wrong length."""

    def __init__(self, folder: Path, round: int, layout: Layout) -> None:
        self.folder = folder
        self.round = round
        self.layout = layout
        self._maps: dict[tuple[bool, int], Values] = {}
        for block in layout.blocks:
            _check_length(folder / block_file(block.index), block.size * VALUE_BYTES)
        self.tile_hashes = _read_hashes(folder / HASHES_FILE, layout)
        self.root = layout.root_of(self.tile_hashes)

    @cached_property
    def wire_hashes(self) -> tuple[Hash, ...]:
        """The wire hash of each tile; NO_HASH for tiles that the round did not hand out (or dropped since)."""
        path = self.folder / WIRE_FOLDER / HASHES_FILE
        return _read_hashes(path, self.layout) if path.exists() else (NO_HASH,) * len(self.layout.tiles)

    def block_path(self, index: int) -> Path:
        """The file of a block."""
        return self.folder / block_file(index)

    def block(self, index: int) -> Values:
        """The values of a block, read-only, shape [block size]; the map outlives `StateStore.drop`."""
        return self._map(False, index)

    def tile(self, tile_id: int) -> memoryview:
        """The bytes of a tile of the state."""
        return self._tile(False, tile_id)

    def wire_tile(self, tile_id: int) -> memoryview | None:
        """The bytes that the round handed out for a tile, or None where it did not."""
        return None if self.wire_hashes[tile_id] == NO_HASH else self._tile(True, tile_id)

    def find(self, tile_hash: Hash) -> memoryview | None:
        """The bytes with this state or wire hash, or None."""
        wire, tile_id = self._by_hash.get(tile_hash, (False, -1))
        return None if tile_id < 0 else self._tile(wire, tile_id)

    def damaged_tiles(self) -> Iterator[int]:
        """Ids of the state tiles whose bytes no longer hash to what they should."""
        found = hash_tiles(self.tile(tile.id) for tile in self.layout.tiles)
        return (tile_id for tile_id, (have, want) in enumerate(zip(found, self.tile_hashes)) if have != want)

    def verify(self) -> None:
        """Hashes everything again. Raises StateError naming the first damaged tile and its file."""
        for tile_id in self.damaged_tiles():
            tile = self.layout.tiles[tile_id]
            raise StateError(
                f"{self.block_path(tile.block)}: tile {tile_id} (values {tile.start} to {tile.stop} of the block) "
                f"does not hash to {self.tile_hashes[tile_id].hex()[:10]}",
                fix=_REPAIR,
            )

    def link_into(self, directory: Path) -> tuple[str, ...]:
        """Hard-links (copies across devices) this version's files into a folder that exists; their names."""
        names = (*(block_file(block.index) for block in self.layout.blocks), HASHES_FILE)
        for name in names:
            link_or_copy(self.folder / name, directory / name)
        return names

    @cached_property
    def _by_hash(self) -> dict[Hash, tuple[bool, int]]:
        wire = {tile_hash: (True, tile_id) for tile_id, tile_hash in enumerate(self.wire_hashes)}
        wire.pop(NO_HASH, None)
        return wire | {tile_hash: (False, tile_id) for tile_id, tile_hash in enumerate(self.tile_hashes)}

    def _map(self, wire: bool, index: int) -> Values:
        if (wire, index) not in self._maps:
            folder = self.folder / WIRE_FOLDER if wire else self.folder
            self._maps[wire, index] = map_block(folder / block_file(index), self.layout.blocks[index].size)
        return self._maps[wire, index]

    def _tile(self, wire: bool, tile_id: int) -> memoryview:
        tile = self.layout.tiles[tile_id]
        return bytes_of(self._map(wire, tile.block)[tile.start : tile.stop])


def _check_length(path: Path, expected_bytes: int) -> None:
    if not path.is_file():
        raise StateError(f"{path} is missing", fix=_REPAIR)
    if path.stat().st_size != expected_bytes:
        raise StateError(f"{path} has {path.stat().st_size} bytes instead of {expected_bytes}", fix=_REPAIR)


def _read_hashes(path: Path, layout: Layout) -> tuple[Hash, ...]:
    _check_length(path, len(layout.tiles) * HASH_BYTES)
    return split_hashes(path.read_bytes())

"""Opening a version whose files were damaged, so that only what is damaged has to come from elsewhere.

Leaves out where that comes from: what is lost is found as damaged tiles by whoever checks the version.
"""

from __future__ import annotations

import os
from pathlib import Path

from spes_p2p.errors import StateError
from spes_p2p.files import write_whole
from spes_p2p.ids import Hash
from spes_p2p.state.hashes import HASH_BYTES, hash_tiles, split_hashes
from spes_p2p.state.layout import VALUE_BYTES, Layout
from spes_p2p.state.version import HASHES_FILE, Version, block_file, bytes_of, map_block


def salvaged(folder: Path, round: int, layout: Layout, root: Hash) -> Version | None:
    """The version in `folder`, None where its hashes cannot be brought back.

    Block files that were cut short or are missing get their length back, with zeros. A list of hashes that is not that
    of `root` is computed anew, if no value was damaged. Raises StorageFull.
    """
    if not folder.is_dir():
        return None
    for block in layout.blocks:
        _give_length(folder / block_file(block.index), block.size * VALUE_BYTES)
    path = folder / HASHES_FILE
    if not _has_root(path, layout, root):
        blocks = [map_block(folder / block_file(block.index), block.size) for block in layout.blocks]
        tiles = (bytes_of(blocks[tile.block][tile.start : tile.stop]) for tile in layout.tiles)
        hashes = tuple(hash_tiles(tiles))
        if layout.root_of(hashes) != root:
            return None
        write_whole(path, b"".join(hashes))
    try:
        return Version(folder, round, layout)
    except StateError:
        return None


def _give_length(path: Path, size: int) -> None:
    with open(path, "ab") as file:
        if file.tell() != size:
            os.ftruncate(file.fileno(), size)


def _has_root(path: Path, layout: Layout, root: Hash) -> bool:
    data = path.read_bytes() if path.is_file() else b""
    return len(data) == len(layout.tiles) * HASH_BYTES and layout.root_of(split_hashes(data)) == root

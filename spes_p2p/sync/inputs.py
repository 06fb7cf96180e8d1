"""What a peer brings into a round: a snapshot of its trained values, kept until the round is certified and whole here.

The snapshot is on disk, memory-mapped, apart from what trains: the GPU may go on, and a large model needs no second
copy in memory. It is lost with a restart: then this peer's work since its last checkpoint is lost too.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from spes_p2p.errors import StorageFull
from spes_p2p.ids import NO_HASH, Hash
from spes_p2p.state.files import storing
from spes_p2p.state.layout import VALUE_BYTES, BlockSource, Layout, Values
from spes_p2p.state.version import bytes_of


class Inputs:
    """Snapshots in `directory`, one at a time. Written by the trainer's thread, read by the network's."""

    def __init__(self, directory: Path, layout: Layout) -> None:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        self._directory = directory
        self._layout = layout
        self._parent = NO_HASH
        self._arrays: dict[int, Values] = {}
        self._count = 0

    def take(self, parent: Hash, blocks: Sequence[int], values: Callable[[int], Values]) -> None:
        """Replaces the snapshot by `values(block)` for each of `blocks`, trained on top of manifest `parent`.

        Where the disk is full the snapshot is held in memory.
        """
        self._parent, self._arrays = NO_HASH, {}
        self._count += 1
        arrays: dict[int, Values] = {}
        for block in blocks:
            path = self._directory / f"{self._count % 2}-block-{block:05d}.f32"
            size = self._layout.blocks[block].size
            trained = values(block).astype("<f4", copy=False)
            try:
                with storing(path, size * VALUE_BYTES):
                    trained.tofile(path)
                arrays[block] = np.memmap(path, np.dtype("<f4"), mode="r", shape=(size,))
            except StorageFull:
                arrays[block] = np.array(trained)
        self._parent, self._arrays = parent, arrays

    @property
    def parent(self) -> Hash:
        """The manifest that the snapshot was trained on; NO_HASH when there is none."""
        return self._parent

    @property
    def blocks(self) -> tuple[int, ...]:
        return tuple(self._arrays)

    def block(self, index: int) -> Values:
        """The trained values of a block. KeyError for one that was not trained here."""
        return self._arrays[index]

    def values(self, parent: Hash, first_tile: int, count: int) -> Values | None:
        """Values of consecutive tiles of one block, or None where the snapshot does not have them."""
        tiles = self._layout.tiles[max(first_tile, 0) : max(first_tile, 0) + max(count, 0)]
        if parent != self._parent or len(tiles) != count or not tiles:
            return None
        block = tiles[0].block
        if block not in self._arrays or tiles[-1].block != block:
            return None
        return self._arrays[block][tiles[0].start : tiles[-1].stop]

    def serve(self, parent: Hash, first_tile: int, count: int) -> memoryview | None:
        """The bytes of `values`."""
        found = self.values(parent, first_tile, count)
        return None if found is None else bytes_of(found)


class Carried:
    """The state to go on from after a commit: the new values, plus own work that the round did not count.

    theta <- new + (theta - old) for what was not counted (design section 4): for every tile if the round left this peer
    out, else for the tiles of slices that lost it.
    """

    def __init__(
        self, layout: Layout, new: BlockSource, old: BlockSource | None, inputs: Inputs, uncounted: frozenset[int]
    ) -> None:
        self._layout = layout
        self._new = new
        self._old = old
        self._inputs = inputs
        self._uncounted = uncounted

    def block(self, index: int) -> Values:
        new = self._new.block(index)
        tiles = [tile for tile in self._layout.tiles_of(index) if tile.id in self._uncounted]
        if self._old is None or not tiles or index not in self._inputs.blocks:
            return new
        carried = np.array(new)
        trained, old = self._inputs.block(index), self._old.block(index)
        for tile in tiles:
            part = slice(tile.start, tile.stop)
            change = trained[part] - old[part]
            if np.isfinite(change).all():
                carried[part] += change
        return carried

"""What a peer brings into a round: a snapshot of its trained values, kept until the round is certified and whole here.

The snapshot is on disk, memory-mapped, apart from what trains: the GPU may go on, and a large model needs no second
copy in memory. It is lost with a restart: then this peer's work since its last checkpoint is lost too.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spes_p2p.errors import LocalProtocolError
from spes_p2p.ids import NO_HASH, Hash
from spes_p2p.state.layout import BlockSource, Layout, Values
from spes_p2p.state.version import block_file, on_disk

_FROZEN = "frozen"


@dataclass(frozen=True)
class Snapshot:
    """Trained values by block, on top of manifest `parent`; stays readable when the next one was taken."""

    parent: Hash
    arrays: Mapping[int, Values]

    @property
    def blocks(self) -> tuple[int, ...]:
        return tuple(self.arrays)

    def block(self, index: int) -> Values:
        """The trained values of a block. KeyError for one that was not trained here."""
        return self.arrays[index]


class Inputs:
    """The newest snapshot, in `directory`. Taken by the trainer's thread, read by any."""

    def __init__(self, directory: Path, layout: Layout) -> None:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        self._directory = directory
        self._layout = layout
        self.snapshot = Snapshot(NO_HASH, {})
        """The newest one."""
        self._count = self._frozen = 0

    def take(self, parent: Hash, blocks: Sequence[int], values: Callable[[int], Values]) -> None:
        """Replaces the snapshot by `values(block)` for each of `blocks`, trained on top of manifest `parent`.

        Where the disk is full the snapshot is held in memory. Maps of the earlier one stay good.
        """
        self._count += 1
        folder = self._directory / f"{self._count:08d}"
        arrays = {block: self._store(folder, block, values(block)) for block in blocks}
        self.snapshot = Snapshot(parent, arrays)  # at once: readers see the one or the other
        for older in self._directory.iterdir():
            if older != folder:
                shutil.rmtree(older)

    def _store(self, folder: Path, block: int, values: Values) -> Values:
        size = self._layout.blocks[block].size
        if values.shape != (size,):
            raise LocalProtocolError(f"block {block} has {size} values, the snapshot {values.shape}")
        return on_disk(folder / block_file(block), values)

    def freeze(self, source: BlockSource, blocks: Sequence[int]) -> BlockSource:
        """`source` as it is now for `blocks`, kept beside the snapshot until the next one is taken.

        It may read what an earlier call has kept: no file is written twice.
        """
        self._frozen += 1
        folder = self._directory / f"{_FROZEN}-{self._frozen}"
        return _Frozen(source, {block: on_disk(folder / block_file(block), source.block(block)) for block in blocks})

    def values(self, parent: Hash, first_tile: int, count: int) -> Values | None:
        """Values of consecutive tiles of one block, or None where the snapshot does not have them."""
        snapshot, tiles = self.snapshot, self._layout.consecutive(first_tile, count)
        if parent != snapshot.parent or not tiles or tiles[0].block not in snapshot.arrays:
            return None
        return snapshot.arrays[tiles[0].block][tiles[0].start : tiles[-1].stop]


@dataclass(frozen=True)
class _Frozen:
    source: BlockSource
    arrays: Mapping[int, Values]

    def block(self, index: int) -> Values:
        return self.arrays[index] if index in self.arrays else self.source.block(index)


@dataclass(eq=False)
class RebasedState:
    """The state to go on from after a commit: the new values, plus own work that the round did not count.

    theta <- new + (theta - old) for what was not counted (design section 4): for every tile if the round left this peer
    out, else for the tiles of slices that lost it. `new` and `old` are what is trained on after a commit that counted
    everything (`TrainingBase`): so what a sole owner is ahead counts once, whoever owns the column beside it then.
    Work in a tile whose old values are damaged (`is_sound(tile id)`) is lost: nobody knows what it was.
    """

    _layout: Layout
    _new: BlockSource
    _old: BlockSource | None
    _trained: Snapshot
    _uncounted: frozenset[int]
    _is_sound: Callable[[int], bool] = lambda tile_id: True

    def block(self, index: int) -> Values:
        new = self._new.block(index)
        tiles = [
            tile for tile in self._layout.tiles_of(index) if tile.id in self._uncounted and self._is_sound(tile.id)
        ]
        if self._old is None or not tiles or index not in self._trained.blocks:
            return new
        carried = np.array(new)
        trained, old = self._trained.block(index), self._old.block(index)
        for tile in tiles:
            part = slice(tile.start, tile.stop)
            change = trained[part] - old[part]
            if np.isfinite(change).all():
                carried[part] = new[part] + change
        return carried


class OverlapRebase:
    """The state to train on from after a commit, if training continued during the sync: theta <- new + (theta - since).

    `trained(block)` is theta now, for each of `blocks`, and `since` what it went on from: with overlap the snapshot
    (design section 4). What is not finite in a block drops all that was trained ahead in it.
    """

    def __init__(
        self, new: BlockSource, trained: Callable[[int], Values], since: BlockSource, blocks: Collection[int]
    ) -> None:
        self._new = new
        self._trained = trained
        self._since = since
        self._blocks = frozenset(blocks)

    def block(self, index: int) -> Values:
        new = self._new.block(index)
        if index not in self._blocks:
            return new
        ahead = self._trained(index) - self._since.block(index)
        return new + ahead if np.isfinite(ahead).all() else new

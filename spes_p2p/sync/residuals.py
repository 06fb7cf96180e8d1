"""What lossy codecs left unsent, by tile, on disk until it can be sent: nothing that was trained is lost to rounding.

Two kinds. `sent`: what a peer could not say of its own contribution; the next one carries it. `handed`: what a reducer
could not say of a mean; its next hand-out of the same tile carries it, and it is dropped when somebody else hands the
tile out. Where a column has one owner, that is how far the owner's master is ahead of what the others have: the owner
trains on from there, so the next change holds it already.

A set belongs to a manifest and lies in a folder named by its hash. What a round leaves is staged beside it, and becomes
the next set by `settle`, which is on disk before the certificate is: after a crash at any point the set of the tip is
there. Tiles of blocks whose codec is fp32 never occur. May be used from several threads.

    residuals/
      <manifest hash>/         one set
        sent/, handed/         block files, as a staging has them; tiles that are not listed have no meaning
        tiles.json             {"sent": [tile ids], "handed": [tile ids]}
      staged-<manifest hash>/  what is left of the round on top of that manifest
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal

import numpy as np

from spes_p2p.ids import NO_HASH, Hash, PeerId
from spes_p2p.state.files import publish_folder, remove_folder, storing, write_whole
from spes_p2p.state.layout import Layout, Values
from spes_p2p.state.staging import TileArea
from spes_p2p.state.version import DTYPE, bytes_of
from spes_p2p.sync.core.messages import Manifest

Kind = Literal["sent", "handed"]
KINDS: tuple[Kind, ...] = ("sent", "handed")
_INDEX = "tiles.json"
_STAGED = "staged-"


class _Set:
    """Both kinds in one folder."""

    def __init__(self, folder: Path, layout: Layout, tiles: Mapping[Kind, list[int]] | None = None) -> None:
        self.folder = folder
        self.areas = {
            kind: TileArea(folder / kind, layout, dict.fromkeys((tiles or {}).get(kind, ()), NO_HASH)) for kind in KINDS
        }

    def values(self, kind: Kind, tile_id: int) -> Values | None:
        area = self.areas[kind]
        return np.frombuffer(area.tile(tile_id), DTYPE) if tile_id in area.hashes else None

    def put(self, kind: Kind, tile_id: int, values: Values, mark: Hash) -> None:
        area = self.areas[kind]
        area.write(area.layout.tiles[tile_id], bytes_of(np.ascontiguousarray(values, DTYPE)), mark)


class Residuals:
    """The residuals of one peer. Every write raises StorageFull where the disk is full."""

    def __init__(self, directory: Path, layout: Layout) -> None:
        """Nothing is kept yet: see `open`."""
        self._directory = directory
        self._layout = layout
        self._lock = threading.RLock()
        self._is_used = any(layout.codec_of(block.index) != "fp32" for block in layout.blocks)
        self._head = NO_HASH
        self._set = _Set(directory / "none", layout)
        self._staged = self._set

    def open(self, head: Hash) -> None:
        """Goes on from the set of manifest `head`, with an empty one where there is none; removes all others."""
        if not self._is_used:
            return
        with self._lock:
            self._directory.mkdir(parents=True, exist_ok=True)
            for folder in self._directory.iterdir():
                if folder.name != head.hex():
                    shutil.rmtree(folder)
            folder = self._directory / head.hex()
            self._enter(head, _Set(folder, self._layout, _read_index(folder / _INDEX)))

    def clear(self, head: Hash) -> None:
        """Nothing is kept from before manifest `head`: another history of the run won."""
        with self._lock:
            shutil.rmtree(self._directory, ignore_errors=True)
            self.open(head)

    def values(self, kind: Kind, tile_id: int) -> Values | None:
        """What is kept of a tile, flat fp32, or None."""
        with self._lock:
            return self._set.values(kind, tile_id)

    def stage(self, head: Hash, kind: Kind, tile_id: int, values: Values, mark: Hash = NO_HASH) -> None:
        """What the round on top of `head` leaves of a tile; `mark`: the wire hash of what was handed out."""
        with self._lock:
            if head == self._head:
                self._staged.folder.mkdir(parents=True, exist_ok=True)
                self._staged.put(kind, tile_id, values, mark)

    def settle(self, manifest: Manifest, head: Hash, me: PeerId, wire_hash: Callable[[int], Hash]) -> None:
        """Makes the set of manifest `head` from what `manifest`, the child of the present head, counted.

        `head` is the hash of `manifest`, or of a later one where this peer missed rounds. `wire_hash(tile id)` is what
        was handed out. The set before stays on disk until the next call.
        """
        if not self._is_used:
            return
        with self._lock:
            for folder in list(self._directory.iterdir()):
                if folder not in (self._set.folder, self._staged.folder):
                    shutil.rmtree(folder)
            kept = self._counted(manifest, me, wire_hash)
            publish_folder(self._staged.folder, self._directory / head.hex())
            self._enter(head, _Set(self._directory / head.hex(), self._layout, kept))

    def _counted(self, manifest: Manifest, me: PeerId, wire_hash: Callable[[int], Hash]) -> dict[Kind, list[int]]:
        """Makes the staged folder the next set, on disk; which tiles it has. May be called again where it failed."""
        folder = self._staged.folder
        with storing(folder, 0):
            folder.mkdir(exist_ok=True)
        made = _Set(folder, self._layout)
        for kind in KINDS:
            made.areas[kind] = TileArea(folder / kind, self._layout, dict(self._staged.areas[kind].hashes))
        untouched = set(range(len(self._layout.tiles)))
        for piece in manifest.slices:
            untouched.difference_update(piece.tile_ids)
            for tile_id in piece.tile_ids:
                if piece.reducer != me or made.areas["handed"].hashes.get(tile_id) != wire_hash(tile_id):
                    made.areas["handed"].hashes.pop(tile_id, None)
                if piece.reducer == me:  # who reduces takes its own values as they are
                    made.areas["sent"].hashes.pop(tile_id, None)
                elif me not in piece.contributors:
                    self._keep(made, "sent", (tile_id,))
        for kind in KINDS:
            self._keep(made, kind, untouched)
            made.areas[kind].sync()
        kept = {kind: sorted(area.hashes) for kind, area in made.areas.items()}
        write_whole(folder / _INDEX, json.dumps(kept).encode())
        return kept

    def _keep(self, made: _Set, kind: Kind, tile_ids: Iterable[int]) -> None:
        """Takes tiles over from the present set, in the place of what was staged."""
        for tile_id in tile_ids:
            made.areas[kind].hashes.pop(tile_id, None)
            values = self._set.values(kind, tile_id)
            if values is not None:
                made.put(kind, tile_id, values, NO_HASH)

    def _enter(self, head: Hash, kept: _Set) -> None:
        self._head, self._set = head, kept
        staged = self._directory / (_STAGED + head.hex())
        if staged.exists():
            remove_folder(staged)
        self._staged = _Set(staged, self._layout)


def _read_index(path: Path) -> dict[Kind, list[int]]:
    if not path.exists():
        return {}
    found: dict[Kind, list[int]] = json.loads(path.read_text())
    return found

"""Error feedback: rounding errors of lossy codecs, by tile, kept on disk until they are sent, so that none is lost.

There are two kinds. `sent` is what a peer's encoded contribution left out; its next one carries it. `handed` is what a
reducer's encoded mean left out; its next hand-out of the same tile carries it, however many rounds later, and whoever
hands the tile out meanwhile. If a column has one owner, `handed` is how far the owner's master is
ahead of what the others have. The owner trains on from its master, so the next change already contains it; when a
second owner comes, it becomes unsent work like any other.

A set belongs to a manifest and lies in a folder named by its hash. What a round leaves is staged beside it, and becomes
the next set by `settle`, which is on disk before the certificate is: after a crash at any point the set of the tip, or
of a manifest before it, is there. Tiles of blocks whose codec is fp32 never occur. May be used from several threads.

    residuals/
      <manifest hash>/         one set
        sent/, handed/         block files, as a staging has them; tiles that are not listed have no meaning
        index                  of which round, which columns are owned, which alone, which tiles have something kept
      staged-<manifest hash>/  what is left of the round on top of that manifest
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from spes_p2p.consensus.manifest import Manifest, Slice, manifest_hash
from spes_p2p.errors import RemoteProtocolError, StateError, StorageFull
from spes_p2p.files import publish_folder, remove_folder, storing, sync, write_whole
from spes_p2p.ids import NO_HASH, Hash, PeerId
from spes_p2p.ownership.assign import columns_of, sole_columns
from spes_p2p.state.layout import VALUE_BYTES, Layout, Values
from spes_p2p.state.tile_area import TileArea
from spes_p2p.state.version import DTYPE, bytes_of
from spes_p2p.sync.chain import Chain
from spes_p2p.wire import pack, unpack

Kind = Literal["sent", "handed"]
KINDS: tuple[Kind, ...] = ("sent", "handed")
_INDEX = "index"
_STAGED = "staged-"


@dataclass(frozen=True)
class _Index:
    """What a set holds: `owned` and `sole` columns, and tiles by kind."""

    round: int
    owned: tuple[int, ...]
    sole: tuple[int, ...]
    sent: tuple[int, ...]
    handed: tuple[int, ...]


class _Set:
    """Both kinds in one folder. `owned`, `sole`: the columns that this peer owns (alone) by the set's manifest."""

    def __init__(self, folder: Path, layout: Layout, owned: Collection[int] = (), sole: Collection[int] = ()) -> None:
        self.folder = folder
        self.layout = layout
        self.owned, self.sole = frozenset(owned), frozenset(sole)
        self.areas = {kind: TileArea(folder / kind, layout) for kind in KINDS}

    @classmethod
    def read(cls, folder: Path, layout: Layout) -> _Set:
        """Raises StateError where it cannot be what was written."""
        index = _read_index(folder)
        found = cls(folder, layout, index.owned, index.sole)
        listed: dict[Kind, tuple[int, ...]] = {"sent": index.sent, "handed": index.handed}
        for kind, tile_ids in listed.items():
            area = TileArea(folder / kind, layout, dict.fromkeys(tile_ids, NO_HASH))
            for block in {layout.tiles[tile_id].block for tile_id in tile_ids}:
                path, size = area.block_path(block), layout.blocks[block].size * VALUE_BYTES
                if not path.is_file() or path.stat().st_size != size:
                    raise StateError(f"{path} is missing or does not have {size} bytes")
            found.areas[kind] = area
        return found

    def values(self, kind: Kind, tile_id: int) -> Values | None:
        area = self.areas[kind]
        return np.frombuffer(area.tile(tile_id), DTYPE) if tile_id in area.hashes else None

    def put(self, kind: Kind, tile_id: int, values: Values, mark: Hash = NO_HASH) -> None:
        area, tile = self.areas[kind], self.layout.tiles[tile_id]
        if not area.has_block(tile.block):  # a file may be left of an attempt that failed
            area.block_path(tile.block).unlink(missing_ok=True)
        area.write(tile, bytes_of(np.ascontiguousarray(values, DTYPE)), mark)

    def forget(self, kinds: Iterable[Kind], tile_ids: Collection[int]) -> None:
        for kind in kinds:
            for tile_id in tile_ids:
                self.areas[kind].hashes.pop(tile_id, None)

    def is_sole(self, tile_id: int) -> bool:
        return self.layout.tiles[tile_id].block - 1 in self.sole

    def map_files(self) -> _Set:
        """Itself, readable from now on also when its folder is gone."""
        for tile_id in self.areas["handed"].hashes:
            self.values("handed", tile_id)
        return self


class _NextSet:
    """The staged set on its way to be the next one: what a manifest counted leaves it, what it did not count stays."""

    def __init__(self, me: PeerId, present: _Set, made: _Set) -> None:
        self._me = me
        self._present = present
        self._made = made

    def make(self, first: Manifest, later: Iterable[Manifest], wire_hash: Callable[[int], Hash]) -> None:
        """By the manifests from the child of the present one on, and writes it to disk. Raises StorageFull."""
        made, newest = self._made, first
        self._count(first, wire_hash)
        owned = self._follow(self._present.owned, first)
        sole = self._hold_back_shared(first)
        for newest in later:
            for piece in newest.slices:
                made.forget(("handed",), [tile_id for tile_id in piece.tile_ids if not self._waits(piece, tile_id)])
                if self._me in piece.contributors:  # in another life: this disk is an older copy
                    made.forget(("sent",), piece.tile_ids)
            owned = self._follow(owned, newest)
            sole = self._hold_back_shared(newest)
        for area in made.areas.values():
            area.sync()
            if area.folder.exists():
                sync(area.folder)
        sent, handed = (tuple(sorted(made.areas[kind].hashes)) for kind in KINDS)
        index = _Index(newest.round, tuple(sorted(owned)), tuple(sorted(sole)), sent, handed)
        write_whole(made.folder / _INDEX, pack(index))

    def _count(self, child: Manifest, wire_hash: Callable[[int], Hash]) -> None:
        """Keeps of what was staged what `child` counted, and else what there was before."""
        made = self._made
        handed = made.areas["handed"].hashes
        untouched = set(range(made.layout.num_model_tiles))
        for piece in child.slices:
            untouched.difference_update(piece.tile_ids)
            for tile_id in piece.tile_ids:
                if self._waits(piece, tile_id):
                    self._keep("handed", (tile_id,))
                elif piece.reducer != self._me or handed.get(tile_id) != wire_hash(tile_id):
                    made.forget(("handed",), (tile_id,))
            if self._me not in piece.contributors:
                self._keep("sent", piece.tile_ids)
            elif piece.reducer == self._me:  # it takes its own values as they are
                made.forget(("sent",), piece.tile_ids)
        for kind in KINDS:
            self._keep(kind, untouched)

    def _waits(self, piece: Slice, tile_id: int) -> bool:
        """Whether what our means of a tile have left out waits for our next one: another has handed the tile out.

        A sole owner is not ahead by it any more: its contribution had it.
        """
        return piece.reducer != self._me and not self._present.is_sole(tile_id)

    def _keep(self, kind: Kind, tile_ids: Collection[int]) -> None:
        """Takes tiles over from the present set, in the place of what was staged."""
        self._made.forget((kind,), tile_ids)
        for tile_id in tile_ids:
            values = self._present.values(kind, tile_id)
            if values is not None:
                self._made.put(kind, tile_id, values)

    def _follow(self, before: frozenset[int], manifest: Manifest) -> frozenset[int]:
        """Who loses a column has nothing left to send of it; who reduced it for its owners may again, in any round.

        `before` are the columns owned so far; the result those that are by `manifest`.
        """
        owned = frozenset(columns_of(manifest.ownership, self._me))
        layout = self._made.layout
        for block in layout.model_blocks[1:]:
            if block.index - 1 not in owned:
                kinds: tuple[Kind, ...] = KINDS if block.index - 1 in before else ("sent",)
                self._made.forget(kinds, layout.tile_ids_of(block.index))
        return owned

    def _hold_back_shared(self, manifest: Manifest) -> frozenset[int]:
        """Turns `handed` of columns that are no longer ours alone into unsent work, before others hand them out and
        void it. Returns the columns that are ours alone now."""
        made, sole = self._made, frozenset(sole_columns(manifest.ownership, self._me))
        for tile_id in list(made.areas["handed"].hashes):
            if self._present.is_sole(tile_id) and made.layout.tiles[tile_id].block - 1 not in sole:
                self._hold_back(tile_id)
        return sole

    def _hold_back(self, tile_id: int) -> None:
        """Turns how far a former sole owner's master was ahead in a tile into unsent work."""
        made = self._made
        ahead, unsent = made.values("handed", tile_id), made.values("sent", tile_id)
        assert ahead is not None
        made.put("sent", tile_id, ahead if unsent is None else ahead + unsent)
        made.forget(("handed",), (tile_id,))


class Residuals:
    """The residuals of one peer. Every write but `stage` raises StorageFull where the disk is full."""

    def __init__(self, directory: Path, layout: Layout) -> None:
        """Nothing is kept yet: see `open`."""
        self._directory = directory
        self._layout = layout
        self._lock = threading.RLock()
        self._is_used = any(layout.codec_of(block.index) != "fp32" for block in layout.model_blocks)
        self._me = PeerId("")
        self._head = NO_HASH
        self._set = self._staged = _Set(directory / "none", layout)
        self._in_memory: dict[tuple[Kind, int], tuple[Values, Hash]] = {}
        self.problems: list[str] = []
        """What could not be read, for a person."""

    def open(self, chain: Chain, round: int, me: PeerId) -> None:
        """Goes on from the set of the chain's manifest of `round`, or of the newest before it that has one."""
        self._me = me
        if not self._is_used:
            return
        with self._lock:
            tip = chain.commit(round).manifest
            head = manifest_hash(tip)
            for found_round, found_head in sorted(self._on_disk(), reverse=True):
                if found_round <= round and chain.has(found_head, found_round):
                    found = self._read(found_head)
                    if found is None:
                        continue
                    self._enter(found_head, found)
                    if found_round < round:
                        later = (chain.commit(at).manifest for at in range(found_round + 2, round + 1))
                        self.settle(chain.commit(found_round + 1).manifest, head, lambda tile_id: NO_HASH, later)
                    return
            self._enter(head, self._empty(tip))

    def clear(self, tip: Manifest) -> None:
        """Nothing is kept from before manifest `tip`: another history of the run won."""
        if not self._is_used:
            return
        with self._lock:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._enter(manifest_hash(tip), self._empty(tip))

    def unsent(self, tile_id: int) -> Values | None:
        """What this peer's contributions have left out of a tile so far, flat fp32, or None."""
        with self._lock:
            return self._set.values("sent", tile_id)

    def unsent_of_mean(self, tile_id: int) -> Values | None:
        """What the next mean of a tile that this peer hands out must add; a sole owner's values already contain it."""
        with self._lock:
            return None if self._set.is_sole(tile_id) else self._set.values("handed", tile_id)

    def is_sole(self, tile_id: int) -> bool:
        """Whether a tile is of a column that this peer owns alone."""
        with self._lock:
            return self._set.is_sole(tile_id)

    def ahead(self, head: Hash) -> Callable[[int], Values | None]:
        """By tile id, how far a sole owner's master is ahead of the state of manifest `head`; None for not at all.

        Nothing is ahead where another manifest is the present one: whose work was overtaken is counted by none.
        """
        with self._lock:
            present = self._set.map_files() if head == self._head else _Set(self._directory / "none", self._layout)
        return lambda tile_id: present.values("handed", tile_id) if present.is_sole(tile_id) else None

    def stage(self, head: Hash, kind: Kind, tile_id: int, values: Values, mark: Hash = NO_HASH) -> None:
        """What the round on top of `head` leaves of a tile; `mark`: the wire hash of what was handed out.

        Where the disk is full it is held in memory, as the snapshot is that it was taken from.
        """
        with self._lock:
            if head != self._head:
                return
            try:
                with storing(self._staged.folder, 0):
                    self._staged.folder.mkdir(parents=True, exist_ok=True)
                self._staged.put(kind, tile_id, values, mark)
            except StorageFull:
                self._in_memory[kind, tile_id] = np.array(values), mark
            else:
                self._in_memory.pop((kind, tile_id), None)

    def settle(
        self, first: Manifest, head: Hash, wire_hash: Callable[[int], Hash], later: Iterable[Manifest] = ()
    ) -> None:
        """Makes the set of manifest `head` from what `first`, the child of the present one, counted, and goes on to it.

        Where this peer missed rounds, `later` are the manifests after `first` up to that of `head`. `wire_hash(tile
        id)` is what `first` handed out. The set before stays on disk until the next call. May be called again, whether
        it failed or what should have followed.
        """
        if not self._is_used:
            return
        with self._lock:
            if head == self._head:
                return
            if first.parent != self._head:  # the commit that we had settled for did not come to the disk
                self._enter(first.parent, self._read(first.parent) or _Set(self._folder(first.parent), self._layout))
            made = self._read(head)
            if made is None:
                self._drop_all_but(self._set.folder, self._staged.folder)
                _NextSet(self._me, self._set, self._staged_again()).make(first, later, wire_hash)
                with storing(self._folder(head), 0):
                    publish_folder(self._staged.folder, self._folder(head))
                made = _Set.read(self._folder(head), self._layout)
            self._enter(head, made)

    def _staged_again(self) -> _Set:
        """What was staged, without what an earlier attempt has added."""
        folder = self._staged.folder
        with storing(folder, 0):
            folder.mkdir(parents=True, exist_ok=True)
        made = _Set(folder, self._layout)
        for kind in KINDS:
            made.areas[kind] = TileArea(folder / kind, self._layout, dict(self._staged.areas[kind].hashes))
        for (kind, tile_id), (values, mark) in self._in_memory.items():
            made.put(kind, tile_id, values, mark)
        return made

    def _empty(self, tip: Manifest) -> _Set:
        owned, sole = columns_of(tip.ownership, self._me), sole_columns(tip.ownership, self._me)
        return _Set(self._folder(manifest_hash(tip)), self._layout, owned, sole)

    def _enter(self, head: Hash, kept: _Set) -> None:
        self._head, self._set = head, kept
        staged = self._directory / (_STAGED + head.hex())
        if staged.exists():
            remove_folder(staged)
        self._staged = _Set(staged, self._layout)
        self._in_memory.clear()

    def _folder(self, head: Hash) -> Path:
        return self._directory / head.hex()

    def _on_disk(self) -> Iterator[tuple[int, Hash]]:
        """(round, manifest hash) of each set."""
        for path in self._directory.glob(f"*/{_INDEX}"):
            if not path.parent.name.startswith(_STAGED):
                try:
                    yield _read_index(path.parent).round, Hash(bytes.fromhex(path.parent.name))
                except StateError as error:
                    self._complain(path.parent, error)

    def _read(self, head: Hash) -> _Set | None:
        """The set of a manifest; None where there is none, or none that can be used."""
        folder = self._folder(head)
        if not folder.exists():
            return None
        try:
            return _Set.read(folder, self._layout)
        except StateError as error:
            self._complain(folder, error)
            return None

    def _complain(self, folder: Path, error: StateError) -> None:
        self.problems.append(f"{folder}: the kept rounding errors are lost, since they cannot be read: {error}")

    def _drop_all_but(self, *kept: Path) -> None:
        for folder in list(self._directory.glob("*")):
            if folder not in kept:
                shutil.rmtree(folder)


def _read_index(folder: Path) -> _Index:
    """Raises StateError."""
    path = folder / _INDEX
    try:
        return unpack(_Index, path.read_bytes())
    except (OSError, RemoteProtocolError) as error:
        raise StateError(f"{path}: {error}") from error

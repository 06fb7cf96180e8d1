"""The committed state on disk: complete versions by round, and the stagings that become versions.

    store/
      lock                 one process at a time may write here
      round-00000007/      a version (see `version`), never changed once it is there
      wire-00000005/       what a round handed out, of a version that is not here any more
      staging-00000008/    a version in the making (see `staging`); -LABEL at the end where a round has several

A crash at any byte leaves the versions as they were: versions appear by a rename, after all their bytes are synced.
What a crash leaves of a staging is removed by the next start, unless it was finished: an elector that has accepted it
must still have it after a restart. When versions are made and dropped is decided elsewhere.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from spes_p2p.errors import StateError, StorageFull
from spes_p2p.files import publish_folder, recover_folders, remove_folder, storing, sync, write_whole
from spes_p2p.ids import HASH_BYTES, Hash
from spes_p2p.locks import FileLock
from spes_p2p.state.hashes import HASH_THREADS, hash_tile, hash_tiles, split_hashes
from spes_p2p.state.layout import VALUE_BYTES, Layout, Tile, Values
from spes_p2p.state.staging import Staging
from spes_p2p.state.version import HASHES_FILE, WIRE_FOLDER, Version, WireTiles, block_file, bytes_of, map_block

__all__ = ["Staging", "StateStore", "Version"]

TileSource = Callable[[Tile], Values]
_ROUND = re.compile(r"round-(\d{8,})")
_STAGING = re.compile(r"staging-(\d{8,})(?:-(.+))?")


class StateStore:
    """All versions in `directory`. The process of a peer that talks to the network writes, others open it read-only."""

    def __init__(self, directory: Path | str, layout: Layout, read_only: bool = False) -> None:
        """Opens or creates the store.

        `problems` lists versions on disk that cannot be read: they are left alone until a newer one is there. Raises
        StateError where another process writes to the store.
        """
        self.directory = Path(directory)
        self.layout = layout
        self.problems: list[StateError] = []
        self.spare_folders: Callable[[], Iterable[Path]] = tuple
        """Folders beside the store that hold versions too, such as checkpoints: see `recall`."""
        self.wires = KeptWires(self.directory, layout)
        self._stagings: dict[tuple[int, str], Staging] = {}
        self._lock: FileLock | None = None
        if not read_only:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(self.directory / "lock")
            recover_folders(self.directory)
            self.wires.clear()
        self._versions = dict(_versions_in(self.directory, layout, self.problems))
        if not read_only:
            self._stagings.update(_stagings_in(self.directory, layout, self._versions, self._publish))

    def rounds(self) -> tuple[int, ...]:
        """The rounds whose versions are here, oldest first."""
        return tuple(sorted(self._versions))

    def latest(self) -> Version | None:
        """The version of the highest round, or None in an empty store."""
        return self._versions[max(self._versions)] if self._versions else None

    def version(self, round: int) -> Version:
        """The version of a round. Raises StateError where it is not here."""
        if round not in self._versions:
            raise StateError(f"{self.directory} has no state of round {round}, only of {self.rounds()}", fix="catch up")
        return self._versions[round]

    def create_initial(self, values: TileSource, round: int = 0) -> Version:
        """Stores a first version, tile by tile: no block is held in memory."""
        staging = self.stage(round, None)
        with ThreadPoolExecutor(HASH_THREADS) as pool:  # hashes and writes while the next values are made
            pending: deque[Future[Hash]] = deque()
            for tile in self.layout.tiles:
                pending.append(pool.submit(staging.write_state, tile.id, values(tile)))
                if len(pending) > 2 * HASH_THREADS:
                    pending.popleft().result()
            for future in pending:
                future.result()
        staging.finish()
        return staging.publish()

    def adopt(self, folder: Path, round: int) -> Version:
        """Takes a version from a folder such as a checkpoint's state, by hard links where that is possible."""
        source = Version(folder, round, self.layout)
        target = self.directory / f"staging-{round:08d}-adopted"
        if target.exists():
            remove_folder(target)
        target.mkdir()
        try:
            source.link_into(target)
        except (StorageFull, StateError):
            remove_folder(target)
            raise
        sync(target)
        staged = Version(target, round, self.layout)
        return Staging(target, round, self.layout, None, self._publish, staged).publish()

    def stage(
        self,
        round: int,
        parent_round: int | None,
        label: str = "",
        parent: Version | None = None,
        outlives: bool = False,
    ) -> Staging:
        """A new empty staging for `round`, whose tiles default to those of the parent version (None: no default).

        `parent`: that version, where it is none of the store's.

        Replaces an earlier staging of this round and label. Different labels let several proposals for one round be
        staged beside each other; publishing one of them discards the others, and those of rounds before, save for one
        that `outlives` this.
        """
        if parent is None and parent_round is not None:
            parent = self.version(parent_round)
        if (round, label) in self._stagings:
            self._stagings.pop((round, label)).discard()
        folder = self.directory / (f"staging-{round:08d}" + (f"-{label}" if label else ""))
        with storing(folder, 0):
            staging = Staging(folder, round, self.layout, parent, self._publish, outlives=outlives)
        self._stagings[round, label] = staging
        return staging

    def staged(self, round: int, label: str = "") -> Staging | None:
        """The staging of a round that is under way, or was finished before a restart; None where it is gone."""
        staging = self._stagings.get((round, label))
        return None if staging is None or staging.is_gone else staging

    def unstage(self, round: int, label: str = "") -> None:
        """Removes a staging, where there is one."""
        staging = self._stagings.pop((round, label), None)
        if staging is not None:
            staging.discard()

    @property
    def stagings(self) -> tuple[Staging, ...]:
        """Those that are here, in the order of rounds."""
        return tuple(one for _, one in sorted(self._stagings.items()))

    def find(self, tile_hash: Hash) -> memoryview | None:
        """The bytes with this hash, wire or state, in any staging or version that is here: for serving.

        Those of a version are hashed first; those of a staging were when they were written, not long ago.
        """
        places: tuple[WireTiles | Staging | Version, ...]
        places = (*self.wires.folders.values(), *self._versions.values(), *self._stagings.values())
        for place in reversed(places):
            try:
                data = place.find(tile_hash)
            except OSError:  # its files went away in this moment, with the round that it belonged to
                continue
            if data is not None:
                return data
        return None

    def recall(self, wanted: Mapping[int, Hash]) -> Iterator[tuple[int, memoryview, Hash]]:
        """(id, bytes, hash) of those of `wanted` that are anywhere on this disk, checkpoints included."""
        spares = [version for folder in self.spare_folders() if (version := _opened(folder, self.layout)) is not None]
        for tile_id, tile_hash in wanted.items():
            data = self.find(tile_hash)
            others = (spare.find(tile_hash) for spare in spares)
            data = data if data is not None else next((other for other in others if other is not None), None)
            if data is not None and hash_tile(data) == tile_hash:
                yield tile_id, data, tile_hash

    def salvage(self, round: int, root: Hash) -> Version | None:
        """Opens a version of `problems`, damaged as it is, where its hashes are known to be those of `root`."""
        version = salvaged(self.directory / f"round-{round:08d}", round, self.layout, root)
        if version is not None:
            self._versions[round] = version
        return version

    def drop(self, round: int, keep_wire: bool = False) -> None:
        """Removes a version and its wire tiles; maps that are in use, and checkpoints that link to it, stay good.

        `keep_wire`: what the round handed out stays in `wires`, until a restart.
        """
        version = self.version(round)
        del self._versions[round]
        if keep_wire:
            self.wires.keep(version)
        remove_folder(version.folder)

    def wire_hashes(self, round: int) -> tuple[Hash, ...] | None:
        """The hashes of what a round handed out, None where that is not known here."""
        if round in self._versions:
            return self._versions[round].wire.hashes
        return self.wires.folders[round].hashes if round in self.wires.folders else None

    def round_of(self, tile_hash: Hash) -> int | None:
        """The newest round whose version has a tile with this state hash; nothing is read."""
        return next((round for round in reversed(self.rounds()) if self.holds(round, tile_hash)), None)

    def handed_out_in(self, tile_hash: Hash) -> int | None:
        """The newest round that handed out a tile with this wire hash, as far as it is here; nothing is read."""
        wires = self.wires.folders | {round: version.wire for round, version in list(self._versions.items())}
        return next((round for round in sorted(wires, reverse=True) if wires[round].holds(tile_hash)), None)

    def holds(self, round: int, tile_hash: Hash) -> bool:
        """Whether the version of a round is here and has a tile with this state hash."""
        version = self._versions.get(round)
        return version is not None and version.holds(tile_hash)

    def close(self) -> None:
        """Lets another process write here. Finished stagings wait for the next start, others end."""
        for staging in self._stagings.values():
            if staging.finished is None:
                staging.discard()
        self._stagings.clear()
        if self._lock is not None:
            self._lock.release()

    def _publish(self, staging: Staging) -> Version:
        target = self.directory / f"round-{staging.round:08d}"
        publish_folder(staging.folder, target)
        version = Version(target, staging.round, self.layout)
        self._versions[staging.round] = version
        for folder, round in _folders_in(self.directory):
            if round < staging.round and round not in self._versions:  # of `problems`
                remove_folder(folder)
        for round_label, other in list(self._stagings.items()):
            if other is staging or (round_label[0] <= staging.round and not other.outlives):
                del self._stagings[round_label]
                if other is not staging:
                    other.discard()
        return version


class KeptWires:
    """What rounds handed out whose versions are gone, for those who are coming up to date by it."""

    def __init__(self, directory: Path, layout: Layout) -> None:
        self._directory = directory
        self._layout = layout
        self.folders: dict[int, WireTiles] = {}

    def keep(self, version: Version) -> None:
        """Takes what a version has of it, before that is removed."""
        folder = self._directory / f"wire-{version.round:08d}"
        if folder.exists():
            remove_folder(folder)
        if (version.folder / WIRE_FOLDER).exists():
            (version.folder / WIRE_FOLDER).rename(folder)
            self.folders[version.round] = WireTiles(folder, self._layout, encoded=True)

    def drop_all_but(self, rounds: Collection[int]) -> None:
        """Removes what nobody needs any more."""
        for round in [round for round in self.folders if round not in rounds]:
            remove_folder(self.folders.pop(round).folder)

    def clear(self) -> None:
        """After a restart: whoever wanted it asks again."""
        for folder in self._directory.glob("wire-*"):
            remove_folder(folder)


def _opened(folder: Path, layout: Layout) -> Version | None:
    try:
        return Version(folder, 0, layout)
    except (StateError, OSError):  # another shape, cut short, or just removed
        return None


def _versions_in(directory: Path, layout: Layout, problems: list[StateError]) -> Iterator[tuple[int, Version]]:
    for folder, round in _folders_in(directory):
        try:
            yield round, Version(folder, round, layout)
        except StateError as error:
            problems.append(error)


def _folders_in(directory: Path) -> Iterator[tuple[Path, int]]:
    """Those of versions, with their rounds, readable or not."""
    for folder in sorted(directory.glob("round-*")):
        if match := _ROUND.fullmatch(folder.name):
            yield folder, int(match[1])


def _stagings_in(
    directory: Path, layout: Layout, versions: Mapping[int, Version], publish: Callable[[Staging], Version]
) -> Iterator[tuple[tuple[int, str], Staging]]:
    """Those that were finished; what the process ended before was promised to nobody, and goes."""
    for folder in sorted(directory.glob("staging-*")):
        if match := _STAGING.fullmatch(folder.name):
            round, label = int(match[1]), match[2] or ""
            try:
                finished = Version(folder, round, layout)
            except StateError:
                remove_folder(folder)
            else:
                yield (round, label), Staging(folder, round, layout, versions.get(round - 1), publish, finished)


def _locked(path: Path) -> FileLock:
    try:
        return FileLock(path)
    except BlockingIOError as error:
        raise StateError(
            f"{path.parent} is in use by another process", fix="end that process, or choose another folder"
        ) from error


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

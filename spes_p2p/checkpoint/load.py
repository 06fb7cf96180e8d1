"""Loading: a checkpoint is read only after every byte of it was checked; a damaged one is refused by the file's name.

Reads nothing but the checkpoint folder, so that resume and export work without a store and on another machine.
Putting the values into a model or a store is up to the callers.
"""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from spes_p2p.checkpoint.private import read_private
from spes_p2p.checkpoint.save import FORMAT, METADATA_FILE, STATE_FOLDER, checkpoint_folders, sealed_json
from spes_p2p.errors import CheckpointError
from spes_p2p.ids import HASH_BYTES, sha256
from spes_p2p.state.hashes import hash_tiles
from spes_p2p.state.layout import VALUE_BYTES, Layout
from spes_p2p.state.version import HASHES_FILE, Version

_READ_BYTES = 2**20
_FIX = "remove this folder and resume from an older checkpoint, or copy it here again"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was found whole."""

    folder: Path
    step: int
    round: int
    run: dict[str, Any]
    """What the saving peer wrote about its run."""

    def version(self, layout: Layout) -> Version:
        """The state, memory-mapped. Raises StateError where it does not have the shape of `layout`."""
        return Version(self.folder / STATE_FOLDER, self.round, layout)

    def private(self) -> Any:
        """The peer's private training state, as it was saved; read from disk at each call."""
        return read_private(self.folder)


def load_latest(root: Path, store: Path | None = None) -> tuple[Checkpoint, tuple[str, ...]]:
    """The newest whole checkpoint under `root`, and a warning for each damaged one that had to be passed over.

    `store`: see `load_checkpoint`. Raises CheckpointError where there is none.
    """
    refused: list[tuple[Path, CheckpointError]] = []
    for folder in reversed(checkpoint_folders(root)):
        try:
            checkpoint = load_checkpoint(folder, store=store)
        except CheckpointError as error:
            refused.append((folder, error))
        else:
            return checkpoint, tuple(
                f"{bad.name} is damaged ({why}); continuing from {folder.name}" for bad, why in refused
            )
    reasons = "".join(f"; {why}" for _, why in refused)
    fix = "remove the damaged checkpoints" if refused else "give the folder of a peer that has trained"
    raise CheckpointError(f"no usable checkpoint in {root}{reasons}", fix=fix)


def load_checkpoint(folder: Path, verify_state: bool = True, store: Path | None = None) -> Checkpoint:
    """Opens one checkpoint after checking the size and hash of all its files.

    `verify_state=False` checks only the sizes of the block files; so does `store`, a state store's folder, for those
    that are the same files as there: who uses the store checks them, and mends them. Raises CheckpointError naming the
    damaged file; what the disk cannot read is no better.
    """
    try:
        return _load(folder, verify_state, store)
    except OSError as error:
        if error.errno != errno.EIO:  # the rest may pass, and is said as it is
            raise
        raise CheckpointError(f"{folder} cannot be read: {error.strerror}", fix=_FIX) from error


def _load(folder: Path, verify_state: bool, store: Path | None) -> Checkpoint:
    metadata = read_metadata(folder)
    files: dict[str, dict[str, Any]] = metadata["files"]
    for name, record in files.items():
        _check_size(folder / name, record["bytes"])
    blocks = {name: record for name, record in files.items() if name.endswith(".f32")}
    for name in files.keys() - blocks.keys():
        _check_hash(folder / name, files[name]["sha256"])
    if verify_state:
        shared = frozenset() if store is None else _shared_with(store, folder, metadata["round"], blocks)
        _check_blocks(folder, blocks, metadata["tile_values"] * VALUE_BYTES, shared)
    return Checkpoint(folder, metadata["step"], metadata["round"], metadata["run"])


def read_metadata(folder: Path) -> dict[str, Any]:
    """The checked content of metadata.json. Raises CheckpointError where it is missing, damaged or too new."""
    path = folder / METADATA_FILE
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: the checkpoint was cut short", fix=_FIX)
    data = path.read_bytes()
    try:
        metadata: dict[str, Any] = json.loads(data)["metadata"]
    except (ValueError, KeyError, TypeError):
        _refuse(path, "is damaged")
    if data != sealed_json(metadata):
        _refuse(path, "is damaged: its content does not match its hash")
    if metadata["format"] != FORMAT:
        raise CheckpointError(
            f"{path} has format {metadata['format']}, not {FORMAT}", fix="use the version that wrote it"
        )
    return metadata


def _refuse(path: Path, reason: str) -> NoReturn:
    raise CheckpointError(f"{path} {reason}", fix=_FIX)


def _check_size(path: Path, expected_bytes: int) -> None:
    if not path.is_file():
        _refuse(path, "is missing")
    if path.stat().st_size != expected_bytes:
        _refuse(path, f"has {path.stat().st_size} bytes instead of {expected_bytes}")


def _check_hash(path: Path, expected: str) -> None:
    with open(path, "rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != expected:
            _refuse(path, "is damaged: its bytes do not match the hash in metadata.json")


def _shared_with(store: Path, folder: Path, round: int, names: Iterable[str]) -> frozenset[str]:
    """Those of the block files that are hard links to the store's version of the round."""
    version = store / f"round-{round:08d}"
    pairs = ((name, version / Path(name).name) for name in names)
    return frozenset(name for name, other in pairs if other.is_file() and other.samefile(folder / name))


def _check_blocks(
    folder: Path, blocks: dict[str, dict[str, Any]], tile_bytes: int, unread: frozenset[str] = frozenset()
) -> None:
    joined, at = (folder / STATE_FOLDER / HASHES_FILE).read_bytes(), 0
    for name, record in sorted(blocks.items()):
        expected = joined[at : at + HASH_BYTES * -(-record["bytes"] // tile_bytes)]
        at += len(expected)
        if sha256(expected).hex() != record["sha256"]:
            _refuse(folder / name, f"does not fit {HASHES_FILE}")
        if name in unread:
            continue
        for number, tile_hash in enumerate(hash_tiles(_tiles(folder / name, tile_bytes))):
            if tile_hash != expected[number * HASH_BYTES : (number + 1) * HASH_BYTES]:
                _refuse(folder / name, f"is damaged in its tile {number}")


def _tiles(path: Path, tile_bytes: int) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while tile := file.read(tile_bytes):
            yield tile

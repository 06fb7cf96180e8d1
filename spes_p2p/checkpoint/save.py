"""Saving: the files of a state version beside the peer's private training state, complete or not there at all.

    checkpoints/
      step-00000300/
        state/block-00000.f32 ..   hard links to the store's files (copies where links cannot be made)
        state/hashes.bin           SHA-256 of every tile of the state
        private.json               the peer's own values: see `private`
        private.safetensors
        metadata.json              written last: step, round, run, size and hash of every file

A block file's hash is the SHA-256 of its tile hashes, which the state has anyway: reading gigabytes again only to
hash them otherwise would be waste. What the private state holds, and when to save, is decided by the callers.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spes_p2p import failpoints
from spes_p2p.checkpoint.private import FileRecord, write_private
from spes_p2p.failpoints import reached
from spes_p2p.files import recover_folders, remove_folder, storing, whole_folder, write_whole
from spes_p2p.ids import sha256
from spes_p2p.state.layout import VALUE_BYTES
from spes_p2p.state.version import HASHES_FILE, Version, block_file

FORMAT = 1
METADATA_FILE = "metadata.json"
STATE_FOLDER = "state"
_PARTIAL = "partial-"
_SUPERSEDED = "superseded-"
_STEP = re.compile(r"(?:replaced-)?step-(\d{8,})")


def save_checkpoint(
    root: Path, version: Version, step: int, private: Any, run: Mapping[str, Any], keep_checkpoints: int
) -> Path:
    """Saves `step-%08d` under `root` and removes all but the newest `keep_checkpoints`; the new folder.

    `private` is any tree that `write_private` takes; `run` (JSON-able) says which run this is. An earlier checkpoint of
    the same step is replaced. Those of later steps, left by a line that the run abandoned, are renamed to superseded-*,
    of which the newest stays. Raises StorageFull: nothing of the new checkpoint is left then, and the older ones are
    untouched.
    """
    target = root / f"step-{step:08d}"
    with _new_folder(target) as folder:
        state = folder / STATE_FOLDER
        state.mkdir()
        version.link_into(state)
        reached(failpoints.CHECKPOINT_LINKED, folder=folder, round=version.round)
        files = _state_records(version) | write_private(folder, private)
        reached(failpoints.CHECKPOINT_WRITTEN, folder=folder, round=version.round)
        metadata = {
            "format": FORMAT,
            "step": step,
            "round": version.round,
            "tile_values": version.layout.tile_values,
            "run": json.loads(json.dumps(run)),  # keys as they will be read
            "files": {name: dataclasses.asdict(record) for name, record in files.items()},
        }
        write_whole(folder / METADATA_FILE, sealed_json(metadata))
        reached(failpoints.CHECKPOINT_SEALED, folder=folder, round=version.round)
    _prune(root, step, keep_checkpoints)
    return target


@contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """A checkpoint to fill, where what a crash left of others is cleared away first."""
    with storing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        recover_folders(target.parent)
        for leftover in target.parent.glob(f"{_PARTIAL}*"):
            shutil.rmtree(leftover)
    with whole_folder(target, target.with_name(_PARTIAL + target.name)) as folder:
        yield folder


def canonical_json(value: Any) -> bytes:
    """The one JSON text of `value`: sorted keys, two spaces of indentation, a newline at the end."""
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def sealed_json(metadata: dict[str, Any]) -> bytes:
    """JSON text that carries the hash of its own content."""
    return canonical_json({"metadata": metadata, "sha256": sha256(canonical_json(metadata)).hex()})


def checkpoint_folders(root: Path) -> list[Path]:
    """The checkpoints under `root`, oldest step first (one whose replacement was cut short counts as there)."""
    found: dict[int, Path] = {}
    for folder in sorted(root.glob("*step-*"), key=lambda path: path.name, reverse=True):
        if match := _STEP.fullmatch(folder.name):
            found.setdefault(int(match[1]), folder)
    return [found[step] for step in sorted(found)]


def superseded_folders(root: Path) -> list[Path]:
    """Those that were set aside with a line that the run abandoned, oldest step first."""
    return sorted(root.glob(f"{_SUPERSEDED}*"))


def step_of(folder: Path) -> int:
    """The step that a checkpoint's folder is named after."""
    return int(folder.name.split("-")[-1])


def _state_records(version: Version) -> dict[str, FileRecord]:
    records = {
        f"{STATE_FOLDER}/{block_file(block.index)}": FileRecord(
            block.size * VALUE_BYTES,
            sha256(*(version.tile_hashes[tile_id] for tile_id in version.layout.tile_ids_of(block.index))).hex(),
        )
        for block in version.layout.blocks
    }
    joined = b"".join(version.tile_hashes)
    return records | {f"{STATE_FOLDER}/{HASHES_FILE}": FileRecord(len(joined), sha256(joined).hex())}


def _saved_at(folder: Path) -> tuple[int, int]:
    """When, as far as the disk tells; a line that was abandoned earlier may have come further."""
    return folder.stat().st_mtime_ns, step_of(folder)


def _prune(root: Path, step: int, keep_checkpoints: int) -> None:
    folders = {step_of(folder): folder for folder in checkpoint_folders(root)}
    for later in [at for at in folders if at > step]:
        aside = root / (_SUPERSEDED + folders[later].name)
        if aside.exists():
            shutil.rmtree(aside)
        os.rename(folders.pop(later), aside)
    for aside in sorted(superseded_folders(root), key=_saved_at)[:-1]:
        remove_folder(aside)
    for old in sorted(folders)[: -max(1, keep_checkpoints)]:
        remove_folder(folders[old])

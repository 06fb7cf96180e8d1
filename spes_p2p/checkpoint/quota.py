"""Bytes that checkpoints may take: room for a new one is made by removing older ones, never the newest good one.

A file counts once, as `du` counts it, also where the state store has it too: when the store goes on, the checkpoint
alone holds it. Leaves out how many are kept at most (`save`), and how much is needed at the start
(`planning/disk.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spes_p2p.checkpoint.private import private_bytes
from spes_p2p.checkpoint.save import checkpoint_folders, step_of, superseded_folders
from spes_p2p.errors import StorageFull
from spes_p2p.files import remove_folder
from spes_p2p.observe.metrics import bytes_text
from spes_p2p.planning.disk import MAX_CHECKPOINT_DISK
from spes_p2p.planning.units import enough_text
from spes_p2p.state.version import Version

_METADATA_BYTES = 2**14
_METADATA_BYTES_A_BLOCK = 256

Sizes = dict[tuple[int, int], int]
"""Bytes of each file, by device and inode."""


@dataclass(frozen=True)
class Quota:
    """`max_bytes` for all checkpoints of one peer."""

    max_bytes: int

    def make_room(self, root: Path, version: Version, step: int, private: Any, good: Path | None) -> None:
        """Removes as few of the checkpoints under `root` as make room for one of `version` with `private`.

        Those that the run abandoned go first, then the oldest. `good` stays: the newest that is known to be whole
        (else the newest up to `step`). Raises StorageFull, with all still there, where no removal would help.
        """
        new, own = _sizes_of(version.files()), private_bytes(private) + _metadata_bytes(version)
        stays = good if good is not None and good.is_dir() else _newest(root, step)
        alone = _total([stays] if stays else [], new) + own
        if alone > self.max_bytes:
            raise StorageFull(
                f"the newest checkpoint and the next one take {bytes_text(alone)}, more than {MAX_CHECKPOINT_DISK} "
                f"{bytes_text(self.max_bytes)}",
                fix=f"start again with --resume and {MAX_CHECKPOINT_DISK} {enough_text(alone)}",
            )
        later = [folder for folder in checkpoint_folders(root) if step_of(folder) > step]
        older = [folder for folder in checkpoint_folders(root) if step_of(folder) <= step]
        left = [folder for folder in (*superseded_folders(root), *later, *older) if folder != stays]
        kept = [stays] if stays else []
        while left and _total(left + kept, new) + own > self.max_bytes:
            remove_folder(left.pop(0))


def _newest(root: Path, step: int) -> Path | None:
    folders = checkpoint_folders(root)
    return next((folder for folder in reversed(folders) if step_of(folder) <= step), folders[-1] if folders else None)


def _total(folders: Iterable[Path], new: Sizes) -> int:
    found = dict(new)
    for folder in folders:
        found |= _sizes_of(path for path in folder.rglob("*") if path.is_file())
    return sum(found.values())


def _sizes_of(files: Iterable[Path]) -> Sizes:
    stats = (os.stat(path) for path in files)
    return {(stat.st_dev, stat.st_ino): stat.st_size for stat in stats}


def _metadata_bytes(version: Version) -> int:
    return _METADATA_BYTES + _METADATA_BYTES_A_BLOCK * len(version.layout.blocks)

"""Files and folders that are either whole or not there: temporary name, fsync, rename, fsync of the folder.

What goes into them is up to the callers. A full disk is StorageFull, and leaves what was there before.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spes_p2p.state.files import publish_folder, recover_folders, storing, sync, write_whole

_PARTIAL = "partial-"


def write_bytes(path: Path, data: bytes | memoryview) -> None:
    """Replaces the file `path` by `data` at once. Raises StorageFull."""
    write_whole(path, data)


def write_json(path: Path, value: Any) -> None:
    """Replaces the file `path` by the JSON text of `value` at once. Raises StorageFull."""
    write_whole(path, canonical_json(value))


def canonical_json(value: Any) -> bytes:
    """The one JSON text of `value`: sorted keys, two spaces of indentation, a newline at the end."""
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to fill: becomes `target`, in place of an older one, when the block ends well, and vanishes if not."""
    with storing(target, 0):  # even a folder needs room, and so may a name
        target.parent.mkdir(parents=True, exist_ok=True)
        recover_folders(target.parent)
        partial = target.with_name(_PARTIAL + target.name)
        for leftover in target.parent.glob(f"{_PARTIAL}*"):
            shutil.rmtree(leftover)
        partial.mkdir()
    try:
        with storing(partial, 0):
            yield partial
        for folder in (*(path for path in partial.rglob("*") if path.is_dir()), partial):
            sync(folder)
    except BaseException:
        shutil.rmtree(partial)
        raise
    with storing(target, 0):
        publish_folder(partial, target)

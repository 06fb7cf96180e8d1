"""A folder that a user asked for, which appears at once: filled under another name beside it, then renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spes_p2p.errors import ConfigError
from spes_p2p.state.files import storing, sync


@contextmanager
def filled_folder(target: Path) -> Iterator[Path]:
    """A folder to fill: becomes `target` when the block ends well, and vanishes if not.

    Raises ConfigError where there is something at `target` already, or where it cannot be made; StorageFull.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} is there already", fix="choose another --output, or remove it")
    partial = target.with_name(f"{target.name}.partial")
    try:
        with storing(partial, 0):
            shutil.rmtree(partial, ignore_errors=True)  # of a call that was killed
            partial.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"{partial} cannot be made: {error.strerror}", fix="choose another --output") from error
    try:
        yield partial
        for path in sorted(partial.rglob("*"), reverse=True):
            sync(path)
        sync(partial)
        os.rename(partial, target)
    except BaseException:
        shutil.rmtree(partial)
        raise
    sync(target.parent)

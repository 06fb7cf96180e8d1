"""A temporary folder that is removed at the end, or, where that was cut off, when the next one of its kind is made."""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from pathlib import Path
from typing import IO

_LOCK = "lock"


class Scratch:
    """A folder under the system's temporary one, locked for as long as this process lives.

    `prefix`: its kind, and what its name begins with.
    """

    def __init__(self, prefix: str = "spes-p2p-ranks-") -> None:
        temporary = Path(tempfile.gettempdir())
        for lock in temporary.glob(f"{prefix}*/{_LOCK}"):
            _remove_if_left(lock)
        made = Path(tempfile.mkdtemp(prefix="spes-new-"))
        self._lock = _locked(made / _LOCK)
        self.path = made.rename(made.with_name(made.name.replace("spes-new-", prefix)))  # seen only once it is locked

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _locked(path: Path) -> IO[bytes]:
    """Raises BlockingIOError where another process, of any container, holds it."""
    lock = open(path, "ab")  # noqa: SIM115 (held for as long as the folder is used)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        lock.close()
        raise
    return lock


def _remove_if_left(path: Path) -> None:
    try:
        lock = _locked(path)
    except OSError:  # in use, or of another user, or just removed
        return
    shutil.rmtree(path.parent, ignore_errors=True)
    lock.close()

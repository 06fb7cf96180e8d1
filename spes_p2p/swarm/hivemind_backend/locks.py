"""A lock on a file that ends with the process that took it, however that ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

_held: set[int] = set()


class FileLock:
    """Holds `path` (made when missing) alone until `release`. Raises BlockingIOError when it is taken, or OSError."""

    def __init__(self, path: Path, create: bool = True) -> None:
        self._handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._handle)
            raise
        _held.add(self._handle)

    def release(self) -> None:
        """The file stays: removing it would let two processes hold two files of one name. Safe to call twice."""
        if self._handle in _held:
            _held.discard(self._handle)
            os.close(self._handle)
            self._handle = -1


def _let_go() -> None:
    for handle in _held:
        os.close(handle)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)  # a forked worker that outlives us would hold the lock for us

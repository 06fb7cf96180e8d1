"""Locks on files that end with the process that took them, however that ends; and temporary folders known by them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_LOCK = "lock"
_held: set[int] = set()


class FileLock:
    """Holds `path` (made when missing) alone until `release`, and writes the process's number into it.

    Raises BlockingIOError when it is taken, or OSError.
    """

    def __init__(self, path: Path, create: bool = True) -> None:
        self._handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._handle)
            raise
        _held.add(self._handle)
        with contextlib.suppress(OSError):  # a full disk; it is for people
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """The file stays: removing it would let two processes hold two files of one name. Safe to call twice."""
        if self._handle in _held:
            _held.discard(self._handle)
            os.close(self._handle)
            self._handle = -1


def holder_of(path: Path) -> str:
    """The number of the process that holds this lock, or held it last; empty where nobody has written it."""
    try:
        words = path.read_text(errors="replace").split()
    except OSError:
        return ""
    return words[0] if words and words[0].isdecimal() else ""


class Scratch:
    """A folder under the system's temporary one, locked for as long as this process lives; `remove` it at the end.

    Where that was cut off, it is removed when the next one of its kind is made. `kind`: what its name begins with.
    """

    def __init__(self, kind: str) -> None:
        for path in Path(tempfile.gettempdir()).glob(f"{kind}*/{_LOCK}"):
            _remove_if_left(path)
        made = Path(tempfile.mkdtemp(prefix="spes-new-"))
        self._lock = FileLock(made / _LOCK)
        self.path = made.rename(made.with_name(made.name.replace("spes-new-", kind)))  # seen only once it is locked

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()


def _remove_if_left(path: Path) -> None:
    try:
        lock = FileLock(path, create=False)
    except OSError:  # in use, or of another user, or just removed
        return
    shutil.rmtree(path.parent, ignore_errors=True)
    lock.release()


def _let_go() -> None:
    for handle in _held:
        os.close(handle)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)  # a forked worker that outlives us would hold the lock for us

"""Small steps on files that the store and the checkpoints are made of: room, links, and folders that appear at once.

A folder is built under another name and renamed, so that nobody ever sees half of it; one that is replaced or removed
is renamed first as well, and `recover_folders` ends what a crash left between two such steps. Knows neither tiles nor
tensors.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spes_p2p.errors import StorageFull

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_CANNOT_LINK = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS}
_CANNOT_RESERVE = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}
_REPLACED = "replaced-"
_DROPPED = "dropped-"


@contextmanager
def storing(path: Path, needed_bytes: int) -> Iterator[None]:
    """Turns a full disk (or quota, or file size limit) inside into StorageFull naming `path` and `needed_bytes`."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise StorageFull(
            f"{path}: no room for {needed_bytes} bytes ({_free_bytes(path)} free): {os.strerror(error.errno)}",
            fix="free disk space, or move the output folder to a larger disk and start again with --resume",
        ) from error


def _free_bytes(path: Path) -> int:
    parent = path
    while not parent.exists():
        parent = parent.parent
    return shutil.disk_usage(parent).free


def reserve(path: Path, size: int) -> None:
    """Creates `path` with `size` bytes of reserved room, so that later writes inside it find the disk not full."""
    try:
        with storing(path, size), open(path, "xb") as file:
            os.ftruncate(file.fileno(), size)
            _allocate(file.fileno(), size)
    except StorageFull:
        path.unlink(missing_ok=True)
        raise


def _allocate(descriptor: int, size: int) -> None:
    if size and hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            if error.errno not in _CANNOT_RESERVE:
                raise


def write_at(path: Path, offset: int, data: bytes | memoryview) -> None:
    """Writes all of `data` at byte `offset` of a file that exists.

    Never through a writable memory map: a disk that turns out full would kill the process with SIGBUS there.
    """
    with storing(path, len(data)):
        descriptor = os.open(path, os.O_WRONLY)
        try:
            write_into(descriptor, offset, data)
        finally:
            os.close(descriptor)


def write_into(descriptor: int, offset: int, data: bytes | memoryview) -> None:
    """Writes all of `data` at byte `offset` of an open file."""
    written = 0
    while written < len(data):
        written += os.pwrite(descriptor, memoryview(data)[written:], offset + written)


def sync(path: Path) -> None:
    """fsync of a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with storing(path, os.fstat(descriptor).st_size):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, data: bytes | memoryview) -> None:
    """Replaces `path` by `data` at once: temporary file, fsync, rename, fsync of the folder."""
    temporary = path.with_name(path.name + ".partial")
    try:
        with storing(path, len(data)), open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        with storing(path, 0):
            os.rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def link_or_copy(source: Path, target: Path) -> None:
    """A hard link, or a synced copy where the file system cannot link (another device, a limit on links)."""
    try:
        with storing(target, 0):
            os.link(source, target)
    except OSError as error:
        if error.errno not in _CANNOT_LINK:
            raise
        with storing(target, source.stat().st_size):
            shutil.copyfile(source, target)
        sync(target)


def publish_folder(staged: Path, target: Path) -> None:
    """Renames a complete folder to `target`, in place of an older one if there is one."""
    aside = target.with_name(_REPLACED + target.name)
    if target.exists():
        os.rename(target, aside)
    os.rename(staged, target)
    sync(target.parent)
    if aside.exists():
        shutil.rmtree(aside)


def remove_folder(folder: Path) -> None:
    """Removes a folder so that it is gone at once for everybody who lists its parent."""
    aside = folder.with_name(_DROPPED + folder.name)
    if aside.exists():
        shutil.rmtree(aside)
    os.rename(folder, aside)
    shutil.rmtree(aside)


def recover_folders(parent: Path) -> None:
    """Ends what a crash interrupted: a replacement that did not come is undone, a removal is finished."""
    for aside in sorted(parent.glob(f"{_REPLACED}*")):
        target = aside.with_name(aside.name.removeprefix(_REPLACED))
        if target.exists():
            shutil.rmtree(aside)
        else:
            os.rename(aside, target)
    for aside in sorted(parent.glob(f"{_DROPPED}*")):
        shutil.rmtree(aside)

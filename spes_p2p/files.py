"""Atomic files and folders: temporary name, fsync, rename, fsync of the parent folder; and reserving disk space.

A folder that is replaced or removed is renamed first, too, and `recover_folders` completes or undoes what a crash left
between two such steps. A full disk raises StorageFull and leaves the old file or folder in place; one that fails
otherwise ends who lives on it (`on_a_sound_disk`).
"""

from __future__ import annotations

import errno
import os
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from spes_p2p.errors import ConfigError, StorageBroken, StorageFull

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_BROKEN = {
    errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM, errno.ENODEV, errno.ENXIO, errno.ESTALE, errno.EUCLEAN,
}  # fmt: skip
_CANNOT_LINK = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS}
_CANNOT_RESERVE = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}
PARTIAL = ".partial"
"""Ends the name of a file that is being written."""
_REPLACED = "replaced-"
_DROPPED = "dropped-"


@contextmanager
def storing(path: Path, needed_bytes: int = 0) -> Iterator[None]:
    """Turns a full disk (or quota, or file size limit) inside into StorageFull naming `path` and `needed_bytes`.

    0 where that is not known. Another OSError names `path` too, where it names no file.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            if error.errno is not None:  # else it is no word of the system's, and needs no name
                error.filename = error.filename or str(path)
            raise
        needed = f"{needed_bytes} bytes" if needed_bytes else "more"
        raise StorageFull(
            f"{path}: no room for {needed} ({_free_bytes(path)} bytes free): {os.strerror(error.errno)}",
            fix="free disk space, or move the folder to a larger disk; then start again",
        ) from error


@contextmanager
def on_a_sound_disk(folder: Path) -> Iterator[None]:
    """Turns a disk that proves to be read-only, not ours or broken into StorageBroken naming the file, or `folder`."""
    try:
        yield
    except OSError as error:
        if error.errno not in _BROKEN:
            raise
        raise StorageBroken(
            f"{error.filename or folder} cannot be read or written: {error.strerror}",
            fix="see that the disk is sound and mounted for writing, and that the files belong to you; then start "
            "again: what was written before is not lost",
        ) from error


def _free_bytes(path: Path) -> int:
    parent = path
    while not parent.exists():
        parent = parent.parent
    return shutil.disk_usage(parent).free


def make_folder(output: Path, flag: str = "--output") -> None:
    """Raises ConfigError where it cannot be made, and StorageFull."""
    try:
        with storing(output):
            output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = "a file has this name" if isinstance(error, FileExistsError) else error.strerror
        raise ConfigError(
            f"the folder {output} of {flag} cannot be created: {reason}", fix=f"choose another with {flag}"
        ) from error


@contextmanager
def made_folder(output: Path) -> Iterator[None]:
    """As `make_folder`; where the block fails, folders that were made here and are empty go again."""
    made = [folder for folder in (output, *output.parents) if not os.path.exists(folder)]
    make_folder(output)
    try:
        yield
    except BaseException:
        with suppress(OSError):
            for folder in made:
                folder.rmdir()
        raise


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


@contextmanager
def whole_file(path: Path, needed_bytes: int = 0, mark: str = "", mode: int = 0o666) -> Iterator[BinaryIO]:
    """A file to fill and read: becomes `path`, in place of an older one, when the block ends well, and vanishes if not.

    `mark`: part of its temporary name, where several processes may write the same file. `mode`: who may read it, as for
    os.open. Raises StorageFull.
    """
    temporary = path.with_name(f"{path.name}{mark}{PARTIAL}")
    temporary.unlink(missing_ok=True)
    try:
        with storing(path, needed_bytes):
            with open(temporary, "x+b", opener=lambda name, flags: os.open(name, flags, mode)) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_whole(path: Path, data: bytes | memoryview, mode: int = 0o666) -> None:
    """Replaces `path` by `data` at once. Raises StorageFull."""
    with whole_file(path, len(data), mode=mode) as file:
        file.write(data)


def check_is_new(path: Path) -> None:
    """Raises ConfigError where a file that somebody names for us to write is there already."""
    if os.path.exists(path):  # Path.exists raises where we may not look, or the name is too long: `write_new` says so
        raise ConfigError(f"{path} already exists", fix="choose another name, or remove it")


def write_new(path: Path, data: bytes) -> None:
    """Writes a file that somebody named, never over another. Raises ConfigError where that cannot be, StorageFull."""
    check_is_new(path)
    try:
        write_whole(path, data)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}", fix="name a file in a folder that you may write to"
        ) from error


@contextmanager
def whole_folder(target: Path, partial: Path) -> Iterator[Path]:
    """A folder to fill, `partial`: becomes `target`, in place of an older one, when the block ends well, else vanishes.

    Raises StorageFull.
    """
    with storing(target):  # even a folder needs room, and so may a name
        if partial.exists():  # of a process that was killed
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
    try:
        with storing(partial):
            yield partial
            for path in (*partial.rglob("*"), partial):
                sync(path)
    except BaseException:
        shutil.rmtree(partial)
        raise
    with storing(target):
        publish_folder(partial, target)


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
    """Cleans up after a crash in `parent`: an unfinished replacement is undone, an unfinished removal is completed."""
    for aside in sorted(parent.glob(f"{_REPLACED}*")):
        target = aside.with_name(aside.name.removeprefix(_REPLACED))
        if target.exists():
            shutil.rmtree(aside)
        else:
            os.rename(aside, target)
    for aside in sorted(parent.glob(f"{_DROPPED}*")):
        shutil.rmtree(aside)


NODE_FOLDER, PEER_FOLDER = "bootstrap-node", "peer"
"""Where a bootstrap node and a peer are kept, where nothing else was said."""


def in_folder(command: str, folder: Path, usual: str, flag: str = "--folder") -> str:
    """A command of this program to type, with its folder where that is not the one it takes by itself."""
    return command if folder == Path(usual) else f"{command} {flag} {shlex.quote(str(folder))}"

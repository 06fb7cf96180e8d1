"""Files at any URL that fsspec opens. Each is there whole, or not at all, where the storage can do that.

Object stores do it by themselves. Elsewhere a file is written under another name, and renamed: what a crash, or a power
cut, leaves half written must not look like the whole. See `RENAMING` for where that is done.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

from spes_p2p.errors import ConfigError, NetworkError, first_line
from spes_p2p.files import PARTIAL, write_whole

T = TypeVar("T")
CHECK_FIX = "check the URL, the network, and the keys in the environment"
RENAMING = {"sftp", "smb"}
"""Storage, beside local disks, where a file can be given its name when it is whole. Others are written in place."""


class RemoteFolder:
    """Files at a URL. Blocking: for threads. Raises NetworkError for whatever the storage refuses."""

    def __init__(self, url: str) -> None:
        """Raises ConfigError for a URL that nothing here can open, or keep files at; NetworkError."""
        self.url = url.rstrip("/")
        if url.startswith(("http://", "https://")):
            raise ConfigError(
                f"--archive {url} cannot be kept: over http nothing can be listed or removed",
                fix="give storage that can be written, such as s3://bucket/run, or a folder",
            )
        self._turn: AbstractContextManager[Any] = nullcontext()
        try:
            self._files, root = self._opened()
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"--archive {url} cannot be opened: {first_line(error)}",
                fix="install what it needs (scripts/venv.sh s3 for s3://...), or correct the URL",
            ) from error
        self._root = str(root).rstrip("/")
        protocols = self._files.protocol
        self._protocols = {protocols} if isinstance(protocols, str) else set(protocols)
        if "sftp" in self._protocols:
            self._turn = Lock()  # of two threads that wait for an answer, one never gets it
        self._there: dict[str, int] | None = None
        """The files that are there, with their sizes in bytes; None until they were listed."""

    def read(self, name: str) -> bytes | None:
        """The bytes of a file, None where there is none."""
        try:
            return self._asking(lambda: bytes(self._files.cat_file(self._path(name))))
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        """Puts a file there, in the place of one that is there."""
        path = self._path(name)
        try:
            self._asking(lambda: self._put(path, data))
        except FileNotFoundError:  # storage that has real folders
            self._asking(lambda: self._files.makedirs(path.rpartition("/")[0], exist_ok=True))
            self._asking(lambda: self._put(path, data))
        if self._there is not None:
            self._there[name] = len(data)

    def remove(self, name: str) -> None:
        """Removes a file, if it is there."""
        with suppress(FileNotFoundError):
            self._asking(lambda: self._files.rm_file(self._path(name)))
        if self._there is not None:
            self._there.pop(name, None)

    def sizes(self) -> dict[str, int]:
        """All files that are there, by name, with their sizes in bytes. Listed once, and followed since."""
        if self._there is None:
            found: dict[str, dict[str, Any]] = {}
            with suppress(FileNotFoundError):
                found = self._asking(lambda: self._files.find(self._root, detail=True))
            self._there = {path.removeprefix(f"{self._root}/"): int(about["size"]) for path, about in found.items()}
        return self._there

    def forget(self) -> None:
        """Lists again the next time."""
        self._there = None

    def _opened(self) -> tuple[Any, str]:
        try:
            return fsspec.core.url_to_fs(self.url, use_listings_cache=False)
        except (ImportError, ValueError):
            raise
        except TypeError:  # sftp keeps no lists, and takes this for an option of its connection
            return self._asking(lambda: fsspec.core.url_to_fs(self.url))
        except Exception as error:  # some connect at once
            raise self._refused(error) from error

    def _put(self, path: str, data: bytes) -> None:
        """All at once, as object stores do it by themselves."""
        if isinstance(self._files, LocalFileSystem):
            write_whole(Path(path), data)
        elif not RENAMING & self._protocols:
            self._files.pipe_file(path, data)
        else:
            self._files.pipe_file(path + PARTIAL, data)
            try:
                self._files.mv(path + PARTIAL, path)
            except Exception:  # noqa: BLE001 (each kind of storage has errors of its own; some replace nothing so)
                self._files.pipe_file(path, data)
                self._files.rm_file(path + PARTIAL)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _asking(self, work: Callable[[], T]) -> T:
        try:
            with self._turn:
                return work()
        except FileNotFoundError:
            raise
        except Exception as error:  # each kind of storage has errors of its own
            if isinstance(error, OSError) and error.errno == errno.ENOENT:
                raise FileNotFoundError(str(error)) from error
            raise self._refused(error) from error

    def _refused(self, error: Exception) -> NetworkError:
        return NetworkError(f"{self.url} refused: {first_line(error)}", fix=CHECK_FIX)

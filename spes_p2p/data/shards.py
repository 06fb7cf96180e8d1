"""Writes token shards: real .npy files of bounded size, each whole or absent.

A shard is written beside its final name, hashed on the way, synced and renamed. The header is our own fixed 128 bytes
of the published .npy format 1.0, so that the same tokens make the same bytes under every version of numpy. It leaves
out what the tokens are and where to go on after an interruption (`tokenize.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, BinaryIO

import numpy as np
from numpy.typing import NDArray

from spes_p2p.bounds import Bounded, between, matching
from spes_p2p.errors import ConfigError
from spes_p2p.files import storing, whole_file

HEADER_BYTES = 128


@dataclass(frozen=True)
class Shard(Bounded):
    """One finished file of a dataset. Raises ValueError or TypeError for what no such file has."""

    file: str
    tokens: Annotated[int, between(0, 2**48 - 1)]
    sha256: Annotated[str, matching("[0-9a-f]{64}")]
    """Over the little-endian token bytes, without the header. None is left out: by it whoever serves the dataset knows
    that a file, or what a link leads to, is of the dataset and nothing else of this machine."""


def npy_header(dtype: str, tokens: int) -> bytes:
    """The .npy 1.0 header of a flat array: magic, version, header length, a dict padded with spaces, newline."""
    code = {"uint16": "<u2", "uint32": "<u4"}[dtype]
    fields = f"{{'descr': '{code}', 'fortran_order': False, 'shape': ({tokens},), }}"
    return (
        b"\x93NUMPY\x01\x00"
        + (HEADER_BYTES - 10).to_bytes(2, "little")
        + fields.ljust(HEADER_BYTES - 11).encode()
        + b"\n"
    )


class ShardWriter:
    """Cuts one stream of tokens into shards `<stem>-00000.npy`, `<stem>-00001.npy`, ...; use as a context manager.

    Leaving the block finishes the last shard; leaving it by an exception drops that one and keeps the finished ones.
    Raises StorageFull, and ConfigError where not even one token fits into `max_shard_bytes`.
    """

    def __init__(
        self, folder: Path, stem: str, dtype: str, max_shard_bytes: int, finished: tuple[Shard, ...] = ()
    ) -> None:
        self._capacity = (max_shard_bytes - HEADER_BYTES) // np.dtype(dtype).itemsize
        if self._capacity < 1:
            raise ConfigError(
                f"max-shard-bytes is {max_shard_bytes}, too small for a header of {HEADER_BYTES} bytes and one token",
                fix="use 1000000 or more",
            )
        self._folder, self._stem, self._dtype = folder, stem, np.dtype(dtype)
        self.finished = finished
        self._stack = ExitStack()
        self._file: BinaryIO | None = None
        self._tokens = 0

    @property
    def tokens(self) -> int:
        """Of all shards, the one under way included."""
        return self._tokens + sum(shard.tokens for shard in self.finished)

    def write(self, tokens: NDArray[np.unsignedinteger]) -> Iterator[int]:
        """Appends `tokens`; yields after each shard that it finishes how many of `tokens` are written by then."""
        done = 0
        while done < len(tokens):
            part = tokens[done : done + self._capacity - self._tokens]
            self._append(part.astype(self._dtype.newbyteorder("<"), copy=False))
            done += len(part)
            if self._tokens == self._capacity:
                self._finish()
                yield done

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._file is not None:
            self._finish()
        self._stack.__exit__(kind, error, trace)

    def _append(self, tokens: NDArray[np.unsignedinteger]) -> None:
        if self._file is None:
            self._name = f"{self._stem}-{len(self.finished):05d}.npy"
            self._file = self._stack.enter_context(whole_file(self._folder / self._name))
            self._file.write(npy_header(self._dtype.name, 0))
            self._digest = hashlib.sha256()
        self._file.write(tokens.data)
        self._digest.update(tokens.data)
        self._tokens += len(tokens)

    def _finish(self) -> None:
        assert self._file is not None
        with storing(self._folder / self._name):
            self._file.seek(0)
            self._file.write(npy_header(self._dtype.name, self._tokens))
        self._stack.close()
        self.finished += (Shard(self._name, self._tokens, self._digest.hexdigest()),)
        self._file, self._tokens = None, 0

"""The cache of pieces: within its bound, true to the hashes, and whole again after a restart."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from spes_p2p.data.piece_cache import SLOTS, PieceCache
from spes_p2p.data.trees import FolderPieces
from spes_p2p.errors import StorageFull
from tests.data.piece_makers import make_pieces


@pytest.fixture
def pieces(tmp_path: Path) -> FolderPieces:
    return make_pieces(tmp_path / "whole", (400,))


def cache_of(pieces: FolderPieces, folder: Path, slots: int) -> PieceCache:
    return PieceCache(folder, pieces.grid, slots * (pieces.grid.max_bytes + 8))


def fill(cache: PieceCache, pieces: FolderPieces, *numbers: int) -> list[bool]:
    return [cache.put(number, pieces.find(number) or b"") for number in numbers]


def here(cache: PieceCache) -> list[int]:
    return np.flatnonzero(cache.has(np.arange(cache.grid.total))).tolist()


@contextmanager
def files_at_most(size: int) -> Iterator[None]:
    """What is longer cannot be written, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_was_put_in_comes_out(pieces: FolderPieces, tmp_path: Path) -> None:
    cache = cache_of(pieces, tmp_path / "cache", 100)
    assert cache.capacity == pieces.held == 50
    assert fill(cache, pieces, 3, 49, 3) == [True] * 3
    assert here(cache) == [3, 49]
    assert cache.held == 2
    assert cache.find(3) == pieces.find(3)
    assert cache.find(4) is None


def test_the_least_recently_needed_makes_room_and_the_bound_holds(pieces: FolderPieces, tmp_path: Path) -> None:
    cache = cache_of(pieces, tmp_path / "cache", 4)
    cache.need(np.array([0, 1, 2, 3]))
    fill(cache, pieces, 0, 1, 2, 3)
    cache.need(np.array([1, 3, 5]))
    assert fill(cache, pieces, 5) == [True]
    assert set(here(cache)) > {1, 3, 5}
    assert fill(cache, pieces, 6, 7) == [True, False]  # only what is needed now is left
    assert {1, 3, 5} < set(here(cache))
    size = sum(file.stat().st_size for file in (tmp_path / "cache").iterdir())
    assert size <= 4 * (pieces.grid.max_bytes + 8)


def test_a_restart_finds_everything(pieces: FolderPieces, tmp_path: Path) -> None:
    cache = cache_of(pieces, tmp_path / "cache", 10)
    fill(cache, pieces, *range(40, 50))
    cache.close()
    again = cache_of(pieces, tmp_path / "cache", 10)
    assert here(again) == list(range(40, 50))
    assert all(again.find(number) == pieces.find(number) for number in range(40, 50))
    again.close()
    smaller = cache_of(pieces, tmp_path / "cache", 3)
    assert here(smaller) == [40, 41, 42]
    assert fill(smaller, pieces, 0) == [False]
    smaller.need(np.array([0]))
    assert fill(smaller, pieces, 0) == [True]


def test_damage_on_disk_is_a_piece_that_is_not_there(pieces: FolderPieces, tmp_path: Path) -> None:
    cache = cache_of(pieces, tmp_path / "cache", 10)
    fill(cache, pieces, 1, 2, 3)
    cache.close()
    slots = tmp_path / "cache" / SLOTS
    data = bytearray(slots.read_bytes())
    data[pieces.grid.max_bytes + 3] ^= 1  # in the second slot
    slots.write_bytes(data[:-1])  # and the last one is cut
    again = cache_of(pieces, tmp_path / "cache", 10)
    assert again.find(1) == pieces.find(1)
    assert again.find(2) is None
    assert again.find(3) is None
    assert here(again) == [1]
    assert again.held == 1
    assert fill(again, pieces, 2, 3) == [True, True]
    assert again.find(2) == pieces.find(2)


def test_what_the_disk_cannot_read_is_a_piece_that_is_not_there(
    pieces: FolderPieces, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = cache_of(pieces, tmp_path / "cache", 8)
    fill(cache, pieces, 1, 2)

    def fail(*read: int) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", fail)
        assert cache.find(1) is None
    assert here(cache) == [2]
    assert fill(cache, pieces, 1) == [True]
    assert cache.find(1) == pieces.find(1)


def test_a_full_disk_leaves_what_is_there(pieces: FolderPieces, tmp_path: Path) -> None:
    cache = cache_of(pieces, tmp_path / "cache", 10)
    with files_at_most(3 * pieces.grid.max_bytes):
        fill(cache, pieces, 0, 1, 2)
        with pytest.raises(StorageFull):
            fill(cache, pieces, 3)
        assert cache.capacity == 3
        cache.need(np.array([3, 4]))
        assert fill(cache, pieces, 3, 4) == [True, True]  # in the place of others
    assert fill(cache, pieces, 5, 6) == [True, False]
    cache.grow_again()
    assert fill(cache, pieces, 6) == [True]
    assert set(here(cache)) == {3, 4, 5, 6}

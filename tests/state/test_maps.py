"""Maps of a store's files: how many of them a process can have, and what becomes of them."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest

from spes_p2p.ids import NO_HASH
from spes_p2p.state.maps import map_file
from spes_p2p.state.store import StateStore
from tests.state.small import commit_round, small_layout, small_store

COLUMNS, ROUNDS = 30, 12


def open_files() -> int:
    gc.collect()
    return len(os.listdir("/dev/fd"))


def maps_of(path: Path) -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count(str(path))


def test_rounds_that_are_kept_and_served_need_no_open_files(tmp_path: Path) -> None:
    layout = small_layout(COLUMNS)
    before = open_files()
    store = small_store(tmp_path, layout)
    served = []
    for round in range(1, ROUNDS):
        commit_round(store, round, range(COLUMNS + 1))
        store.drop(round - 1, keep_wire=True)
        hashes = store.wire_hashes(round)
        assert hashes is not None
        served += [store.find(tile_hash) for tile_hash in hashes]
    for round in range(1, ROUNDS - 1):
        hashes = store.wire_hashes(round)
        assert hashes is not None
        assert NO_HASH not in hashes
        served += [store.find(tile_hash) for tile_hash in hashes]
    assert all(served)
    assert open_files() - before <= 2  # the lock


def test_a_checkpoint_that_is_looked_through_needs_none_either(tmp_path: Path) -> None:
    layout = small_layout(COLUMNS)
    store = small_store(tmp_path, layout)
    before = open_files()
    others = [StateStore(tmp_path, layout, read_only=True) for _ in range(ROUNDS)]
    assert {other.version(0).root for other in others} == {store.version(0).root}
    assert open_files() == before


def test_a_map_outlives_its_file_and_ends_with_its_last_array(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(200)))
    values = map_file(path, 200).view("<f4")[10:20]
    expected = np.frombuffer(bytes(range(40, 80)), "<f4")
    assert not values.flags.writeable
    if Path("/proc/self/maps").exists():
        assert maps_of(path) == 1
    path.unlink()
    view = values.data
    del values
    assert bytes(view) == expected.tobytes()
    del view
    if Path("/proc/self/maps").exists():
        assert maps_of(path) == 0


def test_a_map_is_never_longer_than_its_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"1234")
    with pytest.raises(ValueError, match="has 4 bytes, not 5"):
        map_file(path, 5)
    with pytest.raises(FileNotFoundError):
        map_file(tmp_path / "none", 5)
    assert map_file(path, 0).size == 0


def test_what_is_mended_is_seen_by_maps_that_are_open(tmp_path: Path) -> None:
    version = small_store(tmp_path).version(0)
    good = bytes(version.tile(0))
    path = version.block_path(0)
    data = path.read_bytes()
    with path.open("r+b") as file:
        file.write(bytes(len(good)))
    assert bytes(version.tile(0)) != good
    version.mend(0, good)
    assert (bytes(version.tile(0)), path.read_bytes()) == (good, data)

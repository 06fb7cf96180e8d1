"""Damage to the committed state: found by its hash, never handed on, mended in place for all who share the file."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from spes_p2p.errors import LocalProtocolError, TileDamaged
from spes_p2p.state.store import StateStore, Version
from tests.state.small import commit_round, small_store, stage_round


def flip(version: Version, tile_id: int, bit: int = 0) -> None:
    """Flips a bit of a tile on disk."""
    tile = version.layout.tiles[tile_id]
    with open(version.block_path(tile.block), "r+b") as file:
        file.seek(4 * tile.start + bit // 8)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1 << bit % 8]))


def reopened(store: StateStore) -> StateStore:
    store.close()
    return StateStore(store.directory, store.layout)


@pytest.fixture
def store(tmp_path: Path) -> StateStore:
    """Round 1 on top of round 0; block 3 is the same file in both."""
    store = small_store(tmp_path / "store")
    commit_round(store, 1, range(3))
    return store


def test_a_mended_tile_is_mended_for_all_who_share_the_file(tmp_path: Path, store: StateStore) -> None:
    tile_id = store.layout.tile_ids_of(3)[0]
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    store.version(1).link_into(checkpoint)
    sharing = (store.version(0), store.version(1), Version(checkpoint, 1, store.layout))
    good, before = bytes(sharing[0].tile(tile_id)), sharing[1].block(3)
    expected = np.array(before)
    flip(store.version(1), tile_id)
    assert [list(version.damaged_tiles()) for version in sharing] == [[tile_id]] * 3
    store.version(1).mend(tile_id, good)
    for version in sharing:
        version.verify()
    np.testing.assert_array_equal(before, expected)  # a map that was open all the time


def test_only_the_right_bytes_mend(store: StateStore) -> None:
    version = store.version(1)
    with pytest.raises(LocalProtocolError, match="with bytes of another hash"):
        version.mend(2, bytes(len(version.tile(2))))
    version.verify()


def test_a_folder_that_another_version_took_is_not_touched(store: StateStore) -> None:
    old = store.version(1)
    good = bytes(old.tile(0))
    staging = store.stage(1, 0, "other branch")
    other = np.full(store.layout.tiles[0].size, 7, np.float32)
    staging.write_tile(0, other)
    staging.finish()
    staging.publish()
    assert old.is_sound(0)
    old.mend(0, good)
    store.version(1).verify()
    assert bytes(store.version(1).tile(0)) == other.tobytes()
    store.drop(1)
    assert old.is_sound(0)


def test_damaged_bytes_are_neither_served_nor_copied_into_a_new_version(store: StateStore) -> None:
    version = store.version(1)
    tile = store.layout.tiles_of(2)[0]
    tile_hash = version.tile_hashes[tile.id]
    assert store.find(tile_hash) is not None
    flip(version, tile.id)
    assert store.find(tile_hash) is None
    assert list(store.recall({tile.id: tile_hash})) == []
    assert version.damaged == {tile.id}
    staging = store.stage(2, 1)
    other = store.layout.tiles_of(2)[1]
    staging.write_tile(other.id, bytes(4 * other.size))
    with pytest.raises(TileDamaged, match=f"block-00002.f32: tile {tile.id} "):
        staging.finish()


def test_lost_tiles_are_recalled_from_checkpoints(tmp_path: Path, store: StateStore) -> None:
    good = {tile.id: bytes(store.version(1).tile(tile.id)) for tile in store.layout.tiles}
    copies = []
    for name in ("damaged", "cut short", "whole"):
        folder = tmp_path / name
        folder.mkdir()
        for path in store.version(1).folder.glob("*.*"):
            (folder / path.name).write_bytes(path.read_bytes())
        copies.append(folder)
    flip(Version(copies[0], 1, store.layout), 5)
    (copies[1] / "block-00001.f32").write_bytes(b"")
    lost = StateStore(tmp_path / "empty", store.layout)
    lost.spare_folders = lambda: copies[:1]
    wanted = dict(enumerate(store.version(1).tile_hashes))
    assert {tile_id: bytes(data) for tile_id, data, _ in lost.recall(wanted)} == {
        tile_id: data for tile_id, data in good.items() if tile_id != 5
    }
    lost.spare_folders = lambda: copies
    assert {tile_id: bytes(data) for tile_id, data, _ in lost.recall(wanted)} == good


def test_files_cut_short_or_missing_are_damaged_tiles_once_salvaged(store: StateStore) -> None:
    version = store.version(1)
    cut, missing = version.block_path(1), version.block_path(2)
    good = {tile.id: bytes(version.tile(tile.id)) for tile in store.layout.tiles}
    os.truncate(cut, 4 * store.layout.tiles_of(1)[1].start)
    missing.unlink()
    again = reopened(store)
    assert again.rounds() == (0,)
    salvaged = again.salvage(1, version.root)
    assert salvaged is again.latest()
    assert salvaged is not None
    lost = list(salvaged.damaged_tiles())
    assert lost == [*store.layout.tile_ids_of(1)[1:], *store.layout.tile_ids_of(2)]
    for tile_id in lost:
        salvaged.mend(tile_id, good[tile_id])
    salvaged.verify()


def test_a_damaged_list_of_hashes_is_computed_anew_from_sound_values(store: StateStore) -> None:
    version = store.version(1)
    path = version.folder / "hashes.bin"
    for damaged in (path.read_bytes()[:-1], bytes(len(path.read_bytes()))):
        path.write_bytes(damaged)
        store = reopened(store)
        assert store.salvage(1, version.root) is not None
        assert store.version(1).tile_hashes == version.tile_hashes
    path.write_bytes(b"")
    flip(version, 0)
    assert reopened(store).salvage(1, version.root) is None
    assert store.salvage(5, version.root) is None


def test_a_damaged_list_of_what_was_handed_out_costs_nothing_else(store: StateStore) -> None:
    stage_round(store, 2, [1]).finish()
    for folder in ("round-00000001", "staging-00000002"):
        (store.directory / folder / "wire" / "hashes.bin").write_bytes(b"cut")
    again = reopened(store)
    assert set(again.version(1).wire.hashes) == {bytes(32)}
    staged = again.staged(2)
    assert staged is not None
    staged.publish()
    again.version(2).verify()


def test_a_file_that_is_cut_short_while_it_is_mapped_ends_nobody(store: StateStore) -> None:
    """As with a disk that fails, a look at the map would end the process."""
    version, tile_id = store.version(1), store.layout.tile_ids_of(1)[0]
    good = bytes(version.sound_tile(tile_id))
    os.truncate(version.block_path(1), 0)
    assert store.find(version.tile_hashes[tile_id]) is None
    with pytest.raises(TileDamaged, match=r"block-00001\.f32"):
        version.sound_tile(tile_id)
    version.mend(tile_id, good)
    assert bytes(version.sound_tile(tile_id)) == good


def test_what_a_round_handed_out_is_cut_short_while_it_is_mapped(store: StateStore) -> None:
    wire = store.version(1).wire
    tile_id = store.layout.tile_ids_of(1)[0]
    assert wire.find(wire.hashes[tile_id]) is not None
    os.truncate(wire.block_path(1), 0)
    assert wire.find(wire.hashes[tile_id]) is None


def test_a_tile_that_the_disk_cannot_read_is_damaged(store: StateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def bad_sector(descriptor: int, size: int, offset: int) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", bad_sector)
    assert not store.version(1).is_sound(0)
    with pytest.raises(TileDamaged, match="tile 0 "):
        store.version(1).verify()


def test_too_many_open_files_are_no_damage(store: StateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever cannot open one can still look at what is mapped."""

    def none_left(path: Path, flags: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    version = store.version(1)
    flip(version, 1)
    monkeypatch.setattr(os, "open", none_left)
    assert store.find(version.tile_hashes[0]) is not None
    with pytest.raises(TileDamaged, match="tile 1 "):
        version.sound_tile(1)
    assert version.damaged == {1}

"""Versions and stagings: what is shared, what is found, what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from spes_p2p.errors import LocalProtocolError, StateError
from spes_p2p.ids import NO_HASH
from spes_p2p.state.hashes import hash_tile
from spes_p2p.state.initial import InitialState
from spes_p2p.state.store import StateStore, Version
from tests.state.small import commit_round, new_values, small_layout, small_store, stage_round


def inode(path: Path) -> int:
    return path.stat().st_ino


def content(data: memoryview | None) -> bytes | None:
    return None if data is None else bytes(data)


def test_the_initial_version_is_made_of_tiles(tmp_path: Path) -> None:
    layout = small_layout()
    initial = InitialState(layout, seed=1, init_std=0.02)
    from_tiles = StateStore(tmp_path / "a", layout).create_initial(initial)
    assert all((from_tiles.block(block.index) == initial.block(block.index)).all() for block in layout.blocks)
    assert from_tiles.root == layout.root_of(from_tiles.tile_hashes)
    tile = layout.tiles[5]
    assert from_tiles.tile(5) == initial(tile).tobytes()
    assert from_tiles.tile_hashes[5] == hash_tile(initial(tile).tobytes())


def test_a_version_has_the_values_that_were_staged(tmp_path: Path) -> None:
    store = small_store(tmp_path)
    hashes = commit_round(store, 1, range(4))
    version = store.version(1)
    for block, values in enumerate(new_values(store.layout, 1)):
        np.testing.assert_array_equal(version.block(block), values)
    assert version.tile_hashes == version.wire.hashes == hashes
    assert store.rounds() == (0, 1)
    assert store.latest() is version
    store.version(1).verify()


def test_mapped_blocks_cannot_be_written(tmp_path: Path) -> None:
    version = small_store(tmp_path).version(0)
    with pytest.raises(ValueError, match="read-only"):
        version.block(1)[0] = 1
    assert version.tile(0).readonly


def test_equal_blocks_are_one_file(tmp_path: Path) -> None:
    store = small_store(tmp_path)
    staging = stage_round(store, 1, [0, 1, 2])
    merged_tile = store.layout.tiles_of(2)[0]
    staging.write_state(merged_tile.id, np.zeros(merged_tile.size, np.float32))
    staging.finish()
    new, old = staging.publish(), store.version(0)
    wire = new.folder / "wire"
    assert inode(new.block_path(1)) == inode(wire / "block-00001.f32")
    assert inode(new.block_path(2)) != inode(wire / "block-00002.f32")
    assert inode(new.block_path(3)) == inode(old.block_path(3))
    assert not (wire / "block-00003.f32").exists()


def test_tiles_that_were_not_staged_keep_the_parents_values(tmp_path: Path) -> None:
    store = small_store(tmp_path)
    before = store.version(0).block(1).copy()
    staging = store.stage(1, 0)
    tile = store.layout.tiles_of(1)[2]
    staging.write_tile(tile.id, np.ones(tile.size, np.float32))
    hashes = staging.finish()
    version = staging.publish()
    expected = before.copy()
    expected[tile.start : tile.stop] = 1
    np.testing.assert_array_equal(version.block(1), expected)
    np.testing.assert_array_equal(store.version(0).block(1), before)
    changed = [at for at, (new, old) in enumerate(zip(hashes, store.version(0).tile_hashes)) if new != old]
    assert changed == [tile.id]
    assert [at for at, tile_hash in enumerate(version.wire.hashes) if tile_hash != NO_HASH] == [tile.id]
    store.version(1).verify()


def test_a_merge_reads_the_values_before_it_and_leaves_the_wire_tiles(tmp_path: Path) -> None:
    store = small_store(tmp_path)
    staging = stage_round(store, 1, [1])
    before = [staging.block(index).copy() for index in range(4)]
    np.testing.assert_array_equal(before[1], new_values(store.layout, 1)[1])
    np.testing.assert_array_equal(before[2], store.version(0).block(2))
    for tile in store.layout.tiles_of(1):
        staging.write_state(tile.id, 2 * before[1][tile.start : tile.stop])
        np.testing.assert_array_equal(staging.block(1), before[1])
    staging.finish()
    version = staging.publish()
    np.testing.assert_array_equal(version.block(1), 2 * before[1])
    tile = store.layout.tiles_of(1)[0]
    assert content(version.find(version.wire.hashes[tile.id])) == before[1][tile.start : tile.stop].tobytes()
    assert version.wire.hashes[0] == NO_HASH
    store.version(1).verify()


def test_tiles_are_found_by_hash_in_stagings_and_versions_until_they_are_dropped(tmp_path: Path) -> None:
    store = small_store(tmp_path)
    wire, merged = np.full(8, 3, np.float32), np.full(8, 4, np.float32)
    staging = store.stage(1, 0)
    tile_id = store.layout.tile_ids_of(1)[1]
    wire_hash = staging.write_tile(tile_id, wire)
    assert content(store.find(wire_hash)) == wire.tobytes()
    state_hash = staging.write_state(tile_id, merged)
    staging.finish()
    staging.publish()
    assert content(store.find(wire_hash)) == wire.tobytes()
    assert content(store.find(state_hash)) == merged.tobytes()
    held = store.find(wire_hash)
    commit_round(store, 2, [1])
    store.drop(1)
    assert store.find(wire_hash) is None
    assert content(held) == wire.tobytes()
    assert store.rounds() == (0, 2)
    store.version(2).verify()


def test_a_tile_done_again_replaces_the_first(tmp_path: Path) -> None:
    store = small_store(tmp_path)
    staging = store.stage(1, 0)
    first = staging.write_tile(0, np.ones(8, np.float32))
    second = staging.write_tile(0, bytes(32))
    assert staging.wire_hash(0) == second == hash_tile(bytes(32))
    assert store.find(first) is None
    staging.finish()
    assert staging.publish().tile(0) == bytes(32)


def test_forgotten_tiles_keep_the_parents_values(tmp_path: Path) -> None:
    store = small_store(tmp_path)
    staging = stage_round(store, 1, [1, 2])
    staging.block(1)
    ids = store.layout.tile_ids_of
    staging.forget([ids(1)[0], *ids(2)])
    assert not staging.has(ids(1)[0])
    assert staging.has(ids(1)[1])
    staging.finish()
    version, parent = staging.publish(), store.version(0)
    assert version.tile(ids(1)[0]) == parent.tile(ids(1)[0])
    assert version.tile(ids(1)[1]) != parent.tile(ids(1)[1])
    assert inode(version.block_path(2)) == inode(parent.block_path(2))
    store.version(1).verify()


def test_a_finished_staging_can_be_repaired_and_finished_again(tmp_path: Path) -> None:
    store = small_store(tmp_path)
    staging = stage_round(store, 1, [1])
    first = staging.finish()
    tile_id = store.layout.tile_ids_of(3)[0]
    with pytest.raises(LocalProtocolError, match="finished"):
        staging.write_state(tile_id, bytes(32))
    staging.reopen()
    staging.write_state(tile_id, bytes(32))
    second = staging.finish()
    assert [at for at, (one, two) in enumerate(zip(first, second)) if one != two] == [tile_id]
    staging.reopen(keep_state=False)
    assert staging.finish() == first
    staging.publish()
    store.version(1).verify()
    store.version(0).verify()


def test_a_state_without_parent_needs_all_its_tiles(tmp_path: Path) -> None:
    store = StateStore(tmp_path, small_layout())
    source = small_store(tmp_path / "other").version(0)
    staging = store.stage(7, None)
    for tile in store.layout.tiles[:-1]:
        staging.write_state(tile.id, source.tile(tile.id), source.tile_hashes[tile.id])
    with pytest.raises(StateError, match="was not staged"):
        staging.finish()
    staging.write_state(store.layout.tiles[-1].id, source.tile(store.layout.tiles[-1].id))
    staging.finish()
    assert staging.publish().root == source.root


def test_publishing_one_label_discards_the_others(tmp_path: Path) -> None:
    store = small_store(tmp_path)
    ballots = [stage_round(store, 1, [block], label=f"ballot-{block}") for block in (1, 2)]
    for staging in ballots:
        staging.finish()
    ballots[1].publish()
    assert store.staged(1, "ballot-1") is None
    with pytest.raises(LocalProtocolError, match="published or discarded"):
        ballots[0].publish()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "round-00000000", "round-00000001"]


def test_a_round_can_be_replaced_by_another_of_its_number(tmp_path: Path) -> None:
    store = small_store(tmp_path)
    old = commit_round(store, 1, [1])
    held = store.version(1).block(1)
    before = held.copy()
    staging = store.stage(1, 1)
    staging.write_state(0, bytes(32))
    staging.finish()
    version = staging.publish()
    assert version is store.version(1)
    assert version.tile_hashes[1:] == old[1:]
    assert version.tile_hashes[0] != old[0]
    np.testing.assert_array_equal(held, before)


def test_a_staging_refuses_what_is_no_tile(tmp_path: Path) -> None:
    staging = small_store(tmp_path).stage(1, 0)
    with pytest.raises(LocalProtocolError, match="32 bytes, but 31"):
        staging.write_tile(0, bytes(31))
    with pytest.raises(LocalProtocolError, match="float64"):
        staging.write_tile(0, np.zeros(8))  # type: ignore[arg-type]
    with pytest.raises(LocalProtocolError, match="not finished"):
        staging.publish()


def test_a_version_is_linked_into_and_adopted_from_a_folder(tmp_path: Path) -> None:
    store = small_store(tmp_path / "store")
    commit_round(store, 1, [1])
    folder = tmp_path / "copy"
    folder.mkdir()
    names = store.version(1).link_into(folder)
    assert sorted(names) == sorted(path.name for path in folder.iterdir())
    assert inode(folder / "block-00001.f32") == inode(store.version(1).block_path(1))
    other = StateStore(tmp_path / "other", store.layout)
    adopted = other.adopt(folder, 1)
    assert adopted.root == store.version(1).root
    assert adopted is other.latest()
    other.version(1).verify()


def test_one_process_writes_and_others_read(tmp_path: Path) -> None:
    store = small_store(tmp_path)
    staging = stage_round(store, 1, [1])
    with pytest.raises(StateError, match="in use"):
        StateStore(tmp_path, store.layout)
    reader = StateStore(tmp_path, store.layout, read_only=True)
    assert reader.rounds() == (0,)
    staging.finish()
    staging.publish()
    store.close()
    assert StateStore(tmp_path, store.layout).rounds() == (0, 1)


def test_a_missing_round_is_named(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="no state of round 9"):
        small_store(tmp_path).version(9)


def test_empty_blocks_are_files_of_no_bytes(tmp_path: Path) -> None:
    layout = small_layout()
    columns_only = type(layout)([tensor for tensor in layout.tensors if tensor.column is not None], 8)
    version = small_store(tmp_path, columns_only).version(0)
    assert version.block(0).shape == (0,)
    assert Version(version.folder, 0, columns_only).root == version.root


@pytest.mark.parametrize("end", ["another history", "dropped"])
def test_files_of_another_version_in_its_place_are_not_taken_for_its_own(tmp_path: Path, end: str) -> None:
    store = small_store(tmp_path / "store")
    commit_round(store, 1, range(2))
    ours = store.version(1)
    values = bytes(ours.tile(0))
    if end == "dropped":
        store.drop(1)
    else:
        stage_round(store, 1, [1, 2], "theirs").finish()
        theirs = store.staged(1, "theirs")
        assert theirs is not None
        assert theirs.publish().root != ours.root
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    with pytest.raises(StateError, match="no longer holds state"):
        ours.link_into(folder)
    assert bytes(ours.tile(0)) == values

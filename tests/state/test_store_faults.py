"""Damage, full disks and kills: the last good version is always there, and what is bad is named."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from spes_p2p import files
from spes_p2p.errors import StateError, StorageFull
from spes_p2p.state.store import StateStore
from tests.state.small import all_files, commit_round, file_size_limit, small_layout, small_store, stage_round

STEPS = ("pwrite", "fsync", "rename", "link", "ftruncate", "unlink", "rmdir", "mkdir")


def reopened(store: StateStore) -> StateStore:
    store.close()
    return StateStore(store.directory, store.layout)


def test_a_file_cut_short_is_named_and_the_version_before_it_is_used(tmp_path: Path) -> None:
    store = small_store(tmp_path)
    commit_round(store, 1, range(4))
    names = [path.name for path in sorted(store.version(1).folder.iterdir()) if path.is_file()]
    for name in names:
        path = store.version(1).folder / name
        whole = path.read_bytes()
        for length in {0, 1, len(whole) // 2, len(whole) - 1}:
            path.write_bytes(whole[:length])
            damaged = reopened(store)
            latest = damaged.latest()
            assert latest is not None
            assert latest.round == 0
            (problem,) = damaged.problems
            assert f"{path} has {length} bytes instead of {len(whole)}" in str(problem)
            assert problem.fix
            damaged.close()
        path.write_bytes(whole)
    assert reopened(store).rounds() == (0, 1)


def test_a_version_that_cannot_be_read_goes_when_a_newer_one_is_there(tmp_path: Path) -> None:
    """Nothing else would ever remove it, and it takes as much disk as a state."""
    store = small_store(tmp_path)
    for round in (1, 2, 3):
        commit_round(store, round, [0])
    cut = {round: store.version(round).block_path(0) for round in (2, 3)}
    store.close()
    for path in cut.values():
        path.write_bytes(b"cut")
    store = StateStore(tmp_path, store.layout)
    assert store.rounds() == (0, 1)
    for round, parent in ((2, 1), (4, 2)):
        assert cut[3].exists()
        staging = store.stage(round, parent)
        staging.finish()
        staging.publish()
    assert [path.name for path in sorted(tmp_path.glob("round-*"))] == [f"round-{at:08d}" for at in store.rounds()]


def test_every_flipped_bit_is_found_in_its_tile(tmp_path: Path) -> None:
    store = small_store(tmp_path)
    for tile in store.layout.tiles:
        path = store.version(0).block_path(tile.block)
        with open(path, "r+b") as file:
            file.seek(4 * tile.stop - 1)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))
        with pytest.raises(StateError, match=f"{path.name}: tile {tile.id} ") as caught:
            store.version(0).verify()
        assert "to fetch the tile again" in caught.value.fix
        assert list(store.version(0).damaged_tiles()) == [tile.id]
        with open(path, "r+b") as file:
            file.seek(4 * tile.stop - 1)
            file.write(byte)
    store.version(0).verify()


@pytest.mark.parametrize("limit_bytes", [40, 500])  # less than a block; more than any block, less than the hashes
def test_a_full_disk_costs_the_staging_alone(tmp_path: Path, limit_bytes: int) -> None:
    store = small_store(tmp_path)
    before = all_files(tmp_path)

    def stage_and_finish() -> None:
        stage_round(store, 1, range(4)).finish()

    with (
        file_size_limit(limit_bytes),
        pytest.raises(StorageFull, match=f"{tmp_path}/staging-00000001/.*no room for") as e,
    ):
        stage_and_finish()
    assert "free disk space" in e.value.fix
    assert all_files(tmp_path) == before
    commit_round(store, 1, range(4))
    store.version(1).verify()


def test_every_thread_that_writes_learns_that_the_disk_is_full(tmp_path: Path) -> None:
    store = small_store(tmp_path)
    tiles = store.layout.tiles_of(2)
    with file_size_limit(40), ThreadPoolExecutor(4) as pool:
        for _ in range(200):  # what a thread sees of a folder that another one removes depends on chance
            staging = store.stage(1, 0)
            writes = [pool.submit(staging.write_tile, tile.id, bytes(4 * tile.size)) for tile in tiles]
            assert {type(write.exception()) for write in writes} == {StorageFull}
            assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["round-00000000"]


def test_a_staging_is_cleaned_on_open_unless_it_was_finished(tmp_path: Path) -> None:
    store = small_store(tmp_path)
    finished = stage_round(store, 1, [1], label="accepted")
    hashes = finished.finish()
    stage_round(store, 1, [2])
    again = reopened(store)
    assert again.staged(1) is None
    kept = again.staged(1, "accepted")
    assert kept is not None
    assert kept.finished is not None
    assert kept.finished.tile_hashes == hashes
    tile_id = again.layout.tile_ids_of(1)[0]
    assert again.find(hashes[tile_id]) is not None
    kept.publish()
    again.version(1).verify()
    assert again.version(1).wire.hashes[tile_id] == hashes[tile_id]


@pytest.mark.parametrize("keep_state", [True, False])
def test_what_was_finished_before_a_restart_can_be_reopened(tmp_path: Path, keep_state: bool) -> None:
    store = small_store(tmp_path)
    staging = stage_round(store, 1, [1, 2])
    merged, later = store.layout.tiles_of(2)[1], store.layout.tiles_of(3)[0]
    unmerged = staging.wire_hash(merged.id)
    staging.write_state(merged.id, bytes(4 * merged.size))
    expected = list(staging.finish())
    again = reopened(store)
    kept = again.staged(1)
    assert kept is not None
    kept.reopen(keep_state)
    assert [kept.has(tile_id) for tile_id in (merged.id, later.id)] == [True, False]
    expected[later.id] = kept.write_state(later.id, bytes(4 * later.size))
    if not keep_state:
        expected[merged.id] = unmerged
    assert list(kept.finish()) == expected
    kept.publish()
    again.version(1).verify()
    again.version(0).verify()


def _die_at(step: int) -> None:
    """From now on the process kills itself at its `step`-th change of the disk, half of a write done."""
    done = 0

    def deadly(name: str, real: Callable[..., int]) -> Callable[..., int]:
        def call(*arguments: object, **options: object) -> int:
            nonlocal done
            done += 1
            if done == step:
                if name == "pwrite":
                    descriptor, data, offset = arguments
                    real(descriptor, data[: len(data) // 2], offset)  # type: ignore[index, arg-type]
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        return call

    for name in STEPS:
        setattr(os, name, deadly(name, getattr(os, name)))


def _child_dies_at(directory: Path, step: int) -> bool:
    """Runs a whole round in a child process that is killed at its `step`-th change of the disk; False if it lived."""
    pid = os.fork()
    if pid == 0:
        store = StateStore(directory, small_layout())
        _die_at(step)
        staging = stage_round(store, 1, [1, 2])
        tile = store.layout.tiles_of(3)[1]
        staging.write_state(tile.id, bytes(4 * tile.size))
        staging.finish()
        staging.publish()
        store.drop(0)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def test_killed_at_any_step_the_store_opens_with_a_whole_version(tmp_path: Path) -> None:
    expected = small_store(tmp_path / "undisturbed")
    roots, step, found = {0: expected.version(0).root}, 0, set()
    killed = True
    while killed:
        step += 1
        directory = tmp_path / str(step)
        small_store(directory).close()
        killed = _child_dies_at(directory, step)
        store = StateStore(directory, small_layout())
        latest = store.latest()
        assert latest is not None
        assert not store.problems
        for round in store.rounds():
            store.version(round).verify()
            assert store.version(round).root == roots.setdefault(round, store.version(round).root)
        names = {path.name for path in directory.iterdir()} - {"lock"}
        kept = {"staging-00000001"} if store.staged(1) else set()
        assert names == {f"round-{round:08d}" for round in store.rounds()} | kept
        found.add((store.rounds(), bool(kept)))
    assert found == {((0,), False), ((0,), True), ((0, 1), False), ((1,), False)}
    assert step > 50


def test_replacing_and_removing_folders_is_ended_after_a_crash(tmp_path: Path) -> None:
    for name in ("replaced-a", "replaced-b", "b", "dropped-c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    files.recover_folders(tmp_path)
    assert all_files(tmp_path) == {"a/file": b"replaced-a", "b/file": b"b"}

"""Checkpoints: whole or refused, the last K kept, and independent of the store they were made from."""

from __future__ import annotations

import builtins
import errno
import io
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spes_p2p.checkpoint.load import Checkpoint, load_checkpoint, load_latest
from spes_p2p.checkpoint.save import save_checkpoint
from spes_p2p.errors import CheckpointError, StateError, StorageFull
from spes_p2p.state.store import StateStore
from tests.state.small import all_files, commit_round, file_size_limit, new_values, small_layout, small_store

RUN = {"fingerprint": "ab12", "config": "model:\n  d_model: 3\n"}


def private(step: int) -> dict[str, Any]:
    return {"step": step, "moments": torch.full((10, 10), float(step)), "certificate": b"signed"}


def save(root: Path, store: StateStore, step: int, keep: int = 3, round: int = 1) -> Path:
    return save_checkpoint(root, store.version(round), step, private(step), RUN, keep)


@pytest.fixture
def store(tmp_path: Path) -> StateStore:
    store = small_store(tmp_path / "store")
    commit_round(store, 1, range(4))
    return store


def test_everything_comes_back_without_the_store(tmp_path: Path, store: StateStore) -> None:
    folder = save(tmp_path / "checkpoints", store, 100)
    assert folder.name == "step-00000100"
    assert (folder / "state/block-00001.f32").stat().st_ino == store.version(1).block_path(1).stat().st_ino
    layout, root = store.layout, store.version(1).root
    store.close()
    shutil.rmtree(tmp_path / "store")
    checkpoint, warnings = load_latest(tmp_path / "checkpoints")
    assert warnings == ()
    assert (checkpoint.step, checkpoint.round, checkpoint.run) == (100, 1, RUN)
    saved = checkpoint.private()
    assert torch.equal(saved.pop("moments"), private(100)["moments"])
    assert saved == {"step": 100, "certificate": b"signed"}
    version = checkpoint.version(layout)
    assert version.root == root
    np.testing.assert_array_equal(version.block(2), new_values(layout, 1)[2])
    assert StateStore(tmp_path / "new", layout).adopt(version.folder, 1).root == root


def test_rounds_after_a_checkpoint_do_not_touch_it(tmp_path: Path, store: StateStore) -> None:
    folder = save(tmp_path / "checkpoints", store, 100)
    before = all_files(folder)
    for round in (2, 3):
        commit_round(store, round, [1])
        store.drop(round - 1)
    assert all_files(folder) == before
    load_checkpoint(folder)


def test_only_the_last_are_kept(tmp_path: Path, store: StateStore) -> None:
    for step in (100, 200, 300):
        save(tmp_path, store, step, keep=2)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000200", "step-00000300"]


def test_a_step_saved_again_replaces_the_first(tmp_path: Path, store: StateStore) -> None:
    save(tmp_path, store, 100, round=0)
    save(tmp_path, store, 100, round=1)
    assert load_latest(tmp_path)[0].round == 1


def test_checkpoints_of_an_abandoned_line_are_set_aside(tmp_path: Path, store: StateStore) -> None:
    for step in (100, 300, 200):
        save(tmp_path, store, step, keep=1)
    assert load_latest(tmp_path)[0].step == 200
    assert sorted(path.name for path in tmp_path.glob("*step-*")) == ["step-00000200", "superseded-step-00000300"]


def test_of_those_set_aside_the_newest_stays(tmp_path: Path, store: StateStore) -> None:
    for step in (100, 400, 200, 300, 250):  # 400 was abandoned before 300
        save(tmp_path, store, step, keep=2)
    names = sorted(path.name for path in tmp_path.glob("*step-*"))
    assert names == ["step-00000200", "step-00000250", "superseded-step-00000300"]


def test_a_checkpoint_cut_short_anywhere_is_refused_by_the_files_name(tmp_path: Path, store: StateStore) -> None:
    folder = save(tmp_path, store, 100)
    for name, whole in all_files(folder).items():
        path = folder / name
        for length in {0, 1, 7, len(whole) // 3, len(whole) // 2, len(whole) - 1}:
            path.unlink()
            path.write_bytes(whole[:length])
            with pytest.raises(CheckpointError, match=f"{path} ") as caught:
                load_checkpoint(folder)
            assert caught.value.fix
        path.unlink()
        with pytest.raises(CheckpointError, match=f"{path} is missing"):
            load_checkpoint(folder)
        path.write_bytes(whole)
    load_checkpoint(folder)


def test_a_flipped_bit_anywhere_is_refused_by_the_files_name(tmp_path: Path, store: StateStore) -> None:
    folder = save(tmp_path, store, 100)
    for name, whole in all_files(folder).items():
        path = folder / name
        for at in range(0, len(whole), 1 + len(whole) // 40):
            path.unlink()
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
            with pytest.raises(CheckpointError, match=f"{path} "):
                load_checkpoint(folder)
        path.write_bytes(whole)
    load_checkpoint(folder)


def test_the_one_before_a_damaged_one_is_used_and_both_are_named(tmp_path: Path, store: StateStore) -> None:
    for step in (100, 200, 300):
        save(tmp_path, store, step)
    (tmp_path / "step-00000300/private.json").write_bytes(b"")
    (tmp_path / "step-00000200/metadata.json").unlink()
    checkpoint, warnings = load_latest(tmp_path)
    assert checkpoint.step == 100
    assert ["step-00000300" in warnings[0], "step-00000200" in warnings[1]] == [True, True]
    assert all("step-00000100" in warning and "json" in warning for warning in warnings)


@pytest.mark.parametrize("name", ["metadata.json", "private.safetensors", "state/block-00001.f32"])
def test_the_one_before_one_that_the_disk_cannot_read_is_used(
    tmp_path: Path, store: StateStore, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for step in (100, 200):
        save(tmp_path, store, step)
    real = io.open

    def failing(path: Path, *mode: Any, **how: Any) -> Any:
        if Path(path) == tmp_path / "step-00000200" / name:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, *mode, **how)

    for module in (io, builtins):
        monkeypatch.setattr(module, "open", failing)
    checkpoint, [warning] = load_latest(tmp_path)
    assert checkpoint.step == 100
    assert "step-00000200 cannot be read: Input/output error" in warning


def test_without_any_good_checkpoint_all_the_reasons_are_given(tmp_path: Path, store: StateStore) -> None:
    with pytest.raises(CheckpointError, match="no usable checkpoint"):
        load_latest(tmp_path / "nothing")
    save(tmp_path, store, 100)
    (tmp_path / "step-00000100/private.json").unlink()
    with pytest.raises(CheckpointError, match=r"private\.json is missing"):
        load_latest(tmp_path)


def test_a_full_disk_leaves_the_older_checkpoints(tmp_path: Path, store: StateStore) -> None:
    root = tmp_path / "checkpoints"
    save(root, store, 100)
    before = all_files(root)

    def save_next() -> None:
        save(root, store, 200, keep=1)

    for limit_bytes in (50, 300):  # in the tree, in the tensors
        with file_size_limit(limit_bytes), pytest.raises(StorageFull, match=r"private\.\w+: no room for \d+ bytes"):
            save_next()
        assert all_files(root) == before
    save_next()
    assert load_latest(root)[0].step == 200


def _child_dies_at(root: Path, store_folder: Path, step: int) -> bool:
    pid = os.fork()
    if pid == 0:
        done = 0

        def deadly(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                nonlocal done
                done += 1
                if done == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*arguments, **options)

            return call

        store = StateStore(store_folder, small_layout(), read_only=True)
        for name in ("fsync", "rename", "link", "mkdir", "unlink", "rmdir"):
            setattr(os, name, deadly(getattr(os, name)))
        save(root, store, 200, keep=1)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("first_step", [100, 200])  # an older one, and one that is replaced
def test_killed_at_any_point_of_a_save_a_good_checkpoint_is_there(
    tmp_path: Path, store: StateStore, first_step: int
) -> None:
    found, step, killed = set(), 0, True
    while killed:
        step += 1
        root = tmp_path / str(step)
        save(root, store, first_step, round=0)
        killed = _child_dies_at(root, tmp_path / "store", step)
        checkpoint, warnings = load_latest(root)
        assert warnings == ()
        found.add((checkpoint.step, checkpoint.round))
        save(root, store, 300, keep=1)
        assert [path.name for path in root.iterdir()] == ["step-00000300"]
    assert found == {(first_step, 0), (200, 1)}
    assert step > 15


def test_a_checkpoint_of_another_shape_is_refused(tmp_path: Path, store: StateStore) -> None:
    checkpoint: Checkpoint = load_checkpoint(save(tmp_path, store, 100))
    with pytest.raises(StateError, match=r"missing|bytes instead of"):
        checkpoint.version(small_layout(columns=4))

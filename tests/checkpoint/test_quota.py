"""What checkpoints may take: older ones go first, the newest good one never, and none where it would not help."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spes_p2p.checkpoint.load import load_checkpoint
from spes_p2p.checkpoint.private import private_bytes, write_private
from spes_p2p.checkpoint.quota import Quota
from spes_p2p.checkpoint.save import save_checkpoint
from spes_p2p.errors import StorageFull
from spes_p2p.planning.units import parse_bytes
from spes_p2p.state.store import StateStore
from tests.state.small import commit_round, small_store

PRIVATE_VALUES = 50_000
ONE = 4 * PRIVATE_VALUES + 30_000
"""Bytes of a checkpoint, with room for its texts and its small state."""


@pytest.fixture
def store(tmp_path: Path) -> StateStore:
    store = small_store(tmp_path / "store")
    commit_round(store, 1, range(4))
    return store


def private(step: int) -> dict[str, Any]:
    return {"step": step, "moments": np.full(PRIVATE_VALUES, step, np.float32)}


def save(root: Path, store: StateStore, step: int, max_bytes: int, good: Path | None = None) -> Path:
    version = store.version(1)
    Quota(max_bytes).make_room(root, version, step, private(step), good)
    return save_checkpoint(root, version, step, private(step), {}, 9)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def used(root: Path) -> int:
    files = {os.stat(path).st_ino: os.stat(path).st_size for path in root.rglob("*") if path.is_file()}
    return sum(files.values())


def test_older_ones_make_room_for_the_next(tmp_path: Path, store: StateStore) -> None:
    root = tmp_path / "checkpoints"
    for step in range(100, 700, 100):
        save(root, store, step, 3 * ONE)
        assert used(root) <= 3 * ONE
    assert names(root) == ["step-00000400", "step-00000500", "step-00000600"]


def test_with_room_for_two_the_newest_is_whole_while_the_next_is_written(tmp_path: Path, store: StateStore) -> None:
    root = tmp_path / "checkpoints"
    for step in (100, 200, 300):
        save(root, store, step, 2 * ONE)
    Quota(2 * ONE).make_room(root, store.version(1), 400, private(400), None)
    assert names(root) == ["step-00000300"]
    load_checkpoint(root / "step-00000300")


def test_what_cannot_fit_removes_nothing_and_names_what_would_do(tmp_path: Path, store: StateStore) -> None:
    root = tmp_path / "checkpoints"
    for step in (100, 200):
        save(root, store, step, 3 * ONE)
    with pytest.raises(StorageFull, match="more than --max-checkpoint-disk") as caught:
        save(root, store, 300, ONE)
    assert names(root) == ["step-00000100", "step-00000200"]
    enough = parse_bytes(caught.value.fix.split()[-1], "--max-checkpoint-disk")
    save(root, store, 300, enough)
    assert "step-00000300" in names(root)


def test_the_one_that_was_found_whole_stays_where_newer_ones_are_damaged(tmp_path: Path, store: StateStore) -> None:
    root = tmp_path / "checkpoints"
    good, damaged = (save(root, store, step, 9 * ONE) for step in (100, 200))
    (damaged / "private.json").write_bytes(b"{}")
    save(root, store, 300, 2 * ONE, good)
    assert names(root) == ["step-00000100", "step-00000300"]


def test_what_the_run_abandoned_goes_before_what_is_older(tmp_path: Path, store: StateStore) -> None:
    root = tmp_path / "checkpoints"
    for step in (100, 500, 200):
        save(root, store, step, 9 * ONE)
    assert "superseded-step-00000500" in names(root)
    save(root, store, 300, 3 * ONE)
    assert names(root) == ["step-00000100", "step-00000200", "step-00000300"]


def test_a_file_that_two_checkpoints_share_counts_once(tmp_path: Path) -> None:
    """Both hold the state of one round: it takes its bytes once, whoever else links to it."""
    store, root = small_store(tmp_path / "store"), tmp_path / "checkpoints"
    commit_round(store, 1, range(4))
    for step in (100, 200):
        save(root, store, step, 9 * ONE)
    first, second = (root / name / "state/block-00001.f32" for name in names(root))
    assert first.stat().st_ino == second.stat().st_ino
    save(root, store, 300, used(root) + ONE)
    assert len(names(root)) == 3


def test_the_size_of_private_state_is_known_before_it_is_written(tmp_path: Path) -> None:
    tree = {"a": [1, (2.5, "x")], "b": np.arange(7, dtype=np.int16), "c": np.float32(3)}
    records = write_private(tmp_path, tree)
    assert private_bytes(tree) == sum(record.bytes for record in records.values())

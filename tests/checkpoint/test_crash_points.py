"""A save that is cut off anywhere, by a kill or by the loss of power: the last good checkpoint can be loaded."""

from __future__ import annotations

import builtins
import contextlib
import errno
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from spes_p2p import files
from spes_p2p.checkpoint import private as private_module
from spes_p2p.checkpoint.load import load_checkpoint, load_latest
from spes_p2p.errors import StorageFull
from spes_p2p.state.store import StateStore
from tests.checkpoint.test_checkpoint import save
from tests.state.small import commit_round, small_layout, small_store
from tests.state.test_mending import flip

STEPS = ("fsync", "rename", "link", "mkdir", "unlink", "rmdir")
WRITERS = (private_module, files)
"""The modules whose `open` writes the files of a checkpoint."""


class Writer:
    """A file opened for writing that tells `before` and `halfway` of each write."""

    def __init__(self, file: Any, crash: Callable[[], None]) -> None:
        self._file, self._crash = file, crash

    def write(self, data: bytes | memoryview) -> int:
        self._crash()
        view = memoryview(data).cast("B")
        half = len(view) // 2
        self._file.write(view[:half])
        self._file.flush()
        self._crash()
        return half + int(self._file.write(view[half:]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


@contextlib.contextmanager
def at_every_step(crash: Callable[[], None]) -> Iterator[None]:
    """Calls `crash` before each change of the disk, and in the middle of each write."""
    real = {name: getattr(os, name) for name in STEPS}
    inside = False

    def once() -> None:
        nonlocal inside
        if not inside:  # what `crash` does itself is no step
            inside = True
            crash()
            inside = False

    def stepping(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            once()
            return real[name](*arguments, **options)

        return call

    def opened(path: Path, mode: str = "r", **options: Any) -> Any:
        file = builtins.open(path, mode, **options)  # noqa: SIM115 (whoever opens it closes it)
        return Writer(file, once) if mode in ("wb", "xb", "x+b") else file

    with pytest.MonkeyPatch.context() as patch:
        for name in STEPS:
            patch.setattr(os, name, stepping(name))
        for module in WRITERS:
            patch.setattr(module, "open", opened, raising=False)
        yield


@pytest.fixture
def store(tmp_path: Path) -> StateStore:
    store = small_store(tmp_path / "store")
    commit_round(store, 1, range(4))
    return store


def copied(source: Path, target: Path, lost: Callable[[Path], bool]) -> None:
    """What a disk holds; the content of files for which `lost` is true had not reached it."""
    shutil.copytree(source, target)
    for path in target.rglob("*"):
        if path.is_file() and lost(source / path.relative_to(target)):
            path.write_bytes(b"")


@pytest.mark.parametrize("first_step", [100, 200])  # an older checkpoint, and one that is replaced
@pytest.mark.parametrize("power", ["stays", "is cut"])
def test_cut_off_anywhere_a_good_checkpoint_is_there(
    tmp_path: Path, store: StateStore, first_step: int, power: str
) -> None:
    """Without power, what was not synced is gone, though its name may be there."""
    root = tmp_path / "checkpoints"
    save(root, store, first_step, round=0)
    written: set[int] = set()
    real_sync, snapshots = os.fsync, list[Path]()

    def crash() -> None:
        snapshots.append(tmp_path / "snapshots" / str(len(snapshots)))
        inodes = {path.stat().st_ino for path in root.rglob("*") if path.is_file()}
        unsynced = inodes - written if power == "is cut" else frozenset()
        copied(root, snapshots[-1], lambda path: path.stat().st_ino in unsynced)

    def noting(descriptor: int) -> None:
        written.add(os.fstat(descriptor).st_ino)
        real_sync(descriptor)

    for path in (*root.rglob("*"), *store.version(1).folder.rglob("*")):
        written.add(path.stat().st_ino)  # links to what the store has synced long ago
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", noting)
        with at_every_step(crash):
            save(root, store, 200, keep=1)
    found = set()
    for snapshot in snapshots:
        checkpoint, warnings = load_latest(snapshot)
        assert warnings == ()
        found.add((checkpoint.step, checkpoint.round))
    assert found == {(first_step, 0), (200, 1)}
    assert len(snapshots) > 25


def killed_at(root: Path, store_folder: Path, step: int) -> bool:
    """A child that saves and is killed by the kernel at its `step`-th moment; False if it lived."""
    pid = os.fork()
    if pid == 0:
        moments = 0

        def crash() -> None:
            nonlocal moments
            moments += 1
            if moments == step:
                os.kill(os.getpid(), signal.SIGKILL)

        with at_every_step(crash):
            save(root, StateStore(store_folder, small_layout(), read_only=True), 200, keep=1)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def test_a_child_killed_at_random_leaves_a_good_checkpoint(tmp_path: Path, store: StateStore) -> None:
    root, found = tmp_path / "checkpoints", set()
    for step in random.Random(0).sample(range(1, 60), 16):
        shutil.rmtree(root, ignore_errors=True)
        save(root, store, 100, round=0)
        killed_at(root, store.directory, step)
        checkpoint, warnings = load_latest(root)
        assert warnings == ()
        found.add(checkpoint.step)
        save(root, store, 300, keep=1)
        assert [path.name for path in root.iterdir()] == ["step-00000300"]
    assert found == {100, 200}


def test_state_files_that_the_store_has_are_left_to_its_own_check(tmp_path: Path, store: StateStore) -> None:
    root = tmp_path / "checkpoints"
    older, newest = save(root, store, 100, round=0), save(root, store, 200)
    flip(store.version(1), 0)
    checkpoint, warnings = load_latest(root, store.directory)
    assert (checkpoint.folder, warnings) == (newest, ())
    checkpoint, warnings = load_latest(root)
    assert checkpoint.folder == older
    assert "state/block-00000.f32 is damaged in its tile 0" in warnings[0]
    copy = newest / "state" / "block-00001.f32"
    data = bytearray(copy.read_bytes())
    data[3] ^= 1
    copy.unlink()
    copy.write_bytes(data)
    _, warnings = load_latest(root, store.directory)
    assert "state/block-00001.f32 is damaged in its tile 0" in warnings[0]
    store.drop(0)
    load_checkpoint(older, store=store.directory)


def test_a_disk_without_room_for_any_step_leaves_the_older_checkpoint(tmp_path: Path, store: StateStore) -> None:
    """Not only for bytes: for a folder, a link, a new name."""
    root, step, saved = tmp_path / "checkpoints", 0, False
    save(root, store, 100, round=0)
    while not saved:
        step, moments = step + 1, 0

        def full(step: int = step) -> None:
            nonlocal moments
            moments += 1
            if moments == step:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with at_every_step(full), contextlib.suppress(StorageFull):
            save(root, store, 200, keep=2)
            saved = moments < step
        assert load_latest(root)[1] == ()
    assert load_latest(root)[0].step == 200
    assert step > 25

"""Files and folders that are whole or not there, also where the disk is full."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from spes_p2p.errors import ConfigError, StorageBroken, StorageFull
from spes_p2p.files import (
    check_is_new,
    made_folder,
    make_folder,
    on_a_sound_disk,
    whole_file,
    whole_folder,
    write_new,
    write_whole,
)
from tests.state.small import all_files, file_size_limit


def test_a_file_is_replaced_at_once_or_stays(tmp_path: Path) -> None:
    path = tmp_path / "vote"
    write_whole(path, b"old")
    with file_size_limit(4), pytest.raises(StorageFull, match=rf"{path}: no room for 5 bytes \(\d+ bytes free\)"):
        write_whole(path, bytes(5))
    assert all_files(tmp_path) == {"vote": b"old"}
    write_whole(path, b"new")
    assert all_files(tmp_path) == {"vote": b"new"}


def fill(path: Path, *, error: Exception | None = None) -> None:
    with whole_file(path) as file:
        file.write(bytes(5))
        file.flush()
        if error is not None:
            raise error


def test_a_file_that_is_not_finished_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="why"):
        fill(tmp_path / "shard", error=ValueError("why"))
    with file_size_limit(4), pytest.raises(StorageFull, match=f"{tmp_path}/shard: no room for more"):
        fill(tmp_path / "shard")
    assert all_files(tmp_path) == {}


def test_two_writers_of_one_file_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "trees"
    with whole_file(path, mark=".1") as first, whole_file(path, mark=".2") as second:
        first.write(b"1")
        second.write(b"2")
    assert all_files(tmp_path) == {"trees": b"1"}


def test_a_name_that_no_file_can_have_is_refused(tmp_path: Path) -> None:
    path = tmp_path / f"{'x' * 300}.yaml"
    check_is_new(path)
    with pytest.raises(ConfigError, match="cannot be written: File name too long"):
        write_new(path, b"run: mine")


def test_a_secret_is_nobody_elses_to_read(tmp_path: Path) -> None:
    path = tmp_path / "key"
    (tmp_path / "key.partial").write_text("of a process that was killed, for all to read")
    write_whole(path, b"secret", mode=0o600)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_folder_comes_whole_in_place_of_an_older_one(tmp_path: Path) -> None:
    target, partial = tmp_path / "step", tmp_path / "step.partial"

    def make(name: str) -> None:
        with whole_folder(target, partial) as folder:
            (folder / name).write_bytes(bytes(5))

    partial.mkdir()
    (partial / "left").touch()
    make("a")
    with file_size_limit(4), pytest.raises(StorageFull, match=f"{partial}: no room for more"):
        make("b")
    assert all_files(tmp_path) == {"step/a": bytes(5)}
    make("b")
    assert all_files(tmp_path) == {"step/b": bytes(5)}


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be created: Not a directory"):
        make_folder(tmp_path / "file" / "folder")
    with pytest.raises(ConfigError, match="file of --output cannot be created: a file has this name"):
        make_folder(tmp_path / "file")
    make_folder(tmp_path / "new" / "folder")
    assert (tmp_path / "new" / "folder").is_dir()


def test_a_folder_that_was_made_in_vain_goes_again(tmp_path: Path) -> None:
    def write_in_vain(folder: Path, *files: str) -> None:
        with made_folder(folder):
            for name in files:
                (folder / name).touch()
            raise ValueError("in vain")

    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "new" / "folder"):
        with pytest.raises(ValueError, match="in vain"):
            write_in_vain(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]
    with pytest.raises(ValueError, match="in vain"):
        write_in_vain(tmp_path / "new" / "folder", "identity.key")
    with made_folder(tmp_path / "good"):
        pass
    assert (tmp_path / "new" / "folder" / "identity.key").exists()
    assert (tmp_path / "good").is_dir()


@pytest.mark.parametrize("number", [errno.EROFS, errno.EIO, errno.EACCES])
def test_a_disk_that_fails_is_named_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """What fails at an open file does not say which it was."""

    def fail(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    wanted = f"{tmp_path / 'votes'} cannot be read or written: {os.strerror(number)}"
    with pytest.raises(StorageBroken, match=wanted), on_a_sound_disk(tmp_path):
        write_whole(tmp_path / "votes", b"mine")
    with pytest.raises(StorageBroken, match=f"{tmp_path} cannot be"), on_a_sound_disk(tmp_path):
        fail(0)


def test_what_is_a_fault_of_ours_keeps_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), on_a_sound_disk(tmp_path):
        (tmp_path / "nothing").read_bytes()

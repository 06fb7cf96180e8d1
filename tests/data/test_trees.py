"""The hash trees of a folder: made once, kept, made anew where the shards are others, and never in the way."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from spes_p2p.data.manifest import Dataset
from spes_p2p.data.tokenize import TokenizeOptions, tokenize
from spes_p2p.data.trees import TREES, FolderPieces
from spes_p2p.errors import DataError
from tests.data.piece_makers import make_dataset, make_pieces


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("abcdefgh" * 4000)
    tokenize([str(tmp_path / "a.txt")], tmp_path / "out", TokenizeOptions(processes=1, max_shard_bytes=25_000))
    return tmp_path / "out"


def opened(folder: Path) -> FolderPieces:
    """A folder of shards, or its manifest."""
    return FolderPieces.open(Dataset.open(folder), folder.parent / "own", lambda text: None)


def test_a_prepared_folder_is_hashed_once(folder: Path) -> None:
    """By tokenize, so that a web server can hold the hashes beside the shards."""
    assert (folder / TREES).is_file()
    first = opened(folder)
    trees = folder / TREES
    written = trees.stat().st_mtime_ns, trees.stat().st_ino
    again = opened(folder)
    assert (trees.stat().st_mtime_ns, trees.stat().st_ino) == written
    assert first.catalogue == again.catalogue
    assert first.held == sum(-(-shard.tokens * 2 // 8192) for shard in first.catalogue.shards)
    assert list(folder.parent.glob("own/*")) == []


def test_the_hash_is_that_of_the_tokens_and_their_shards_alone(folder: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.move(folder, moved)
    tokens = [np.load(shard) for shard in sorted(moved.glob("*.npy"))]
    other = tmp_path / "list"
    other.mkdir()
    for index, part in enumerate(tokens):
        (other / f"{index}.raw").write_bytes(part.tobytes())
    (other / "paths.txt").write_text("".join(f"{index}.raw\n" for index in range(len(tokens))))
    raw = FolderPieces.open(Dataset.open(other / "paths.txt", "uint16"), tmp_path / "own", lambda text: None)
    assert raw.dataset_hash == opened(moved).dataset_hash == opened(moved / "manifest.json").dataset_hash
    tokens[1][0] ^= 1
    (other / "1.raw").write_bytes(tokens[1].tobytes())
    changed = FolderPieces.open(Dataset.open(other / "paths.txt", "uint16"), tmp_path / "own", lambda text: None)
    assert changed.dataset_hash != raw.dataset_hash


def test_what_was_kept_of_other_shards_or_is_damaged_is_made_anew(folder: Path) -> None:
    whole = opened(folder).dataset_hash
    trees = folder / TREES
    for damaged in (b"", b"junk" * 100, trees.read_bytes()[:-1], trees.read_bytes()[:100]):
        trees.write_bytes(damaged)
        assert opened(folder).dataset_hash == whole
    make_pieces(folder.parent / "raw")
    shutil.copy(folder.parent / "raw" / TREES, trees)
    assert opened(folder).dataset_hash == whole


def test_where_the_folder_cannot_be_written_the_trees_are_kept_in_the_own_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / TREES).unlink()
    (folder / TREES).mkdir()  # nobody can put a file there, not even root
    pieces = opened(folder)
    assert (folder.parent / "own" / TREES).is_file()
    assert pieces.find(0) is not None
    assert opened(folder).dataset_hash == pieces.dataset_hash
    assert list(folder.glob("*.partial")) == []


def test_what_a_killed_process_had_begun_is_removed(folder: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left, running = folder / f"{TREES}.{ended.pid}.partial", folder / f"{TREES}.1.partial"
    left.touch()
    running.touch()
    (folder / TREES).unlink()
    opened(folder)
    assert not left.exists()
    assert running.exists()


def test_an_altered_shard_is_no_part_of_a_run(folder: Path) -> None:
    shard = folder / "a-00001.npy"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(DataError, match=r"a-00001.npy was altered"):
        opened(folder)


def test_a_shard_that_is_damaged_later_is_not_handed_out(tmp_path: Path) -> None:
    pieces = make_pieces(tmp_path)
    assert all(pieces.find(piece) for piece in range(pieces.held))
    data = bytearray((tmp_path / "0.raw").read_bytes())
    data[20] ^= 1  # in the second piece
    (tmp_path / "0.raw").write_bytes(data)
    assert [piece for piece in range(pieces.held) if pieces.find(piece) is None] == [1]
    (tmp_path / "0.raw").unlink()
    assert pieces.find(0) is None


def test_a_large_shard_is_hashed_level_by_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spes_p2p.data.trees._NODES_AT_ONCE", 4)
    monkeypatch.setattr("spes_p2p.data.trees._READ_BYTES", 48)
    few = make_pieces(tmp_path / "few", (999,))
    monkeypatch.undo()
    assert few.dataset_hash == make_pieces(tmp_path / "many", (999,)).dataset_hash
    assert make_dataset(tmp_path / "few", (999,)).tokens == 999
    assert all(few.find(piece) for piece in range(few.held))

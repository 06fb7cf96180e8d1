"""Datasets on disk: both forms open, and damage is named."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from spes_p2p.data.manifest import Dataset
from spes_p2p.data.memmap import TokenSequences
from spes_p2p.data.tokenize import TokenizeOptions, tokenize
from spes_p2p.data.trees import FolderPieces
from spes_p2p.errors import DataError
from tests.data.piece_makers import is_unaltered


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("abcdefgh" * 40)
    tokenize([str(tmp_path / "a.txt")], tmp_path / "out", TokenizeOptions(processes=1, max_shard_bytes=400))
    return tmp_path / "out"


def raw_list(folder: Path, *parts: np.ndarray) -> Path:
    for index, part in enumerate(parts):
        (folder / f"{index}.npy").write_bytes(part.tobytes())
    (folder / "paths.txt").write_text("".join(f"{index}.npy\n" for index in range(len(parts))))
    return folder / "paths.txt"


def test_shards_are_real_npy_files_of_bounded_size(folder: Path) -> None:
    shards = sorted(folder.glob("*.npy"))
    assert len(shards) == 3
    assert max(shard.stat().st_size for shard in shards) <= 400
    tokens = np.concatenate([np.load(shard) for shard in shards])
    assert bytes(tokens[:-1].astype(np.uint8)) == b"abcdefgh" * 40
    assert tokens[-1] == 256
    assert is_unaltered(Dataset.open(folder))


def test_a_truncated_shard_is_named(folder: Path) -> None:
    shard = folder / "a-00001.npy"
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"a-00001.npy is truncated: 270 bytes are not 136 tokens") as caught:
        Dataset.open(folder)
    assert "copy a-00001.npy again" in caught.value.fix
    shard.unlink()
    with pytest.raises(DataError, match=r"a-00001.npy is missing"):
        Dataset.open(folder)


def test_a_shard_of_another_corpus_is_refused(folder: Path) -> None:
    np.save(folder / "a-00000.npy", np.zeros(3, dtype=np.uint32))
    with pytest.raises(DataError, match="3 tokens of uint32, but the manifest says 136 of uint16"):
        Dataset.open(folder)


@pytest.mark.parametrize("name", ["../secret", "sub/../../secret", "{parent}/secret", 5])
def test_a_manifest_names_no_file_outside_of_its_folder(folder: Path, name: str | int) -> None:
    """Whoever serves the dataset would hand that file out."""
    (folder.parent / "secret").write_bytes(b"a key!")
    (folder / "sub").mkdir()
    path = folder / "manifest.json"
    plain = json.loads(path.read_text())
    file = name.format(parent=folder.parent) if isinstance(name, str) else name
    plain["shards"] = [{"file": file, "tokens": 3, "sha256": hashlib.sha256(b"a key!").hexdigest()}]
    path.write_text(json.dumps(plain))
    with pytest.raises(DataError, match="which is not in its folder"):
        Dataset.open(folder)


@pytest.mark.parametrize("said", [None, "", 5, "00" * 32])
def test_a_link_in_a_dataset_hands_out_no_file_of_this_machine(folder: Path, said: object) -> None:
    """Links are allowed (the hub's cache is made of them), but only to what the manifest's maker knew already."""
    (folder.parent / "secret").write_bytes(b"a key!")
    (folder / "key.npy").symlink_to(folder.parent / "secret")
    path = folder / "manifest.json"
    plain = json.loads(path.read_text())
    plain["shards"].append({"file": "key.npy", "tokens": 3, "sha256": said})
    path.write_text(json.dumps(plain))
    with pytest.raises(DataError, match=r"manifest.json is damaged|key.npy was altered"):
        FolderPieces.open(Dataset.open(folder), folder.parent / "own", lambda text: None)


@pytest.mark.parametrize("wrong", [{"vocab_size": "257"}, {"vocab_size": 0}, {"eos_id": None}, {"eos_id": -1}])
def test_a_manifest_with_impossible_ids_is_damaged(folder: Path, wrong: dict[str, object]) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | wrong))
    with pytest.raises(DataError, match="is damaged: it is not what spes-p2p tokenize writes"):
        Dataset.open(folder)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{\n a", "is damaged: it is not valid JSON at line 2, character 2"),
        ("[]", "is damaged: it is not what spes-p2p tokenize writes"),
        ('{"format_version": 1}', "is damaged: it has no 'inputs'"),
        ('{"format_version": 1, "inputs": [{}]}', "is damaged: it is not what spes-p2p tokenize writes"),
    ],
)
def test_a_damaged_manifest_is_refused(folder: Path, content: str, words: str) -> None:
    (folder / "manifest.json").write_text(content)
    with pytest.raises(DataError, match=words):
        Dataset.open(folder)


def test_a_newer_format_is_refused(folder: Path) -> None:
    plain = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(plain | {"format_version": 2}))
    with pytest.raises(DataError, match="format version 2, but this program reads 1"):
        Dataset.open(folder)


def test_raw_memmaps_are_read_by_the_size_of_the_vocabulary(tmp_path: Path) -> None:
    small, large = np.arange(8, dtype="<u2"), np.arange(70000, 70008, dtype="<u4")
    assert Dataset.open(raw_list(tmp_path, small), vocab_size=65536).tokens == 8
    dataset = Dataset.open(raw_list(tmp_path, large[:3], large[3:]), vocab_size=65537)
    assert TokenSequences(dataset, 4).read(np.array([1, 0])).tolist() == [
        [70004, 70005, 70006, 70007],
        [70000, 70001, 70002, 70003],
    ]


def test_raw_lists_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    path = raw_list(tmp_path, np.arange(3, dtype="<u2"))
    with pytest.raises(DataError, match=r"0.npy is truncated: 6 bytes are not whole tokens of uint32"):
        Dataset.open(path, "uint32")
    with pytest.raises(DataError, match="dtype of the raw memmaps"):
        Dataset.open(path)
    path.write_text("# nothing\n")
    with pytest.raises(DataError, match="lists no file"):
        Dataset.open(path, "uint16")
    with pytest.raises(DataError, match="there is no dataset"):
        Dataset.open(tmp_path / "nowhere")


def test_a_list_may_begin_with_the_mark_that_windows_puts_there(tmp_path: Path) -> None:
    path = raw_list(tmp_path, np.arange(8, dtype=np.uint16))
    path.write_text(path.read_text(), encoding="utf-8-sig")
    assert Dataset.open(path, "uint16").tokens == 8


@pytest.mark.parametrize("text", ["some prose that is not a path\n", "x" * 5000 + "\n"])
def test_text_in_place_of_a_list_of_paths_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "corpus.txt").write_text(text)
    with pytest.raises(DataError, match=r"corpus.txt lists .*, which is not a file") as caught:
        Dataset.open(tmp_path / "corpus.txt", vocab_size=300)
    assert "spes-p2p tokenize" in caught.value.fix

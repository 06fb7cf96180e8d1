"""A run from a model: data of another tokenizer is refused, and a doubt is said."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from spes_p2p.data.manifest import Dataset
from spes_p2p.data.tokenizers import ByteTokenizer, load_tokenizer
from spes_p2p.errors import ConfigError
from spes_p2p.interop.tokenizer import Publishable, check_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a model with a tokenizer of three ids."""
    words = {"<|endoftext|>": 0, "a": 1, "b": 2}
    Tokenizer(models.WordLevel(words, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def dataset(name: str | None, ids: int | None = None, fingerprint: str | None = None) -> Dataset:
    return Dataset("uint16", (), ids, 0, name, fingerprint)


BYTES = dataset("byte", ByteTokenizer.vocab_size, ByteTokenizer.fingerprint)


def said(folder: Path, data: Dataset) -> list[str]:
    lines = list[str]()
    check_tokenizer(folder, data, lines.append)
    return lines


def test_bytes_for_a_model_of_words_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenized with 'byte' of 257 ids.*has 3$") as caught:
        said(folder, BYTES)
    assert f"--tokenizer {folder}" in caught.value.fix


def test_its_own_tokenizer_is_taken_without_a_word(folder: Path) -> None:
    own = load_tokenizer(str(folder))
    assert said(folder, dataset("of/the/hub", own.vocab_size, own.fingerprint)) == []


def test_bytes_go_with_a_model_that_a_run_on_bytes_has_made(tmp_path: Path) -> None:
    Publishable("byte").save(tmp_path, 32)
    assert said(tmp_path, BYTES) == []


def test_what_cannot_be_known_is_said(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    bare = tmp_path_factory.mktemp("bare")
    assert said(bare, BYTES)[0].endswith("that folder has no tokenizer.json; the data names 'byte'")
    assert said(folder, dataset(None))[0].endswith("the data names no tokenizer")
    assert said(folder, dataset("a/name", 3, "ab" * 32))[0].endswith(
        "'a/name' has the same number of ids but a different hash"
    )

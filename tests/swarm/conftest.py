"""The text that all these swarms train on, tokenized once."""

from __future__ import annotations

from pathlib import Path

import pytest

from spes_p2p.data.corpus import build_stdlib_corpus
from spes_p2p.data.tokenize import TokenizeOptions, tokenize


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of 400 kB of real text, in bytes."""
    folder = tmp_path_factory.mktemp("data")
    build_stdlib_corpus(folder / "corpus", 400_000, files=1)
    tokenize([str(folder / "corpus")], folder / "tokens", TokenizeOptions(tokenizer="byte", processes=1))
    return folder / "tokens"

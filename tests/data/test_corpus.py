"""The corpus that every Python carries."""

from __future__ import annotations

import json
from pathlib import Path

from spes_p2p.data.corpus import build_stdlib_corpus


def test_the_corpus_is_real_text_of_bounded_size_and_always_the_same(tmp_path: Path) -> None:
    first, second = (build_stdlib_corpus(tmp_path / name, 300_000) for name in "ab")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    documents = [json.loads(line) for path in first for line in path.read_text().splitlines()]
    size = sum(len(document["text"].encode()) for document in documents)
    assert size == 300_000
    assert documents[0]["source"] == "__future__.py"

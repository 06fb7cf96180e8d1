"""Datasets cut into small pieces, and what stands in for a network: pieces handed from one shelf to another."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from spes_p2p.data.feed import Feed
from spes_p2p.data.manifest import Dataset, hash_tokens
from spes_p2p.data.piece_cache import PieceCache
from spes_p2p.data.trees import FolderPieces

PIECE_BYTES = 16
TOKENS = (70, 0, 9, 33)
"""Of four shards: pieces of 8 tokens, the last ones shorter, and none of the second."""


def make_dataset(folder: Path, counts: tuple[int, ...] = TOKENS) -> Dataset:
    """Token i of the whole dataset is i."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = np.split(np.arange(sum(counts), dtype="<u2"), np.cumsum(counts)[:-1])
    for index, part in enumerate(parts):
        (folder / f"{index}.raw").write_bytes(part.tobytes())
    (folder / "paths.txt").write_text("".join(f"{index}.raw\n" for index in range(len(parts))))
    return Dataset.open(folder / "paths.txt", "uint16")


def is_unaltered(dataset: Dataset) -> bool:
    return all(file.sha256 == hash_tokens(file) for file in dataset.files)


def make_pieces(folder: Path, counts: tuple[int, ...] = TOKENS, piece_bytes: int = PIECE_BYTES) -> FolderPieces:
    return FolderPieces.open(make_dataset(folder, counts), folder / "own", lambda text: None, piece_bytes)


def make_feed(folder: Path, pieces: FolderPieces, slots: int | None = None) -> tuple[Feed, list[str]]:
    """An empty one with room for so many pieces (None: all), and what it says."""
    said: list[str] = []
    slot = pieces.grid.max_bytes + 8
    count = pieces.grid.total if slots is None else slots
    return Feed(PieceCache(folder, pieces.grid, count * slot), said.append), said


def hand_over(pieces: FolderPieces, feed: Feed, most: int = 10**6) -> int:
    """Gives the feed what it misses; how many pieces that was."""
    missing = feed.missing(most).pieces
    for piece in missing:
        joined = pieces.find(piece)
        assert joined is not None
        feed.take([(piece, joined)])
    return len(missing)

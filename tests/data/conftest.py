"""Small datasets and configs for the data tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from spes_p2p.config.load import bundled_config, load_config
from spes_p2p.config.schema import Config
from spes_p2p.data.manifest import Dataset


def tiny_config(*overrides: str) -> Config:
    """The tiny run with sequences of 4 tokens and batches of 4, nothing held out."""
    small = ["data.sequence_length=4", "optimizer.batch_sequences=4", "data.held_out_fraction=0.0"]
    return load_config(bundled_config("tiny"), [*small, *overrides])


@pytest.fixture
def counting(tmp_path: Path) -> Callable[[int], Dataset]:
    """A raw dataset in which every token of sequence i (of 4 tokens) is i, cut into files at odd places."""

    def make(sequences: int) -> Dataset:
        tokens = np.repeat(np.arange(sequences, dtype="<u2"), 4)
        names = []
        for index, part in enumerate(np.split(tokens, [7, 7, len(tokens) // 2 + 1])):
            (tmp_path / f"part-{index}.raw").write_bytes(part.tobytes())
            names.append(f"part-{index}.raw")
        (tmp_path / "paths.txt").write_text("# a comment\n\n" + "\n".join(names))
        return Dataset.open(tmp_path / "paths.txt", "uint16")

    return make

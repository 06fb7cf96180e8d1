"""Token files as one long stream, cut into sequences, the last of which are kept out of training.

Sequence i is tokens [i * S, (i + 1) * S) of all files put together; S inputs give S - 1 targets, the shift happens
inside the model. What does not fill a sequence at the very end is left out, and so is the order of training
(`order.py`).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from spes_p2p.data.manifest import Dataset
from spes_p2p.errors import DataError

OPEN_FILES = 128
"""Memory maps kept open; each one holds a file descriptor."""


class TokenSequences:
    """Sequences of a dataset by number."""

    def __init__(self, dataset: Dataset, sequence_length: int, held_out_fraction: float = 0.0) -> None:
        self._dataset = dataset
        self._files = [file for file in dataset.files if file.tokens]
        self.sequence_length = sequence_length
        self._ends = np.cumsum([file.tokens for file in self._files], dtype=np.int64)
        self._map = lru_cache(OPEN_FILES)(self._open_map)
        total = dataset.tokens // sequence_length
        self.held_out = min(total, max(1, int(total * held_out_fraction))) if held_out_fraction > 0 else 0
        """Sequences at the end that nobody trains on."""
        self.training = total - self.held_out
        """Sequences 0 to training - 1 are trained on."""

    def read(self, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
        """The tokens [len(sequences), sequence_length] of sequences by number."""
        tokens = np.empty((len(sequences), self.sequence_length), dtype=np.int64)
        starts = sequences * self.sequence_length
        files = np.searchsorted(self._ends, starts, side="right")
        for row, file, start in zip(tokens, files.tolist(), starts.tolist(), strict=True):
            self._read_into(row, file, start)
        return tokens

    def _read_into(self, row: NDArray[np.int64], index: int, start: int) -> None:
        filled = 0
        while filled < len(row):
            file, begin = self._map(index)
            inside = start + filled - begin
            part = file[inside : inside + len(row) - filled]
            row[filled : filled + len(part)] = part
            filled += len(part)
            index += 1

    def _open_map(self, index: int) -> tuple[NDArray[np.unsignedinteger], int]:
        """The tokens of one file, and where they begin in the stream."""
        file = self._files[index]
        dtype = np.dtype(self._dataset.dtype).newbyteorder("<")
        try:
            # np.asarray: slices of a plain array are made several times faster than those of np.memmap
            tokens = np.asarray(np.memmap(file.path, dtype, mode="r", offset=file.offset_bytes, shape=(file.tokens,)))
        except (OSError, ValueError) as error:
            raise DataError(f"shard {file.path} cannot be read: {error}", fix="copy it again") from error
        return tokens, int(self._ends[index]) - file.tokens

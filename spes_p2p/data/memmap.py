"""Token files as one long stream, cut into sequences, the last of which are kept out of training.

Sequence i is tokens [i * S, (i + 1) * S) of all files put together, or of those of one of several datasets; S inputs
give S - 1 targets, the shift happens inside the model. What does not fill a sequence at the very end is left out, and
so is the order of training (`order.py`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from spes_p2p.data.feed import PieceDataset
from spes_p2p.data.manifest import Dataset
from spes_p2p.errors import DataError

OPEN_FILES = 128
"""Memory maps kept open; each one holds a file descriptor."""


class TokenSequences:
    """Sequences of a dataset by number."""

    def __init__(
        self,
        dataset: Dataset | PieceDataset,
        sequence_length: int,
        held_out_fraction: float = 0.0,
        parts: Sequence[int] = (),
    ) -> None:
        """`parts`: tokens of each of several datasets in it; none: it is one. Raises DataError for other tokens."""
        self._tokens = dataset.feed if isinstance(dataset, PieceDataset) else MappedTokens(dataset)
        self.sequence_length = sequence_length
        parts = parts or (dataset.tokens,)
        if sum(parts) != dataset.tokens:
            raise DataError(
                f"the data has {dataset.tokens:,} tokens, but data.datasets lists {sum(parts):,}",
                fix="leave data.datasets out: bootstrap fills it in",
            )
        counts = np.array([count_sequences(tokens, sequence_length, held_out_fraction) for tokens in parts], np.int64)
        self.training_of: list[int] = counts[:, 0].tolist()
        """Of each part; sequences are numbered part by part, first those that are trained on, then the others."""
        self.training, self.held_out = counts.sum(axis=0).tolist()
        """Sequences 0 to training - 1 are trained on; those at the end by nobody."""
        ends = np.cumsum(counts.T.ravel())
        first_token = np.cumsum([0, *parts[:-1]])
        held_out_token = first_token + counts[:, 0] * sequence_length
        self._ends = ends
        self._shifts = np.concatenate((first_token, held_out_token)) - (ends - counts.T.ravel()) * sequence_length

    @property
    def come_from_others(self) -> bool:
        """They must be asked for, and waited for."""
        return not isinstance(self._tokens, MappedTokens)

    @property
    def is_tight(self) -> bool:
        """Whether the last `need` asked for more than fits at once, so that it must be repeated once some was read."""
        return self._tokens.is_tight

    def starts(self, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
        """The token at which each begins."""
        block = np.searchsorted(self._ends, sequences, side="right")
        return np.asarray(sequences * self.sequence_length + self._shifts[block])

    def need(self, sequences: NDArray[np.int64], always: bool = False) -> None:
        """These will be read, in this order; `always`: again and again."""
        self._tokens.need(self.starts(sequences), self.sequence_length, always)

    def wait(self, sequences: NDArray[np.int64], should_stop: Callable[[], bool]) -> bool:
        """Until these can be read, next; False where `should_stop` said so first."""
        return self._tokens.wait(self.starts(sequences), self.sequence_length, should_stop)

    def read(self, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
        """The tokens [len(sequences), sequence_length] of sequences by number."""
        tokens = np.empty((len(sequences), self.sequence_length), dtype=np.int64)
        for row, start in zip(tokens, self.starts(sequences).tolist(), strict=True):
            self._tokens.read_into(row, start)
        return tokens


def count_sequences(tokens: int, sequence_length: int, held_out_fraction: float) -> tuple[int, int]:
    """(sequences to train on, sequences held out) of so many tokens."""
    total = tokens // sequence_length
    held_out = min(total, max(1, int(total * held_out_fraction))) if held_out_fraction > 0 else 0
    return total - held_out, held_out


class MappedTokens:
    """The tokens of files on this machine, mapped into memory: nothing to wait for."""

    is_tight = False

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._files = [file for file in dataset.files if file.tokens]
        self._ends: list[int] = np.cumsum([file.tokens for file in self._files], dtype=np.int64).tolist()
        self._map = lru_cache(OPEN_FILES)(self._open_map)

    def need(self, starts: NDArray[np.int64], length: int, always: bool = False) -> None:
        """Does nothing: all tokens are on this machine."""

    def wait(self, starts: NDArray[np.int64], length: int, should_stop: Callable[[], bool]) -> bool:
        return True

    def read_into(self, row: NDArray[np.int64], start: int) -> None:
        index, filled = bisect_right(self._ends, start), 0
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
        return tokens, self._ends[index] - file.tokens

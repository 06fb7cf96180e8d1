"""Finds sequences that repeat a short pattern over and over (log spam, tables of zeros), which spoil training.

The published SPES configs leave such sequences out of the loss: a pattern of 1 to 13 tokens, 32 times or more in a
row. This only finds them; the loader turns the answer into a loss mask.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MAX_PERIOD = 13
MIN_REPEATS = 32
_STRIDE = 8


def has_repetition(
    tokens: NDArray[np.integer], max_period: int = MAX_PERIOD, min_repeats: int = MIN_REPEATS
) -> NDArray[np.bool_]:
    """Which rows of `tokens` [B, S] repeat 1 to `max_period` tokens `min_repeats` times on end -> bool [B].

    A pattern of period p repeats r times where token[i] == token[i + p] holds for p * (r - 1) neighbouring i.
    """
    found = np.zeros(len(tokens), dtype=bool)
    for period in range(1, max_period + 1):
        run = period * (min_repeats - 1)
        if run + period > tokens.shape[1]:
            break
        rows = np.flatnonzero(~found & _may_have_run(tokens, period, run))
        if len(rows):
            found[rows] = _has_run(tokens[rows, period:] == tokens[rows, :-period], run)
    return found


def _may_have_run(tokens: NDArray[np.integer], period: int, run: int) -> NDArray[np.bool_]:
    """False where a look at every eighth token shows that there is no such run: real text is done with after this.

    A run of 24 or more covers three neighbouring multiples of eight.
    """
    if run < 3 * _STRIDE:
        return np.ones(len(tokens), dtype=bool)
    same = tokens[:, period::_STRIDE] == tokens[:, :-period:_STRIDE]
    return np.any(same[:, :-2] & same[:, 1:-1] & same[:, 2:], axis=1, keepdims=True)[:, 0]


def _has_run(flags: NDArray[np.bool_], length: int) -> NDArray[np.bool_]:
    """Which rows of `flags` [B, N] are true at `length` neighbours; the window doubles, so log2(length) passes."""
    window = 1
    while window < length:
        step = min(window, length - window)
        flags = flags[:, :-step] & flags[:, step:]
        window += step
    return np.any(flags, axis=1, keepdims=True)[:, 0]

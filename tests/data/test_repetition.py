"""Repeated patterns are found exactly where a slow, plain search finds them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spes_p2p.data.loader import has_repetition


def plain_search(row: list[int], max_period: int, min_repeats: int) -> bool:
    for period in range(1, max_period + 1):
        length = period * min_repeats
        for start in range(len(row) - length + 1):
            if row[start : start + length] == row[start : start + period] * min_repeats:
                return True
    return False


@pytest.mark.parametrize("period", [1, 2, 5, 12, 13])
@pytest.mark.parametrize("start", [0, 37])
def test_a_planted_pattern_counts_from_32_repeats_on(period: int, start: int) -> None:
    clean = np.arange(1000, 1600)
    tokens = np.stack([clean, clean, clean])
    tokens[1, start : start + 32 * period] = np.tile(np.arange(period), 32)
    tokens[2, start : start + 32 * period - 1] = np.tile(np.arange(period), 32)[:-1]
    assert has_repetition(tokens).tolist() == [False, True, False]


def test_period_14_and_short_sequences_do_not_count() -> None:
    assert not has_repetition(np.tile(np.arange(14), 40)[None]).any()
    assert not has_repetition(np.zeros((2, 31), dtype=np.int64)).any()
    assert has_repetition(np.zeros((0, 64), dtype=np.int64)).shape == (0,)


@settings(deadline=None)
@given(st.lists(st.integers(0, 1), min_size=1, max_size=40), st.integers(1, 4), st.integers(2, 5))
def test_equal_to_a_plain_search(row: list[int], max_period: int, min_repeats: int) -> None:
    found = has_repetition(np.array([row]), max_period, min_repeats)
    assert found.tolist() == [plain_search(row, max_period, min_repeats)]


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 60), st.integers(20, 110), st.integers(1, 3), st.integers(1, 3))
def test_equal_to_a_plain_search_at_the_real_limits(start: int, length: int, period: int, change: int) -> None:
    """A pattern of nearly the length that counts, at any place, perhaps broken in its middle."""
    row = list(range(100, 300))
    row[start : start + length] = [index % period for index in range(length)]
    row[start + length // 2] *= change
    assert has_repetition(np.array([row])).tolist() == [plain_search(row, 13, 32)]

"""How many columns fit into memory."""

from __future__ import annotations

from spes_p2p.ownership.budget import columns_by_experience, columns_that_fit

GIGABYTE = 10**9


def test_what_is_left_after_shared_training_state_and_activations_is_for_columns() -> None:
    """spes-7b on a GPU of 141 GB: 16 GB of weights in memory, 0.69 billion shared values, 0.21 a column."""
    assert columns_that_fit(125 * GIGABYTE, 141 * GIGABYTE, 690_000_000, 208_000_000) == 24
    assert columns_that_fit(64 * GIGABYTE, 80 * GIGABYTE, 690_000_000, 208_000_000) == 10


def test_a_full_device_has_room_for_none() -> None:
    assert columns_that_fit(GIGABYTE, 16 * GIGABYTE, 10**8, 10**6) == 0


def test_what_training_left_at_its_peak_is_for_more_columns() -> None:
    column = 10**6 * 16
    assert columns_by_experience(3, 8 * GIGABYTE + 2 * column, 160 * GIGABYTE, 10**6) == 5
    assert columns_by_experience(3, GIGABYTE, 160 * GIGABYTE, 10**6) == 3  # what was trained does fit

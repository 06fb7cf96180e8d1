"""How many expert columns fit into a peer's memory: arithmetic on numbers that somebody else measured."""

from __future__ import annotations

TRAINED_VALUE_BYTES = 16
"""Of each value that is trained, all in fp32: the value, its gradient, two optimizer moments."""
ACTIVATION_SHARE = 0.25
"""Of all memory, kept free for what an inner step needs for a while: activations, buffers, fragments."""
FRAGMENT_SHARE = 0.05
"""The same once activations have been seen."""


def columns_that_fit(free_bytes: int, total_bytes: int, shared_values: int, column_values: int) -> int:
    """Columns that a peer has memory for, besides training the shared parameters.

    `free_bytes` are left once the model is allocated, without any column: what counts are gradients and moments of the
    shared parameters, and everything of the columns.
    """
    shared = shared_values * (TRAINED_VALUE_BYTES - 4)
    room = free_bytes - round(ACTIVATION_SHARE * total_bytes) - shared
    return max(0, room // (column_values * TRAINED_VALUE_BYTES))


def columns_by_experience(owned: int, spare_bytes: int, total_bytes: int, column_values: int) -> int:
    """Columns that there is memory for, where training `owned` of them left `spare_bytes` at its peak."""
    room = spare_bytes - round(FRAGMENT_SHARE * total_bytes)
    return owned + max(0, room // (column_values * TRAINED_VALUE_BYTES))

"""The order of training: a permutation in every epoch, and the same one on every machine for ever."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from spes_p2p.data.order import Order


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(0, 2**40), st.integers(0, 3))
def test_each_epoch_visits_every_sequence_once(sequences: int, seed: int, epoch: int) -> None:
    positions = np.arange(sequences) + epoch * sequences
    assert sorted(Order(sequences, seed).sequences_at(positions)) == list(range(sequences))


def test_the_order_is_pinned() -> None:
    """Peers of different versions train together: these numbers may never change."""
    assert Order(1000, 7).sequences_at(np.arange(998, 1006)).tolist() == [119, 963, 492, 364, 203, 913, 484, 779]
    huge = Order(10**12, 7).sequences_at(np.array([0, 5 * 10**12]))
    assert huge.tolist() == [514916596483, 162430152949]


def test_epochs_seeds_and_streams_differ() -> None:
    positions = np.arange(100)
    orders = [Order(100, 1), Order(100, 2), Order(100, 1, stream="other")]
    rows = [order.sequences_at(positions).tolist() for order in orders]
    rows.append(orders[0].sequences_at(positions + 100).tolist())
    assert len({tuple(row) for row in rows}) == 4


def test_any_part_of_the_stream_can_be_asked_for_in_any_order() -> None:
    order = Order(50, 3)
    whole = order.sequences_at(np.arange(200))
    picked = np.array([199, 3, 51, 50, 0])
    assert order.sequences_at(picked).tolist() == whole[picked].tolist()


def test_neighbours_are_far_apart_on_average() -> None:
    """A uniform permutation of n items has a mean distance of n / 3 between neighbours."""
    placed = Order(3000, 0).sequences_at(np.arange(3000))
    assert 900 < np.abs(np.diff(placed)).mean() < 1100

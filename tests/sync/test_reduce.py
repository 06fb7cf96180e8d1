"""The arithmetic of one slice."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_p2p.consensus.manifest import Contribution, Slice
from spes_p2p.consensus.turns import Vocabulary
from spes_p2p.ids import PeerId
from spes_p2p.state.layout import Layout, StateTensor, Values
from spes_p2p.sync.reduce import (
    _AT_ONCE,
    LARGEST_ENCODED,
    NON_FINITE,
    NORM_LIMIT,
    TOO_LARGE,
    far_off,
    useless,
    weighted_mean,
)
from spes_p2p.sync.slice_mean import unfit
from tests.simulation.sim_state import run_rules

BASE = np.zeros(8, np.float32)


def changes(*sizes: float) -> dict[PeerId, Values]:
    return {PeerId(f"p{at}"): np.full(8, size, np.float32) for at, size in enumerate(sizes)}


def refused(values: dict[PeerId, Values], steps: dict[str, int] | None = None) -> dict[PeerId, str]:
    useless_ones = useless(values)
    left = {peer: array for peer, array in values.items() if peer not in useless_ones}
    return useless_ones | far_off(left, BASE, {peer: (steps or {}).get(peer, 10) for peer in left})


def test_one_contributor_gives_exactly_its_values() -> None:
    values = np.array([1e-40, -0.0, 3.3e38, 0.1], np.float32)
    assert weighted_mean([values], [7]).tobytes() == values.tobytes()


@given(
    st.integers(1, 6).flatmap(
        lambda n: st.tuples(
            st.lists(st.lists(st.floats(-1e3, 1e3, width=32), min_size=5, max_size=5), min_size=n, max_size=n),
            st.lists(st.integers(1, 10**9), min_size=n, max_size=n),
        )
    )
)
def test_the_mean_is_the_weighted_mean(case: tuple[list[list[float]], list[int]]) -> None:
    values, weights = case
    arrays = [np.array(array, np.float32) for array in values]
    expected = np.average(np.array(arrays, np.float64), axis=0, weights=weights)
    limit = 1e-6 * max(1.0, float(np.max(np.abs(arrays))))
    assert np.allclose(weighted_mean(arrays, weights), expected, rtol=0, atol=limit)


def test_the_mean_is_computed_in_the_given_order_and_leaves_the_inputs() -> None:
    arrays = [np.array([x], np.float32) for x in (0.1, 0.2, 0.3)]
    copies = [array.copy() for array in arrays]
    first = weighted_mean(arrays, [1, 2, 3])
    expected = np.float32(0)
    for at, (array, weight) in enumerate(zip(copies, (1, 2, 3), strict=True)):
        part = array[0] * np.float32(weight / 6)
        expected = part if at == 0 else np.float32(expected + part)
    assert first[0] == expected
    assert all(np.array_equal(array, copy) for array, copy in zip(arrays, copies, strict=True))


@pytest.mark.parametrize("size", [1, _AT_ONCE - 1, _AT_ONCE, 2 * _AT_ONCE + 3])
def test_the_mean_may_take_the_place_of_any_of_its_values(size: int) -> None:
    rng = np.random.default_rng(size)
    arrays = [rng.standard_normal(size, np.float32) for _ in range(3)]
    mean = weighted_mean(arrays, [1, 2, 3])
    whole = arrays[0] * np.float32(1 / 6) + arrays[1] * np.float32(2 / 6) + arrays[2] * np.float32(3 / 6)
    assert mean.tobytes() == whole.tobytes()
    for at in range(3):
        copies = [array.copy() for array in arrays]
        assert weighted_mean(copies, [1, 2, 3], copies[at]) is copies[at]
        assert copies[at].tobytes() == mean.tobytes()


@pytest.mark.parametrize("place", [0, _AT_ONCE, 2 * _AT_ONCE + 2])
def test_what_is_wrong_anywhere_in_a_long_slice_is_found(place: int) -> None:
    base = np.zeros(2 * _AT_ONCE + 3, np.float32)
    values = {PeerId(f"p{at}"): np.ones_like(base) for at in range(5)}
    values[PeerId("p1")][place] = np.nan
    values[PeerId("p2")][place] = 1e35
    values[PeerId("p3")][place] = 1e25
    assert useless(values, LARGEST_ENCODED) == {"p1": NON_FINITE, "p2": TOO_LARGE}
    left = {peer: array for peer, array in values.items() if peer not in ("p1", "p2")}
    assert far_off(left, base, dict.fromkeys(left, 10)) == {"p3": TOO_LARGE}


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused_from_anybody(wrong: float) -> None:
    values = changes(1.0)
    values[PeerId("p0")][3] = wrong
    assert refused(values) == {"p0": NON_FINITE}


def test_a_change_far_beyond_the_median_is_refused() -> None:
    assert refused(changes(1.0, 1.1, 0.9, 1.2 * NORM_LIMIT)) == {"p3": TOO_LARGE}
    assert refused(changes(1.0, 1.0, 0.95 * NORM_LIMIT)) == {}


def test_two_cannot_judge_each_other() -> None:
    assert refused(changes(1.0, 1e6)) == {}


def test_a_fast_peer_may_move_further() -> None:
    """A hundred steps go further than one: changes are compared a step."""
    assert refused(changes(1.0, 1.0, 100.0), {"p0": 1, "p1": 1, "p2": 100}) == {}
    assert refused(changes(1.0, 1.0, 100.0), {"p0": 1, "p1": 1, "p2": 1}) == {"p2": TOO_LARGE}


def test_an_infinite_norm_of_finite_values_is_refused() -> None:
    assert refused(changes(1.0, 1.0, 3e38)) == {"p2": TOO_LARGE}


def test_a_round_in_which_most_changed_nothing_refuses_nobody() -> None:
    assert refused(changes(0.0, 0.0, 1.0)) == {}


def test_what_is_not_finite_does_not_count_for_the_median() -> None:
    values = changes(1.0, 1.0, 1e6)
    values[PeerId("p1")][0] = np.nan
    assert refused(values) == {"p1": NON_FINITE}


def test_where_changes_grow_for_several_rounds_who_has_just_begun_does_not_shut_the_others_out() -> None:
    """In vocabulary or columns that take turns, steps of one round say nothing of those behind a change."""
    values = changes(1.0, 1.0, 1.0, 1.2 * NORM_LIMIT, 6 * NORM_LIMIT)
    steps = dict.fromkeys(values, 1)
    assert set(far_off(values, BASE, steps)) == {"p3", "p4"}
    assert set(far_off(values, BASE, steps, rounds=5)) == {"p4"}


def test_who_is_a_hundred_times_as_fast_is_fit_where_parts_take_turns_too() -> None:
    layout = Layout([StateTensor("head", (len(BASE),), None, "zeros")], len(BASE))
    rules = dataclasses.replace(run_rules(columns=1, shared_tiles=1), vocabulary=Vocabulary(1, 2))
    values = changes(1.0, 1.0, 1.0, 100.0, 1e6)
    steps = {"p3": 200, "p4": 200}
    roster = {peer: Contribution(peer, 8, steps.get(peer, 2), 8) for peer in values}
    assert unfit(rules, layout, Slice(0, 0, 1, PeerId("p0"), tuple(values)), roster, values, BASE) == {"p4": TOO_LARGE}


@pytest.mark.parametrize("turns", [1, 5])
def test_one_that_went_astray_does_not_spoil_embedding_and_head(turns: int) -> None:
    """Where they take turns nobody knows the steps behind a change: its size is compared all the same."""
    layout = Layout([StateTensor("head", (len(BASE),), None, "zeros")], len(BASE))
    rules = dataclasses.replace(run_rules(columns=1, shared_tiles=1), vocabulary=Vocabulary(1, turns))
    values = changes(1.0, 1.1, 0.9, 1.2, 1e6)
    roster = {peer: Contribution(peer, 8, 1 if peer == "p3" else 100, 8) for peer in values}  # p3 is about to leave
    values[PeerId("p3")] /= 1 if turns > 1 else 100
    piece = Slice(0, 0, 1, PeerId("p0"), tuple(values))
    assert unfit(rules, layout, piece, roster, values, BASE) == {"p4": TOO_LARGE}


def test_what_a_lossy_codec_could_not_carry_is_its_senders_fault_alone() -> None:
    values = changes(1.0, 3e38)
    assert useless(values, LARGEST_ENCODED) == {"p1": TOO_LARGE}
    assert useless(values) == {}

"""Deadlines: learnt from what was observed, with floors and caps."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from spes_p2p.consensus.timing import Pace


def taught(gaps: list[float], heartbeat_seconds: float = 1.0) -> Pace:
    pace = Pace(heartbeat_seconds)
    for gap in gaps:
        pace.observe_gap(gap)
    return pace


def test_before_anything_is_learnt_the_floors_hold() -> None:
    pace = Pace(0.5)
    assert pace.suspect_seconds == 2.0
    assert pace.deadline_seconds(0) == 3.0
    assert pace.round_seconds == 0.0


def test_a_slow_network_is_given_more_time() -> None:
    assert taught([3.0] * 64).suspect_seconds > taught([1.0] * 64).suspect_seconds


def test_one_fault_among_many_good_messages_moves_nothing() -> None:
    assert taught([1.0] * 64 + [4.0] + [1.0] * 64).suspect_seconds == taught([1.0] * 128).suspect_seconds


@given(st.lists(st.floats(0, 1e6), max_size=200))
def test_whatever_is_observed_nobody_waits_for_ever(gaps: list[float]) -> None:
    pace = taught(gaps)
    for seconds in gaps:
        pace.observe_quiet(seconds)
    assert 4.0 <= pace.suspect_seconds <= Pace.SUSPECT_CAP_SECONDS
    assert pace.suspect_seconds < pace.deadline_seconds(0) <= pace.deadline_seconds(60) <= Pace.DEADLINE_CAP_SECONDS


def test_deadlines_double_with_each_ballot() -> None:
    pace = Pace(1.0)
    assert [pace.deadline_seconds(ballot) for ballot in range(4)] == [6.0, 12.0, 24.0, 48.0]


def test_a_stuck_reducer_does_not_cost_the_leader_its_ballot() -> None:
    pace = Pace(1.0)
    assert pace.slice_seconds(0) < pace.deadline_seconds(0)


def test_the_learnt_round_is_the_median_of_the_last() -> None:
    pace = Pace(1.0)
    for seconds in (10.0, 11.0, 500.0, 12.0, 11.0):
        pace.observe_round(seconds)
    assert pace.round_seconds == 11.0
    assert pace.close_after_seconds([]) > 11.0

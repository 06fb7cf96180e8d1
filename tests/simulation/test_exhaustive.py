"""Every order of deliveries, losses and crashes of three peers in one round, and planted faults that must be found.

With `--thorough` of two faults: minutes of CPU time.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.consensus import planted
from tests.simulation.attackers.leaders import machine_with
from tests.simulation.exhaustive import Found, explore_all
from tests.simulation.small_world import CRASH, LATE, LOSE


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("faults", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_no_order_of_deliveries_losses_and_crashes_breaks_a_rule(
    faults: int, record_property: Callable[[str, object], None]
) -> None:
    report = explore_all(faults)
    record_property("told", str(report))
    assert report.whole
    assert report.states > 8_000 * 8 ** (faults - 1)
    assert {"deliver", "lose", "crash", "crash in", "beat"} <= set(report.kinds)
    assert {"vote", "certify", "adopt", "follow"} <= set(report.fired)
    assert report.splits == 0 or faults > 1


@pytest.mark.thorough
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("leader", [0, 2])
def test_no_order_breaks_a_rule_whoever_leads(leader: int) -> None:
    assert explore_all(1, leader=leader).whole


@pytest.mark.parametrize("servers", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_no_order_breaks_a_rule_where_some_only_serve(servers: int) -> None:
    report = explore_all(1, servers=servers)
    assert report.whole
    assert report.states > 20_000
    assert {"crash", "crash in", "lose", "beat"} <= set(report.kinds)


def test_messages_that_overtake_each_other_break_nothing() -> None:
    assert explore_all(1, (LATE,), ordered=False, most_states=6000).states == 6000


@pytest.mark.parametrize(
    ("fault", "faults", "kind"),
    [
        (planted.ForgetsLocks, 0, "lock"),
        (planted.PrevotesBeforeStaging, 0, "staging"),
        (planted.SpeaksBeforeWriting, 0, "durability"),
        pytest.param(planted.NeverBlamesTheLeader, 1, "stall", marks=pytest.mark.thorough),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_a_planted_fault_is_found(fault: type, faults: int, kind: str) -> None:
    with pytest.raises(Found) as found:
        explore_all(faults, (LOSE, CRASH), machine_with(fault))
    assert found.value.kind == kind
    assert found.value.path[0] == ("start",)


def test_a_search_is_the_same_each_time() -> None:
    first, second = explore_all(0), explore_all(0)
    assert (first.states, first.ends, first.kinds) == (second.states, second.ends, second.kinds)

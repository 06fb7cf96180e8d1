"""One of four electors lies, in every way that its messages allow, and a planted fault that must be found.

With `--thorough` to the end, whichever ballot it leads, with messages of the others lost, and some 200,000 states of
two lies.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from spes_p2p.consensus.staging import Staging
from tests.simulation.attackers.leaders import machine_with
from tests.simulation.exhaustive import Found
from tests.simulation.liar_world import search
from tests.simulation.small_world import LOSE

WHEREVER_IT_LEADS = {"prevotes", "precommits", "reports", "leaves", "stands", "cannot", "closes", "trains"}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("place", "lies", "losses", "most_states"),
    [
        (0, 1, False, 6_500),
        pytest.param(0, 1, False, 60_000, marks=pytest.mark.thorough),
        *(pytest.param(place, 1, True, 200_000, marks=pytest.mark.thorough) for place in range(4)),
        *(pytest.param(place, 2, False, 200_000, marks=pytest.mark.thorough) for place in range(2)),
    ],
)
def test_no_lie_of_one_in_four_breaks_a_rule_or_keeps_the_others_from_deciding(
    place: int, lies: int, losses: bool, most_states: int, record_property: Callable[[str, object], None]
) -> None:
    report, told = search(place, lies, kinds=(LOSE,) if losses else (), most_states=most_states)
    record_property("told", f"{report}\n{sorted(told)}")
    assert report.whole == (lies == 1 and most_states > 8_000)
    assert report.states > 15_000 or report.states == most_states
    assert (report.splits, report.lost) == (0, 0)
    assert {"deliver", "lie", "lose", "silent", "refuses", "beat"} <= set(report.kinds)
    assert told >= WHEREVER_IT_LEADS


class FetchesForEver(Staging):
    """Fetching again what never comes out keeps a round waiting."""

    def _note_progress(self, now: float) -> bool:
        self._state.note_progress(now)
        return True


@pytest.mark.thorough
def test_a_planted_fault_is_found() -> None:
    with pytest.raises(Found, match="no commit for") as found:
        search(0, 1, machine_with(FetchesForEver))
    assert any(event[0] == "lie" for event in found.value.path)

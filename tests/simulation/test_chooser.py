"""Every run of a few electors with a fault at each place, a liar's every lie, and planted faults that must be found.

With `--thorough` two faults, and all that one liar in four can say, whichever ballot it leads: minutes of CPU time.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from spes_p2p.consensus.staging import Staging
from tests.consensus import planted
from tests.simulation.attackers.leaders import machine_with
from tests.simulation.chooser import CRASH, GONE, KINDS, LATE, LOSE, Chooser, Found, search

LIES = {"prevotes", "precommits", "votes", "proposes", "plans", "certificate"}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("electors", "faults", "kinds", "parts"),
    [
        (3, 1, (CRASH, LOSE, LATE), 1),
        (3, 2, (CRASH, GONE), 60),
        pytest.param(3, 2, KINDS, 1, marks=pytest.mark.thorough),
        pytest.param(4, 2, (CRASH,), 1, marks=pytest.mark.thorough),
    ],
)
def test_no_fault_at_any_place_breaks_a_rule(
    electors: int, faults: int, kinds: tuple[str, ...], parts: int, record_property: Callable[[str, object], None]
) -> None:
    report = search(electors, faults, kinds, part=(0, parts))
    record_property("told", str(report))
    assert report.whole
    assert report.runs > 20
    assert {"vote", "certify", "adopt", "reduce"} <= set(report.fired)
    assert ("renew" in report.fired) == (GONE in kinds and faults == 2)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("ballot", "parts"), [(0, 60), *(pytest.param(ballot, 1, marks=pytest.mark.thorough) for ballot in range(4))]
)
def test_no_lie_of_one_in_four_breaks_a_rule_or_keeps_the_others_from_deciding(
    ballot: int, parts: int, record_property: Callable[[str, object], None]
) -> None:
    report = search(4, 1, (), liar=ballot, part=(0, parts))
    record_property("told", str(report))
    assert report.whole
    assert set(report.told) >= (LIES if ballot == 0 else LIES - {"proposes", "plans"})


class FetchesForEver(Staging):
    """Fetching again what never comes out keeps a round waiting."""

    def _note_progress(self, now: float) -> bool:
        self._state.note_progress(now)
        return True


@pytest.mark.parametrize(
    ("fault", "faults", "kind", "liar"),
    [
        (planted.ForgetsLocks, 0, "lock", None),
        (planted.PrevotesBeforeStaging, 0, "staging", None),
        (planted.SpeaksBeforeWriting, 0, "durability", None),
        (planted.NeverBlamesTheLeader, 1, "stall", None),
        (planted.ForgetsVotes, 2, "votes", None),
        (planted.UsesBallotTwice, 2, "votes", None),
        pytest.param(FetchesForEver, 1, "stall", 0, marks=pytest.mark.thorough),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_a_planted_fault_is_found_with_the_choices_that_lead_to_it(
    fault: type, faults: int, kind: str, liar: int | None
) -> None:
    kinds = () if liar is not None else (CRASH, LATE)
    with pytest.raises(Found) as found:
        search(3 if liar is None else 4, faults, kinds, machine_with(fault), liar=liar)
    assert found.value.kind == kind
    assert sum(map(bool, found.value.picks)) <= faults


def test_a_chooser_goes_every_way_once_and_its_parts_make_the_whole() -> None:
    def runs(faults: int, part: int = 0, parts: int = 1, depth: int = 9) -> list[tuple[int, ...]]:
        chooser, taken = Chooser(faults, depth, parts, part), []
        while True:
            taken.append(tuple(chooser.pick(ways) for ways in (2, 3, 2)))
            if not chooser.advance():
                return taken

    assert runs(0) == [(0, 0, 0)]
    assert sorted(runs(1)) == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 2, 0), (1, 0, 0)]
    assert len(runs(2)) == len(set(runs(2))) == 10
    assert len(runs(3)) == 12
    assert len(runs(2, depth=2)) == 6
    assert sorted({run for part in range(3) for run in runs(2, part, 3)}) == sorted(runs(2))

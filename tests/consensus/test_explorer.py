"""Seeded schedules of faults, and faults planted in the rules that the explorer must find.

A failure prints the seed and the command that runs it again. `--thorough` takes ten times as many schedules, and
searches for the planted faults anew: what it prints goes into `PLANTED` where schedules have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import pytest

from spes_p2p.consensus.electorate import Faults
from spes_p2p.consensus.manifest import Manifest
from spes_p2p.consensus.table import RULE_NAMES
from spes_p2p.consensus.turns import Vocabulary
from spes_p2p.ids import PeerId
from tests.consensus import planted
from tests.simulation import sim
from tests.simulation.attackers.leaders import machine_with
from tests.simulation.explorer import explore, explore_in_parallel, report, run_schedule
from tests.simulation.judge import Violation
from tests.simulation.schedules import KINDS
from tests.simulation.sim_state import run_rules


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("schedules", [250, pytest.param(5000, marks=pytest.mark.thorough)])
def test_no_schedule_breaks_a_rule_and_every_rule_is_exercised(
    schedules: int, record_property: Callable[[str, object], None]
) -> None:
    summary = explore_in_parallel(0, schedules, processes=2)
    record_property("told", report(summary))
    assert not summary.findings, report(summary)
    assert summary.runs == schedules
    never = [name for name in RULE_NAMES if not summary.fired[name]]
    assert not never, report(summary)
    assert summary.totals["renewals"] > summary.runs // 50
    assert set(summary.kinds) == {kind.name for kind in KINDS}
    assert min(summary.totals[name] for name in ("forks", "switches", "restarts", "handovers")) > 0
    assert summary.totals["extinct"] < summary.runs // 50


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("schedules", [40, pytest.param(2000, marks=pytest.mark.thorough)])
def test_where_electors_may_lie_nobody_votes_twice_for_what_was_lost(
    schedules: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Disks that are old, full or gone must not lead to two votes in one ballot."""
    accused: set[PeerId] = set()

    def noted(world: sim.World, manifest: Manifest) -> None:
        accused.update(peer for up in world.up() if up.core for peer in up.core.state.others.voted_twice)
        note_commit(world, manifest)

    note_commit = sim.World.note_commit
    monkeypatch.setattr(sim.World, "faults", Faults.BYZANTINE)
    monkeypatch.setattr(sim.World, "note_commit", noted)
    summary = explore(range(schedules))
    assert not summary.findings, report(summary)
    assert not accused
    assert summary.totals["restarts"] > 0


PLANTED: list[tuple[type, str | None, set[str], int]] = [
    (planted.ForgetsVotes, "hidden", {"votes", "lock", "conflict", "durability"}, 98),
    (planted.PrevotesBeforeStaging, None, {"staging"}, 0),
    (planted.UsesBallotTwice, "votes", {"votes"}, 102),
    (planted.LeaversDoNotCount, "members", {"certificate"}, 0),
    (planted.AddsUpBallots, "hidden", {"certificate"}, 122),
    (planted.ForgetsLocks, "hidden", {"lock", "conflict"}, 0),
    (planted.NamesWhoIsBehind, "members", {"newcomer"}, 13),
    (planted.TrustsItsDisk, "old disk", {"votes", "lock", "durability"}, 213),
    (planted.SpeaksBeforeWriting, None, {"durability"}, 0),
    (planted.NeverBlamesTheLeader, None, {"stall"}, 8),
    (planted.TakesServersForTrainers, "amnesia", {"serving"}, 64),
    (planted.StaysWhereItIs, "node cut", {"stall", "apart"}, 1),
    (planted.NeverRenews, "renewed", {"stall"}, 0),
    (planted.StartsItsWaitAnew, "renewed", {"stall"}, 0),
    (planted.NamesTheDead, "renewed", {"stall", "apart"}, 0),
    (planted.RenewsTheState, "renewed", {"certificate", "refused"}, 0),
    (planted.CountsWorkTwice, None, {"data", "certificate", "refused"}, 0),
    (planted.ForgetsWhatItFetches, "disk", {"catch-up"}, 9),
]
"""Each with the kind of schedule that finds it, what is then broken, and the seed that finds it first."""


def found_by(fault: type, only: str | None, kinds: set[str], seeds: Iterable[int]) -> int:
    """The first seed that finds it."""
    summary = explore(seeds, machine_with(fault), only)
    assert summary.findings, f"{fault.__name__} was not found in {summary.runs} schedules; --thorough searches anew"
    assert summary.findings[0].kind in kinds, str(summary.findings[0])
    return summary.findings[0].seed


@pytest.mark.parametrize(("fault", "only", "kinds", "seed"), PLANTED, ids=[fault[0].__name__ for fault in PLANTED])
def test_a_planted_fault_is_found_by_its_seed(fault: type, only: str | None, kinds: set[str], seed: int) -> None:
    assert found_by(fault, only, kinds, [seed]) == seed


@pytest.mark.thorough
@pytest.mark.parametrize(("fault", "only", "kinds", "seed"), PLANTED, ids=[fault[0].__name__ for fault in PLANTED])
def test_a_planted_fault_is_found_without_its_seed(
    fault: type,
    only: str | None,
    kinds: set[str],
    seed: int,
    record_property: Callable[[str, object], None],
) -> None:
    found = found_by(fault, only, kinds, range(1600))
    record_property("told", f"by seed {found}" + (f", no longer by {seed}" if found > seed else ""))


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns are handed out in every third round."""
    monkeypatch.setattr(sim, "run_rules", partial(run_rules, expert_rounds=3))


@pytest.mark.usefixtures("turns")
@pytest.mark.parametrize("schedules", [25, pytest.param(50, marks=pytest.mark.thorough)])
def test_no_schedule_breaks_a_rule_where_columns_take_turns(schedules: int) -> None:
    summary = explore(range(schedules))
    assert not summary.findings, report(summary)


@pytest.mark.parametrize("schedules", [25, pytest.param(50, marks=pytest.mark.thorough)])
def test_no_schedule_breaks_a_rule_where_vocabulary_takes_turns(
    schedules: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sim, "run_rules", partial(run_rules, shared_tiles=3, vocabulary=Vocabulary(2, 2)))
    summary = explore(range(schedules))
    assert not summary.findings, report(summary)


@pytest.mark.usefixtures("turns")
def test_columns_that_move_without_their_turn_are_found() -> None:
    summary = explore(range(400), planted.TakesWhatWasNotHandedOut, stop_at=3)
    assert "turns" in [finding.kind for finding in summary.findings], report(summary)


def test_the_same_seed_gives_the_same_run() -> None:
    told: list[list[str]] = [[], []]
    for story in told:
        run_schedule(7, say=story.append)
    assert told[0] == told[1]
    assert len(told[0]) > 20


def test_a_finding_says_how_to_run_it_again() -> None:
    summary = explore(range(20), planted.SpeaksBeforeWriting)
    assert "--first 0 --count 1" in str(summary.findings[0])
    with pytest.raises(Violation, match="not on its disk"):
        run_schedule(summary.findings[0].seed, planted.SpeaksBeforeWriting)

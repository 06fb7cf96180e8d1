"""Thousands of seeded schedules of faults, and faults planted in the rules that the explorer must find.

`SPES_SCHEDULES` and `SPES_FIRST_SEED` make a longer hunt, or another one. A failure prints the seed and the command
that runs it again.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import pytest

from spes_p2p.sync.core.round import Core
from spes_p2p.sync.core.table import RULE_NAMES
from spes_p2p.testing import sim
from spes_p2p.testing.explorer import explore, explore_in_parallel, report, run_schedule
from spes_p2p.testing.judge import Violation
from spes_p2p.testing.schedules import KINDS
from spes_p2p.testing.sim_state import run_rules
from tests.sync import planted

SCHEDULES = int(os.environ.get("SPES_SCHEDULES", "5000"))
FIRST_SEED = int(os.environ.get("SPES_FIRST_SEED", "0"))
HUNT_LIMIT_SECONDS = 60 + SCHEDULES // 3


@pytest.mark.timeout(HUNT_LIMIT_SECONDS)
def test_no_schedule_breaks_a_rule_and_every_rule_is_exercised(
    record_property: Callable[[str, object], None],
) -> None:
    summary = explore_in_parallel(FIRST_SEED, SCHEDULES, processes=2)
    record_property("told", report(summary))
    assert not summary.findings, report(summary)
    assert summary.runs == SCHEDULES
    never = [name for name in RULE_NAMES if not summary.fired[name]]
    assert not never, report(summary)
    assert summary.totals["degraded"] > summary.runs // 100
    assert set(summary.kinds) == {kind.name for kind in KINDS}
    assert min(summary.totals[name] for name in ("forks", "switches", "restarts", "handovers")) > 0
    assert summary.totals["extinct"] < summary.runs // 50


@pytest.mark.parametrize(
    ("core_class", "only", "kinds"),
    [
        (planted.ForgetsVotes, "hidden", {"acceptance", "report", "promise", "conflict"}),
        (planted.AcceptsBeforeStaging, None, {"staging"}),
        (planted.UsesBallotTwice, "votes", {"proposal"}),
        (planted.AttemptInManifest, "hidden", {"conflict"}),
        (planted.LeaversDoNotCount, "members", {"certificate"}),
        (planted.AddsUpBallots, None, {"certificate"}),
        (planted.PromisesWithoutReport, "hidden", {"report", "conflict"}),
        (planted.ProposesWithoutPromises, "hidden", {"conflict"}),
        (planted.IgnoresAcceptances, "hidden", {"conflict"}),
        (planted.BreaksPromises, "votes", {"promise", "acceptance"}),
        (planted.AddsDegradedVotes, "long cut", {"acceptance"}),
        (planted.DoesNotWait, None, {"wait"}),
        (planted.SpeaksBeforeWriting, None, {"durability"}),
        (planted.NeverBlamesTheLeader, None, {"stall"}),
        (planted.WaitsForEver, "many", {"stall"}),
        (planted.NeverGivesUpAState, "mixed", {"stall"}),
        (planted.TakesServersForTrainers, "amnesia", {"serving"}),
        (planted.CountsWorkTwice, None, {"data", "certificate", "refused"}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_a_planted_fault_is_found(core_class: type[Core], only: str | None, kinds: set[str]) -> None:
    summary = explore(range(600), core_class, only)
    assert summary.findings, f"{core_class.__name__} was not found in {summary.runs} schedules"
    assert summary.findings[0].kind in kinds, str(summary.findings[0])


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns are handed out in every third round."""
    monkeypatch.setattr(sim, "run_rules", partial(run_rules, expert_rounds=3))


@pytest.mark.usefixtures("turns")
def test_no_schedule_breaks_a_rule_where_columns_take_turns() -> None:
    summary = explore(range(100))
    assert not summary.findings, report(summary)


def test_no_schedule_breaks_a_rule_where_a_round_is_several_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """With three parts of two shared tiles: one of the syncs has none."""
    monkeypatch.setattr(sim, "run_rules", partial(run_rules, expert_rounds=3, fragments=3))
    summary = explore(range(100))
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

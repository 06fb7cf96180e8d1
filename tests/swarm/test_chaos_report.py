"""What chaos finds is judged: each promise that was broken is named, and none that was kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spes_p2p.consensus.messages import QUORUM, RENEWAL
from tests.swarm.chaos_report import ChaosOptions, Findings, Sample, judge, report


def good() -> Findings:
    """A hundred rounds, four of them renewals, with flat memory and nine tokens of ten counted."""
    found = Findings(ChaosOptions(Path("unused")))
    kinds = [QUORUM] * 97 + [RENEWAL] * 4
    commits: list[Any] = [SimpleNamespace(certificate=SimpleNamespace(kind=kind, ballot=0)) for kind in kinds]
    found.commits = commits
    found.tokens_trained, found.tokens_counted = 1000, 901
    found.samples = [Sample(round, 10**9 + round * 10**5, 60 + round % 7, 20 + round % 2) for round in range(100)]
    found.exit_codes = {"p0": 0, "p1": 0}
    return found


def test_kept_promises_are_no_problem() -> None:
    found = good()
    assert judge(found) == []
    text = report(found)
    assert "96 of 100" in text
    assert "BROKEN" not in text


def grow(what: str, factor: float) -> Callable[[Findings], None]:
    def change(found: Findings) -> None:
        late = [
            Sample(**{**vars(sample), what: int(getattr(sample, what) * factor)}) if sample.round >= 60 else sample
            for sample in found.samples
        ]
        found.samples = late

    return change


def degrade(rounds: int) -> Callable[[Findings], None]:
    def change(found: Findings) -> None:
        commits: list[Any] = list(found.commits)
        for commit in commits[5 : 5 + rounds]:
            commit.certificate.kind = RENEWAL

    return change


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda found: found.exit_codes.update(p1=1), "p1 ended with exit code 1"),
        (lambda found: found.disagreements.append("p1 has another round 7"), "p1 has another round 7"),
        (degrade(1), None),
        (degrade(3), "only 93 of"),
        (lambda found: setattr(found, "tokens_counted", 890), "only 89.0% of the survivors' tokens"),
        (grow("resident_bytes", 1.06), "memory grew by 6"),
        (grow("files", 1.5), "open files early"),
        (grow("threads", 2.0), "open threads early"),
        (lambda found: found.left_over.append("4711 p2pd"), "processes were left over: 4711 p2pd"),
    ],
)
def test_each_broken_promise_is_named(spoil: Callable[[Findings], None], words: str | None) -> None:
    found = good()
    spoil(found)
    found.problems = judge(found)
    assert len(found.problems) == (words is not None)
    assert words is None or words in found.problems[0]
    assert ("BROKEN" in report(found)) == (words is not None)

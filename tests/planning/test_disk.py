"""Disk by the same sums as the table in docs/disk-and-memory.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from spes_p2p.planning.disk import DiskNeed
from spes_p2p.planning.sizes import Sizes
from tests.planning.runs import run_named

TABLE = Path(__file__).parents[2] / "docs" / "disk-and-memory.md"
ROWS = re.findall(
    r"^\| ([\w-]+) \| [\d.]+[MB] \| [\d.]+ [MG]B \| \d+ × (\d+) \| ([\d.]+) ([MG])B", TABLE.read_text(), re.M
)


@pytest.mark.parametrize(("name", "owned", "amount", "unit"), ROWS)
def test_the_table_of_the_docs_says_the_same(name: str, owned: str, amount: str, unit: str) -> None:
    need = DiskNeed.of(run_named(name), int(owned))
    assert need.most == pytest.approx(float(amount) * {"M": 1e6, "G": 1e9}[unit], rel=0.15)  # rounded up there
    assert need.least < need.most


def test_all_runs_of_the_table_are_looked_at() -> None:
    assert len(ROWS) == 7


def test_fewer_checkpoints_take_less() -> None:
    few = run_named("small", "output.keep_checkpoints=1")
    assert DiskNeed.of(few, 2).most < DiskNeed.of(run_named("small"), 2).most
    assert DiskNeed.of(few, 2).least == DiskNeed.of(run_named("small"), 2).least


def test_outer_momentum_and_overlap_take_more() -> None:
    """Each of three rounds has momentum, and what it handed out beside what became of it; overlap another snapshot."""
    unmerged = "sync.merge_alpha=0"
    plain = run_named("small", unmerged)
    values = 4 * Sizes.of(plain.model).total
    trained = 4 * Sizes.of(plain.model).trained(2)
    nesterov, overlap = (run_named("small", unmerged, one) for one in ("sync.outer=nesterov", "sync.overlap=true"))
    assert DiskNeed.of(nesterov, 2).least - DiskNeed.of(plain, 2).least == 3 * 2 * values
    assert DiskNeed.of(overlap, 2).most - DiskNeed.of(plain, 2).most == trained


def test_merges_keep_experts_twice_in_each_round_that_has_one() -> None:
    """For as long as what was handed out is the files of the state; else until the round is committed."""
    plain = run_named("small", "sync.merge_alpha=0")  # rounds of 50 steps
    experts = 4 * Sizes.of(plain.model).experts
    for overrides, rounds in (((), 2), (("sync.merge_interval=500",), 1), (("sync.merge_interval=10",), 3)):
        assert DiskNeed.of(run_named("small", *overrides), 2).least - DiskNeed.of(plain, 2).least == rounds * experts
    often, never = ("sync.codec=int4", "sync.merge_interval=10"), ("sync.codec=int4", "sync.merge_alpha=0")
    assert (
        DiskNeed.of(run_named("small", *often), 2).least - DiskNeed.of(run_named("small", *never), 2).least == experts
    )


@pytest.mark.parametrize(
    ("overrides", "shared", "columns", "most"),
    [
        (("sync.codec=int4",), 2, 2, 4),  # in columns: one owner, two columns
        (("sync.codec=int4", "sync.expert_codec=fp32"), 2, 0, 0),
        (("sync.expert_codec=ternary", "swarm.target_replicas=2"), 0, 4, 2 + 8),
        (("sync.codec=int4", "sync.enabled=false"), 0, 0, 0),
    ],
)
def test_lossy_codecs_keep_what_they_left_out(overrides: tuple[str, ...], shared: int, columns: int, most: int) -> None:
    """In three rounds; beside it what these handed out, which is far less."""
    plain, lossy = (run_named("small", "sync.merge_alpha=0", *more) for more in ((), overrides))
    sizes, checkpoints = Sizes.of(plain.model), DiskNeed.of(plain, 2).most - DiskNeed.of(plain, 2).least
    left_out = DiskNeed.of(lossy, 2).least - DiskNeed.of(plain, 2).least
    kept = 3 * 4 * (shared * sizes.shared + columns * sizes.column)
    assert kept <= left_out <= 1.4 * kept
    more = DiskNeed.of(lossy, 2).most - DiskNeed.of(lossy, 2).least - checkpoints
    assert more == 3 * 4 * (most - columns) * sizes.column

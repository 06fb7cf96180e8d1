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
    plain = run_named("small")
    values = 4 * Sizes.of(plain.model).total
    trained = 4 * Sizes.of(plain.model).trained(2)
    nesterov, overlap = (run_named("small", one) for one in ("sync.outer=nesterov", "sync.overlap=true"))
    assert DiskNeed.of(nesterov, 2).least - DiskNeed.of(plain, 2).least == 3 * 2 * values
    assert DiskNeed.of(overlap, 2).most - DiskNeed.of(plain, 2).most == trained

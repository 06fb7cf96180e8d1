"""The studies behind docs/results.md and docs/ablations.md, small: that they run, and look at what they say they do."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
SMALL = (
    "model.d_model=32", "model.num_layers=1", "model.num_heads=2", "model.expert_ffn=32", "data.sequence_length=16",
    "optimizer.batch_sequences=2", "eval.sequences=4", "sync.tile_values=4096",
)  # fmt: skip

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(300)]


def said(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """What a script prints, run with these arguments and a small model."""
    monkeypatch.setattr(sys, "argv", [name, *arguments, *SMALL])
    monkeypatch.syspath_prepend(SCRIPTS)
    capsys.readouterr()
    runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
    return capsys.readouterr().out.splitlines()


def test_merged_experts_become_alike(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = said("study_merge", monkeypatch, capsys, "--arms", "spes", "merge", "--steps", "100")
    ends = [float(found[1]) for line in lines if (found := re.search(r"([+-][\d.]+) at 100$", line))]
    assert len(ends) == 2
    assert ends[1] > ends[0]


def test_a_run_goes_on_from_where_another_arm_led(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = said("study_warmup", monkeypatch, capsys, "--first-steps", "50", "--steps", "50")
    losses = [[float(loss) for loss in re.findall(r"\d\.\d{4}", line)] for line in lines]
    assert [len(some) for some in losses] == [2, 2]
    assert all(after < before for before, after in losses)

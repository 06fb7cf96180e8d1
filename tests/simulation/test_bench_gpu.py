"""The command for a borrowed GPU, whole, on the CPU; and that a row that breaks takes no other with it."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from spes_p2p.experts import stores

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_gpu.py"


ROWS = ["machine", "kernels", "tests", "moe", "train", "profile", "memory"]


def run_tiny(out: Path, *arguments: str) -> list[dict[str, Any]]:
    """What the command writes, of which nothing failed."""
    command = [sys.executable, str(SCRIPT), "--tiny", "--minutes", "10", "--out", str(out), *arguments]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    found: list[dict[str, Any]] = [json.loads(line) for line in out.read_text().splitlines()]
    assert not [row for row in found if "failed" in row]
    assert found[0]["commit"]
    assert next(row for row in found if row["row"] == "machine")["versions"]["torch"]
    return found


def test_rows_run_here_and_others_are_left_out(tmp_path: Path) -> None:
    """The layer and a whole training step among them; kernels and profiles are those of the test of every kind."""
    found = run_tiny(tmp_path / "tiny.jsonl", "--only", "m")
    assert [row["row"] for row in found if row.get("bench") == "end"] == [name for name in ROWS if name[0] == "m"]
    assert all(row["tokens_per_second"] > 0 for row in found if row["row"] == "memory" and row["bench"] == "train")


@pytest.mark.thorough
def test_every_kind_of_row_runs_here(tmp_path: Path) -> None:
    found = run_tiny(tmp_path / "tiny.jsonl")
    assert [row["row"] for row in found if row.get("bench") == "end"] == ROWS
    kernels = {row["what"] for row in found if row.get("bench") == "kernel" and row["equal"]}
    assert kernels == {
        "grouped rows", "grouped outer", "swiglu forward", "swiglu backward", "gather", "combine",
        "from int8", "from nf4", "softmax loss",
    }  # fmt: skip
    layers = {row["what"] for row in found if row.get("bench") == "moe"}
    assert {"replica of MegaBlocks grouped dMoE", "spes-p2p auto, foreign in int8"} <= layers
    assert all(row["tokens_per_second"] > 0 for row in found if row["row"] == "train" and row["bench"] == "train")
    assert len(next(row for row in found if "top" in row)["top"]) == 20


def test_a_row_that_hangs_or_dies_keeps_what_it_had_and_ends() -> None:
    script = runpy.run_path(str(SCRIPT))
    said = "print('{\"what\": 1}', flush=True); "
    hangs = script["Row"]("hangs", ("-c", said + "import time; time.sleep(3600)"))
    dies = script["Row"]("dies", ("-c", said + "import os; os.abort()"))
    first, last = script["results"](hangs, 10.0, True)
    assert first == {"row": "hangs", "what": 1}
    assert last["failed"] == "stopped after 10 s"
    first, last = script["results"](dies, 60.0, True)
    assert first == {"row": "dies", "what": 1}
    assert last["failed"].startswith("exit code -6")


def test_rows_have_names_of_their_own_and_memory_is_compared_in_twelve_ways_or_more() -> None:
    rows = [(row.name, row.arguments) for row in runpy.run_path(str(SCRIPT))["gpu_rows"]()]
    assert len({name for name, _ in rows}) == len({arguments for _, arguments in rows}) == len(rows)
    assert [name for name, _ in rows[:4]] == ["machine", "kernels", "tests", "moe reference"]
    assert len([name for name, _ in rows if name.startswith("memory")]) >= 12


def test_int8_experts_are_put_together_for_each_pass_of_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    script = runpy.run_path(str(SCRIPT.with_name("bench_moe.py")))
    calls = []
    shape = script["Shape"]("small", 16, 32, 32, 4, 2)
    inputs = script["Inputs"](shape, torch.device("cpu"), torch.float32)
    foreign = stores.Foreign("int8")
    bank = script["ours"](shape, Fraction(1, 4), "eager", torch.device("cpu"), torch.float32, foreign)
    dequantise = stores.dequantise

    def counted(*arguments: Any) -> torch.Tensor:
        calls.append(1)
        return dequantise(*arguments)

    monkeypatch.setattr(stores, "dequantise", counted)
    step = script["step_of"](lambda x_TD: script["routed"](bank, inputs, x_TD), inputs, foreign.workspace)
    for _ in range(3):
        step()
    assert len(calls) == 3 * 2 * 2  # steps, passes, parts

"""Real training on the in-memory network: it learns, it is the same again, and the comparison writes its page."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from spes_p2p.config.load import bundled_config, load_config
from spes_p2p.data.loader import open_dataset
from spes_p2p.errors import ConfigError
from spes_p2p.interop.own import Model, OwnStart
from spes_p2p.testing.training_swarm import Measure, train
from tests.peer.real import SMALL, make_tokens

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokens(tmp_path_factory.mktemp("corpus"))


def test_two_peers_learn_and_it_comes_out_the_same_again(data: Path, tmp_path: Path) -> None:
    overrides = (*SMALL, f"data.path={data}", "swarm.min_peers=2", "swarm.experts_per_peer=4", "optimizer.lr=0.01")
    config = load_config(bundled_config("tiny"), overrides)
    first, again = (
        train(config, tmp_path / name, open_dataset(config), Measure(32), CPU) for name in ("first", "again")
    )
    losses = [point.held_out_loss for point in first.points]
    assert [(point.round, point.step) for point in first.points] == [(0, 0), (1, 16), (2, 32)]
    assert losses[0] > losses[1] > losses[2]
    assert [point.held_out_loss for point in again.points] == losses
    assert first.points[-1].tokens == 2 * 32 * 8 * 64
    assert first.points[-1].bytes_sent > 0
    everything = 4 * sum(block.size for block in _layout(config).blocks)
    held = first.held
    assert held.trained == held.gradients == held.moments // 2 < everything < held.model


def test_points_of_a_curve_are_taken_where_they_are_asked_for(data: Path, tmp_path: Path) -> None:
    overrides = (*SMALL, f"data.path={data}", "swarm.min_peers=1", "swarm.experts_per_peer=8", "sync.steps_per_round=2")
    config = load_config(bundled_config("tiny"), overrides)
    found = train(config, tmp_path, open_dataset(config), Measure(steps=8, every_steps=3), CPU)
    assert [point.step for point in found.points] == [0, 4, 8]


class Words(nn.Module):
    """Two experts, mixed by what the token says; nothing of ours in it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(257, 16)
        self.gate = nn.Linear(16, 2)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(2))
        self.head = nn.Linear(16, 257)

    def forward(self, token_BS: Tensor) -> Tensor:
        hidden = self.table(token_BS)
        mixed = (
            torch.stack([expert(hidden) for expert in self.experts], -1) * self.gate(hidden).softmax(-1)[..., None, :]
        )
        return self.head(hidden + mixed.sum(-1))


def next_byte(module: nn.Module, token_BS: Tensor) -> Tensor:
    logits = module(token_BS[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), token_BS[:, 1:].flatten())


@pytest.mark.parametrize("outer", ["none", "nesterov"])
def test_a_model_of_ones_own_learns_in_a_swarm(data: Path, tmp_path: Path, outer: str) -> None:
    """Each peer owns one of its experts; what they hold in the end is the same, and better."""
    model = Model(Words, next_byte, lambda name: int(name.split(".")[1]) if name.startswith("experts.") else None)
    overrides = ("sync.merge_alpha=0", f"sync.outer={outer}", "swarm.experts_per_peer=1", "swarm.min_peers=2")
    config = load_config(bundled_config("tiny"), [*SMALL, *overrides, f"data.path={data}", "optimizer.lr=0.02"])
    config = model.config_of(config, OwnStart(model, config).root())
    found = train(config, tmp_path, open_dataset(config), Measure(48), CPU, model=model)
    losses = [point.held_out_loss for point in found.points]
    assert losses[0] > losses[1] > losses[-1]
    assert losses[-1] < 4.5  # bytes at random: 5.5
    expert = sum(parameter.numel() for parameter in Words().experts[0].parameters())
    assert found.held.trained == 4 * (sum(parameter.numel() for parameter in Words().parameters()) - expert)


def _layout(config: Any) -> Any:
    from spes_p2p.interop.hf import state_tensors
    from spes_p2p.state.layout import Layout

    return Layout(state_tensors(config.model), config.sync.tile_values)


def last_loss(path: Path, arm: str) -> float:
    found = [one["loss"] for one in json.loads(path.read_text()) if one["arm"] == arm]
    return float(np.mean(found))


def compare(*words: object) -> dict[str, Any]:
    script = runpy.run_path(str(ROOT / "scripts" / "compare.py"))
    small = [text for text in SMALL if not text.startswith("sync.")]
    steps = ["--steps", "4", "--steps-per-round", "4", "--peers", "2", "--device", "cpu"]
    script["main"]([*small, *steps, *map(str, words)])
    return script


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "some",
    [
        ("centralized", "diloco", "spes", "two-periods", "guests-4", "muon"),
        pytest.param((), marks=pytest.mark.thorough),
    ],
    ids=["some", "all"],
)
def test_the_comparison_writes_a_table_of_its_arms_and_does_not_run_them_again(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], some: tuple[str, ...]
) -> None:
    page, points = tmp_path / "results.md", tmp_path / "points.json"
    files = ["--data", data, "--output", page, "--json", points, "--jobs", 1]
    chosen = ("--arms", *some) if some else ()
    script = compare(*files, *chosen, "--seeds", 0)
    arms, (begin, end) = list(some or script["ARMS"]), script["SHORT"]
    text = page.read_text()
    for arm in arms:
        assert f"| {arm} | " in text
    found = {one["arm"]: one for one in json.loads(points.read_text())}
    assert list(found) == arms
    assert found["centralized"]["trained_bytes"] > found["spes"]["trained_bytes"]
    assert found["diloco"]["bytes_sent"] > found["spes"]["bytes_sent"] > 0
    capsys.readouterr()
    short = f"# Results\n\n{begin}\n\nSPES sends less.\n\n{end}\n\n"
    page.write_text(f"{text.replace('# Results', short.rstrip(), 1)}\n## What it says\n\nDiLoCo sends more.\n")
    compare(*files, "--arms", "spes", "diloco", "--seeds", 0, 1)
    assert page.read_text().startswith(f"{short}<!-- Written by")
    assert page.read_text().endswith("\n## What it says\n\nDiLoCo sends more.\n")
    assert page.read_text().count("# Results") == 1
    said = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert said == ["seed 1, spes", "seed 1, diloco"]
    assert "±" in page.read_text()
    *_, by_bytes = page.read_text().split("| arm | ")
    budgets, _, spes, diloco = by_bytes.split("\n")[:4]
    assert [cell.startswith("(") for cell in spes.split(" | ")[1:]] == [False, False, True, True]
    assert float(spes.split(" | ")[3].split()[0].strip("(")) == pytest.approx(last_loss(points, "spes"), abs=1e-4)
    assert diloco.split(" | ")[2] != spes.split(" | ")[2]
    assert len(budgets.split(" | ")) == 4
    assert [one for one in json.loads(points.read_text()) if one["seed"] == 0] == list(found.values())


@pytest.mark.timeout(300)
def test_arms_that_run_side_by_side_give_what_they_give_alone(data: Path, tmp_path: Path) -> None:
    files = [tmp_path / "alone.json", tmp_path / "together.json"]
    for jobs, path in zip((1, 2), files):
        compare("--data", data, "--arms", "spes", "merge", "--output", "", "--json", path, "--jobs", jobs)
    alone, together = ([one["points"] for one in json.loads(path.read_text())] for path in files)
    assert alone == together


def test_an_unknown_arm_is_named(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--arms has 'spse', an unknown arm"):
        compare("--data", data, "--arms", "spse", "--output", "")


@pytest.mark.sampled(1)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_comparison_that_is_ended_leaves_no_folder(data: Path, tmp_path: Path, number: signal.Signals) -> None:
    """What a SIGKILL leaves is removed by the next one."""
    script, temporary = str(ROOT / "scripts" / "compare.py"), tmp_path / "temporary"
    temporary.mkdir()
    environment = os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)}
    small = [text for text in SMALL if not text.startswith("sync.")]
    arguments = [
        "--data",
        str(data),
        "--peers",
        "2",
        "--device",
        "cpu",
        "--output",
        str(tmp_path / "page.md"),
        "--jobs",
        "1",
    ]
    with subprocess.Popen(
        [sys.executable, script, *arguments, "--steps", "9000", *small],
        env=environment,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL) if number != signal.SIGKILL else None,
    ) as process:  # a shell in the background has SIGINT ignored
        until = time.monotonic() + 120.0
        while not list(temporary.glob("spes-p2p-compare-*/*/*")) and process.poll() is None:
            assert time.monotonic() < until
            time.sleep(0.05)
        assert process.poll() is None
        process.send_signal(number)
        assert process.wait(60) != 0
    left = list(temporary.iterdir())
    assert bool(left) is (number == signal.SIGKILL)
    if left:
        code = "from spes_p2p.locks import Scratch; Scratch('spes-p2p-compare-').remove()"
        subprocess.run([sys.executable, "-c", code], env=environment, check=True)
        assert not list(temporary.iterdir())

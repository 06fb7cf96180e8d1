"""Real training on the in-memory network: it learns, it is the same again, and the comparison writes its page."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from spes_p2p.config.load import bundled_config, load_config
from spes_p2p.data.loader import open_dataset
from spes_p2p.testing.training_swarm import train
from tests.peer.real import SMALL, make_tokens

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokens(tmp_path_factory.mktemp("corpus"))


def test_two_peers_learn_and_it_comes_out_the_same_again(data: Path, tmp_path: Path) -> None:
    overrides = (*SMALL, f"data.path={data}", "swarm.min_peers=2", "swarm.experts_per_peer=4", "optimizer.lr=0.01")
    config = load_config(bundled_config("tiny"), overrides)
    first, again = (train(config, tmp_path / name, open_dataset(config), 32, CPU) for name in ("first", "again"))
    losses = [point.held_out_loss for point in first.points]
    assert [(point.round, point.step) for point in first.points] == [(0, 0), (1, 16), (2, 32)]
    assert losses[0] > losses[1] > losses[2]
    assert [point.held_out_loss for point in again.points] == losses
    assert first.points[-1].tokens == 2 * 32 * 8 * 64
    assert first.points[-1].bytes_sent > 0
    everything = sum(block.size for block in _layout(config).blocks)
    assert first.trained_values < everything


def _layout(config: Any) -> Any:
    from spes_p2p.interop.hf import state_tensors
    from spes_p2p.state.layout import Layout

    return Layout(state_tensors(config.model), config.sync.tile_values)


@pytest.mark.timeout(300)
def test_the_comparison_writes_a_table_of_all_methods(data: Path, tmp_path: Path) -> None:
    compare = runpy.run_path(str(ROOT / "scripts" / "compare.py"))
    page, points = tmp_path / "results.md", tmp_path / "points.json"
    small = [text for text in SMALL if not text.startswith("sync.")]
    compare["main"](
        ["--data", str(data), "--steps", "4", "--steps-per-round", "4", "--peers", "2", "--seeds", "0", "--device",
         "cpu", "--output", str(page), "--json", str(points), *small]
    )  # fmt: skip
    text = page.read_text()
    for method in ("centralized", "DiLoCo", "SPES", "SPES, merge", "SPES, 2 owners", "SPES, rising H"):
        assert f"| {method} |" in text
    assert points.is_file()

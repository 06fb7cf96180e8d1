"""Real training on the in-memory network: it learns, and it is the same again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from spes_p2p.config.load import bundled_config, load_config
from spes_p2p.data.loader import open_dataset
from tests.peer.real import SMALL, make_tokens
from tests.simulation.training_swarm import Measure, train

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


def _layout(config: Any) -> Any:
    from spes_p2p.interop.hf import state_tensors
    from spes_p2p.state.layout import Layout

    return Layout(state_tensors(config.model), config.sync.tile_values)

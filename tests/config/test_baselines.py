"""The baselines beside each run: what they are, and that nothing else differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spes_p2p.config.fingerprint import differences
from spes_p2p.config.load import bundled_config, load_config
from spes_p2p.config.schema import Config

CONFIGS = Path(__file__).parents[2] / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml") if path.stem != "home")  # made for links, not to compare


def pair(kind: str, name: str) -> tuple[Config, dict[str, Any]]:
    """The run, and in what its baseline differs."""
    run, baseline = load_config(CONFIGS / f"{name}.yaml"), load_config(bundled_config(f"{kind}-{name}"))
    return run, {item.key: item.ours for item in differences(baseline, run)}


def test_every_run_has_both() -> None:
    found = {path.stem for path in (CONFIGS / "baselines").glob("*.yaml")}
    both = {f"{kind}-{name}" for kind in ("centralized", "diloco") for name in NAMES}
    assert found == both | {"diloco-released-spes-1b"}


def test_what_spes_calls_diloco_is_plain_averaging_and_differs_in_more_than_that() -> None:
    _, changed = pair("diloco-released", "spes-1b")
    assert changed == {
        "run.run_id": "diloco-released-spes-1b",
        "model.rope_theta": 32_000.0,
        "sync.steps_per_round": 50,
        "sync.merge_alpha": 0.0,
        "swarm.experts_per_peer": 16,
        "swarm.target_replicas": 4,
    }


@pytest.mark.parametrize("name", NAMES)
def test_diloco_differs_in_who_trains_what_and_in_the_outer_step(name: str) -> None:
    run, changed = pair("diloco", name)
    wanted = {"run.run_id": f"diloco-{name}", "sync.merge_alpha": 0.0}
    wanted |= {"swarm.experts_per_peer": run.model.num_experts, "swarm.target_replicas": run.swarm.min_peers}
    wanted |= {"sync.outer": "nesterov"}
    assert changed == wanted
    sync = load_config(bundled_config(f"diloco-{name}")).sync
    assert (sync.outer_lr, sync.outer_momentum) == (0.7, 0.9)  # as published


@pytest.mark.parametrize("name", NAMES)
def test_centralized_is_one_peer_with_the_tokens_of_all(name: str) -> None:
    run, changed = pair("centralized", name)
    wanted = {"run.run_id": f"centralized-{name}", "sync.merge_alpha": 0.0, "swarm.min_peers": 1}
    wanted |= {"swarm.experts_per_peer": run.model.num_experts}
    wanted |= {"optimizer.batch_sequences": run.optimizer.batch_sequences * run.swarm.min_peers}
    assert changed == wanted
    baseline = load_config(bundled_config(f"centralized-{name}"))
    assert baseline.optimizer.micro_batch_sequences == run.optimizer.micro_batch_sequences

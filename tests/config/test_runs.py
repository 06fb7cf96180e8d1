"""The complete runs under configs/: each loads, and the published shapes have their published numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spes_p2p.config.load import bundled_config, load_config
from spes_p2p.config.schema import Config, ModelConfig

CONFIGS = sorted(Path(__file__).parents[2].glob("configs/*.yaml"))

HEADLINES: dict[str, dict[str, Any]] = {
    "spes-1b": {
        "model": dict(
            d_model=768, num_layers=12, num_heads=12, num_experts=16, top_k=2, expert_ffn=2048, qk_norm="full"
        )
        | dict(rope_theta=500_000, vocab_size=151_665, embedding_rows=151_665, num_kv_heads=12, head_dim=64),
        "data": dict(sequence_length=2048, mask_repetitions=True),
        "optimizer": dict(lr=5e-4, batch_sequences=256),  # 50,000 steps of 4 peers are 105B tokens
        "scheduler": dict(warmup_steps=2000, total_steps=50_000),
        "sync": dict(merge_alpha=0.01, merge_decay_steps=10_000),
        "swarm": dict(experts_per_peer=4, min_peers=4),
    },
    "spes-7b": {
        "model": dict(
            d_model=2048, num_layers=16, num_heads=16, num_experts=32, top_k=4, expert_ffn=2048, qk_norm="full"
        )
        | dict(rope_theta=32_000, vocab_size=151_665, norm_topk=False),
        "data": dict(sequence_length=2048),
        "optimizer": dict(lr=4e-4, batch_sequences=1024),
        "scheduler": dict(warmup_steps=2000, total_steps=500_000),
        "swarm": dict(experts_per_peer=8, min_peers=4),
    },
    "spes-9b": {
        "model": dict(d_model=2048, num_layers=28, num_heads=16, num_kv_heads=8, head_dim=128, num_experts=8, top_k=2)
        | dict(expert_ffn=6144, norm_topk=True, qk_norm="head", rope_theta=1e6, embedding_rows=151_936),
        "data": dict(sequence_length=4096),
        "optimizer": dict(lr=1e-4, batch_sequences=256),
        "scheduler": dict(warmup_steps=1000, total_steps=100_000),
        "sync": dict(merge_alpha=0.05, merge_decay_steps=20_000),
        "swarm": dict(experts_per_peer=2, min_peers=4),
    },
    "spes-2b": {
        "model": dict(d_model=1024, num_layers=16, num_experts=16, top_k=2, expert_ffn=2048, vocab_size=151_665),
        "swarm": dict(experts_per_peer=1, min_peers=16),
    },
}
PARAMETERS = {
    "tiny": 1.45e6,
    "small": 76e6,
    "home": 238e6,
    "spes-1b": 1.17e9,
    "spes-2b": 1.99e9,
    "spes-7b": 7.33e9,
    "spes-9b": 9.43e9,
}


def parameters(model: ModelConfig) -> int:
    """By hand: untied embedding and head, attention with QK norms, two norms a layer, router, experts, last norm."""
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    qk_norm = {"none": 0, "full": queries + keys, "head": 2 * model.head_dim}[model.qk_norm]
    attention = model.d_model * (2 * queries + 2 * keys) + qk_norm
    experts = model.num_experts * (model.d_model + 3 * model.d_model * model.expert_ffn)
    layer = attention + 2 * model.d_model + experts
    return 2 * model.embedding_rows * model.d_model + model.num_layers * layer + model.d_model


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_run_has_the_size_it_says(path: Path) -> None:
    config = load_config(path)
    assert config.run.run_id == path.stem
    assert parameters(config.model) == pytest.approx(PARAMETERS[path.stem], rel=0.01)


@pytest.mark.parametrize("name", HEADLINES)
def test_published_shape_and_hyperparameters(name: str) -> None:
    config = load_config(bundled_config(name))
    for section, values in HEADLINES[name].items():
        assert {key: getattr(getattr(config, section), key) for key in values} == values
    assert config.scheduler.warmup_ratio == 0.1
    assert config.sync.steps_per_round == 100
    assert (config.sync.merge_interval, config.sync.merge_top_k) == (500, 4)
    assert 0.01 <= config.sync.merge_alpha <= 0.05
    assert 10_000 <= config.sync.merge_decay_steps <= 20_000


@pytest.mark.parametrize("name", HEADLINES)
def test_published_optimizer(name: str) -> None:
    optimizer = load_config(bundled_config(name)).optimizer
    assert (optimizer.betas, optimizer.eps, optimizer.weight_decay, optimizer.grad_clip) == (
        (0.9, 0.95),
        1e-8,
        0.1,
        1.0,
    )
    losses = (optimizer.load_balancing_weight, optimizer.router_z_weight, optimizer.output_z_weight)
    assert losses == (0.01, 0.001, 1e-5)
    assert not optimizer.decayed_aux_loss


def test_tiny_has_several_tiles_in_every_block_and_merges_early() -> None:
    config: Config = load_config(bundled_config("tiny"))
    model = config.model
    column = 3 * model.num_layers * model.d_model * model.expert_ffn
    assert column > 2 * config.sync.tile_values
    assert config.sync.merge_interval <= 40
    assert config.swarm.min_peers * config.swarm.experts_per_peer >= model.num_experts

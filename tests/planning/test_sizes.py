"""Parameter counts against the table of tensors, arithmetic against a count of matrix products."""

from __future__ import annotations

import math

import pytest

from spes_p2p.config.schema import ModelConfig
from spes_p2p.interop.hf import state_tensors
from spes_p2p.planning.sizes import Sizes, flops_per_token
from tests.planning.runs import EVERY, run_named


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("qk_norm", ["none", "full", "head"])
def test_counts_are_those_of_the_tensors(name: str, qk_norm: str) -> None:
    model = run_named(name, f"model.qk_norm={qk_norm}").model
    sizes, counts = Sizes.of(model), [0] * (1 + model.num_experts)
    for tensor in state_tensors(model):
        counts[0 if tensor.column is None else 1 + tensor.column] += math.prod(tensor.shape)
    assert [sizes.shared, *[sizes.column] * model.num_experts] == counts
    assert sizes.total == sum(counts)
    assert sizes.trained(model.num_experts) == sizes.total


@pytest.mark.parametrize(("name", "billions"), [("spes-1b", 1.17), ("spes-7b", 7.33), ("spes-9b", 9.43)])
def test_published_shapes_have_their_published_sizes(name: str, billions: float) -> None:
    assert Sizes.of(run_named(name).model).total / 1e9 == pytest.approx(billions, abs=0.005)


def _forward_flops(model: ModelConfig) -> float:
    """Of one token, counted product by product, without attention scores."""
    query, key = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    layer = 2 * model.d_model * (2 * query + 2 * key + model.num_experts)
    layer += model.top_k * 2 * 3 * model.d_model * model.expert_ffn
    return model.num_layers * layer + 2 * model.d_model * model.embedding_rows


@pytest.mark.parametrize("name", EVERY)
def test_training_everything_costs_three_forward_passes(name: str) -> None:
    model = run_named(name).model
    scores = 6 * model.num_layers * 100 * model.num_heads * model.head_dim
    full = flops_per_token(model, 100, model.num_experts)
    assert full == pytest.approx(3 * _forward_flops(model) + scores)
    nothing_owned = flops_per_token(model, 100, 0)
    assert full - nothing_owned == pytest.approx(2 * model.top_k * Sizes.of(model).column)

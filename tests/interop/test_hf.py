"""The table of names, and our model against transformers' own two for the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import OlmoeForCausalLM, Qwen3MoeForCausalLM

from spes_p2p.errors import ConfigError
from spes_p2p.interop.hf import hf_config, place_table, state_tensors
from spes_p2p.model.params import load_block, place, read_block
from spes_p2p.model.transformer import Transformer
from spes_p2p.state.layout import Layout
from tests.model.tiny import tiny_config, tiny_model, tiny_tokens

OLMOE: dict[str, Any] = {"qk_norm": "full", "rope_theta": 10_000.0}
QWEN3: dict[str, Any] = {"qk_norm": "head", "head_dim": 6, "norm_topk": True, "rope_theta": 1e6, "embedding_rows": 24}


def save_published(model: Transformer, folder: Path) -> None:
    """A folder as published: one tensor an expert matrix, and a config."""
    layout = Layout(state_tensors(model.config), tile_values=1024)
    table = place_table(model.config)
    blocks = [read_block(model, table, block.index) for block in layout.blocks]
    tensors = {t.name: torch.from_numpy(layout.view(blocks[_block(t.column)], t.name)) for t in layout.tensors}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    hf_config(model.config).save_pretrained(folder)


def _block(column: int | None) -> int:
    return 0 if column is None else 1 + column


def randomise_norms(model: Transformer) -> None:
    """Ones would hide a norm in the wrong place."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        (OlmoeForCausalLM, OLMOE),
        (OlmoeForCausalLM, OLMOE | {"norm_topk": True, "num_kv_heads": 4}),
        (Qwen3MoeForCausalLM, QWEN3),
    ],
)
def test_logits_equal_transformers(family: Any, overrides: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_model(**overrides)
    randomise_norms(model)
    save_published(model, tmp_path)
    theirs, info = family.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    tokens = tiny_tokens(2, 17)
    with torch.no_grad():
        want, got = theirs.eval()(tokens).logits, model.logits(tokens)
    assert got.abs().max() > 0.5
    assert (got - want).abs().max() < 1e-4


@pytest.mark.parametrize("overrides", [OLMOE, QWEN3, {"qk_norm": "none"}, {"qk_norm": "none", "qkv_bias": True}])
def test_the_table_names_every_value_of_the_model_once(overrides: dict[str, Any]) -> None:
    config = tiny_config(**overrides)
    model = Transformer(config, range(config.num_experts), device="meta")
    tensors, places = state_tensors(config), [where for block in place_table(config) for where in block]
    assert len(set(places)) == len(places) == len(tensors) == len({tensor.name for tensor in tensors})
    assert [tensor.shape for tensor in tensors] == [tuple(place(model, where).shape) for where in places]
    assert sum(tensor.size for tensor in tensors) == sum(parameter.numel() for parameter in model.parameters())


def test_canonical_order() -> None:
    names = [tensor.name for tensor in state_tensors(tiny_config(num_layers=11, num_experts=2))]
    shared = [name for name in names if ".experts." not in name]
    assert names[: len(shared)] == shared
    assert shared[:3] == ["lm_head.weight", "model.embed_tokens.weight", "model.layers.0.input_layernorm.weight"]
    assert shared[-1] == "model.norm.weight"
    layers = [int(name.split(".")[2]) for name in shared if ".layers." in name]
    assert layers == sorted(layers)
    assert [name for name in shared if ".layers.10." in name] == [
        "model.layers.10.input_layernorm.weight",
        "model.layers.10.mlp.gate.weight",
        "model.layers.10.post_attention_layernorm.weight",
        "model.layers.10.self_attn.k_norm.weight",
        "model.layers.10.self_attn.k_proj.weight",
        "model.layers.10.self_attn.o_proj.weight",
        "model.layers.10.self_attn.q_norm.weight",
        "model.layers.10.self_attn.q_proj.weight",
        "model.layers.10.self_attn.v_proj.weight",
    ]
    assert names[len(shared) :] == [
        f"model.layers.{layer}.mlp.experts.{expert}.{matrix}_proj.weight"
        for expert in range(2)
        for layer in range(11)
        for matrix in ("gate", "up", "down")
    ]


def test_only_norms_start_as_ones() -> None:
    ones = {t.name.rsplit(".", 2)[-2] for t in state_tensors(tiny_config()) if t.init == "ones"}
    assert ones == {"input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "norm"}


@pytest.mark.parametrize("overrides", [OLMOE, QWEN3])
def test_blocks_survive_the_way_in_and_out(overrides: dict[str, Any]) -> None:
    source, target = tiny_model((1, 4), seed=1, **overrides), Transformer(tiny_config(**overrides), (0, 4))
    table = place_table(source.config)
    layout = Layout(state_tensors(source.config), tile_values=1024)
    for block in layout.blocks:
        flat = read_block(source, table, block.index)
        assert flat.shape == (block.size,)
        load_block(target, table, block.index, flat)
        assert (read_block(target, table, block.index) == flat).all()
    tokens = tiny_tokens()
    assert torch.equal(source.logits(tokens), target.logits(tokens))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"qk_norm": "full", "head_dim": 6}, "which OLMoE cannot express"),
        ({"qk_norm": "head", "qkv_bias": True}, "no Hugging Face model family has"),
    ],
)
def test_models_that_no_family_has_are_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        hf_config(tiny_config(**overrides))

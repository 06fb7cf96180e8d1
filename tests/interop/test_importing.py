"""Published checkpoints as a run's first state: same values, same logits, and clear words for what does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from spes_p2p.config.load import config_from_tree
from spes_p2p.config.schema import Config
from spes_p2p.errors import CheckpointError, ConfigError
from spes_p2p.interop.importing import StartModel
from spes_p2p.interop.weights import INDEX_FILE, SINGLE_FILE
from spes_p2p.state.layout import Layout
from spes_p2p.state.store import StateStore
from tests.interop.states import OLMOE, layout_of, model_of, random_state, run_config
from tests.interop.test_export import exported
from tests.model.tiny import tiny_tokens

SMALL: dict[str, Any] = {
    "vocab_size": 19,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "initializer_range": 0.3,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
MOE: dict[str, Any] = {"moe_intermediate_size": 24, "decoder_sparse_step": 1}


def olmoe(**changes: Any) -> PreTrainedModel:
    return OlmoeForCausalLM(OlmoeConfig(**(SMALL | changes)))


def qwen3(**changes: Any) -> PreTrainedModel:
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**(SMALL | MOE | {"head_dim": 6} | changes)))


def qwen2(**changes: Any) -> PreTrainedModel:
    model = Qwen2MoeForCausalLM(Qwen2MoeConfig(**(SMALL | MOE | {"shared_expert_intermediate_size": 3} | changes)))
    for name, parameter in model.named_parameters():
        if name.endswith("shared_expert.down_proj.weight"):
            parameter.data.zero_()
        if name.endswith("proj.bias"):
            parameter.data.normal_()
    return model


def config_for(start: StartModel) -> Config:
    """A run of this model."""
    tree = run_config().model_dump() | {"swarm": {"experts_per_peer": 1}}
    return config_from_tree(tree | yaml.safe_load(start.section()))


def state_of(start: StartModel, folder: Path, config: Config) -> StateStore:
    store = StateStore(folder, layout_of(config))
    with start.values(layout_of(config)) as values:
        store.create_initial(values)
    return store


@pytest.mark.parametrize(
    "theirs",
    [
        pytest.param(olmoe, id="olmoe"),
        pytest.param(qwen3, id="qwen3"),
        pytest.param(qwen2, id="qwen2"),
        pytest.param(lambda: olmoe(norm_topk_prob=True), id="normalised"),
        pytest.param(lambda: qwen3(tie_word_embeddings=True), id="tied"),
    ],
)
def test_what_transformers_saved_computes_the_same_here(theirs: Any, tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = theirs().eval()
    model.save_pretrained(tmp_path / "hf", max_shard_size="5KB")
    assert (tmp_path / "hf" / INDEX_FILE).is_file()
    start = StartModel.open(tmp_path / "hf")
    config = config_for(start)
    start.check_fits(config)
    version = state_of(start, tmp_path / "state", config).version(0)
    assert start.root(version.layout) == version.root
    tokens = tiny_tokens(2, 17)
    with torch.no_grad():
        want, got = model(tokens).logits, model_of(config, version).logits(tokens)
    assert got.abs().max() > 0.05
    assert (got - want).abs().max() < 1e-4


def test_an_export_comes_back_bit_for_bit(tmp_path: Path) -> None:
    config = run_config(**OLMOE)
    _, state = random_state(config)
    start = StartModel.open(exported(tmp_path / "hf", config, state))
    assert start.model == config.model.model_copy(update={"init_std": 0.3})
    store = state_of(start, tmp_path / "state", config)
    for block in store.layout.blocks:
        np.testing.assert_array_equal(store.version(0).block(block.index), state.block(block.index))


def test_tiles_of_any_size_give_the_same_values(tmp_path: Path) -> None:
    config = run_config(**OLMOE)
    start = StartModel.open(exported(tmp_path, config, random_state(config)[1]))
    blocks = []
    for tile_values in (7, 256, 10**6):
        layout = Layout(layout_of(config).tensors, tile_values)
        with start.values(layout) as values:
            blocks.append(np.concatenate([values(tile) for tile in layout.tiles]))
    assert (blocks[0] == blocks[1]).all()
    assert (blocks[0] == blocks[2]).all()


def test_with_an_outer_optimizer_the_start_has_momentum_at_rest(tmp_path: Path) -> None:
    olmoe().save_pretrained(tmp_path)
    start = StartModel.open(tmp_path)
    plain = layout_of(config_for(start))
    layout = Layout(plain.tensors, plain.tile_values, has_momentum=True)
    with start.values(layout) as values, start.values(plain) as expected:
        for tile in plain.tiles:
            assert np.array_equal(values(tile), expected(tile))
            assert not values(layout.tiles[layout.momentum_tile(tile.id)]).any()
    assert start.root(layout) != start.root(plain)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"clip_qkv": 8.0}, "clip_qkv is 8.0"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope_parameters is"),
    ],
)
def test_parts_that_our_model_lacks_are_named(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    olmoe(**changes).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=named) as caught:
        StartModel.open(tmp_path)
    assert caught.value.fix


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("initializer_range", 0.0, "the model's init_std would be 0.0"),
        ("num_experts", 0, "the model's num_experts would be 0"),
        ("rms_norm_eps", "1e-6", "Field 'rms_norm_eps' expected float, got str"),
        ("num_attention_heads", 0, "the model's num_heads would be 0"),
        ("rope_parameters", {"rope_type": "default", "rope_theta": "1e4"}, "the model's rope_theta would be '1e4'"),
        ("rope_parameters", {"rope_type": "default", "rope_theta": None}, "the model's rope_theta would be None"),
        ("dtype", "float33", "has no attribute 'float33'"),
    ],
)
def test_values_that_no_model_has_are_named(field: str, value: object, named: str, tmp_path: Path) -> None:
    olmoe().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(ConfigError, match=named):
        StartModel.open(tmp_path)


def test_a_shared_expert_that_does_something_is_refused(tmp_path: Path) -> None:
    model = qwen2()
    model.get_parameter("model.layers.1.mlp.shared_expert.down_proj.weight").data[0, 0] = 1.0
    model.save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError, match=r"layers.1.mlp.shared_expert.down_proj.weight, which our model does not have"
    ):
        StartModel.open(tmp_path)


def test_other_families_and_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config.json"):
        StartModel.open(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="holds a llama model") as caught:
        StartModel.open(tmp_path)
    assert "upcycle" in caught.value.fix
    (tmp_path / "config.json").write_text('{"model_type": "nobody-knows"}')
    with pytest.raises(ConfigError, match="cannot be used"):
        StartModel.open(tmp_path)


def test_files_that_do_not_fit_are_named(tmp_path: Path) -> None:
    olmoe().save_pretrained(tmp_path)
    path = tmp_path / SINGLE_FILE
    whole = load_file(path)

    def read_all() -> None:
        start = StartModel.open(tmp_path)
        start.root(layout_of(config_for(start)))

    def refused(message: str) -> None:
        with pytest.raises(CheckpointError, match=message):
            read_all()

    save_file(whole | {"model.norm.weight": torch.ones(15)}, path)
    refused(r"model.norm.weight has shape \[15\] instead of \[16\]")
    save_file({name: tensor for name, tensor in whole.items() if name != "model.norm.weight"}, path)
    refused(r"has no tensor model.norm.weight")
    save_file(whole | {"model.norm.weight": torch.full((16,), torch.nan)}, path)
    refused(r"model.norm.weight holds values that are not finite")
    save_file(whole | {"model.norm.weight": torch.ones(16, dtype=torch.int8)}, path)
    refused(r"model.norm.weight holds torch.int8")
    path.write_bytes(path.read_bytes()[:-5])
    refused(r"model.safetensors is damaged")
    path.unlink()
    refused(r"has neither model.safetensors nor")
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    refused(r"gone.safetensors is missing")
    save_file(whole, tmp_path.parent / "others.safetensors")  # whose values the run would publish
    for outside in ("../others.safetensors", str(tmp_path.parent / "others.safetensors")):
        (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": dict.fromkeys(whole, outside)}))
        refused(f"it names '{outside}', which is not in its folder")


def test_a_run_of_another_model_is_refused_by_its_fields(tmp_path: Path) -> None:
    olmoe().save_pretrained(tmp_path)
    start = StartModel.open(tmp_path)
    config = config_for(start)
    other = config.model_copy(update={"model": config.model.model_copy(update={"norm_topk": True, "top_k": 3})})
    with pytest.raises(ConfigError, match=r"model.top_k is 3 in the config and 2 in .*; model.norm_topk is True"):
        start.check_fits(other)
    own = {"vocab_size": 11, "init_std": 1.0, "expert_backend": "eager", "document_end": 3}
    start.check_fits(config.model_copy(update={"model": config.model.model_copy(update=own)}))  # the run decides these


def test_an_exported_model_can_be_loaded_and_saved_by_transformers_and_come_back(tmp_path: Path) -> None:
    config = run_config(**OLMOE)
    exported(tmp_path / "hf", config, random_state(config)[1])
    AutoModelForCausalLM.from_pretrained(tmp_path / "hf").save_pretrained(tmp_path / "again")
    layout = layout_of(config)
    assert StartModel.open(tmp_path / "again").root(layout) == StartModel.open(tmp_path / "hf").root(layout)

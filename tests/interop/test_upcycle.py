"""Dense models as the start of a Mixture of Experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from spes_p2p.errors import ConfigError
from spes_p2p.interop.importing import StartModel
from spes_p2p.interop.tokenizer import Publishable, byte_level
from spes_p2p.interop.upcycle import Upcycling, upcycle
from spes_p2p.interop.weights import SINGLE_FILE
from tests.interop.states import layout_of, model_of
from tests.interop.test_importing import SMALL, config_for, state_of
from tests.model.tiny import tiny_tokens

DENSE: dict[str, Any] = {name: value for name, value in SMALL.items() if "experts" not in name}
EXACT = Upcycling(noise_std=0.0, router_init="normal")


def qwen3(**changes: Any) -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**(DENSE | {"head_dim": 6} | changes)))


def llama(**changes: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**(DENSE | changes)))


def qwen2(**changes: Any) -> PreTrainedModel:
    model = Qwen2ForCausalLM(Qwen2Config(**(DENSE | changes)))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_()
    return model


def made(folder: Path, model: PreTrainedModel, how: Upcycling) -> StartModel:
    model.save_pretrained(folder / "dense")
    (folder / "moe").mkdir()
    return upcycle(folder / "dense", folder / "moe", how)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "moe" / SINGLE_FILE)


@pytest.mark.parametrize(
    "dense",
    [
        pytest.param(qwen3, id="qwen3"),
        pytest.param(lambda: qwen3(tie_word_embeddings=True), id="tied"),
        pytest.param(llama, id="llama"),
        pytest.param(qwen2, id="qwen2"),
    ],
)
@pytest.mark.parametrize("router_init", ["normal", "from_mlp", "zeros"])
def test_without_noise_it_computes_what_the_dense_model_does(dense: Any, router_init: Any, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = dense().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
    start = made(tmp_path, model, Upcycling(noise_std=0.0, router_init=router_init))
    config, tokens = config_for(start), tiny_tokens(2, 17)
    version = state_of(start, tmp_path / "state", config).version(0)
    with torch.no_grad():
        want = model(tokens).logits
        ours = model_of(config, version).logits(tokens)
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "moe").eval()(tokens).logits
    assert want.abs().max() > 0.5
    assert (ours - want).abs().max() < 1e-4
    assert (theirs - want).abs().max() < 1e-4


def test_it_has_the_shape_that_was_asked_for(tmp_path: Path) -> None:
    start = made(tmp_path, qwen3(), Upcycling(experts=5, top_k=3))
    model = start.model
    assert (model.num_experts, model.top_k, model.expert_ffn, model.head_dim) == (5, 3, 24, 6)
    assert (model.norm_topk, model.qk_norm, model.embedding_rows) == (True, "head", 19)
    assert (tmp_path / "moe" / "model.yaml").read_text() == start.section()
    assert config_for(start).model == model


def test_one_expert_per_token_needs_a_router_that_learns() -> None:
    Upcycling(top_k=1, norm_topk=False).check()
    Upcycling(experts=1, top_k=1).check()


def test_noise_is_as_strong_and_as_frequent_as_was_asked_for(tmp_path: Path) -> None:
    dense = qwen3(intermediate_size=600, hidden_size=64)
    made(tmp_path, dense, Upcycling(noise_std=0.05, noise_fraction=0.25))
    found, name = weights(tmp_path), "model.layers.1.mlp.{}up_proj.weight"
    copied = dense.get_parameter(name.format("")).detach()
    noises = [found[name.format(f"experts.{expert}.")] - copied for expert in range(8)]
    for noise in noises:
        assert float((noise != 0).float().mean()) == pytest.approx(0.25, abs=0.01)
        assert float(noise[noise != 0].std()) == pytest.approx(0.05, rel=0.03)
    assert not torch.equal(noises[0], noises[1])
    for name in ("model.norm.weight", "model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight"):
        assert torch.equal(found[name], dense.get_parameter(name))


@pytest.mark.parametrize(("router_init", "sigma"), [("zeros", 0.0), ("normal", 1.0), ("scaled_normal", 0.02)])
def test_routers_are_drawn_as_published(router_init: Any, sigma: float, tmp_path: Path) -> None:
    made(tmp_path, qwen3(hidden_size=1024), Upcycling(router_init=router_init))
    routers = [weights(tmp_path)[f"model.layers.{layer}.mlp.gate.weight"] for layer in range(2)]
    for router in routers:
        assert float(router.std()) == pytest.approx(sigma, rel=0.05)
    assert torch.equal(*routers) == (sigma == 0)


def test_a_router_from_the_mlp_has_the_spread_of_its_down_projection(tmp_path: Path) -> None:
    dense = qwen3(hidden_size=1024)
    dense.get_parameter("model.layers.1.mlp.down_proj.weight").data.mul_(0.1)
    made(tmp_path, dense, Upcycling(router_init="from_mlp"))
    for layer in range(2):
        down = dense.get_parameter(f"model.layers.{layer}.mlp.down_proj.weight")
        router = weights(tmp_path)[f"model.layers.{layer}.mlp.gate.weight"]
        assert float(router.std()) == pytest.approx(float(down.std()), rel=0.05)


def test_one_seed_gives_one_model(tmp_path: Path) -> None:
    dense = qwen3()
    starts = [made(tmp_path / str(at), dense, Upcycling(seed=seed)) for at, seed in enumerate((4, 4, 5))]
    first, same, other = (start.root(layout_of(config_for(start))) for start in starts)
    assert first == same != other


def test_tokenizer_files_go_along(tmp_path: Path) -> None:
    (tmp_path / "dense").mkdir()
    Publishable("byte").save(tmp_path / "dense", 64)
    made(tmp_path, qwen3(), EXACT)
    assert AutoTokenizer.from_pretrained(tmp_path / "moe")("ab")["input_ids"] == [97, 98]


@pytest.mark.parametrize(
    ("how", "named"),
    [
        (Upcycling(top_k=9), "--top-k is 9"),
        (Upcycling(top_k=1), "--top-k is 1 with --norm-topk: .* never learns"),
        (Upcycling(noise_fraction=1.5), "--noise-fraction is 1.5"),
        (Upcycling(noise_std=-1.0), "--noise-std is -1.0"),
        (Upcycling(noise_std=float("inf")), "--noise-std is inf"),
    ],
)
def test_values_that_make_no_sense_are_named(how: Upcycling, named: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=named):
        made(tmp_path, qwen3(), how)


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (lambda: llama(attention_bias=True), "attention_bias is True"),
        (lambda: llama(mlp_bias=True), "mlp_bias is True"),
        (lambda: qwen2(use_sliding_window=True, sliding_window=8, max_window_layers=1), "use_sliding_window is True"),
    ],
)
def test_dense_parts_that_our_model_lacks_are_named(model: Any, named: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=named):
        made(tmp_path, model(), EXACT)


def test_added_tokens_keep_the_ids_that_the_model_has_rows_for(tmp_path: Path) -> None:
    """In a folder as older programs saved it; without its added_tokens.json the end would be another token."""
    dense = tmp_path / "dense"
    qwen2().save_pretrained(dense)
    letters = byte_level().get_vocab(with_added_tokens=False)
    (dense / "vocab.json").write_text(json.dumps(letters))
    (dense / "merges.txt").write_text("#version: 0.2\n")
    (dense / "added_tokens.json").write_text(json.dumps({"<|start|>": 256, "<|end|>": 257}))
    (dense / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|end|>"}')
    (tmp_path / "moe").mkdir()
    upcycle(dense, tmp_path / "moe", EXACT)
    assert AutoTokenizer.from_pretrained(tmp_path / "moe").eos_token_id == 257

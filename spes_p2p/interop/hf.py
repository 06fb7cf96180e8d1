"""Our names and Hugging Face's: ONE table, read both ways, and the matching transformers config.

Three published families fit our model: OLMoE (QK norm over the full width), Qwen3-MoE (QK norm per head) and Qwen2-MoE
(none; its shared expert, which we do not have, is one of zeros). All use the same tensor names with one tensor an
expert matrix, as in their published checkpoints. This file also fixes the canonical order of the state (design section
4 "Bytes"). Reading and writing files is not done here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from spes_p2p.config.schema import Config, ModelConfig
from spes_p2p.errors import ConfigError
from spes_p2p.experts.bank import Matrix
from spes_p2p.model.params import ExpertPlace, Place, SharedPlace
from spes_p2p.state.layout import Init, Layout, StateTensor

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class _Row(NamedTuple):
    published: str
    ours: str
    shape: str
    """Letters: V embedding rows, D d_model, Q query width, G key-value width, C head_dim, E experts, F expert ffn."""


_MODEL = (
    _Row("lm_head.weight", "head.weight", "VD"),
    _Row("model.embed_tokens.weight", "embedding", "VD"),
    _Row("model.norm.weight", "norm.weight", "D"),
)
_VOCABULARY = "lm_head.weight", "model.embed_tokens.weight"
_LAYER = (
    _Row("input_layernorm.weight", "attention_norm.weight", "D"),
    _Row("self_attn.q_proj.weight", "attention.query.weight", "QD"),
    _Row("self_attn.k_proj.weight", "attention.key.weight", "GD"),
    _Row("self_attn.v_proj.weight", "attention.value.weight", "GD"),
    _Row("self_attn.o_proj.weight", "attention.output.weight", "DQ"),
    _Row("post_attention_layernorm.weight", "moe_norm.weight", "D"),
    _Row("mlp.gate.weight", "moe.router.weight", "ED"),
)
_QKV_BIAS = (
    _Row("self_attn.q_proj.bias", "attention.query.bias", "Q"),
    _Row("self_attn.k_proj.bias", "attention.key.bias", "G"),
    _Row("self_attn.v_proj.bias", "attention.value.bias", "G"),
)
_QK_NORM = {
    "none": (),
    "full": (
        _Row("self_attn.q_norm.weight", "attention.query_norm.weight", "Q"),
        _Row("self_attn.k_norm.weight", "attention.key_norm.weight", "G"),
    ),
    "head": (
        _Row("self_attn.q_norm.weight", "attention.query_norm.weight", "C"),
        _Row("self_attn.k_norm.weight", "attention.key_norm.weight", "C"),
    ),
}
_EXPERT: tuple[tuple[str, Matrix, str], ...] = (
    ("gate_proj.weight", "gate", "FD"),
    ("up_proj.weight", "up", "FD"),
    ("down_proj.weight", "down", "DF"),
)


def state_tensors(model: ModelConfig) -> list[StateTensor]:
    """Every tensor of the state in canonical order.

    First the shared ones in the order of their names, layer numbers compared as numbers; then columns 0..E-1, inside a
    column by layer, then gate, up, down.
    """
    return [tensor for tensor, _ in _entries(model)]


def state_layout(config: Config) -> Layout:
    """The grid of a run: where every value of its state lies, and how it travels."""
    sync, tensors = config.sync, state_tensors(config.model)
    return Layout(tensors, sync.tile_values, sync.codec, sync.expert_codec, has_momentum=sync.outer != "none")


def vocabulary_tiles(layout: Layout) -> int:
    """How many tiles at the beginning of the shared block hold embedding and head and nothing else."""
    values = 0
    for placed in layout.blocks[0].tensors:
        if placed.tensor.name not in _VOCABULARY:
            break
        values = placed.offset + placed.tensor.size
    return values // layout.tile_values


def place_table(model: ModelConfig) -> tuple[tuple[Place, ...], ...]:
    """For each block of the state the places of its tensors in our model, in canonical order (for model/params.py)."""
    blocks: list[list[Place]] = [[] for _ in range(1 + model.num_experts)]
    for tensor, place in _entries(model):
        blocks[0 if tensor.column is None else 1 + tensor.column].append(place)
    return tuple(tuple(block) for block in blocks)


def hf_config(model: ModelConfig, max_positions: int = 4096) -> PretrainedConfig:
    """The transformers config of the same model: OlmoeConfig, with QK norm per head Qwen3MoeConfig, without Qwen2Moe's.

    `max_positions` is the longest sequence that the model is meant for. Raises ConfigError for a model that none of
    the families can express.
    """
    from transformers import OlmoeConfig, Qwen2MoeConfig, Qwen3MoeConfig

    if model.qkv_bias and model.qk_norm != "none":
        raise ConfigError(
            f"no Hugging Face model family has model.qkv_bias with model.qk_norm {model.qk_norm}",
            fix="leave qkv_bias out, or set model.qk_norm to none (Qwen2-MoE)",
        )
    if model.qk_norm == "head":
        own: dict[str, Any] = {"moe_intermediate_size": model.expert_ffn, "head_dim": model.head_dim}
        return Qwen3MoeConfig(**_common(model, max_positions), **own, decoder_sparse_step=1, mlp_only_layers=[])
    if model.qk_norm == "none":
        own = {"moe_intermediate_size": model.expert_ffn, "head_dim": model.head_dim, "qkv_bias": model.qkv_bias}
        own |= {"shared_expert_intermediate_size": 1, "decoder_sparse_step": 1, "mlp_only_layers": []}
        return Qwen2MoeConfig(**_common(model, max_positions), **own)
    if model.num_heads * model.head_dim != model.d_model:
        raise ConfigError(
            f"model.head_dim ({model.head_dim}) times num_heads ({model.num_heads}) is not d_model ({model.d_model}), "
            "which OLMoE cannot express",
            fix="set model.qk_norm to head (Qwen3-MoE), or head_dim to d_model / num_heads",
        )
    return OlmoeConfig(**_common(model, max_positions), clip_qkv=None)


def _common(model: ModelConfig, max_positions: int) -> dict[str, Any]:
    return {
        "vocab_size": model.embedding_rows,
        "hidden_size": model.d_model,
        "intermediate_size": model.expert_ffn,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "num_experts": model.num_experts,
        "num_experts_per_tok": model.top_k,
        "norm_topk_prob": model.norm_topk,
        "max_position_embeddings": max_positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "rms_norm_eps": model.rms_eps,
        "initializer_range": model.init_std,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _entries(model: ModelConfig) -> list[tuple[StateTensor, Place]]:
    columns = [_expert(model, expert) for expert in range(model.num_experts)]
    return [*_shared(model), *(entry for column in columns for entry in column)]


def _shared(model: ModelConfig) -> list[tuple[StateTensor, Place]]:
    rows = list(_MODEL)
    for layer in range(model.num_layers):
        for row in (*_LAYER, *_QK_NORM[model.qk_norm], *(_QKV_BIAS if model.qkv_bias else ())):
            rows.append(_Row(f"model.layers.{layer}.{row.published}", f"layers.{layer}.{row.ours}", row.shape))
    rows.sort(key=lambda row: _natural(row.published))
    return [(_tensor(model, row.published, row.shape, None), SharedPlace(row.ours)) for row in rows]


def _expert(model: ModelConfig, expert: int) -> list[tuple[StateTensor, Place]]:
    entries: list[tuple[StateTensor, Place]] = []
    for layer in range(model.num_layers):
        for published, which, shape in _EXPERT:
            name = f"model.layers.{layer}.mlp.experts.{expert}.{published}"
            entries.append((_tensor(model, name, shape, expert), ExpertPlace(layer, expert, which)))
    return entries


def _tensor(model: ModelConfig, name: str, shape: str, column: int | None) -> StateTensor:
    sizes = {
        "V": model.embedding_rows,
        "D": model.d_model,
        "Q": model.num_heads * model.head_dim,
        "G": model.num_kv_heads * model.head_dim,
        "C": model.head_dim,
        "E": model.num_experts,
        "F": model.expert_ffn,
    }
    init: Init = "normal"
    if len(shape) == 1:  # norms and biases
        init = "zeros" if name.endswith(".bias") else "ones"
    return StateTensor(name, tuple(sizes[letter] for letter in shape), column, init)


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts the parts of a name by text, numbers by value (before any text)."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]

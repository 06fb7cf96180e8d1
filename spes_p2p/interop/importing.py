"""Published checkpoints as the state that a run starts from: OLMoE, Qwen3-MoE, and Qwen2-MoE without a shared expert.

`StartModel` knows what model a folder holds, checks it against a run's config, and gives its values tile by tile, so
that neither the model nor a block is ever whole in memory. Tied embeddings become two; what our model does not have
(rope scaling, biases on the output projection, clipping, sliding windows, layers without experts) is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml
from pydantic import ValidationError

from spes_p2p.config.schema import Config, ModelConfig
from spes_p2p.config.sections import is_local
from spes_p2p.errors import CheckpointError, ConfigError, first_line
from spes_p2p.ids import Hash
from spes_p2p.interop.hf import state_tensors
from spes_p2p.interop.weights import PublishedWeights
from spes_p2p.state.hashes import hash_tiles
from spes_p2p.state.layout import Layout, Tile, Values
from spes_p2p.state.version import bytes_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

QK_NORMS = {"olmoe": "full", "qwen3_moe": "head", "qwen2_moe": "none"}
"""Families that can be imported, and how they normalise queries and keys."""
_NOT_COMPARED = frozenset({"vocab_size", "init_std", "document_end"})
"""What a run decides for itself: which of the rows are tokens, what new values would be drawn from, who trains the
experts, and whether attention leaves a document. No published model has a field for it."""
_OURS = "our model has no such part; use another checkpoint"
ROUTER_WARNING = (
    "model.top_k is 1 with model.norm_topk=true: each token's weight is one whatever the router says, so the router "
    "never learns from the loss; unless a published model has it so, set model.norm_topk=false or model.top_k=2"
)


def read_config(folder: Path) -> PretrainedConfig:
    """The folder's config.json. Raises ConfigError where there is none that transformers understands."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} has no config.json", fix="give the folder of a Hugging Face model")
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except StrictDataclassError as error:  # its first line names the field alone
        raise _unusable(folder, " ".join(str(error).split())) from error
    except (ValueError, OSError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise _unusable(folder, first_line(error)) from error


def _unusable(folder: Path, why: str) -> ConfigError:
    return ConfigError(f"{folder / 'config.json'} cannot be used: {why}", fix="give the folder of a model")


def check_parts(config: PretrainedConfig, folder: Path) -> None:
    """Raises ConfigError naming a part of the model that ours does not have."""
    rope = getattr(config, "rope_parameters", None) or {}
    unfit = {
        "hidden_act": getattr(config, "hidden_act", "silu") != "silu",
        "rope_parameters": rope.get("rope_type", "default") != "default",
        "attention_bias": bool(getattr(config, "attention_bias", None)),
        "mlp_bias": bool(getattr(config, "mlp_bias", None)),
        "clip_qkv": getattr(config, "clip_qkv", None) is not None,
        "use_sliding_window": bool(getattr(config, "use_sliding_window", None)),
        "mlp_only_layers": bool(getattr(config, "mlp_only_layers", None)),
        "decoder_sparse_step": getattr(config, "decoder_sparse_step", 1) != 1,
    }
    for name, is_unfit in unfit.items():
        if is_unfit:
            raise ConfigError(f"{folder}: {name} is {getattr(config, name)!r}", fix=_OURS)


def model_of(config: PretrainedConfig, folder: Path, **own: Any) -> ModelConfig:
    """Our config of a model, dense ones too. `own`: the fields that each family names otherwise.

    Raises ConfigError for values that no model has.
    """
    heads = config.num_attention_heads
    fields = {
        "vocab_size": config.vocab_size,
        "d_model": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "num_heads": heads,
        "num_kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // max(1, heads),
        "rope_theta": config.rope_parameters["rope_theta"],
        "rms_eps": config.rms_norm_eps,
        "init_std": config.initializer_range,
    }
    try:
        return ModelConfig(**fields | own)
    except ValidationError as error:
        wrong = error.errors()[0]
        raise _unusable(folder, f"the model's {wrong['loc'][0]} would be {wrong['input']!r}") from error


@dataclass(frozen=True)
class StartModel:
    """A folder that a run can start from."""

    folder: Path
    model: ModelConfig
    tied: bool
    """The output head is the embedding."""

    @classmethod
    def open(cls, folder: Path) -> StartModel:
        """Opens a folder. Raises ConfigError if our model cannot represent it, CheckpointError if files are missing."""
        config = read_config(folder)
        if config.model_type not in QK_NORMS:
            known = ", ".join(QK_NORMS)
            raise ConfigError(
                f"{folder} holds a {config.model_type} model, not one of {known}",
                fix="convert a dense model with spes-p2p upcycle, or give another folder",
            )
        check_parts(config, folder)
        model = model_of(
            config,
            folder,
            num_experts=config.num_experts,
            top_k=config.num_experts_per_tok,
            expert_ffn=getattr(config, "moe_intermediate_size", None) or config.intermediate_size,
            norm_topk=config.norm_topk_prob,
            qk_norm=QK_NORMS[config.model_type],
            qkv_bias=config.model_type == "qwen2_moe" and config.qkv_bias,
        )
        start = cls(folder, model, bool(config.tie_word_embeddings))
        start._check_tensors()
        return start

    def _check_tensors(self) -> None:
        with PublishedWeights.open(self.folder) as weights:
            expected = {tensor.name: tensor.shape for tensor in state_tensors(self.model)}
            for name, shape in expected.items():
                weights.check(self._source(name), shape)
            for name in sorted(weights.names - expected.keys()):
                if not _adds_nothing(weights, name):
                    raise ConfigError(f"{self.folder} holds {name}, which our model does not have", fix=_OURS)

    def check_fits(self, config: Config) -> None:
        """Raises ConfigError naming the fields in which the run's model is another one."""
        ours, theirs = config.model.model_dump(), self.model.model_dump()
        wrong = [
            f"model.{name} is {ours[name]!r} in the config and {theirs[name]!r} in {self.folder}"
            for name, field in ModelConfig.model_fields.items()
            if not is_local(field) and name not in _NOT_COMPARED and ours[name] != theirs[name]
        ]
        if wrong:
            raise ConfigError(
                "; ".join(wrong[:3]) + (f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""),
                fix=f"use the `model` section that `spes-p2p import {self.folder}` prints",
            )

    def section(self) -> str:
        """The section `model` of a run's YAML."""
        values = self.model.model_dump(mode="json")
        agreed = {name: values[name] for name, field in ModelConfig.model_fields.items() if not is_local(field)}
        return yaml.safe_dump({"model": agreed}, sort_keys=False)

    @contextmanager
    def values(self, layout: Layout) -> Iterator[Callable[[Tile], Values]]:
        """The values of any tile, for `StateStore.create_initial`. Tiles are cheapest in their order."""
        with PublishedWeights.open(self.folder) as weights:
            yield _Tiles(self, weights, layout)

    def root(self, layout: Layout) -> Hash:
        """The root of the state that these values are. Reads all of them. Raises CheckpointError."""
        with self.values(layout) as values:
            return Layout.root_of(hash_tiles(bytes_of(values(tile)) for tile in layout.tiles))

    def _source(self, name: str) -> str:
        return "model.embed_tokens.weight" if self.tied and name == "lm_head.weight" else name


def _adds_nothing(weights: PublishedWeights, name: str) -> bool:
    """A tensor that can be left out: of a shared expert whose last product is zero, or computed anyway."""
    if name.endswith("rotary_emb.inv_freq"):
        return True
    if not name.endswith(".mlp.shared_expert.down_proj.weight"):
        return ".mlp.shared_expert" in name  # judged by its down projection
    return not weights.read(name, weights.shape(name)).any()


class _Tiles:
    """Keeps the tensor that the last tile ended in, since the next one most often begins there."""

    def __init__(self, start: StartModel, weights: PublishedWeights, layout: Layout) -> None:
        self._start = start
        self._weights = weights
        self._layout = layout
        self._held: tuple[str, Values] = ("", np.empty(0, np.float32))

    def __call__(self, tile: Tile) -> Values:
        """Flat fp32."""
        if tile.id >= self._layout.num_model_tiles:  # an outer optimizer begins at rest
            return np.zeros(tile.size, np.float32)
        values = np.empty(tile.size, np.float32)
        at = tile.start
        while at < tile.stop:
            placed = self._layout.tensor_at(tile.block, at)
            stop = min(tile.stop, placed.offset + placed.tensor.size)
            tensor = self._tensor(placed.tensor.name, placed.tensor.shape)
            values[at - tile.start : stop - tile.start] = tensor[at - placed.offset : stop - placed.offset]
            at = stop
        return values

    def _tensor(self, name: str, shape: tuple[int, ...]) -> Values:
        if self._held[0] != name:
            flat: Values = self._weights.read(self._start._source(name), shape).numpy().reshape(-1)
            if not np.isfinite(flat).all():
                raise CheckpointError(
                    f"{self._start.folder}: {name} holds values that are not finite", fix="copy the folder again"
                )
            self._held = (name, flat)
        return self._held[1]

"""The committed state as a Hugging Face folder that AutoModelForCausalLM loads without code of ours.

    HF_DIR/
      model.safetensors, or model-00001-of-00004.safetensors .. with model.safetensors.index.json
      config.json, generation_config.json
      tokenizer.json, tokenizer_config.json     (where the tokenizer is known)
      README.md                                 the model card

The state is read from its memory-mapped blocks, tensor by tensor. Rows of the embedding and of the output head that no
token has (`model.embedding_rows` beyond `model.vocab_size`) stay behind. Where the state comes from, and that the
folder appears at once, is up to the callers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from spes_p2p.config.schema import ModelConfig
from spes_p2p.errors import ConfigError
from spes_p2p.files import storing, whole_folder
from spes_p2p.interop.card import CARD_FILE, Facts, model_card
from spes_p2p.interop.hf import hf_config, state_layout, state_tensors
from spes_p2p.interop.tokenizer import Publishable
from spes_p2p.interop.weights import TORCH_DTYPES, Format, Piece, Report, say_nothing, write_weights
from spes_p2p.state.layout import BlockSource, Layout, StateTensor

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def export_model(
    state: BlockSource,
    facts: Facts,
    folder: Path,
    how: Format,
    tokenizer: Publishable | None,
    report: Report = say_nothing,
) -> None:
    """Fills `folder`, which exists. config.json comes last: a folder that was cut short is none that loads.

    Raises ConfigError for a model that no family has, and StorageFull.
    """
    model, length = trimmed(facts.config.model), facts.config.data.sequence_length
    if tokenizer is not None:
        tokenizer.check_fits(model.vocab_size)
    family = architecture(hf_config(model, length))
    with storing(folder, 0):
        if tokenizer is not None:
            tokenizer.save(folder, length)
        (folder / CARD_FILE).write_text(model_card(facts, family, how.dtype), encoding="utf-8")
        write_generation_config(folder, None if tokenizer is None else tokenizer.eos_id)
    pieces = pieces_of(state, state_layout(facts.config), facts.config.model)
    eos_id = None if tokenizer is None else tokenizer.eos_id
    write_model(folder, model, pieces, length, how, report, eos_id)


def write_model(
    folder: Path,
    model: ModelConfig,
    pieces: Sequence[Piece],
    max_positions: int,
    how: Format,
    report: Report,
    eos_id: int | list[int] | None,
) -> None:
    """Weights, then config.json. `pieces`: the tensors of the state. Raises StorageFull, ConfigError."""
    config = hf_config(model, max_positions)
    config.architectures = [architecture(config)]
    config.dtype = TORCH_DTYPES[how.dtype]
    config.eos_token_id = eos_id
    absent = _absent_experts(model) if model.qk_norm == "none" else []
    write_weights(folder, [*pieces, *absent], how, report)
    with storing(folder, 0):
        config.save_pretrained(folder)


def architecture(config: PretrainedConfig) -> str:
    """The name of the model's class."""
    return type(config).__name__.removesuffix("Config") + "ForCausalLM"


def trimmed(model: ModelConfig) -> ModelConfig:
    """The model without rows that no token has."""
    return model.model_copy(update={"embedding_rows": model.vocab_size})


def pieces_of(state: BlockSource, layout: Layout, model: ModelConfig) -> list[Piece]:
    """The tensors to be written, in the order in which they lie on disk."""
    return [
        Piece(tensor.name, trimmed_tensor.shape, partial(_load, state, layout, tensor, trimmed_tensor.shape))
        for tensor, trimmed_tensor in zip(state_tensors(model), state_tensors(trimmed(model)))
    ]


def _load(state: BlockSource, layout: Layout, tensor: StateTensor, shape: tuple[int, ...]) -> Tensor:
    """Copies one tensor out of the memory-mapped block that holds it, as far as `shape` asks for it."""
    block = state.block(0 if tensor.column is None else 1 + tensor.column)
    return torch.from_numpy(np.array(layout.view(block, tensor.name)[: shape[0]]))


def _absent_experts(model: ModelConfig) -> list[Piece]:
    """Qwen2-MoE's shared expert as one that adds nothing: one channel of zeros in each layer."""
    width = model.d_model
    shapes = {
        "shared_expert.gate_proj.weight": (1, width),
        "shared_expert.up_proj.weight": (1, width),
        "shared_expert.down_proj.weight": (width, 1),
        "shared_expert_gate.weight": (1, width),
    }
    return [
        Piece(f"model.layers.{layer}.mlp.{name}", shape, lambda shape=shape: torch.zeros(shape))  # type: ignore[misc]
        for layer in range(model.num_layers)
        for name, shape in shapes.items()
    ]


def write_generation_config(folder: Path, eos_id: int | None) -> None:
    """How `generate` ends a text: with `eos_id`, which also pads; nothing else is decided for the user."""
    from transformers import GenerationConfig

    GenerationConfig(eos_token_id=eos_id, pad_token_id=eos_id).save_pretrained(folder)


@contextmanager
def filled_folder(target: Path) -> Iterator[Path]:
    """A folder to fill: becomes `target` when the block ends well, and vanishes if not.

    Raises ConfigError where there is something at `target` already, or where it cannot be made; StorageFull.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} already exists", fix="choose another --output, or remove it")
    partial = target.with_name(f"{target.name}.partial")
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(whole_folder(target, partial))
        except OSError as error:
            raise ConfigError(
                f"{partial} cannot be created: {error.strerror}", fix="choose another --output"
            ) from error
        yield folder

"""A dense model as the start of a Mixture of Experts: each expert is a copy of the MLP, with noise on some entries.

From Qwen3, Llama and Qwen2. Attention, norms and embeddings are copied; tied embeddings become two. With normalised
top-k weights and without noise the new model computes what the dense one does, whatever the router says. Noise and
routers are those of the SPES paper (arXiv 2602.11543) and its released script, but for two things: each entry gets
noise independently with the given probability, and random numbers are keyed by seed and tensor name, so that one seed
gives one model.
"""

from __future__ import annotations

import hashlib
import math
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from spes_p2p.config.schema import ModelConfig
from spes_p2p.errors import ConfigError
from spes_p2p.files import storing
from spes_p2p.interop.export import write_model
from spes_p2p.interop.hf import state_tensors
from spes_p2p.interop.importing import StartModel, check_parts, model_of, read_config
from spes_p2p.interop.weights import FORMAT, Format, Piece, PublishedWeights, Report, say_nothing
from spes_p2p.state.layout import StateTensor

RouterInit = Literal["zeros", "normal", "scaled_normal", "from_mlp"]
QK_NORMS = {"qwen3": "head", "llama": "none", "qwen2": "none"}
"""Dense families, and how they normalise queries and keys."""
_SIGMAS = {"zeros": 0.0, "normal": 1.0, "scaled_normal": 0.02}
SECTION_FILE = "model.yaml"
_TOKENIZER_FILES = (
    "tokenizer*",
    "added_tokens.json",
    "special_tokens_map.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "generation_config.json",
)
ZEROS_WARNING = (
    "a router of zeros makes every top-k a tie: all tokens go to the same experts until the router has learnt; "
    "scaled_normal or from_mlp spread them from the start"
)


@dataclass(frozen=True)
class Upcycling:
    """How experts and routers are made. `noise_std` in the units of the weights."""

    experts: int = 8
    top_k: int = 2
    noise_std: float = 0.02
    noise_fraction: float = 0.5
    router_init: RouterInit = "from_mlp"
    norm_topk: bool = True
    seed: int = 0

    def check(self) -> None:
        """Raises ConfigError naming a value that makes no sense."""
        if not 1 <= self.top_k <= self.experts:
            raise ConfigError(f"--top-k is {self.top_k}", fix=f"give 1 to {self.experts}, or more --experts")
        if self.top_k == 1 and self.norm_topk and self.experts > 1:
            raise ConfigError(
                "--top-k is 1 with --norm-topk: each token's weight is one whatever the router says, so the router "
                "never learns from the loss",
                fix="give --top-k 2, or --no-norm-topk",
            )
        if not 0 <= self.noise_fraction <= 1:
            raise ConfigError(f"--noise-fraction is {self.noise_fraction}", fix="give a number from 0 to 1")
        if not 0 <= self.noise_std < math.inf:
            raise ConfigError(f"--noise-std is {self.noise_std}", fix="give 0 or more")


def upcycle(
    dense: Path, output: Path, how: Upcycling, form: Format = FORMAT, report: Report = say_nothing
) -> StartModel:
    """Fills `output`, which exists, with a model that `bootstrap --init-from` and transformers take.

    Raises ConfigError and CheckpointError for a dense model that cannot be used, and StorageFull.
    """
    how.check()
    config = read_config(dense)
    if config.model_type not in QK_NORMS:
        known = ", ".join(QK_NORMS)
        raise ConfigError(f"{dense} holds a {config.model_type} model, not one of {known}", fix="give a dense model")
    check_parts(config, dense)
    model = model_of(
        config,
        dense,
        num_experts=how.experts,
        top_k=how.top_k,
        expert_ffn=config.intermediate_size,
        norm_topk=how.norm_topk,
        qk_norm=QK_NORMS[config.model_type],
        qkv_bias=config.model_type == "qwen2",
    )
    with PublishedWeights.open(dense) as weights:
        source = _Dense(weights, bool(config.tie_word_embeddings), model, how)
        pieces = [Piece(tensor.name, tensor.shape, partial(source.read, tensor)) for tensor in state_tensors(model)]
        for tensor in state_tensors(model):
            source.check(tensor)
        with storing(output, 0):
            for pattern in _TOKENIZER_FILES:
                for path in filter(Path.is_file, dense.glob(pattern)):
                    shutil.copyfile(path, output / path.name)
        write_model(output, model, pieces, config.max_position_embeddings, form, report,
                    eos_id=config.eos_token_id)  # fmt: skip
    start = StartModel.open(output)
    with storing(output, 0):
        (output / SECTION_FILE).write_text(start.section())
    return start


@dataclass(frozen=True)
class _Dense:
    """The tensors of the new model, made of the dense one's."""

    weights: PublishedWeights
    tied: bool
    model: ModelConfig
    how: Upcycling

    def check(self, tensor: StateTensor) -> None:
        """Raises CheckpointError where the dense model lacks what this tensor is made of."""
        if not _is_router(tensor):
            self.weights.check(self._name(tensor), tensor.shape)

    def read(self, tensor: StateTensor) -> Tensor:
        """Its values, fp32."""
        generator = torch.Generator().manual_seed(_key(self.how.seed, tensor.name))
        if _is_router(tensor):
            return self._router(tensor, generator)
        values = self.weights.read(self._name(tensor), tensor.shape)
        if tensor.column is None or not self.how.noise_std or not self.how.noise_fraction:
            return values
        chosen = torch.rand(tensor.shape, generator=generator) < self.how.noise_fraction
        noise = torch.randn(tensor.shape, generator=generator) * self.how.noise_std
        return values + noise * chosen

    def _router(self, tensor: StateTensor, generator: torch.Generator) -> Tensor:
        sigma = _SIGMAS.get(self.how.router_init)
        if sigma is None:  # from_mlp
            name = tensor.name.replace("mlp.gate.weight", "mlp.down_proj.weight")
            down = self.weights.read(name, (self.model.d_model, self.model.expert_ffn))
            sigma = float(down.std())
        return torch.randn(tensor.shape, generator=generator) * sigma

    def _name(self, tensor: StateTensor) -> str:
        """Where the dense model has the values."""
        if self.tied and tensor.name == "lm_head.weight":
            return "model.embed_tokens.weight"
        return tensor.name if tensor.column is None else tensor.name.replace(f"experts.{tensor.column}.", "")


def _is_router(tensor: StateTensor) -> bool:
    return tensor.name.endswith(".mlp.gate.weight")


def _key(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7])

"""A model small enough to check by hand, for the tests of this folder and of interop."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from spes_p2p.config.schema import ModelConfig
from spes_p2p.experts.bank import MATRICES
from spes_p2p.model.params import named_shared
from spes_p2p.model.transformer import Transformer


def tiny_config(**overrides: Any) -> ModelConfig:
    """Two layers, eight experts top-2, two key-value heads for four query heads."""
    values: dict[str, Any] = {
        "vocab_size": 19,
        "d_model": 16,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "num_experts": 8,
        "top_k": 2,
        "expert_ffn": 24,
        "qk_norm": "full",
        "init_std": 0.3,
    }
    return ModelConfig(**(values | overrides))


def tiny_model(owned: tuple[int, ...] = (1, 4), seed: int = 0, **overrides: Any) -> Transformer:
    """The tiny model with random values that do not depend on `owned`."""
    model = Transformer(tiny_config(**overrides), owned)
    init_normal_(model, seed)
    return model


@torch.no_grad()
def init_normal_(model: Transformer, seed: int) -> None:
    """Random values: normal, cut at three standard deviations; norms are ones, biases zeros.

    The same for any owned set. Runs start from the committed state instead, whose bits are the same on all machines.
    """
    generator = torch.Generator().manual_seed(seed)
    std = model.config.init_std
    for name, parameter in named_shared(model).items():
        flat = torch.zeros(()) if name.endswith(".bias") else torch.ones(())
        parameter.copy_(_cut_normal(parameter.shape, std, generator) if parameter.dim() > 1 else flat)
    for bank in model.banks:
        for which in MATRICES:
            for expert in range(bank.num_experts):
                bank.load(expert, which, _cut_normal(bank.shape_of(which), std, generator))


def _cut_normal(shape: torch.Size, std: float, generator: torch.Generator) -> Tensor:
    return nn.init.trunc_normal_(torch.empty(shape), std=std, a=-3 * std, b=3 * std, generator=generator)


def tiny_tokens(sequences: int = 3, length: int = 10, seed: int = 0) -> torch.Tensor:
    """Random tokens [sequences, length]."""
    return torch.randint(0, 19, (sequences, length), generator=torch.Generator().manual_seed(seed))

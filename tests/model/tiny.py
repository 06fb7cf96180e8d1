"""A model small enough to check by hand, for the tests of this folder and of interop."""

from __future__ import annotations

from typing import Any

import torch

from spes_p2p.config.schema import ModelConfig
from spes_p2p.model.params import init_normal_
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


def tiny_tokens(sequences: int = 3, length: int = 10, seed: int = 0) -> torch.Tensor:
    """Random tokens [sequences, length]."""
    return torch.randint(0, 19, (sequences, length), generator=torch.Generator().manual_seed(seed))

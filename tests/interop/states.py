"""States of tiny models, for the tests of what goes in and out."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from spes_p2p.config.load import config_from_tree
from spes_p2p.config.schema import Config
from spes_p2p.interop.hf import place_table, state_layout
from spes_p2p.model.params import load_block, read_block
from spes_p2p.model.transformer import Transformer
from spes_p2p.state.layout import BlockSource, Layout, Values
from tests.model.tiny import tiny_config, tiny_model

OLMOE: dict[str, Any] = {"qk_norm": "full", "rope_theta": 10_000.0}
QWEN3: dict[str, Any] = {"qk_norm": "head", "head_dim": 6, "norm_topk": True, "rope_theta": 1e6, "embedding_rows": 24}
QWEN2: dict[str, Any] = {"qk_norm": "none", "head_dim": 6, "qkv_bias": True, "rope_theta": 1e6}
LLAMA: dict[str, Any] = {"qk_norm": "none", "norm_topk": True}


class Blocks:
    """A state in memory."""

    def __init__(self, blocks: list[Values]) -> None:
        self.blocks = blocks

    def block(self, index: int) -> Values:
        return self.blocks[index]


def run_config(**model: Any) -> Config:
    """A run of a tiny model."""
    tree = {
        "run": {"run_id": "a-run"},
        "model": tiny_config(**model).model_dump(),
        "data": {"sequence_length": 32},
        "optimizer": {"lr": 1e-3, "batch_sequences": 2},
        "scheduler": {"warmup_steps": 1, "total_steps": 10},
        "sync": {"steps_per_round": 5, "tile_values": 512},
        "swarm": {"experts_per_peer": 8},
    }
    return config_from_tree(tree)


def layout_of(config: Config) -> Layout:
    return state_layout(config)


def random_state(config: Config, seed: int = 0) -> tuple[Transformer, Blocks]:
    """A model, norms random too, since ones would hide a norm in the wrong place; and its blocks."""
    model = tiny_model(seed=seed, **config.model.model_dump())
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
    table = place_table(config.model)
    layout = layout_of(config)
    momentum = [np.zeros(block.size, np.float32) for block in layout.blocks[len(layout.model_blocks) :]]
    return model, Blocks([read_block(model, table, block.index) for block in layout.model_blocks] + momentum)


def model_of(config: Config, state: BlockSource) -> Transformer:
    """The model with the values of a state."""
    model = Transformer(config.model, ())
    table = place_table(config.model)
    for block in layout_of(config).model_blocks:
        load_block(model, table, block.index, np.asarray(state.block(block.index)))
    return model

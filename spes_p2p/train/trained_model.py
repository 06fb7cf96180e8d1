"""The model that a rank trains, and where its blocks are in it."""

from __future__ import annotations

import torch

from spes_p2p.config.schema import Config
from spes_p2p.interop.hf import place_table
from spes_p2p.model.losses import LossWeights
from spes_p2p.model.params import load_block, read_block
from spes_p2p.model.transformer import Transformer
from spes_p2p.state.layout import Values


class TrainedTransformer:
    """Values are NaN until they are loaded."""

    def __init__(self, config: Config, device: torch.device) -> None:
        settings = config.optimizer
        weights = LossWeights(settings.load_balancing_weight, settings.router_z_weight, settings.output_z_weight)
        self.table = place_table(config.model)
        self.module = Transformer(config.model, (), weights, device)

    def load_block(self, block: int, values: Values) -> None:
        """Copies flat fp32 values of block 0, the shared one, or of block 1 + column."""
        load_block(self.module, self.table, block, values)

    def read_block(self, block: int) -> Values:
        """The present values of block 0, or of an owned column, flat fp32."""
        return read_block(self.module, self.table, block)

    def column_shapes(self) -> dict[str, torch.Size]:
        """The tensors of an owned column by their names in the optimizer."""
        banks = enumerate(self.module.banks)
        return {f"layers.{at}.{part}": torch.Size(shape) for at, bank in banks for part, shape in bank.shapes.items()}

"""The trainer of a model of somebody's own: the same rhythm, optimizer and private state as for ours, by one rank."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from spes_p2p.config.schema import Config
from spes_p2p.interop.own import Model
from spes_p2p.state.layout import Layout, Values
from spes_p2p.train.rank import RankTrainer
from spes_p2p.train.trained_model import ColumnPiece
from spes_p2p.train.trainer import Trainer


class TrainedOwnModel:
    """A `TrainedModel` that somebody else made."""

    def __init__(self, own: Model, config: Config, device: torch.device) -> None:
        self.module = own.build(device)
        self.module.set_owned(())

    def load_block(self, block: int, values: Values) -> None:
        self.module.load_block(block, values)

    def read_block(self, block: int) -> Values:
        return self.module.read_block(block)

    def column_shapes(self, column: int) -> dict[str, torch.Size]:
        return {name: parameter.shape for name, parameter in self.module.parameters_of(1 + column).items()}

    def column_pieces(self, column: int) -> Iterator[ColumnPiece]:
        return ((name, ..., part) for name, part in self.module.pieces(1 + column))


def own_trainer(own: Model, config: Config, layout: Layout, device: torch.device) -> Trainer:
    """The trainer of a peer that trains `own`."""
    make_rank = partial(RankTrainer, make_model=partial(TrainedOwnModel, own))
    return Trainer(config, layout, device, rank_trainer=make_rank)

"""The trainer of a model of somebody's own: the same rhythm, optimizer and private state as for ours, by one rank."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from spes_p2p.config.schema import Config
from spes_p2p.interop.own import Model
from spes_p2p.model.own import OwnModel
from spes_p2p.state.layout import Layout, Values
from spes_p2p.train.ddp import Ranks
from spes_p2p.train.rank import ColumnPiece, RankTrainer
from spes_p2p.train.trainer import Trainer


class OwnRankTrainer(RankTrainer):
    """As RankTrainer, with all that touches the inside of the model in other words."""

    def __init__(self, own: Model, config: Config, layout: Layout, ranks: Ranks) -> None:
        self._own = own
        super().__init__(config, layout, ranks)

    def _make_model(self) -> OwnModel:
        self._built = self._own.build(self.ranks.device)
        self._built.set_owned(())
        return self._built

    def _load_block(self, block: int, values: Values) -> None:
        self._built.load_block(block, values)

    def _read_block(self, block: int) -> Values:
        return self._built.read_block(block)

    def column_shapes(self, column: int) -> dict[str, torch.Size]:
        return {name: parameter.shape for name, parameter in self._built.parameters_of(1 + column).items()}

    def column_pieces(self, column: int) -> Iterator[ColumnPiece]:
        return ((name, ..., part) for name, part in self._built.pieces(1 + column))


def own_trainer(own: Model, config: Config, layout: Layout, device: torch.device) -> Trainer:
    """The trainer of a peer that trains `own`."""
    return Trainer(config, layout, device, rank_trainer=partial(OwnRankTrainer, own))

"""A peer's trainer and the config, loader and dataset that it learns from."""

from __future__ import annotations

from dataclasses import dataclass

from spes_p2p.config.schema import Config
from spes_p2p.data.loader import AnyDataset, LeasedLoader, LocalLoader
from spes_p2p.train.trainer import Trainer


@dataclass(frozen=True)
class TrainingSetup:
    """Made once the peer knows its run."""

    config: Config
    trainer: Trainer
    loader: LeasedLoader | LocalLoader
    dataset: AnyDataset

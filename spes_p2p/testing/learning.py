"""Real training in a MemorySwarm: real models, data and exchange; only the network and the clock are pretended.

For comparing what runs learn, not how fast: an inner step takes no virtual time of its own.
"""

from __future__ import annotations

import torch

from spes_p2p.config.schema import Config
from spes_p2p.data.leases import Ranges, count
from spes_p2p.data.loader import LeasedLoader, held_out_batches
from spes_p2p.data.manifest import Dataset
from spes_p2p.interop.hf import state_layout
from spes_p2p.state.layout import BlockSource, Values
from spes_p2p.train.trainer import Trainer


class TrainerOf:
    """The trainer of one peer, as `PretendWork.learner`."""

    def __init__(self, config: Config, dataset: Dataset, device: torch.device) -> None:
        self._config = config
        self._dataset = dataset
        self._trainer = Trainer(config, state_layout(config), device)

    def begin(self, owned: tuple[int, ...], values: BlockSource, step: int) -> None:
        self._trainer.adopt(owned, values, step)

    def train(self, positions: Ranges) -> None:
        loader = LeasedLoader(self._dataset, self._config, positions)
        self._trainer.train_step(loader.next_batch(count(positions)))

    def values(self, block: int) -> Values:
        return self._trainer.contribution(block)


def held_out_loss(
    config: Config, dataset: Dataset, committed: BlockSource, sequences: int, device: torch.device
) -> float:
    """Mean cross entropy of a committed state over held-out sequences, nats a token."""
    trainer = Trainer(config, state_layout(config), device)
    trainer.adopt((), committed, 0)
    return trainer.evaluate(held_out_batches(dataset, config, sequences))

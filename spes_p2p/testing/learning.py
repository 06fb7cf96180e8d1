"""The learner of in-memory peers: a real trainer on real data, where only the network and the clock are pretended.

For comparing what runs learn, not how fast: an inner step takes no virtual time of its own.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from spes_p2p.config.schema import Config
from spes_p2p.consensus.manifest import Decay
from spes_p2p.data.leases import Ranges, count
from spes_p2p.data.loader import Batch, LeasedLoader, LocalLoader, held_out_batches
from spes_p2p.data.manifest import Dataset
from spes_p2p.ids import PeerId
from spes_p2p.interop.own import Model, run_layout
from spes_p2p.state.basis import Basis, Coordinates
from spes_p2p.state.layout import BlockSource, Values
from spes_p2p.train.memory import Held
from spes_p2p.train.own import own_trainer
from spes_p2p.train.trainer import Trainer


class TrainerOf:
    """The trainer of one peer, as `PretendWork.learner`: on the sequences that it leases, or on data of its own."""

    def __init__(
        self,
        config: Config,
        dataset: Dataset,
        device: torch.device,
        own_data_of: PeerId | None = None,
        model: Model | None = None,
    ) -> None:
        """`own_data_of`: nothing is leased, and this name gives the order in which the whole dataset is gone through.

        `model`: a model of one's own that the run trains.
        """
        self._config = config
        self._dataset = dataset
        self._loader = None if own_data_of is None else LocalLoader(dataset, config, own_data_of)
        layout = run_layout(config, model)
        if model is None:
            self._trainer = Trainer(config, layout, device)
        else:
            self._trainer = own_trainer(model, config, layout, device)

    @property
    def owned(self) -> tuple[int, ...]:
        """The columns trained here."""
        return self._trainer.owned

    def begin(self, owned: tuple[int, ...], values: BlockSource, step: int, round_steps: int = 0) -> None:
        self._trainer.adopt(owned, values, step, round_steps=round_steps)

    def run_ahead(self) -> None:
        self._trainer.run_ahead()

    def train(self, positions: Ranges) -> None:
        self._trainer.train_step(self.batch(positions))

    def batch(self, positions: Ranges) -> Batch:
        """What one inner step trains on."""
        loader = self._loader or LeasedLoader(self._dataset, self._config, positions)
        return loader.next_batch(count(positions) if self._loader is None else self._config.optimizer.batch_sequences)

    def values(self, block: int) -> Values:
        return self._trainer.contribution(block)

    def use_bases(self, bases: Mapping[int, Basis], left_out: bool) -> None:
        """See `Trainer.use_bases`."""
        self._trainer.use_bases(bases, left_out)

    def use_decay(self, decay: Decay | None) -> None:
        """See `Trainer.use_decay`."""
        self._trainer.use_decay(decay)

    def coordinates(self) -> Mapping[int, Coordinates]:
        """See `Trainer.coordinates`."""
        return self._trainer.coordinates()

    @property
    def held(self) -> Held:
        """What the trainer's tensors take."""
        return self._trainer.held

    def held_out_loss(self, committed: BlockSource, sequences: int, step: int = 0) -> float:
        """Mean cross entropy of a committed state over held-out sequences, nats a token; `begin` must follow."""
        self._trainer.adopt(self.owned, committed, step)
        return self._trainer.evaluate(held_out_batches(self._dataset, self._config, sequences))

    def close(self) -> None:
        """Ends the trainer."""
        self._trainer.close()


def held_out_loss(
    config: Config, dataset: Dataset, committed: BlockSource, sequences: int, device: torch.device
) -> float:
    """The same of a state that nobody here trains on."""
    return TrainerOf(config, dataset, device).held_out_loss(committed, sequences)

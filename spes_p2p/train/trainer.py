"""The trainer of a peer, as rank 0 sees it: what to train from, inner steps, values for the exchange, private state.

With more ranks than one, each call first tells the others to make the same call (see `worker`), so that the caller
need not know how many there are. Knows no network and no rounds beyond counting own steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from spes_p2p.config.load import config_to_yaml
from spes_p2p.config.schema import Config
from spes_p2p.consensus.manifest import Decay
from spes_p2p.data.loader import Batch
from spes_p2p.errors import ConfigError, LocalProtocolError
from spes_p2p.planning.budget import columns_by_experience
from spes_p2p.planning.options import Options
from spes_p2p.state.layout import BlockSource, Layout, Values
from spes_p2p.train.ddp import Ranks
from spes_p2p.train.memory import free_and_total_bytes, spare_at_peak_bytes, telling_of_memory
from spes_p2p.train.others import Others
from spes_p2p.train.pace import take_fastest_micro_batch
from spes_p2p.train.private import load_private_state, outline, private_state
from spes_p2p.train.rank import RankTrainer, step_that_fits, value_hashes
from spes_p2p.train.step import ShouldDrop, StepResult, never

__all__ = ["StepResult", "Trainer"]


class Trainer:
    """Model, optimizer and rhythm of inner steps of one peer. One thread at a time may call it.

    Every method raises SpesError where another rank has ended, naming it; only `close` is of use then.
    """

    def __init__(
        self,
        config: Config,
        layout: Layout,
        device: torch.device,
        ranks: Ranks | None = None,
        rank_trainer: Callable[[Config, Layout, Ranks], RankTrainer] = RankTrainer,
    ) -> None:
        """Allocates the model on `device` (with several ranks, on the device of each); values come with `adopt`.

        `rank_trainer` makes what rank 0 holds. Raises ConfigError where the batch cannot be split over the ranks.
        """
        ranks = ranks or Ranks()
        if ranks.rank:
            raise LocalProtocolError(f"a Trainer was made on rank {ranks.rank}", fix="call worker.serve there")
        _check_batch(config.optimizer.batch_sequences, ranks)
        self.skipped_in_row = 0
        """Steps skipped since the last one that was not."""
        self.sizes_to_time: tuple[int, ...] = ()
        """Micro-batches of which the fastest is taken before the next step, if there are any."""
        self._ranks = ranks if ranks.world_size > 1 else replace(ranks, device=device)
        self._others = Others(self._ranks)
        self._late_state: tuple[BlockSource, int, bool] | None = None
        build = self._others.told("build", config=config_to_yaml(config), threads=torch.get_num_threads())
        with build, telling_of_memory("making the model"):
            self.rank = rank_trainer(config, layout, self._ranks)
            """What rank 0 holds, to be read. What all ranks do is called here, so that the others hear of it."""

    def take_notes(self) -> list[str]:
        """What there is to say of the last steps, once."""
        notes, self.rank.notes = self.rank.notes, []
        return notes

    def park(self) -> None:
        """Takes everything off the device, at every rank, until somebody needs it: any other call brings it back.

        Only a new state of which no column is trained here waits too: `adopt` keeps the last one and reads its values
        when all is back, so it must be there until the next `adopt` or `wake`.
        """
        if self.rank.parked is None:
            with self._others.told("park"):
                self.rank.park()

    def wake(self) -> None:
        """Brings everything back as it was, then the state that came meanwhile. Raises SpesError for want of memory."""
        if self.rank.parked is None:
            return
        with self._others.told("wake"), telling_of_memory("going on after a pause"):
            self.rank.wake()
        state, self._late_state = self._late_state, None
        if state is not None:
            self.adopt((), *state)

    def columns_that_fit(self) -> int | None:
        """Expert columns for which there is memory, by what the steps since the last call have used; None on a CPU."""
        spare = spare_at_peak_bytes(self._ranks.device)
        if spare is None:
            return None
        _, total = free_and_total_bytes(self._ranks.device)
        column_values, options = self.rank.layout.model_blocks[-1].size, Options.of(self.rank.config)
        return columns_by_experience(len(self.rank.owned), spare, total, column_values, options, self._ranks.world_size)

    def adopt(
        self,
        owned: tuple[int, ...],
        values: BlockSource | None,
        step: int,
        keep_moments: bool = True,
        round_steps: int = 0,
    ) -> None:
        """Loads the state of committed global step `step` and starts a round in which columns `owned` are trained.

        Moments of the shared parameters and of columns that stay owned are kept, unless `keep_moments` is False. What
        is newly trained starts with fresh moments, its own bias-correction count and, when the run is past step 0, a
        learning rate that rises over its first steps. `round_steps`: own steps of the round that `values` have already.
        A block is asked for when it is its turn, so `values` may read what is in the model until then, but only while
        `owned` stays the same.
        """
        if values is None:
            raise LocalProtocolError("adopt without values on rank 0")
        if owned != self.rank.owned:
            _check_owned(owned, self.rank.config.model.num_experts)
        if self.rank.parked is not None and not owned and not self.rank.owned and not round_steps:
            self._late_state, self.rank.step, self.rank.round_steps = (values, step, keep_moments), step, 0
            return
        self.wake()
        adopt = self._others.told("adopt", owned=owned, step=step, keep_moments=keep_moments, round_steps=round_steps)
        loading = f"loading the state to train {len(owned)} expert columns"
        with adopt, telling_of_memory(loading):
            self.rank.adopt(owned, step, keep_moments, round_steps)
        for block in self.rank.layout.model_blocks:
            own = values.block(block.index)  # before the command: it may need one of its own
            with self._others.told("load_block", block=block.index), telling_of_memory(loading):
                self.rank.load_block(block.index, own)

    def use_decay(self, decay: Decay | None) -> None:
        """Takes the learning rate from here on as a manifest has it; None: as the config plans it."""
        if decay != self.rank.decay:
            begin_step, steps = (0, 0) if decay is None else (decay.begin_step, decay.steps)
            with self._others.told("use_decay", begin_step=begin_step, steps=steps):
                self.rank.decay = decay

    def run_ahead(self) -> None:
        """The round is over here and its outcome not known yet: steps from now on are the next round's."""
        self.wake()
        with self._others.told("run_ahead"):
            self.rank.run_ahead()

    def train_step(self, batch: Batch) -> StepResult:
        """A step that is made whole; see `train_step_unless`."""
        result = self.train_step_unless(batch)
        assert result is not None
        return result

    def train_step_unless(self, batch: Batch, should_drop: ShouldDrop = never) -> StepResult | None:
        """One inner step on `batch` (the whole peer's; rank 0 always has one).

        A step whose loss or gradient is not finite changes nothing and says `skipped`. `should_drop` is asked between
        micro-batches with the share of them that is done; where it says so, the step did not happen, at any rank: None,
        with values, moments and counts as before. A step that runs out of memory is made again with a
        smaller micro-batch or more checkpointing, from then on; `take_notes` says so. Raises SpesError where nothing is
        left to save (several ranks find out before they wait for each other in the first step, and cannot step down in
        a later one), ConfigError where the batch cannot be split over the ranks.
        """
        _check_batch(len(batch.tokens), self._ranks)
        self.wake()
        if self.sizes_to_time:
            sizes, self.sizes_to_time = self.sizes_to_time, ()
            some = batch.first(max(sizes) * self._ranks.world_size)
            with self._others.told("take_fastest", some, sizes=sizes):
                self.rank.notes += filter(None, [take_fastest_micro_batch(self.rank, some, sizes)])
        with self._others.told("train_step", batch):
            result = step_that_fits(self.rank, batch, should_drop)
        if result is None:
            return None
        self.skipped_in_row = self.skipped_in_row + 1 if result.skipped else 0
        return result

    def contribution(self, block: int) -> Values:
        """Present values of block 0 or of an owned column: flat fp32, a copy."""
        if self._late_state is not None and block == 0:
            return self._late_state[0].block(0).copy()
        self.wake()
        with self._others.told("contribution", block=block) if self.rank.deals_values else nullcontext():
            return self.rank.contribution(block)

    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Mean cross entropy a target token over `batches`, in nats; NaN where there is no target.

        By rank 0 alone, unless values are dealt to the ranks: then all of them make each pass, on the same tokens.
        """
        self.wake()
        if self.rank.deals_values:
            batches = self._others.told_each("evaluate", batches)
        with telling_of_memory("evaluating held-out data"):
            return self.rank.evaluate(batches)

    def private_state(self) -> dict[str, Any]:
        """What must be saved beside the committed state to go on exactly: a tree with the tensors that are trained.

        No copies, but for moments and values that are dealt to ranks: whoever keeps it beyond the next step or `adopt`
        must make them.
        """
        self.wake()
        with self._others.told("private_state"):
            return private_state(self.rank)

    def load_private_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from a saved `private_state`; adopt the committed state of that time first (foreign experts).

        Raises CheckpointError where it does not fit the model.
        """
        self.wake()
        if not self.rank.optimizer.groups:
            raise LocalProtocolError("load_private_state before the first adopt: foreign experts have no values")
        plain = outline(self.rank, state)
        with self._others.told("load_private_state", plain=plain), telling_of_memory("loading the training state"):
            load_private_state(self.rank, plain, state)

    def value_hashes(self) -> list[str]:
        """SHA-256 of all trained values (hexadecimal) at each rank: equal, or something is badly wrong."""
        self.wake()
        with self._others.told("value_hashes"):
            return value_hashes(self.rank)

    def close(self) -> None:
        """Lets the other ranks end. Never raises for a rank that has ended already."""
        self._others.stop()


def _check_batch(sequences: int, ranks: Ranks) -> None:
    if sequences % ranks.world_size:
        raise ConfigError(
            f"a batch of {sequences} sequences cannot be split over {ranks.world_size} ranks",
            fix="use a number of local ranks that divides optimizer.batch_sequences",
        )


def _check_owned(owned: tuple[int, ...], num_experts: int) -> None:
    if list(owned) != sorted(set(owned)) or not all(0 <= column < num_experts for column in owned):
        raise ConfigError(
            f"owned columns are {owned}, which are not ascending numbers below model.num_experts ({num_experts})",
            fix="give each column once, in ascending order",
        )

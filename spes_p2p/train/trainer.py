"""The trainer of a peer: what to train from, inner steps, values for the exchange, private state.

With more ranks than one each has a `Trainer`, and the others' call the methods that rank 0's does (`on_all_ranks`), so
that who uses it on rank 0 need not know how many there are; `worker` starts them. Knows no network and no rounds beyond
counting own steps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from spes_p2p.config.load import config_to_yaml
from spes_p2p.config.schema import Config, steps_per_round_at
from spes_p2p.consensus.manifest import Decay
from spes_p2p.data.loader import Batch
from spes_p2p.errors import ConfigError, LocalProtocolError
from spes_p2p.model.params import load_block, read_block
from spes_p2p.state.layout import BlockSource, Layout, Values
from spes_p2p.train.ddp import Ranks, broadcast_array, gather_texts
from spes_p2p.train.learner import Learner
from spes_p2p.train.memory import telling_of_memory
from spes_p2p.train.others import Others, on_all_ranks
from spes_p2p.train.pace import take_fastest_micro_batch
from spes_p2p.train.parking import Parked
from spes_p2p.train.private import load_private_state, outline, private_state
from spes_p2p.train.schedule import learning_rate, owned_balance_factor
from spes_p2p.train.step import ShouldDrop, StepResult, never

__all__ = ["StepResult", "Trainer"]


class Trainer:
    """Model, optimizer and rhythm of inner steps of one peer. One thread at a time may call it.

    Every method raises SpesError where another rank has ended, naming it; only `close` is of use then.
    """

    def __init__(self, config: Config, layout: Layout, device: torch.device, ranks: Ranks | None = None) -> None:
        """Allocates the model on `device` (with several ranks, on the device of each); values come with `adopt`.

        Raises ConfigError where the batch cannot be split over the ranks.
        """
        ranks = ranks or Ranks()
        _check_batch(config.optimizer.batch_sequences, ranks)
        self.layout = layout
        self.step = 0
        """The committed global step that was adopted last."""
        self.round_steps = 0
        """Own inner steps since then, without skipped ones."""
        self.decay: Decay | None = None
        """The organiser's word on the learning rate, as the newest manifest has it."""
        self.skipped_in_row = 0
        """Steps skipped since the last one that was not."""
        self.sizes_to_time: tuple[int, ...] = ()
        """Micro-batches of which the fastest is taken before the next step, if there are any."""
        self.parked: Parked | None = None
        """Where the tensors are while they are off the device."""
        self._late_state: tuple[BlockSource, int, bool] | None = None
        self._ranks = ranks if ranks.world_size > 1 else replace(ranks, device=device)
        self.others = Others(self._ranks)
        build = self.others.told("build", config=config_to_yaml(config), threads=torch.get_num_threads())
        with build, telling_of_memory("making the model"):
            self.learner = Learner(config, self._ranks)
            """What this rank holds."""

    @on_all_ranks(while_parked=True)
    def park(self) -> None:
        """Takes everything off the device, at every rank, until somebody needs it: any other call brings it back.

        Only a new state of which no column is trained here waits too: `adopt` keeps the last one and reads its values
        when all is back, so it must be there until the next `adopt` or `wake`.
        """
        if self.parked is None:
            self.learner.unwrap()
            self.parked = Parked(self.learner, self._ranks.device)

    def wake(self) -> None:
        """Brings everything back as it was, then the state that came meanwhile. Raises SpesError for want of memory."""
        if self.parked is not None:
            self.bring_back()
            state, self._late_state = self._late_state, None
            if state is not None:
                self.adopt((), *state)

    @on_all_ranks(while_parked=True)
    def bring_back(self) -> None:
        """The first half of `wake`."""
        with telling_of_memory("going on after a pause"):
            if self.parked is not None:
                self.parked.bring_back()
                self.parked = None
            self.learner.set_owned(self.learner.owned, keep_moments=True, ramp_fresh=False)

    def adopt(
        self,
        owned: tuple[int, ...],
        values: BlockSource,
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
        if owned != self.learner.owned:
            _check_owned(owned, self.learner.config.model.num_experts)
        if self.parked is not None and not owned and not self.learner.owned and not round_steps:
            self._late_state, self.step, self.round_steps = (values, step, keep_moments), step, 0
            return
        self.begin(owned, step, keep_moments, round_steps)
        for block in self.layout.model_blocks:
            self.load_block(block.index, values.block(block.index))

    @on_all_ranks()
    def begin(self, owned: tuple[int, ...], step: int, keep_moments: bool, round_steps: int) -> None:
        """The first part of `adopt`: a round without its values."""
        with telling_of_memory(f"loading the state to train {len(owned)} expert columns"):
            self.learner.set_owned(owned, keep_moments, ramp_fresh=step > 0)
        self.step, self.round_steps = step, round_steps

    @on_all_ranks("values")
    def load_block(self, block: int, values: Values | None = None) -> None:
        """Takes over a block of the state: `values` of rank 0."""
        with telling_of_memory(f"loading the state to train {len(self.learner.owned)} expert columns"):
            received = broadcast_array(self._ranks, values, self.layout.blocks[block].size)
            load_block(self.learner.model, self.learner.table, block, received)

    @on_all_ranks(while_parked=True)
    def use_decay(self, decay: Decay | None) -> None:
        """Takes the learning rate from here on as a manifest has it; None: as the config plans it."""
        self.decay = decay

    @on_all_ranks()
    def run_ahead(self) -> None:
        """The round is over here and its outcome not known yet: steps from now on are the next round's."""
        self.step += min(self.round_steps, steps_per_round_at(self.learner.config, self.step))
        self.round_steps = 0

    def train_step(self, batch: Batch) -> StepResult:
        """A step that is made whole; see `train_step_unless`."""
        result = self.train_step_unless(batch)
        assert result is not None
        return result

    def train_step_unless(self, batch: Batch, should_drop: ShouldDrop = never) -> StepResult | None:
        """One inner step on `batch` (the whole peer's; rank 0 always has one).

        A step whose loss or gradient is not finite changes nothing and says `skipped`. `should_drop` is asked between
        micro-batches with the share of them that is done; where it says so, the step did not happen, at any rank: None,
        with values, moments and counts as before. A step that runs out of memory is made again with a smaller
        micro-batch or more checkpointing, from then on; notes say so. Raises SpesError where nothing is left to save
        (several ranks find out before they wait for each other in the first step, and cannot step down in a later one),
        ConfigError where the batch cannot be split over the ranks.
        """
        _check_batch(len(batch.tokens), self._ranks)
        sizes, self.sizes_to_time = self.sizes_to_time, ()
        result = self.inner_step(batch, sizes, should_drop)
        if result is not None:
            self.skipped_in_row = self.skipped_in_row + 1 if result.skipped else 0
        return result

    @on_all_ranks("should_drop")
    def inner_step(self, batch: Batch, sizes: tuple[int, ...], should_drop: ShouldDrop = never) -> StepResult | None:
        """As `train_step_unless`, with the fastest of micro-batches of `sizes`, if there are any."""
        learner = self.learner
        if sizes:
            some = batch.first(max(sizes) * self._ranks.world_size)
            learner.notes += filter(None, [take_fastest_micro_batch(learner, some, sizes)])
        step = self.step + min(self.round_steps + 1, steps_per_round_at(learner.config, self.step))
        lr, factor = learning_rate(learner.config, step, self.decay), owned_balance_factor(learner.config, step)
        made = learner.step(batch, lr, factor, should_drop)
        if made is None:
            return None
        self.round_steps += made.is_finite
        return StepResult(
            self.step + self.round_steps,
            *made.losses,
            batch.tokens.size,
            made.grad_norm,
            lr,
            made.seconds,
            not made.is_finite,
            made.counts,
        )

    def contribution(self, block: int) -> Values:
        """Present values of block 0 or of an owned column: flat fp32, a copy."""
        if self._late_state is not None and block == 0:
            return self._late_state[0].block(0).copy()
        self.wake()
        owned = self.learner.owned
        if block and block - 1 not in owned:
            raise LocalProtocolError(f"block {block} was asked for, but column {block - 1} is not among {owned}")
        return read_block(self.learner.model, self.learner.table, block)

    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Mean cross entropy a target token over `batches`, in nats; NaN where there is no target. By rank 0 alone."""
        self.wake()
        with telling_of_memory("evaluating held-out data"):
            return self.learner.evaluate(batches)

    def private_state(self) -> dict[str, Any]:
        """What must be saved beside the committed state to go on exactly: a tree with the tensors that are trained.

        No copies: whoever keeps it beyond the next step or `adopt` must make them.
        """
        self.wake()
        return {**private_state(self.learner), "step": self.step, "round_steps": self.round_steps}

    def load_private_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from a saved `private_state`; adopt the committed state of that time first (foreign experts).

        Raises CheckpointError where it does not fit the model.
        """
        self.wake()
        if not self.learner.optimizer.groups:
            raise LocalProtocolError("load_private_state before the first adopt: foreign experts have no values")
        self.go_on_from(outline(self.learner, state), state)

    @on_all_ranks("state")
    def go_on_from(self, plain: Mapping[str, Any], state: Mapping[str, Any] | None = None) -> None:
        """As `load_private_state`, with the tree of rank 0 and its outline."""
        with telling_of_memory("loading the training state"):
            load_private_state(self.learner, plain, state)
        self.step, self.round_steps = plain["step"], plain["round_steps"]

    @on_all_ranks()
    def value_hashes(self) -> list[str]:
        """SHA-256 of all trained values (hexadecimal) at each rank: equal, or something is badly wrong."""
        digest = hashlib.sha256()
        for _, _, values in self.learner.trained_tensors():
            digest.update(values.cpu().numpy().tobytes())
        return gather_texts(self._ranks, digest.hexdigest())

    def close(self) -> None:
        """Lets the other ranks end. Never raises for a rank that has ended already."""
        self.others.stop()


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

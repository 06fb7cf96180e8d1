"""The model and the optimizer of one rank, and an inner step with them. Knows no rounds; who calls it, and on which
ranks together, is `trainer`'s business.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from spes_p2p.config.schema import Config
from spes_p2p.data.loader import Batch
from spes_p2p.errors import LocalProtocolError, SpesError
from spes_p2p.experts.kernels import half_dtype
from spes_p2p.interop.hf import place_table
from spes_p2p.model.compiling import as_it_is
from spes_p2p.model.losses import LossWeights
from spes_p2p.model.transformer import Transformer
from spes_p2p.planning.budget import columns_by_experience
from spes_p2p.planning.options import Options
from spes_p2p.planning.search import one_step_down
from spes_p2p.planning.sizes import Sizes
from spes_p2p.train.ddp import Ranks, sum_over_ranks, wrap
from spes_p2p.train.loss_scale import LossScale
from spes_p2p.train.memory import (
    Held,
    forget_peak,
    free_and_total_bytes,
    is_out_of_memory,
    out_of_memory,
    spare_at_peak_bytes,
)
from spes_p2p.train.optim import Group, Optimizer, clip_gradients, gradients_of, values_of
from spes_p2p.train.step import ShouldDrop, accumulate_gradient, autocast, never, sum_dtype, to_device


class Losses(NamedTuple):
    """Means over the whole peer's batch, without their weights."""

    cross_entropy: float
    load_balancing: float
    router_z: float
    output_z: float


class Made(NamedTuple):
    """What came of one inner step."""

    losses: Losses
    grad_norm: float
    """Before clipping, without the loss scale."""
    counts: tuple[tuple[int, ...], ...]
    """(token, slot) pairs that went to each expert, of each layer."""
    seconds: float = 0.0

    @property
    def is_finite(self) -> bool:
        return all(map(math.isfinite, (*self.losses, self.grad_norm)))


class Learner:
    """What one rank holds. Every rank of a peer makes the same calls in the same order; values are NaN until loaded."""

    def __init__(self, config: Config, ranks: Ranks) -> None:
        self.config, self.ranks = config, ranks
        """`config` as given, or with less memory where that had to be."""
        settings = config.optimizer
        weights = LossWeights(settings.load_balancing_weight, settings.router_z_weight, settings.output_z_weight)
        self.table = place_table(config.model)
        """Where the blocks of the state are in the model."""
        self.model = Transformer(config.model, (), weights, ranks.device)
        self.optimizer = Optimizer(settings)
        self.loss_scale = LossScale(half_dtype(ranks.device))
        self.forward: nn.Module | None = None
        """The model, or DDP around it, from the first `set_owned` on."""
        self.gradient_bytes = 0
        self.notes: list[str] = []
        """Messages about steps for the user."""
        self._is_updating = False
        """Parameters may be half changed: a step that failed then must not be repeated."""
        self._rehearsed = False

    @property
    def owned(self) -> tuple[int, ...]:
        """The expert columns trained here, rising."""
        return self.model.owned

    @property
    def held(self) -> Held:
        """What this rank's tensors take."""
        trained = [values for _, _, values in self.trained_tensors()]
        every = (*self.model.parameters(), *self.model.buffers(), *trained)
        storages = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in every}
        size = sum(values.nbytes for values in trained)
        return Held(sum(storages.values()), size, self.gradient_bytes, self.optimizer.nbytes)

    def columns_that_fit(self) -> int | None:
        """Expert columns for which there is memory, by what the steps since the last call have used; None on a CPU."""
        spare = spare_at_peak_bytes(self.ranks.device)
        if spare is None:
            return None
        _, total = free_and_total_bytes(self.ranks.device)
        column = Sizes.of(self.config.model).column
        return columns_by_experience(len(self.owned), spare, total, column, Options.of(self.config))

    def take_notes(self) -> list[str]:
        """What there is to say of the last steps, once."""
        notes, self.notes = self.notes, []
        return notes

    def set_owned(self, owned: tuple[int, ...], keep_moments: bool, ramp_fresh: bool) -> None:
        """Changes what is trained; optimizer and DDP are built again only where that is needed."""
        changed = owned != self.owned or self.forward is None
        if changed or not keep_moments:
            self.model.set_owned(owned)
            self.optimizer.rebuild(self.model, keep_moments, ramp_fresh)
        if changed:
            self.unwrap()
            if self.ranks.world_size == 1:
                self.model.add_gradients_in_place()
            self.forward = wrap(self.model, self.ranks, self.config.model.torch_compile is not False)
            self._rehearsed = False

    def unwrap(self) -> None:
        """Takes DDP with its buckets off the model, until the next `set_owned`."""
        if self.forward is not self.model:
            self.forward = None
            gc.collect()  # an old DDP takes its hooks off the shared parameters when it ends

    def step(self, batch: Batch, lr: float, balance_factor: float, should_drop: ShouldDrop = never) -> Made | None:
        """One inner step on the whole peer's `batch`, of which this rank computes its share.

        Where loss or gradient is not finite nothing changes. None where rank 0's `should_drop` ended it between two
        micro-batches: then all is as if it had not begun. Made again with less memory where one rank alone runs out of
        it before its update. Raises SpesError where nothing is left to save.
        """
        while True:
            try:
                return self._step(batch, lr, balance_factor, should_drop)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                failure = out_of_memory(error, f"training {len(self.owned)} expert columns")
                if self._is_updating or self.ranks.world_size > 1:
                    raise failure from error
            # out here nothing holds the failed step's tensors any more
            change = self.use_less_memory()
            if not change:
                raise failure
            self.notes.append(f"{failure}; the step is repeated with {change}, which is kept from now on")

    def _step(self, batch: Batch, lr: float, balance_factor: float, should_drop: ShouldDrop) -> Made | None:
        if self.forward is None:
            raise LocalProtocolError("a step before the first adopt: the model has no values")
        if not self._rehearsed:
            self._rehearse(self.forward, batch)
        started, scale = time.perf_counter(), self.loss_scale.value
        while True:
            made = self._gradient(self.forward, batch, balance_factor, should_drop)
            if made is None:
                self.clear_gradients()
                self.loss_scale.value = scale
                return None
            if made.is_finite or not all(map(math.isfinite, made.losses)) or not self.loss_scale.shrink():
                break
            self.clear_gradients()
        if made.is_finite:
            self._update(made.grad_norm, lr)
        else:
            self.loss_scale.give_up(scale)
        self.gradient_bytes = sum(one.nbytes for one in gradients_of(self.model))
        self.clear_gradients()
        return made._replace(seconds=time.perf_counter() - started)

    def _gradient(self, forward: nn.Module, batch: Batch, factor: float, should_drop: ShouldDrop) -> Made | None:
        """Makes the gradient of a step, times the loss scale."""
        micro, scale = self.config.optimizer.micro_batch_sequences, self.loss_scale.value
        summed = accumulate_gradient(
            forward, batch, self.ranks, micro, factor, should_drop=should_drop, loss_scale=scale
        )
        if summed is None:
            return None
        sums, count_LE = summed
        norm = torch.nn.utils.get_total_norm(gradients_of(self.model) if self.ranks.rank == 0 else [])
        square = (norm.to(sums.dtype) / scale).square().to(self.ranks.device)
        return _made(self.ranks, sums, square, count_LE, batch)

    def _update(self, norm: float, lr: float) -> None:
        self._is_updating = True
        clip_gradients(gradients_of(self.model), norm, self.config.optimizer.grad_clip, self.loss_scale.value)
        self.loss_scale.note_good()
        self.optimizer.step(lr)
        self._is_updating = False

    def clear_gradients(self) -> None:
        """DDP keeps gradients in its buckets; without it their memory is free for the next forward pass."""
        self.model.zero_grad(set_to_none=self.forward in (None, self.model))

    def _rehearse(self, forward: nn.Module, batch: Batch) -> None:
        """Before the first gradient after a change of columns: makes the moments, while there are no activations yet.

        With several ranks, reduces memory use until a gradient fits on each, before they wait for each other in a step.
        A rank that runs out of memory in the middle of a step would leave the others in an exchange that never ends.
        So the first gradient after a change of columns is made twice, the first time without exchange: later ones need
        as much, whatever the tokens. Raises SpesError, at every rank, where nothing is left to save.
        """
        world_size = self.ranks.world_size
        if world_size == 1:
            self.optimizer.reserve()
            self._rehearsed = True
            return
        while True:
            micro = self.config.optimizer.micro_batch_sequences
            some = batch.first(min(len(batch.tokens), 2 * micro * world_size))
            failure: SpesError | None = None
            try:
                self.optimizer.reserve()
                accumulate_gradient(forward, some, self.ranks, micro, 1.0, exchange=False)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                failure = out_of_memory(error, f"training {len(self.owned)} expert columns")
            self.clear_gradients()
            failed = sum_over_ranks(self.ranks, torch.tensor([float(failure is not None)], device=self.ranks.device))
            if not failed.item():
                break
            failure = failure or SpesError(
                f"{failed.item():.0f} other local ranks ran out of memory", fix="see their errors above"
            )
            change = self.use_less_memory()
            if not change:
                raise failure
            self.notes.append(f"{failure}; all ranks continue with {change} from now on")
        self._rehearsed = True

    def use_less_memory(self) -> str:
        """Takes the next step down (see `one_step_down`), after a step that failed before its update; says which.

        Nothing where there is none. All ranks of a peer must do it together.
        """
        before, data = Options.of(self.config), self.config.data
        after = one_step_down(before, self.config.optimizer.batch_sequences, data.sequence_length)
        if after is None:
            return ""
        self.config = after.applied(self.config)
        self.model.config = self.config.model
        self.clear_gradients()
        gc.collect()
        forget_peak(self.ranks.device)
        return ", ".join(after.changes(before))

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Mean cross entropy a target token, in nats, by this rank's model; NaN where there is no target."""
        device = self.ranks.device
        total, targets = torch.zeros(2, dtype=sum_dtype(device), device=device)
        # as it is: other shapes would be compiled for it
        with as_it_is():
            for batch in batches:
                with autocast(device):
                    parts = self.model(to_device(batch.tokens, device), to_device(batch.loss_mask, device))
                total += parts.cross_entropy.to(total.dtype) * parts.targets
                targets += parts.targets
        return float(total / targets)

    def trained_tensors(self) -> Iterator[tuple[Group, str, Tensor]]:
        """(group, name, what holds its values, or half of them) of all that is trained."""
        for group in self.optimizer.groups:
            for name, trainable in group.tensors.items():
                for values in values_of(trainable).values():
                    yield group, name, values


def _made(ranks: Ranks, sums: Tensor, square: Tensor, count_LE: Tensor, batch: Batch) -> Made:
    """Of the whole peer.

    `square`: of the norm of the gradients on rank 0, zero elsewhere: they are equal to the bit at all ranks, but a norm
    is a sum whose order may depend on the thread count. All in one tensor, so that the host waits for the device once.
    """
    totals = sum_over_ranks(ranks, torch.cat((sums, square.view(1), count_LE.flatten())))
    cross_entropy, output_z, load_balancing, router_z, square_value, *flat = totals.tolist()
    sequences, counted = len(batch.tokens), max(1, int(batch.loss_mask.sum()))
    losses = Losses(cross_entropy / counted, load_balancing / sequences, router_z / sequences, output_z / counted)
    width = count_LE.shape[1]
    counts = tuple(tuple(map(int, flat[at : at + width])) for at in range(0, len(flat), width))
    return Made(losses, math.sqrt(square_value), counts)

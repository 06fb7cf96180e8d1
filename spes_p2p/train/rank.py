"""One rank: model, optimizer and rhythm of inner steps. Every rank of a peer makes the same calls in the same order.

`trainer` is what the rest of the project calls on rank 0; `worker` makes the same calls on the other ranks.
"""

from __future__ import annotations

import gc
import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from spes_p2p.config.schema import Config, steps_per_round_at
from spes_p2p.consensus.manifest import Decay
from spes_p2p.data.loader import Batch
from spes_p2p.errors import LocalProtocolError, SpesError
from spes_p2p.experts.kernels import half_dtype
from spes_p2p.experts.shards import Share
from spes_p2p.model.compiling import as_it_is
from spes_p2p.model.params import deal_values
from spes_p2p.planning.options import Options
from spes_p2p.planning.search import one_step_down
from spes_p2p.state.layout import Layout, Values
from spes_p2p.train.ddp import Ranks, broadcast_array, gather_texts, sum_over_ranks, wrap
from spes_p2p.train.kept_gradients import KeptGradients, whole_moments
from spes_p2p.train.loss_scale import LossScale
from spes_p2p.train.memory import Held, forget_peak, is_out_of_memory, out_of_memory
from spes_p2p.train.moment_store import Stored
from spes_p2p.train.optim import Group, Optimizer, clip_gradients, gradient_norm, gradients_of
from spes_p2p.train.parking import Parked
from spes_p2p.train.schedule import learning_rate, owned_balance_factor
from spes_p2p.train.step import ShouldDrop, StepResult, accumulate_gradient, autocast, never, sum_dtype, to_device
from spes_p2p.train.trained_model import TrainedTransformer


class RankTrainer:
    """What one rank holds. Values are NaN until the first `adopt`."""

    def __init__(
        self,
        config: Config,
        layout: Layout,
        ranks: Ranks,
        make_model: Callable[[Config, torch.device], TrainedTransformer] = TrainedTransformer,
    ) -> None:
        self.config, self.layout, self.ranks = config, layout, ranks
        """`config` as given, or with less memory where that had to be."""
        self.step = 0
        """The committed global step that was adopted last."""
        self.round_steps = 0
        """Own inner steps since then, without skipped ones."""
        self.decay: Decay | None = None
        """The organiser's word on the learning rate, as the newest manifest has it."""
        self.gradient_bytes = 0
        self.is_updating = False
        """Parameters may be half changed: a step that failed then must not be repeated."""
        self.notes: list[str] = []
        """Messages about steps for the user; whoever shows them empties the list."""
        self.trained = make_model(config, ranks.device)
        self.model = self.trained.module
        self.shares = ranks.world_size > 1 and config.optimizer.sharding != "none"
        """Whether each rank steps a part of everything."""
        self.deals_values = self.shares and config.optimizer.sharding == "zero3"
        """Whether it has that part alone of shared values and masters: whoever reads them must ask all ranks."""
        self._share = Share(ranks.rank, ranks.world_size, ranks.group) if self.shares else Share()
        if self.deals_values:
            deal_values(self.model, self._share)
        self.optimizer = Optimizer(config.optimizer, self._share)
        self.loss_scale = LossScale(half_dtype(ranks.device))
        self.forward: nn.Module | None = None
        """The model, or what is around it (DDP, KeptGradients), from the first `set_owned` on."""
        self._rehearsed = False
        self.parked: Parked | None = None
        """Where the tensors are while they are off the device."""

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

    def adopt(self, owned: tuple[int, ...], step: int, keep_moments: bool, round_steps: int = 0) -> None:
        """Starts a round that trains `owned` from global step `step`, whose values `load_block` brings.

        `round_steps`: own steps of the round that these values have already.
        """
        self.set_owned(owned, keep_moments, ramp_fresh=step > 0)
        self.step, self.round_steps = step, round_steps

    def load_block(self, block: int, values: Values | None = None) -> None:
        """Takes over a block of the state; `values` on rank 0."""
        self.trained.load_block(block, broadcast_array(self.ranks, values, self.layout.blocks[block].size))

    def run_ahead(self) -> None:
        """Steps from here on belong to the next round, though the state that it begins with is not known yet."""
        self.step += min(self.round_steps, steps_per_round_at(self.config, self.step))
        self.round_steps = 0

    def park(self) -> None:
        """Takes all tensors off the device."""
        if self.forward is not self.model and not isinstance(self.forward, KeptGradients):  # the buckets of DDP
            self.forward = None
        gc.collect()
        self.parked = Parked(self, self.ranks.device)

    def wake(self) -> None:
        """Brings them back as they were."""
        if self.parked is not None:
            self.parked.bring_back()
            self.parked = None
        if self.forward is None:
            self.set_owned(self.owned, keep_moments=True, ramp_fresh=False)

    def set_owned(self, owned: tuple[int, ...], keep_moments: bool, ramp_fresh: bool) -> None:
        """Changes what is trained; optimizer and DDP are built again only where that is needed."""
        changed = owned != self.owned or self.forward is None
        if changed or not keep_moments:
            self.model.set_owned(owned)
            self.optimizer.rebuild(self.model, keep_moments, ramp_fresh)
        if changed:
            was_wrapped = self.forward not in (None, self.model)
            if isinstance(self.forward, KeptGradients):
                self.forward.close()
            self.forward, self._rehearsed = None, False
            if was_wrapped:
                gc.collect()  # an old DDP takes its hooks off the shared parameters when it ends
            compiled = self.config.model.torch_compile is not False
            in_fp32_here = self.ranks.world_size == 1 and not _has_bf16_gradients(self.config)
            if in_fp32_here:
                self.model.add_gradients_in_place()
            if self.shares or _has_bf16_gradients(self.config):
                rounds = (self.model.head.weight,)
                dtype = torch.bfloat16 if _has_bf16_gradients(self.config) else torch.float32
                self.forward = KeptGradients(self.model, self.ranks, self._share, dtype, rounds)
            else:
                self.forward = wrap(self.model, self.ranks, compiled)

    def train_step(self, batch: Batch, should_drop: ShouldDrop = never) -> StepResult | None:
        """One inner step on the whole peer's `batch`, of which this rank computes its share.

        None where rank 0's `should_drop` ended it between two micro-batches: then all is as if it had not begun.
        """
        if self.forward is None:
            raise LocalProtocolError("train_step before the first adopt: the model has no values")
        if not self._rehearsed:
            self._rehearse(self.forward, batch)
        started = time.perf_counter()
        scale = self.loss_scale.value
        own_steps = min(self.round_steps + 1, steps_per_round_at(self.config, self.step))
        lr = learning_rate(self.config, self.step + own_steps, self.decay)
        factor = owned_balance_factor(self.config, self.step + own_steps)
        while True:
            found = self._totals_of_step(self.forward, batch, factor, should_drop)
            if found is None:
                self.clear_gradients()
                self.loss_scale.value = scale
                return None
            losses, norm_value, counts = found
            finite = all(map(math.isfinite, (*losses, norm_value)))
            if finite or not all(map(math.isfinite, losses)) or not self.loss_scale.shrink():
                break
            self.clear_gradients()
        if finite:
            self._update(self.forward, norm_value, lr)
        else:
            self.loss_scale.give_up(scale)
        self.gradient_bytes = sum(one.nbytes for one in self._gradients(self.forward))
        self.clear_gradients()
        step, seconds = self.step + self.round_steps, time.perf_counter() - started
        return StepResult(step, *losses, batch.tokens.size, norm_value, lr, seconds, not finite, counts)

    def _totals_of_step(
        self, forward: nn.Module, batch: Batch, factor: float, should_drop: ShouldDrop
    ) -> tuple[tuple[float, float, float, float], float, tuple[tuple[int, ...], ...]] | None:
        """Makes the gradient of a step, times the loss scale; what `totals_of` gives, the norm without the scale."""
        if isinstance(forward, KeptGradients):
            forward.begin(self.step + self.round_steps)
        micro, scale = self.config.optimizer.micro_batch_sequences, self.loss_scale.value
        summed = accumulate_gradient(
            forward, batch, self.ranks, micro, factor, should_drop=should_drop, loss_scale=scale
        )
        if summed is None:
            return None
        sums, count_LE = summed
        if isinstance(forward, KeptGradients):
            forward.finish()
            counted = forward.counted()
        else:
            counted = gradients_of(self.model) if self.ranks.rank == 0 else []
        norm = gradient_norm(counted)
        square = (norm.to(sums.dtype) / scale).square().to(self.ranks.device)
        return totals_of(self.ranks, sums, square, count_LE, batch)

    def _gradients(self, forward: nn.Module) -> list[Tensor]:
        """Those that this rank steps with."""
        return forward.gradients() if isinstance(forward, KeptGradients) else gradients_of(self.model)

    def clear_gradients(self) -> None:
        """DDP keeps gradients in its buckets; without it their memory is free for the next forward pass."""
        if isinstance(self.forward, KeptGradients):
            self.forward.clear()
        else:
            self.model.zero_grad(set_to_none=self.forward in (None, self.model))

    def whole_moments(self, group: Group, name: str) -> Stored:
        """Moments of a tensor: the very ones, or where ranks share them a copy in host memory on rank 0.

        All ranks that share moments call it.
        """
        if not self.shares:
            return group.moments[name]
        return whole_moments(self.ranks, group.tensors[name].shape, group.moments[name])

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
        """Mean cross entropy a target token, in nats, by this rank's model; NaN where there is no target.

        Where values are dealt, all ranks must go through the same batches.
        """
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

    def contribution(self, block: int) -> Values:
        """Present values of block 0 or of an owned column, flat fp32. All ranks call it where values are dealt."""
        if block and block - 1 not in self.owned:
            raise LocalProtocolError(f"block {block} was asked for, but column {block - 1} is not among {self.owned}")
        return self.trained.read_block(block)

    def trained_tensors(self) -> Iterator[tuple[Group, str, Tensor]]:
        """(group, name, what holds its values, or half of them) of all that is trained; this rank's rows if dealt."""
        for group in self.optimizer.groups:
            for name in group.tensors:
                for values in self.optimizer.values(group, name).values():
                    yield group, name, values

    def _update(self, forward: nn.Module, norm: float, lr: float) -> None:
        self.is_updating = True
        clip_gradients(self._gradients(forward), norm, self.config.optimizer.grad_clip, self.loss_scale.value)
        self.loss_scale.note_good()
        if isinstance(forward, KeptGradients):
            self.optimizer.step(lr, forward.gradient)
            forward.fetch()
            self.model.refresh()
        else:
            self.optimizer.step(lr)
        self.round_steps += 1
        self.is_updating = False


def _has_bf16_gradients(config: Config) -> bool:
    return config.optimizer.gradient_dtype == "bf16"


def totals_of(
    ranks: Ranks, sums: Tensor, square: Tensor, count_LE: Tensor, batch: Batch
) -> tuple[tuple[float, float, float, float], float, tuple[tuple[int, ...], ...]]:
    """(cross entropy, load balancing, router z, output z) of the whole peer, gradient norm, assignments.

    `square`: of the norm of the gradients that this rank stands for: all of rank 0's, or each rank's rows. All in one
    tensor, so that the host waits for the device once. Whole gradients are equal to the bit at all ranks, but a norm is
    a sum whose order may depend on the thread count.
    """
    totals = sum_over_ranks(ranks, torch.cat((sums, square.view(1), count_LE.flatten())))
    cross_entropy, output_z, load_balancing, router_z, square_value, *flat = totals.tolist()
    norm_value = math.sqrt(square_value)
    sequences, counted = len(batch.tokens), max(1, int(batch.loss_mask.sum()))
    losses = cross_entropy / counted, load_balancing / sequences, router_z / sequences, output_z / counted
    width = count_LE.shape[1]
    counts = tuple(tuple(map(int, flat[at : at + width])) for at in range(0, len(flat), width))
    return losses, norm_value, counts


def step_that_fits(rank: RankTrainer, batch: Batch, should_drop: ShouldDrop) -> StepResult | None:
    """As `train_step`, made again with less memory where one rank alone runs out of it before its update."""
    while True:
        try:
            return rank.train_step(batch, should_drop)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            failure = out_of_memory(error, f"training {len(rank.owned)} expert columns")
            if rank.is_updating or rank.ranks.world_size > 1:
                raise failure from error
        # out here nothing holds the failed step's tensors any more
        change = rank.use_less_memory()
        if not change:
            raise failure
        rank.notes.append(f"{failure}; the step is repeated with {change}, which is kept from now on")


def value_hashes(rank: RankTrainer) -> list[str]:
    """SHA-256 of all trained values, for each rank; all ranks must ask."""
    digest = hashlib.sha256()
    for group in rank.optimizer.groups:
        for name in group.tensors:
            for values in rank.optimizer.values(group, name, whole=True).values():
                digest.update(values.cpu().numpy().tobytes())
    return gather_texts(rank.ranks, digest.hexdigest())

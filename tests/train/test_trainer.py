"""One rank: what is trained, how big a step is, and that nothing depends on how the batch was cut."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spes_p2p.data.loader import Batch
from spes_p2p.errors import ConfigError, LocalProtocolError, SpesError
from spes_p2p.experts.bank import MATRICES
from spes_p2p.train import learner, moment_store
from spes_p2p.train.schedule import learning_rate
from spes_p2p.train.step import pinned, to_device
from spes_p2p.train.trainer import StepResult, Trainer
from tests.train.small import (
    CPU,
    Blocks,
    SmallDevice,
    batch_of,
    initial,
    largest_difference,
    same_bits,
    small_config,
    small_layout,
    trainer_of,
    values_of,
)


def steps(trainer: Trainer, count: int, first: int = 0) -> list[StepResult]:
    return [trainer.train_step(batch_of(seed)) for seed in range(first, first + count)]


def test_loss_falls_on_a_repeated_batch() -> None:
    trainer, batch = trainer_of(small_config()), batch_of(0)
    results = [trainer.train_step(batch) for _ in range(30)]
    assert results[0].loss == pytest.approx(np.log(32), rel=0.05)
    assert results[-1].loss < 0.5 * results[0].loss
    assert trainer.round_steps == results[-1].step == 30
    assert results[0].tokens == 8 * 12
    assert trainer.evaluate([batch]) < results[-1].loss


def test_the_same_seed_gives_the_same_bits() -> None:
    first, second = trainer_of(small_config()), trainer_of(small_config())
    losses = [[result.loss for result in steps(trainer, 5)] for trainer in (first, second)]
    assert losses[0] == losses[1]
    assert same_bits(values_of(first), values_of(second))


def test_steps_equal_those_of_a_plain_adamw() -> None:
    """Everything owned, so that a plain loop over the model's parameters is the whole algorithm."""
    config = small_config("model.activation_checkpointing=full", "optimizer.grad_clip=0.5")
    everything = tuple(range(6))
    ours, plain = trainer_of(config, everything), trainer_of(config, everything).learner.model
    adamw = torch.optim.AdamW(plain.parameters(), betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, foreach=True)
    for step in range(1, 6):
        adamw.param_groups[0]["lr"] = learning_rate(config, step)
        adamw.zero_grad()
        parts = plain(torch.from_numpy(batch_of(step).tokens))
        parts.total.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        with plain.masters_in_fp32():
            adamw.step()
        result = ours.train_step(batch_of(step))
        got = result.loss, result.load_balancing, result.router_z, result.output_z, result.grad_norm
        assert got == pytest.approx([float(number) for number in (*parts[1:5], norm)], rel=1e-5)
    expected = torch.cat([master.detach().flatten() for master in plain.parameters()])
    trained = torch.cat([master.detach().flatten() for master in ours.learner.model.parameters()])
    assert float((trained - expected).abs().max()) < 1e-5


@pytest.mark.parametrize("masked", [(), (0, 1, 5)], ids=["all", "masked"])
@pytest.mark.parametrize("micro", [1, 2, 4])
def test_accumulation_equals_one_big_batch(micro: int, masked: tuple[int, ...]) -> None:
    """Without the load-balancing loss, which is one of each micro-batch by its definition."""
    batch, results, values = batch_of(0, masked=masked), [], []
    for size in (8, micro):
        weights = ("optimizer.load_balancing_weight=0.0", "optimizer.router_z_weight=0.1", "optimizer.grad_clip=1e9")
        trainer = trainer_of(small_config(f"optimizer.micro_batch_sequences={size}", *weights, "optimizer.eps=1.0"))
        results.append(trainer.train_step(batch))
        values.append(values_of(trainer))
    assert results[1].loss == pytest.approx(results[0].loss, rel=1e-6)
    assert results[1].router_z == pytest.approx(results[0].router_z, rel=1e-6)
    assert results[1].grad_norm == pytest.approx(results[0].grad_norm, rel=1e-5)
    assert largest_difference(*values) < 1e-7  # with eps 1 a step is about lr times the gradient: of order 1e-3


def test_masked_sequences_give_no_loss() -> None:
    trainer = trainer_of(small_config())
    whole, part = batch_of(0), batch_of(0, masked=(2, 3, 4, 5, 6, 7))
    two = Batch(whole.tokens[:2], whole.loss_mask[:2], whole.positions[:2])
    assert trainer.evaluate([part]) == pytest.approx(trainer.evaluate([two]), rel=1e-6)
    assert trainer.evaluate([whole, part]) != pytest.approx(trainer.evaluate([whole]), rel=1e-6)
    assert np.isnan(trainer.evaluate([]))


def test_foreign_experts_stay_and_cost_no_gradient_and_no_moments() -> None:
    config = small_config()
    trainer = trainer_of(config, (1, 4))
    before = values_of(trainer_of(config, tuple(range(6))))
    steps(trainer, 3)
    own = values_of(trainer)
    moved = {block: not np.array_equal(values, before[block]) for block, values in own.items()}
    assert moved == {0: True, 2: True, 5: True}
    with pytest.raises(LocalProtocolError, match="column 2"):
        trainer.contribution(3)
    trained_bytes = 4 * sum(values.size for values in own.values())
    assert trainer.learner.held.gradients == trained_bytes
    assert trainer.learner.held.moments == 2 * trained_bytes
    for expert in (0, 2, 3, 5):
        matrices = [bank.read(expert, which).numpy() for bank in trainer.learner.model.banks for which in MATRICES]
        assert np.array_equal(np.concatenate([matrix.ravel() for matrix in matrices]), before[1 + expert])


@pytest.mark.parametrize(("held", "distance"), [("int8", 0.02), ("nf4", 0.05)])
def test_foreign_experts_may_be_held_otherwise(held: str, distance: float) -> None:
    """Over a change of columns too; what becomes owned starts from the committed values, not from rounded ones."""
    plain, other = (trainer_of(small_config(*options)) for options in ((), (f"model.foreign_dtype={held}",)))
    losses = [[result.loss for result in steps(trainer, 3)] for trainer in (plain, other)]
    assert losses[1] == pytest.approx(losses[0], rel=distance)
    committed = initial(small_config())
    for trainer in (plain, other):
        trainer.adopt((0, 4), committed, 3)
    assert same_bits(values_of(plain), values_of(other))
    assert other.train_step(batch_of(7)).loss == pytest.approx(plain.train_step(batch_of(7)).loss, rel=distance)


def test_gradients_above_the_limit_are_scaled_down() -> None:
    """AdamW with a huge eps steps by lr * gradient / eps: the step's length tells the clipped norm."""
    plain = ("optimizer.eps=1e6", "optimizer.weight_decay=0.0", "optimizer.lr=1e3", "optimizer.betas=[0.0, 0.0]")
    config = small_config(*plain, "optimizer.grad_clip=0.001")
    before, trainer = values_of(trainer_of(config)), trainer_of(config)
    result = trainer.train_step(batch_of(0))
    moved = [values - before[block] for block, values in values_of(trainer).items()]
    assert result.grad_norm > 0.01
    length = float(np.sqrt(sum(np.square(part.astype(np.float64)).sum() for part in moved)))
    assert length == pytest.approx(0.001 * result.lr / 1e6, rel=0.2)


def test_learning_rate_follows_committed_step_plus_own_steps_up_to_H() -> None:
    config = small_config("scheduler.warmup_steps=50", "sync.steps_per_round=[[20, 2], [0, 4]]")
    trainer = trainer_of(config, step=10)
    assert [result.lr for result in steps(trainer, 4)] == [learning_rate(config, step) for step in (11, 12, 12, 12)]
    trainer.adopt((1, 4), initial(config), 20)
    assert trainer.round_steps == 0
    assert [result.lr for result in steps(trainer, 5)] == [learning_rate(config, step) for step in (21, 22, 23, 24, 24)]


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    trainer = trainer_of(small_config())
    steps(trainer, 1)
    before = values_of(trainer)
    poisoned = trainer.learner.model.norm.weight
    good = poisoned.detach().clone()
    poisoned.detach()[0] = np.nan
    result = trainer.train_step(batch_of(1))
    assert result.skipped
    assert trainer.skipped_in_row == trainer.round_steps == 1
    poisoned.detach().copy_(good)
    assert same_bits(values_of(trainer), before)
    assert not trainer.train_step(batch_of(1)).skipped
    assert trainer.skipped_in_row == 0


@pytest.mark.parametrize(("owned", "factor"), [((0, 1, 2, 3, 4, 5), 0.7), ((), 1.0)])
def test_decayed_auxiliary_loss_scales_the_balance_of_owned_experts(owned: tuple[int, ...], factor: float) -> None:
    """With a load-balancing weight that drowns all else, the gradient's norm shows the factor."""
    settings = "optimizer.load_balancing_weight=1e6", "scheduler.total_steps=10000"
    norms = [
        trainer_of(small_config(*settings, f"optimizer.decayed_aux_loss={decayed}"), owned)
        .train_step(batch_of(0))
        .grad_norm
        for decayed in ("true", "false")
    ]
    assert norms[0] / norms[1] == pytest.approx(factor, rel=1e-3)


def test_a_device_without_memory_left_is_named_with_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(small_config())

    def full(*given: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. More words")

    monkeypatch.setattr(trainer.learner, "_step", full)
    with pytest.raises(SpesError, match=r"while training 2 expert columns: CUDA out of memory$") as caught:
        trainer.train_step(batch_of(0))
    assert "--max-experts" in caught.value.fix
    assert trainer.learner.columns_that_fit() is None


def test_a_step_that_runs_out_of_memory_is_made_again_with_less() -> None:
    tight, roomy = trainer_of(small_config()), trainer_of(small_config("optimizer.micro_batch_sequences=4"))
    SmallDevice(tight, sequences=2)
    results = [[trainer.train_step(batch_of(seed)) for seed in range(3)] for trainer in (tight, roomy)]
    assert [result.loss for result in results[0]] == pytest.approx([result.loss for result in results[1]], rel=1e-5)
    assert largest_difference(values_of(tight), values_of(roomy)) < 1e-4
    notes = tight.learner.take_notes()
    assert "while training 2 expert columns: CUDA out of memory; the step is repeated with" in notes[0]
    last = notes[-1]
    assert last.endswith("with optimizer.micro_batch_sequences=4, which is kept from now on")
    assert notes.count(last) == 1, "later steps fit"


def test_a_device_without_room_for_one_sequence_ends_the_peer() -> None:
    trainer = trainer_of(small_config())
    SmallDevice(trainer, sequences=0)
    with pytest.raises(SpesError, match=r"while training 2 expert columns: CUDA out of memory$"):
        trainer.train_step(batch_of(0))
    assert trainer.learner.config.optimizer.micro_batch_sequences == 1
    assert trainer.learner.config.model.activation_checkpointing == "full"


def test_a_step_that_fails_in_its_update_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(small_config())

    def full(lr: float) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(trainer.learner.optimizer, "step", full)
    with pytest.raises(SpesError, match="while training 2 expert columns"):
        trainer.train_step(batch_of(0))
    assert not trainer.learner.take_notes()


def test_misuse_is_refused() -> None:
    config = small_config()
    trainer = Trainer(config, small_layout(config), CPU)
    with pytest.raises(LocalProtocolError, match="before the first adopt"):
        trainer.train_step(batch_of(0))
    with pytest.raises(LocalProtocolError, match="before the first adopt"):
        trainer.load_private_state(trainer_of(config).private_state())
    with pytest.raises(ConfigError, match="ascending"):
        trainer.adopt((4, 1), initial(config), 0)
    with pytest.raises(ConfigError, match="below"):
        trainer.adopt((6,), initial(config), 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_batch_is_pinned_once_and_copied_from_there() -> None:
    tokens = np.arange(12).reshape(4, 3)
    batch = pinned(Batch(tokens, np.array([True, False, True, True]), np.arange(4)))
    part = torch.from_numpy(batch.tokens[1:])
    assert part.is_pinned()
    assert part.pin_memory().data_ptr() == part.data_ptr()
    assert to_device(batch.tokens[1:], torch.device("cuda")).tolist() == tokens[1:].tolist()
    assert to_device(batch.loss_mask, torch.device("cuda")).tolist() == [True, False, True, True]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "options",
    [
        (),
        ("optimizer.name=muon", "model.activation_checkpointing=selective"),
        ("model.torch_compile=true",),
    ],
    ids=["plain", "thrifty", "compiled"],
)
def test_on_cuda_in_bf16_the_loss_falls_and_masters_keep_32_bits(options: tuple[str, ...]) -> None:
    config = small_config("model.d_model=64", "model.expert_ffn=64", "optimizer.lr=0.003", *options)
    trainer = Trainer(config, small_layout(config), torch.device("cuda"))
    trainer.adopt((1, 4), initial(config), 0)
    results = [trainer.train_step(batch_of(0)) for _ in range(30)]
    assert results[-1].loss < 0.6 * results[0].loss
    state, loss = copy.deepcopy(trainer.private_state()), trainer.train_step(batch_of(1)).loss
    resumed = Trainer(config, small_layout(config), torch.device("cuda"))
    resumed.adopt((1, 4), initial(config), 0)
    resumed.load_private_state(state)
    assert resumed.train_step(batch_of(1)).loss == pytest.approx(loss, rel=1e-2)
    shared, *columns = ([set(entry) for entry in group["tensors"].values()] for group in state["groups"])
    assert all("value" in keys for keys in shared)
    assert all({"upper", "lower"} < keys for column in columns for keys in column)


@pytest.mark.parametrize(
    ("name", "call", "doing"),
    [
        ("evaluate", lambda trainer: trainer.evaluate([batch_of(0)]), "evaluating held-out data"),
        (
            "set_owned",
            lambda trainer: trainer.adopt((1, 4), initial(small_config()), 0),
            "loading the state to train 2",
        ),
    ],
)
def test_memory_that_runs_out_beside_a_step_is_a_known_error(
    monkeypatch: pytest.MonkeyPatch, name: str, call: Callable[[Trainer], object], doing: str
) -> None:
    trainer = trainer_of(small_config())

    def full(*given: object, **named: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. More words")

    monkeypatch.setattr(trainer.learner, name, full)
    with pytest.raises(SpesError, match=f"ran out of memory while {doing}") as caught:
        call(trainer)
    assert caught.value.fix


def test_a_model_that_cannot_be_made_for_lack_of_memory_is_a_known_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object) -> None:
        raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later")

    monkeypatch.setattr(learner, "Transformer", full)
    config = small_config()
    with pytest.raises(SpesError, match=r"while making the model: CUDA error: out of memory$"):
        Trainer(config, small_layout(config), CPU)


def test_moments_are_made_before_the_first_activations() -> None:
    """Else the first step finds out last of all, in its update, that memory is short: too late to make it smaller."""
    trainer, seen = trainer_of(small_config()), list[int]()
    trainer.learner.model.register_forward_pre_hook(lambda *given: seen.append(trainer.learner.held.moments))
    trainer.train_step(batch_of(0))
    assert seen[0] == trainer.learner.held.moments > 0


def test_a_first_step_that_was_given_up_can_be_saved_and_loaded() -> None:
    config = small_config("optimizer.micro_batch_sequences=2")
    trainer, again = trainer_of(config), trainer_of(config)
    assert trainer.train_step_unless(batch_of(0), lambda share: True) is None
    again.load_private_state(copy.deepcopy(trainer.private_state()))
    trainer.train_step(batch_of(0))
    again.train_step(batch_of(0))
    assert same_bits(values_of(trainer), values_of(again))


def test_a_parked_trainer_leaves_the_device_and_goes_on_bit_for_bit() -> None:
    parked, other = trainer_of(small_config(), (1, 4)), trainer_of(small_config(), (1, 4))
    for trainer in (parked, other):
        steps(trainer, 2)
    on_device = [one.untyped_storage() for one in (*parked.learner.model.parameters(), *parked.learner.model.buffers())]
    on_device += [one.untyped_storage() for group in parked.learner.optimizer.groups
                  for kept in group.moments.values() for one in kept.values()]  # fmt: skip
    parked.park()
    assert parked.parked is not None
    assert not any(storage.nbytes() for storage in on_device)
    assert [result.loss for result in steps(parked, 3, 2)] == [result.loss for result in steps(other, 3, 2)]
    assert parked.parked is None
    assert same_bits(values_of(parked), values_of(other))


class _FullDevice:
    """A storage for which there is no room until `has_room`."""

    has_room = False

    def resize_(self, size: int) -> None:
        if size and not self.has_room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def copy_(self, host: torch.UntypedStorage) -> None:
        assert self.has_room


def test_a_pause_for_whose_end_there_is_no_memory_goes_on_until_there_is() -> None:
    parked, other, device = trainer_of(small_config()), trainer_of(small_config()), _FullDevice()
    parked.park()
    state = parked.parked
    assert state is not None
    state._kept.append((device, torch.UntypedStorage(8)))  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(SpesError, match="memory while going on after a pause"):
            parked.contribution(0)
        assert not any(one.untyped_storage().nbytes() for one in parked.learner.model.parameters())
    device.has_room = True
    assert [result.loss for result in steps(parked, 2)] == [result.loss for result in steps(other, 2)]
    assert same_bits(values_of(parked), values_of(other))


def test_a_state_that_comes_while_parked_is_loaded_when_training_goes_on() -> None:
    parked, other = trainer_of(small_config(), ()), trainer_of(small_config(), ())
    start = initial(small_config())
    news = Blocks(lambda block: start.block(block) * np.float32(1.5))
    for trainer in (parked, other):
        steps(trainer, 2)
    parked.park()
    for trainer in (parked, other):
        trainer.adopt((), news, 10)
    assert parked.parked is not None
    assert (parked.contribution(0) == other.contribution(0)).all()
    assert parked.parked is not None
    assert [result.loss for result in steps(parked, 2)] == [result.loss for result in steps(other, 2)]
    assert same_bits(values_of(parked), values_of(other))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_parked_trainer_keeps_nothing_on_the_gpu() -> None:
    config, gpu = small_config(), torch.device("cuda")
    gc.collect()
    before = torch.cuda.memory_allocated(gpu)
    trainer = Trainer(config, small_layout(config), gpu)
    trainer.adopt((1, 4), initial(config), 0)
    steps(trainer, 2)
    values = values_of(trainer)
    trainer.park()
    assert torch.cuda.memory_allocated(gpu) == before
    assert same_bits(values_of(trainer), values)


class _NoDouble(TorchDispatchMode):
    """A device without fp64, as Apple's."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves((args, result)):
            assert not (isinstance(one, torch.Tensor) and one.dtype == torch.float64), f"{func} in fp64"
        return result


def test_a_device_without_fp64_and_fused_kernels_trains_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config("optimizer.micro_batch_sequences=2")
    usual, other = trainer_of(config), trainer_of(config)
    wanted, held_out = usual.train_step(batch_of(0)), usual.evaluate([batch_of(1)])
    monkeypatch.setattr(moment_store, "FUSED_ON", ())
    for module in ("step", "learner"):
        monkeypatch.setattr(f"spes_p2p.train.{module}.sum_dtype", lambda device: torch.float32)
    with _NoDouble():
        result = other.train_step(batch_of(0))
        assert other.evaluate([batch_of(1)]) == pytest.approx(held_out, rel=1e-5)
    assert (result.loss, result.grad_norm) == pytest.approx((wanted.loss, wanted.grad_norm), rel=1e-5)
    assert result.expert_counts == wanted.expert_counts
    assert largest_difference(values_of(other), values_of(usual)) < 1e-6

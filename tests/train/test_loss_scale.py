"""fp16's loss scale: it changes no value, and gradients that are too large for it cost a repeat, not a step."""

from __future__ import annotations

import math

import pytest
import torch

from spes_p2p.train import loss_scale, step
from spes_p2p.train.loss_scale import FIRST, LossScale
from spes_p2p.train.trainer import Trainer
from tests.train.small import (
    batch_of,
    largest_difference,
    small_config,
    trainer_of,
    values_of,
)

STEPS = 3


@pytest.mark.parametrize("options", [(), ("optimizer.grad_clip=0.1",)])
def test_values_are_those_without_a_scale(options: tuple[str, ...]) -> None:
    plain, scaled = (trainer_of(small_config(*options)) for _ in range(2))
    scaled.learner.loss_scale = LossScale(torch.float16)
    results = [[trainer.train_step(batch_of(seed)) for seed in range(STEPS)] for trainer in (plain, scaled)]
    for left, right in zip(*results, strict=True):
        assert right.loss == pytest.approx(left.loss, rel=1e-6)
        assert right.grad_norm == pytest.approx(left.grad_norm, rel=1e-5)
    assert largest_difference(values_of(plain), values_of(scaled)) < 1e-6


def test_a_gradient_that_is_too_large_is_made_again_with_a_smaller_scale() -> None:
    plain, scaled = (trainer_of(small_config()) for _ in range(2))
    scale = scaled.learner.loss_scale = LossScale(torch.float16)
    scale.value = 2.0**100  # the squares of a norm are more than fp32 holds
    results = [[trainer.train_step(batch_of(seed)) for seed in range(STEPS)] for trainer in (plain, scaled)]
    assert not any(result.skipped for result in results[1])
    assert 1.0 < scale.value < 2.0**100
    assert [result.loss for result in results[1]] == pytest.approx([result.loss for result in results[0]], rel=1e-5)


def with_nan_gradients(trainer: Trainer) -> None:
    """The loss stays finite, the gradient is not, whatever the scale."""
    trainer.learner.model.norm.weight.register_hook(lambda gradient: gradient * math.nan)


def test_a_loss_that_no_scale_can_cure_is_skipped() -> None:
    trainer = trainer_of(small_config())
    scale = trainer.learner.loss_scale = LossScale(torch.float16)
    with torch.no_grad():
        trainer.learner.model.head.weight[0, 0] = math.inf
    assert trainer.train_step(batch_of(0)).skipped
    assert scale.value == FIRST


def test_a_gradient_that_no_scale_can_cure_is_skipped_and_the_scale_halved_once() -> None:
    trainer = trainer_of(small_config())
    scale = trainer.learner.loss_scale = LossScale(torch.float16)
    with_nan_gradients(trainer)
    for value in (FIRST / 2, FIRST / 4):
        result = trainer.train_step(batch_of(0))
        assert result.skipped
        assert math.isfinite(result.loss)
        assert scale.value == value
    scale.value = 1.0
    assert trainer.train_step(batch_of(0)).skipped
    assert scale.value == 1.0


def test_a_step_that_is_given_up_leaves_the_scale_as_it_was() -> None:
    trainer, asked = trainer_of(small_config("optimizer.micro_batch_sequences=4")), list[float]()
    scale = trainer.learner.loss_scale = LossScale(torch.float16)
    with_nan_gradients(trainer)

    def should_drop(share: float) -> bool:
        asked.append(scale.value)
        return len(asked) == 3

    assert trainer.train_step_unless(batch_of(0), should_drop) is None
    assert asked == [FIRST, FIRST / 2, FIRST / 4]
    assert scale.value == FIRST


def test_in_fp16_the_loss_falls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products outside the experts in fp16, by the CPU's own autocast."""
    monkeypatch.setattr(step, "autocast", lambda device: torch.autocast("cpu", torch.float16))
    trainer = trainer_of(small_config("optimizer.lr=0.003"))
    trainer.learner.loss_scale = LossScale(torch.float16)
    losses = [trainer.train_step(batch_of(0)).loss for _ in range(15)]
    assert losses[-1] < 0.9 * losses[0]


def test_the_scale_doubles_after_many_good_steps_and_stays_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "STEPS_TO_DOUBLE", 3)
    scale, none = LossScale(torch.float16), LossScale(torch.bfloat16)
    assert scale.shrink()
    for each in (scale, none):
        for _ in range(3):
            each.note_good()
    assert (scale.value, none.value) == (FIRST, 1.0)
    assert not none.shrink()

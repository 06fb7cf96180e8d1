"""Learning rate, ramp and auxiliary factor: values computed by hand."""

from __future__ import annotations

import pytest

from spes_p2p.consensus.manifest import Decay
from spes_p2p.train.schedule import learning_rate, owned_balance_factor, ramp
from tests.train.small import small_config

CONFIG = small_config(
    "optimizer.lr=2.0", "scheduler.warmup_steps=10", "scheduler.total_steps=110", "scheduler.min_ratio=0.1"
)


@pytest.mark.parametrize(
    ("step", "lr"),
    [(1, 0.2), (5, 1.0), (10, 2.0), (60, 1.1), (35, 0.2 + 1.8 * (2 + 2**0.5) / 4), (110, 0.2), (10_000, 0.2)],
)
def test_linear_warm_up_then_a_cosine_to_the_lowest_rate(step: int, lr: float) -> None:
    assert learning_rate(CONFIG, step) == pytest.approx(lr, rel=1e-12)


@pytest.mark.parametrize(
    ("step", "lr"), [(1, 0.2), (10, 2.0), (60, 2.0), (90, 2.0), (100, 1.1), (105, 0.65), (110, 0.2), (10_000, 0.2)]
)
def test_warm_up_stable_decay(step: int, lr: float) -> None:
    shape = ("scheduler.name=wsd", "scheduler.decay_steps=20", "scheduler.warmup_steps=10", "scheduler.total_steps=110")
    config = small_config("optimizer.lr=2.0", *shape, "scheduler.min_ratio=0.1")
    assert learning_rate(config, step) == pytest.approx(lr, rel=1e-12)


@pytest.mark.parametrize(("step", "lr"), [(0, 0.2), (5, 1.1), (9, 1.82), (10, 2.0)])
def test_a_warm_up_that_does_not_begin_at_zero(step: int, lr: float) -> None:
    config = small_config("optimizer.lr=2.0", "scheduler.warmup_steps=10", "scheduler.warmup_ratio=0.1")
    assert learning_rate(config, step) == pytest.approx(lr, rel=1e-12)


@pytest.mark.parametrize("name", ["cosine", "wsd"])
def test_by_the_organisers_word_it_falls_from_where_it_is_planned(name: str) -> None:
    shape = (f"scheduler.name={name}", "scheduler.warmup_steps=10", "scheduler.total_steps=110")
    config = small_config("optimizer.lr=2.0", *shape, "scheduler.min_ratio=0.1")
    decay = Decay(begin_step=60, steps=20)
    first = learning_rate(config, 60)
    assert first == pytest.approx({"cosine": 1.1, "wsd": 2.0}[name])
    assert [learning_rate(config, step, decay) for step in (5, 59, 60)] == [
        learning_rate(config, step) for step in (5, 59, 60)
    ]
    assert learning_rate(config, 70, decay) == pytest.approx((first + 0.2) / 2)
    assert [learning_rate(config, step, decay) for step in (80, 109, 5000)] == pytest.approx([0.2] * 3)


def test_by_the_organisers_word_it_never_rises() -> None:
    """Not in a warm-up, and not above a plan that falls faster."""
    config = small_config("optimizer.lr=2.0", "scheduler.warmup_steps=100", "scheduler.total_steps=200")
    assert [learning_rate(config, step, Decay(5, 10)) for step in (5, 10, 15, 50)] == pytest.approx([0.1] * 4)
    assert learning_rate(config, 190, Decay(150, 1000)) == learning_rate(config, 190)


def test_the_decay_is_a_fifth_of_the_run_where_nobody_says() -> None:
    assert small_config("scheduler.total_steps=110", "scheduler.warmup_steps=10").scheduler.decay_steps == 22


def test_no_warm_up_starts_at_the_highest_rate() -> None:
    assert learning_rate(small_config("scheduler.warmup_steps=0", "optimizer.lr=1.0"), 0) == 1.0


def test_fresh_moments_reach_the_full_rate_after_ten_steps() -> None:
    assert [ramp(steps) for steps in (0, 4, 9, 50)] == [0.1, 0.5, 1.0, 1.0]


@pytest.mark.parametrize(("step", "factor"), [(1, 0.7), (499, 0.7), (500, 0.775), (1250, 0.85), (2000, 1.0), (9999, 1)])
def test_balance_factor_of_owned_experts_rises_in_jumps(step: int, factor: float) -> None:
    long = ("scheduler.total_steps=10000", "optimizer.decayed_aux_loss=true")
    assert owned_balance_factor(small_config(*long), step) == pytest.approx(factor)
    assert owned_balance_factor(small_config(), step) == 1.0

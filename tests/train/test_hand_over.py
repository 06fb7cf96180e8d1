"""Optimizer moments that go from one trainer to another."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from spes_p2p.interop.hf import place_table
from spes_p2p.model.params import ExpertPlace
from spes_p2p.state.moments import NO_MOMENTS, check_moments
from spes_p2p.train.schedule import RAMP_STEPS
from spes_p2p.train.trainer import Trainer
from spes_p2p.train.worker import LocalRanks
from tests.train.small import (
    CPU,
    batch_of,
    initial,
    largest_difference,
    same_bits,
    small_config,
    trainer_of,
    transformer_of,
    values_of,
)


def trained(owned: tuple[int, ...], steps: int = 4) -> Trainer:
    trainer = trainer_of(small_config(), owned)
    for seed in range(steps):
        trainer.train_step(batch_of(seed))
    return trainer


def heir_of(giver: Trainer, column: int, heir: Trainer) -> Trainer:
    """`heir` has trained as `giver` did, but for that column, and now owns it too, with its moments."""
    heir.adopt(tuple(sorted({*heir.rank.owned, column})), initial(small_config()), 4)
    heir.take_moments(column, giver.moments(column))
    return heir


def test_a_new_owner_goes_on_as_the_old_one_would_have() -> None:
    """Both from the same state: with the moments taken over, the column steps as where it came from, bit for bit."""
    giver = trained((1, 4), steps=RAMP_STEPS)
    config = small_config()
    heir = trainer_of(config, ())
    heir.load_private_state({**giver.private_state()})  # the same shared moments
    heir.adopt((4,), initial(config), 4)
    heir.adopt((1, 4), initial(config), 4)
    giver.adopt((1, 4), initial(config), 4)
    assert heir.moments(1) == NO_MOMENTS
    heir.take_moments(1, giver.moments(1))
    for trainer in (giver, heir):
        trainer.train_step(batch_of(9))
    assert same_bits(values_of(giver), values_of(heir))


def test_moments_are_laid_out_like_the_block() -> None:
    giver, config = trained((1, 4)), small_config()
    flat, start = giver.moments(4), 0
    tensors, bank = giver.private_state()["groups"][2]["tensors"], transformer_of(giver.rank).banks[0]
    for place in place_table(config.model)[1 + 4]:
        assert isinstance(place, ExpertPlace)
        name, rows = bank.rows_of(place.which)
        own = tensors[f"layers.{place.layer}.{name}"]
        part = slice(start, start + own["value"][rows].numel())
        assert np.array_equal(flat.mean[part], own["exp_avg"][rows].reshape(-1).numpy())
        assert np.array_equal(flat.square[part], own["exp_avg_sq"][rows].reshape(-1).numpy())
        start = part.stop
    assert (flat.steps, len(flat.mean), len(flat.square)) == (4, start, start)


def test_what_training_gives_stands_the_check() -> None:
    giver, optimizer = trained((1, 4), steps=12), small_config().optimizer
    for column in (1, 4):
        check_moments(giver.moments(column), optimizer.betas, optimizer.grad_clip)


def test_moments_that_are_handed_over_are_copies() -> None:
    giver = trained((1, 4))
    heir = heir_of(giver, 1, trained((4,)))
    before = giver.moments(1)
    heir.train_step(batch_of(0))
    assert np.array_equal(giver.moments(1).mean, before.mean)
    giver.train_step(batch_of(0))
    assert heir.moments(1).steps == before.steps + 1 == 5


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[LocalRanks]:
    before = torch.get_num_threads()
    with LocalRanks(2, CPU) as ranks:
        yield ranks
    torch.set_num_threads(before)


def test_two_ranks_take_over_like_one(two_ranks: LocalRanks) -> None:
    """Up to the order of sums: each micro-batch of a rank has a load-balancing loss of its own, which is off here."""
    giver, config = trained((1,)), small_config("optimizer.load_balancing_weight=0.0", "optimizer.eps=1e-3")
    alone, together = trainer_of(config, (4,)), trainer_of(config, (4,), ranks=two_ranks.ranks)
    for trainer in (alone, together):
        trainer.adopt((1, 4), initial(config), 4)
        trainer.take_moments(1, giver.moments(1))
        trainer.train_step(batch_of(9))
    assert len(set(together.value_hashes())) == 1
    assert largest_difference(values_of(alone), values_of(together)) < 1e-5
    together.close()

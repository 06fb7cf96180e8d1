"""Ranks that share gradients, moments and the update: the same training as one rank, with a part of the memory."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from spes_p2p.errors import ConfigError
from spes_p2p.planning.memory import OPTIMIZER, Workload, predict
from spes_p2p.train.kept_gradients import Share
from spes_p2p.train.moment_store import MOMENTS
from spes_p2p.train.trainer import Trainer
from spes_p2p.train.worker import LocalRanks
from tests.train.small import (
    CPU,
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

PLAIN = "optimizer.load_balancing_weight=0.0", "optimizer.eps=1e-3", "optimizer.micro_batch_sequences=1"
SHARED = "optimizer.sharding=zero2"


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[LocalRanks]:
    with LocalRanks(2, CPU) as some:
        yield some


def test_rows_are_dealt_whole_and_once() -> None:
    for count in (0, 1, 5, 8, 151_808):
        for of in (1, 2, 3, 8):
            dealt = [row for rank in range(of) for row in range(count)[Share(rank, of).rows(count)]]
            assert dealt == list(range(count))


def rounds(trainer: Trainer) -> list[float]:
    """Two rounds with a change of columns between: losses and gradient norms."""
    numbers = []
    for start, owned in ((0, (1, 4)), (3, (0, 4, 5))):
        trainer.adopt(owned, initial(trainer.config), start)
        results = [trainer.train_step(batch_of(start + index, masked=(0, 1, 2))) for index in range(3)]
        numbers += [number for result in results for number in (result.loss, result.grad_norm)]
    return numbers


@pytest.mark.parametrize("count", [2, 4])
def test_they_train_like_one_rank_in_a_part_of_its_memory(count: int) -> None:
    """A vocabulary and a router that no number of ranks divides, a gradient that is clipped, and what follows."""
    uneven = (*PLAIN, "model.vocab_size=33", "model.num_experts=7", "optimizer.grad_clip=0.5")
    one = Trainer(small_config(*uneven), small_layout(small_config(*uneven)), CPU)
    config = small_config(*uneven, SHARED)
    with LocalRanks(count, CPU) as ranks:
        some = Trainer(config, small_layout(config), CPU, ranks.ranks)
        assert rounds(some) == pytest.approx(rounds(one), rel=1e-4)
        assert largest_difference(values_of(some), values_of(one)) < 1e-5
        assert len(set(some.value_hashes())) == 1
        assert some.held.gradients == pytest.approx(one.held.gradients / count, rel=0.05)
        planned = predict(Workload.of(config, len(some.owned), ranks=count)).parts[OPTIMIZER]
        assert some.held.moments == pytest.approx(planned, rel=0.05)
        assert planned == pytest.approx(one.held.moments / count, rel=0.01)
        for column in some.owned:  # what a new owner gets is whole
            given, wanted = some.moments(column), one.moments(column)
            assert given.steps == wanted.steps
            assert np.allclose(given.mean, wanted.mean, atol=1e-5)
        some.take_moments(4, one.moments(4))
        assert np.array_equal(some.moments(4).square, one.moments(4).square)
        some.close()


@pytest.mark.parametrize("small", [(), ("optimizer.name=adamw8bit", "optimizer.gradient_dtype=bf16")])
def test_they_resume_bit_for_bit_and_give_a_step_up_together(two_ranks: LocalRanks, small: tuple[str, ...]) -> None:
    """Saved whole, so that another number of ranks goes on from it, too. Codes of 8 bits stay codes."""
    wide = "model.d_model=256", "model.num_heads=4", "model.expert_ffn=256", "sync.tile_values=1048576"
    config = small_config(*PLAIN, *wide, *small, SHARED)
    whole = trainer_of(config, ranks=two_ranks.ranks)
    whole.train_step(batch_of(0))
    assert whole.train_step_unless(batch_of(8), lambda share: share >= 0.5) is None
    state = copy.deepcopy(whole.private_state())
    matrix = state["groups"][1]["tensors"]["layers.1.down"]
    assert matrix[MOMENTS[0]].dtype == (torch.uint8 if small else torch.float32)
    loss = whole.train_step(batch_of(1)).loss
    resumed = trainer_of(config, (3,), ranks=two_ranks.ranks)
    resumed.load_private_state(state)
    resumed.park()
    assert resumed.train_step(batch_of(1)).loss == loss
    assert same_bits(values_of(resumed), values_of(whole))
    alone = trainer_of(small_config(*PLAIN, *wide, *small), (3,))
    alone.load_private_state(state)
    assert alone.train_step(batch_of(1)).loss == pytest.approx(loss, rel=1e-3)
    assert largest_difference(values_of(alone), values_of(whole)) < (2e-2 if small else 1e-5)


def test_a_rank_without_memory_stops_no_exchange(two_ranks: LocalRanks) -> None:
    config = small_config(*PLAIN[:2], SHARED)
    roomy, tight = trainer_of(small_config(*PLAIN[:2])), trainer_of(config, ranks=two_ranks.ranks)
    SmallDevice(tight, sequences=1)
    results = [[trainer.train_step(batch_of(seed)).loss for seed in range(2)] for trainer in (tight, roomy)]
    assert results[0] == pytest.approx(results[1], rel=1e-4)
    assert "all ranks continue with" in tight.take_notes()[0]


def test_muon_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match=r"sharding is zero2, but optimizer\.name is muon"):
        small_config("optimizer.name=muon", SHARED)

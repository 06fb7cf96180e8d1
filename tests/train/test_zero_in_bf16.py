"""Ranks with experts in bf16, as on a GPU, that share values, too: of masters each has the lower half of its rows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from spes_p2p.experts.masters import halves_of
from spes_p2p.experts.shards import own_rows
from spes_p2p.model.params import masters_of
from spes_p2p.train.worker import LocalRanks
from tests.train.sharing import (
    EIGHT_BIT,
    PLAIN,
    ZERO3,
    check_that_they_resume,
    check_that_they_train_like_one_rank,
    ranks_of,
    trainer_in,
)
from tests.train.small import Blocks, batch_of, initial, same_bits, small_config, transformer_of, values_of


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[LocalRanks]:
    with ranks_of(2, in_bf16=True) as some:
        yield some


@pytest.mark.thorough
def test_four_train_like_one_rank_in_a_part_of_its_memory() -> None:
    """In fp32 they do in each test run (tests/train/test_zero.py)."""
    with ranks_of(4, in_bf16=True) as ranks:
        check_that_they_train_like_one_rank(ranks, ZERO3, in_bf16=True)


def test_they_train_like_one_rank_in_a_part_of_its_memory(two_ranks: LocalRanks) -> None:
    check_that_they_train_like_one_rank(two_ranks, ZERO3, in_bf16=True)


@pytest.mark.parametrize("small", [(), EIGHT_BIT])
def test_they_resume_bit_for_bit_and_give_a_step_up_together(two_ranks: LocalRanks, small: tuple[str, ...]) -> None:
    check_that_they_resume(two_ranks, ZERO3, True, small)


def test_what_is_dealt_is_read_and_written_to_the_bit(two_ranks: LocalRanks) -> None:
    """What was committed, and what values that are loaded ask of the model while it takes them."""
    trainer, config = trainer_in(small_config(*PLAIN, ZERO3), True, two_ranks.ranks), small_config(*PLAIN)
    trainer.adopt((1, 4), initial(config), 0)
    model = transformer_of(trainer.rank)
    assert not any(parameter.untyped_storage().nbytes() for parameter in (model.embedding, *masters_of(model)))
    lower = [halves.lower.shape for halves in map(halves_of, masters_of(model)) if halves is not None]
    assert lower == [(2, 8, 16), (2, 8, 8)] * 2
    for block, values in values_of(trainer).items():
        assert np.array_equal(values, initial(config).block(block))
    trainer.train_step(batch_of(0))
    trained = values_of(trainer)
    trainer.adopt(
        (1, 4), Blocks(lambda at: trainer.contribution(at) if at in trained else initial(config).block(at)), 1
    )
    assert same_bits(values_of(trainer), trained)
    trainer.adopt((1, 2, 4), Blocks(lambda at: trained.get(at, initial(config).block(at))), 1)
    assert all(np.array_equal(trainer.contribution(block), values) for block, values in trained.items())
    assert np.array_equal(trainer.contribution(3), initial(config).block(3))
    trainer.park()
    kept = [own_rows(model.embedding), *(halves.lower for halves in map(halves_of, masters_of(model)) if halves)]
    assert not any(one.untyped_storage().nbytes() for one in kept if one is not None)

"""Ranks that share the work: the same training as one rank, with a part of the memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from spes_p2p.errors import ConfigError
from spes_p2p.experts.shards import Share
from spes_p2p.train.worker import LocalRanks
from tests.train.sharing import (
    EIGHT_BIT,
    PLAIN,
    ZERO2,
    ZERO3,
    check_that_they_resume,
    check_that_they_train_like_one_rank,
    ranks_of,
)
from tests.train.small import SmallDevice, batch_of, small_config, trainer_of


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[LocalRanks]:
    with ranks_of(2, in_bf16=False) as some:
        yield some


def test_rows_are_dealt_whole_and_once() -> None:
    for count in (0, 1, 5, 8, 151_808):
        for of in (1, 2, 3, 8):
            dealt = [row for rank in range(of) for row in range(count)[Share(rank, of).rows(count)]]
            assert dealt == list(range(count))


def test_four_train_like_one_rank_in_a_part_of_its_memory() -> None:
    """Before `two_ranks` are there: a process has one group at a time."""
    with ranks_of(4, in_bf16=False) as ranks:
        check_that_they_train_like_one_rank(ranks, ZERO2, in_bf16=False)


@pytest.mark.parametrize("sharding", [ZERO2, ZERO3])
def test_they_train_like_one_rank_in_a_part_of_its_memory(two_ranks: LocalRanks, sharding: str) -> None:
    check_that_they_train_like_one_rank(two_ranks, sharding, in_bf16=False)


@pytest.mark.parametrize(("sharding", "small"), [(ZERO2, ()), (ZERO2, EIGHT_BIT), (ZERO3, ())])
def test_they_resume_bit_for_bit_and_give_a_step_up_together(
    two_ranks: LocalRanks, sharding: str, small: tuple[str, ...]
) -> None:
    check_that_they_resume(two_ranks, sharding, False, small)


def test_what_is_computed_again_is_fetched_again(two_ranks: LocalRanks) -> None:
    losses = []
    for mode in ("none", "selective", "full"):
        config = small_config(*PLAIN, ZERO3, f"model.activation_checkpointing={mode}")
        trainer = trainer_of(config, ranks=two_ranks.ranks)
        losses.append([trainer.train_step(batch_of(seed)).loss for seed in range(3)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert losses[2] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.parametrize("sharding", [ZERO2, ZERO3])
def test_a_rank_without_memory_stops_no_exchange(two_ranks: LocalRanks, sharding: str) -> None:
    config = small_config(*PLAIN[:2], sharding)
    roomy, tight = trainer_of(small_config(*PLAIN[:2])), trainer_of(config, ranks=two_ranks.ranks)
    SmallDevice(tight, sequences=1)
    results = [[trainer.train_step(batch_of(seed)).loss for seed in range(2)] for trainer in (tight, roomy)]
    assert results[0] == pytest.approx(results[1], rel=1e-4)
    assert "all ranks continue with" in tight.take_notes()[0]


@pytest.mark.parametrize("sharding", [ZERO2, ZERO3])
def test_muon_is_refused_in_words(sharding: str) -> None:
    with pytest.raises(ConfigError, match=r"sharding is zero\d, but optimizer\.name is muon"):
        small_config("optimizer.name=muon", sharding)

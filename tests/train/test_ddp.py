"""Two ranks, as real processes: the same training as one rank, and equal values at both."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
from torch import nn

from spes_p2p.consensus.manifest import Decay
from spes_p2p.errors import ConfigError
from spes_p2p.train.schedule import learning_rate
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


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[LocalRanks]:
    with LocalRanks(2, CPU) as ranks:
        yield ranks


def rounds(trainer: Trainer) -> list[float]:
    """Two rounds with a change of columns between; losses and gradient norms of the steps."""
    numbers = []
    for start, owned in ((0, (1, 4)), (3, (0, 4, 5))):
        trainer.adopt(owned, initial(trainer.learner.config), start)
        results = [trainer.train_step(batch_of(start + index, masked=(0, 1, 2))) for index in range(3)]
        numbers += [number for result in results for number in (result.loss, result.grad_norm, result.router_z)]
        numbers += [sum(count**2 for layer in result.expert_counts for count in layer) for result in results[:1]]
    return numbers


@pytest.mark.parametrize("micro", [8, 2])
def test_two_ranks_train_like_one(two_ranks: LocalRanks, micro: int) -> None:
    """Each micro-batch of a rank has a load-balancing loss of its own: it is off here."""
    config = small_config(
        f"optimizer.micro_batch_sequences={micro}", "optimizer.load_balancing_weight=0.0", "optimizer.eps=1e-3"
    )
    one = Trainer(config, small_layout(config), CPU)
    two = Trainer(config, small_layout(config), CPU, two_ranks.ranks)
    assert rounds(two) == pytest.approx(rounds(one), rel=1e-4)
    assert largest_difference(values_of(two), values_of(one)) < 1e-5
    hashes = two.value_hashes()
    assert len(hashes) == 2
    assert hashes[0] == hashes[1]
    assert one.value_hashes() != trainer_of(config).value_hashes()


def test_two_ranks_follow_the_organisers_word_on_the_learning_rate(two_ranks: LocalRanks) -> None:
    config, decay = small_config(), Decay(1, 4)
    trainer = trainer_of(config, ranks=two_ranks.ranks)
    trainer.use_decay(decay)
    rates = [trainer.train_step(batch_of(seed)).lr for seed in range(5)]
    assert rates == [learning_rate(config, step, decay) for step in range(1, 6)]
    assert rates[-1] < rates[0] / 5
    assert len(set(trainer.value_hashes())) == 1
    trainer.use_decay(None)
    assert trainer.train_step(batch_of(5)).lr == learning_rate(config, 6)
    assert len(set(trainer.value_hashes())) == 1


def test_two_ranks_resume_bit_for_bit(two_ranks: LocalRanks) -> None:
    config = small_config()
    whole = trainer_of(config, ranks=two_ranks.ranks)
    whole.train_step(batch_of(0))
    state = copy.deepcopy(whole.private_state())
    loss = whole.train_step(batch_of(1)).loss
    resumed = trainer_of(config, (3,), ranks=two_ranks.ranks)
    resumed.load_private_state(state)
    assert resumed.train_step(batch_of(1)).loss == loss
    assert same_bits(values_of(resumed), values_of(whole))
    assert len(set(resumed.value_hashes())) == 1


def test_two_ranks_leave_their_devices_and_come_back_bit_for_bit(two_ranks: LocalRanks) -> None:
    config, losses, hashes = small_config(), list[list[float]](), list[list[str]]()
    for parks in (False, True):
        trainer = trainer_of(config, ranks=two_ranks.ranks)
        trainer.train_step(batch_of(0))
        if parks:
            trainer.park()
        losses.append([trainer.train_step(batch_of(seed)).loss for seed in (1, 2)])
        hashes.append(trainer.value_hashes())
    assert losses[0] == losses[1]
    assert len({one for found in hashes for one in found}) == 1


def test_ranks_step_down_together_where_one_has_no_memory(two_ranks: LocalRanks) -> None:
    """Rank 0 holds two sequences at once, rank 1 any number: neither waits in an exchange for the other."""
    config = small_config("optimizer.load_balancing_weight=0.0", "optimizer.eps=1e-3")
    roomy = trainer_of(config)
    tight = trainer_of(config, ranks=two_ranks.ranks)
    SmallDevice(tight, sequences=1)
    results = [[trainer.train_step(batch_of(seed)) for seed in range(3)] for trainer in (tight, roomy)]
    assert [result.loss for result in results[0]] == pytest.approx([result.loss for result in results[1]], rel=1e-4)
    assert largest_difference(values_of(tight), values_of(roomy)) < 1e-4
    assert len(set(tight.value_hashes())) == 1
    notes = tight.learner.take_notes()
    assert notes[0].endswith(
        "CUDA out of memory; all ranks continue with model.activation_checkpointing=selective from now on"
    )
    assert not tight.learner.take_notes()


def test_a_batch_that_cannot_be_split_is_refused(two_ranks: LocalRanks) -> None:
    odd = small_config("optimizer.batch_sequences=7")
    with pytest.raises(ConfigError, match="7 sequences cannot be split over 2 ranks"):
        Trainer(odd, small_layout(odd), CPU, two_ranks.ranks)
    trainer = trainer_of(small_config(), ranks=two_ranks.ranks)
    with pytest.raises(ConfigError, match="3 sequences"):
        trainer.train_step(batch_of(0, sequences=3))
    trainer.train_step(batch_of(0))  # and nothing is broken


def test_all_ranks_give_a_step_up_at_the_same_micro_batch(two_ranks: LocalRanks) -> None:
    config = small_config("optimizer.micro_batch_sequences=1")
    whole, stopped = (trainer_of(config, ranks=two_ranks.ranks) for _ in range(2))
    whole.train_step(batch_of(0))
    expected = whole.train_step(batch_of(1)).loss, whole.value_hashes()
    stopped = trainer_of(config, ranks=two_ranks.ranks)
    stopped.train_step(batch_of(0))
    assert stopped.train_step_unless(batch_of(1), lambda share: share == 0.75) is None
    assert stopped.round_steps == 1
    assert (stopped.train_step(batch_of(1)).loss, stopped.value_hashes()) == expected


def test_there_is_one_set_of_gradients_from_the_beginning(two_ranks: LocalRanks) -> None:
    """They lie in DDP's buckets before the first exchange, too: beside them there need not be memory for another."""
    config = small_config("optimizer.micro_batch_sequences=1")
    for owned in ((1, 4), (1, 2, 4)):
        trainer = trainer_of(config, owned, ranks=two_ranks.ranks)
        model = trainer.learner.model
        assert len(places_of(model)) == 1  # one bucket
        before = places_of(model)
        assert trainer.train_step_unless(batch_of(0), lambda share: True) is None  # rehearsed, and no exchange yet
        assert places_of(model) == before
    trainer.train_step(batch_of(0))
    assert len(places_of(model)) == 1


def places_of(model: nn.Module) -> set[int]:
    """Where the gradients' memory begins."""
    return {0 if p.grad is None else p.grad.untyped_storage().data_ptr() for p in model.parameters()}

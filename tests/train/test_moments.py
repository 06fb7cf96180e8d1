"""What happens to moments: kept for columns that stay, fresh for new ones, and saved for an exact resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spes_p2p.checkpoint.private import read_private, write_private
from spes_p2p.errors import CheckpointError
from spes_p2p.state.layout import Values
from spes_p2p.train.private import FORMAT
from spes_p2p.train.trainer import Trainer
from tests.train.small import Blocks, batch_of, initial, same_bits, small_config, trainer_of, values_of

Tree = dict[str, Any]


def train(trainer: Trainer, steps: int) -> list[float]:
    return [trainer.train_step(batch_of(seed)).loss for seed in range(steps)]


def group_of(trainer: Trainer, column: int | None) -> Tree:
    groups = trainer.private_state()["groups"]
    return next(group for group in groups if group["column"] == column)


def same_moments(left: Tree, right: Tree) -> bool:
    return left["steps"] == right["steps"] and all(
        torch.equal(left["tensors"][name][key], right["tensors"][name][key])
        for name in left["tensors"]
        for key in ("exp_avg", "exp_avg_sq")
    )


def test_an_owned_set_that_changes_keeps_the_moments_of_what_stays() -> None:
    config = small_config()
    trainer = trainer_of(config, (1, 4))
    train(trainer, 3)
    before = {column: group_of(trainer, column) for column in (None, 1, 4)}
    trainer.adopt((0, 4), initial(config), 3)
    assert trainer.learner.owned == (0, 4)
    assert same_moments(group_of(trainer, None), before[None])
    assert same_moments(group_of(trainer, 4), before[4])
    fresh = group_of(trainer, 0)
    assert (fresh["steps"], fresh["ramped"]) == (0, True)
    assert all(entry.keys() == {"value"} for entry in fresh["tensors"].values())
    train(trainer, 2)
    assert [group_of(trainer, column)["steps"] for column in (None, 0, 4)] == [5, 2, 5]


def test_adopting_puts_the_given_values_everywhere() -> None:
    config = small_config()
    trainer, source = trainer_of(config, (1, 4)), initial(config)
    train(trainer, 2)

    def shifted(index: int) -> Values:
        return source.block(index) + np.float32(index)

    trainer.adopt((2, 4), Blocks(shifted), 2)
    assert same_bits(values_of(trainer), {block: shifted(block) for block in (0, 3, 5)})
    other = trainer_of(config, ())
    other.adopt((), Blocks(shifted), 2)
    assert trainer.evaluate([batch_of(0)]) == other.evaluate([batch_of(0)])  # foreign columns too


def test_a_new_column_steps_like_a_fresh_adamw_on_a_ramp() -> None:
    """Without weight decay, the first AdamW steps are lr times the sign of the gradient."""
    config = small_config("optimizer.weight_decay=0.0", "optimizer.eps=1e-20", "scheduler.warmup_steps=0")
    trainer = trainer_of(config, (4,))
    train(trainer, 5)
    trainer.adopt((0, 4), initial(config), 5)
    before = values_of(trainer)
    result = trainer.train_step(batch_of(9))
    moved = {block: np.abs(values - before[block]) for block, values in values_of(trainer).items()}
    assert np.median(moved[1]) == pytest.approx(0.1 * result.lr, rel=1e-3)
    assert moved[1].max() == pytest.approx(0.1 * result.lr, rel=1e-3)
    assert np.median(moved[5]) > 0.2 * result.lr


def test_columns_that_are_there_from_the_start_have_no_ramp() -> None:
    trainer = trainer_of(small_config(), (1, 4))
    assert not any(group["ramped"] for group in trainer.private_state()["groups"])
    late = trainer_of(small_config(), (1, 4), step=50)
    assert all(group["ramped"] for group in late.private_state()["groups"])


def test_an_owned_set_that_grows_and_shrinks_trains_as_a_group_of_one_size() -> None:
    """Column 4's path depends on its own history alone: neighbours in the stacked master do not disturb it."""
    config = small_config("optimizer.lr=1e-12", "optimizer.grad_clip=1e9")  # no value changes, only moments do
    alone, moving = trainer_of(config, (4,)), trainer_of(config, (0, 1, 4))
    for owned in ((4, 5), (2, 3, 4), (4,)):
        train(alone, 2)
        train(moving, 2)
        alone.adopt((4,), initial(config), 2)
        moving.adopt(owned, initial(config), 2)
    mine, other = group_of(alone, 4), group_of(moving, 4)
    assert mine["steps"] == other["steps"] == 6
    for name, entry in mine["tensors"].items():
        assert torch.allclose(entry["exp_avg_sq"], other["tensors"][name]["exp_avg_sq"], rtol=1e-4, atol=0)


def test_moments_are_dropped_on_demand() -> None:
    config = small_config()
    trainer = trainer_of(config)
    train(trainer, 2)
    trainer.adopt((1, 4), initial(config), 2, keep_moments=False)
    assert [group["steps"] for group in trainer.private_state()["groups"]] == [0, 0, 0]


@pytest.mark.parametrize("interrupted_after", [2, 4])
def test_an_interrupted_peer_goes_on_bit_for_bit(interrupted_after: int, tmp_path: Path) -> None:
    """Interrupted inside a round after columns changed; through the files of a checkpoint, in a new trainer."""
    config = small_config("scheduler.warmup_steps=3")

    def start() -> Trainer:
        trainer = trainer_of(config, (1, 4))
        train(trainer, 3)
        trainer.adopt((0, 4), initial(config), 3)
        return trainer

    whole = start()
    expected = [whole.train_step(batch_of(10 + index)).loss for index in range(6)]
    first = start()
    losses = [first.train_step(batch_of(10 + index)).loss for index in range(interrupted_after)]
    write_private(tmp_path, first.private_state())

    second = trainer_of(config, (2,), step=3)
    second.load_private_state(read_private(tmp_path))
    assert (second.learner.owned, second.step, second.round_steps) == ((0, 4), 3, interrupted_after)
    losses += [second.train_step(batch_of(10 + index)).loss for index in range(interrupted_after, 6)]
    assert losses == expected
    assert same_bits(values_of(second), values_of(whole))


def test_a_state_to_be_saved_takes_no_memory() -> None:
    trainer = trainer_of(small_config())
    train(trainer, 1)
    saved, own = trainer.private_state()["groups"], trainer.learner.optimizer.groups
    for group, trained in zip(saved, own, strict=True):
        for name, entry in group["tensors"].items():
            assert entry["value"].data_ptr() == trained.tensors[name].values.data_ptr()
            assert entry["exp_avg"].data_ptr() == trained.moments[name]["exp_avg"].data_ptr()


def test_a_saved_state_that_does_not_fit_is_refused() -> None:
    config = small_config()
    trainer = trainer_of(config)
    other = trainer_of(small_config("model.expert_ffn=16")).private_state()
    with pytest.raises(CheckpointError, match="shape"):
        trainer.load_private_state(other)
    with pytest.raises(CheckpointError, match="format 9"):
        trainer.load_private_state(trainer.private_state() | {"format": 9})
    with pytest.raises(CheckpointError, match="damaged"):
        trainer.load_private_state({"format": FORMAT})
    with pytest.raises(CheckpointError, match="groups"):
        trainer.load_private_state(trainer.private_state() | {"owned": (1, 2)})

"""The trainer of a model of somebody's own: who is trained, what is saved and handed over, as with ours."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from spes_p2p.config.schema import Config
from spes_p2p.errors import CheckpointError
from spes_p2p.interop.own import Model, OwnStart
from spes_p2p.state.moments import check_moments
from spes_p2p.train.own import own_trainer
from spes_p2p.train.trainer import Trainer
from tests.train.small import CPU, VOCABULARY, Blocks, batch_of, same_bits, small_config, values_of

EXPERTS = 3


class Sum(nn.Module):
    """Three experts on every token, one of them with a scale of no dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 8)
        self.experts = nn.ModuleList(nn.Linear(8, VOCABULARY) for _ in range(EXPERTS))
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(())) for _ in range(EXPERTS))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.table(tokens)
        pairs = zip(self.experts, self.scales, strict=True)
        return torch.stack([scale * expert(hidden) for expert, scale in pairs]).sum(0)


def next_token(module: nn.Module, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(module(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def column_of(name: str) -> int | None:
    return None if name.startswith("table") else int(name.split(".")[1])


MODEL = Model(Sum, next_token, column_of)


def config_of(*overrides: str) -> Config:
    config = small_config("sync.merge_alpha=0", *overrides)
    return MODEL.config_of(config, OwnStart(MODEL, config).root())


def start_of(config: Config) -> Blocks:
    start = OwnStart(MODEL, config)
    return Blocks(lambda block: np.concatenate([start(tile) for tile in start.layout.tiles_of(block)]))


def trainer_of(config: Config, owned: tuple[int, ...] = (0, 2), step: int = 0) -> Trainer:
    trainer = own_trainer(MODEL, config, MODEL.layout(config), CPU)
    trainer.adopt(owned, start_of(config), step)
    return trainer


def test_it_learns_and_trains_only_what_it_owns() -> None:
    config = config_of()
    trainer = trainer_of(config)
    before = values_of(trainer)
    results = [trainer.train_step(batch_of(seed)) for seed in range(60)]
    assert results[-1].loss < results[0].loss / 2
    assert not any(np.array_equal(value, before[block]) for block, value in values_of(trainer).items())
    foreign = trainer.rank.trained.read_block(2)
    assert np.array_equal(foreign, start_of(config).block(2))


@pytest.mark.parametrize("micro", [2, 8])
def test_micro_batches_give_the_gradient_of_the_whole_batch(micro: int) -> None:
    trainer = trainer_of(config_of(f"optimizer.micro_batch_sequences={micro}"))
    result = trainer.train_step(batch_of(1, masked=(0, 5)))
    whole = trainer_of(config_of("optimizer.micro_batch_sequences=4")).train_step(batch_of(1, masked=(0, 5)))
    assert result.loss == pytest.approx(whole.loss, rel=1e-5)
    assert result.grad_norm == pytest.approx(whole.grad_norm, rel=1e-4)


def test_a_saved_trainer_goes_on_as_if_nothing_had_been() -> None:
    config = config_of()
    trainer = trainer_of(config)
    for seed in range(3):
        trainer.train_step(batch_of(seed))
    saved = trainer.private_state()
    copies = [{name: {k: v.clone() for k, v in e.items()} for name, e in g["tensors"].items()} for g in saved["groups"]]
    groups = [group | {"tensors": tensors} for group, tensors in zip(saved["groups"], copies, strict=True)]
    trainer.train_step(batch_of(9))
    again = trainer_of(config)
    again.load_private_state(saved | {"groups": groups})
    again.train_step(batch_of(9))
    assert same_bits(values_of(trainer), values_of(again))
    del groups[1]["tensors"]["scales.0"]
    with pytest.raises(CheckpointError, match="damaged"):
        again.load_private_state(saved | {"groups": groups})


def test_moments_of_a_column_pass_from_one_owner_to_the_next() -> None:
    config = config_of()
    giver, taker = trainer_of(config), trainer_of(config, owned=(2,), step=5)
    for seed in range(3):
        giver.train_step(batch_of(seed))
    moments = giver.moments(2)
    assert moments.mean.shape == moments.square.shape == (8 * VOCABULARY + VOCABULARY + 1,)
    check_moments(moments, config.optimizer.betas, config.optimizer.grad_clip)
    taker.take_moments(2, moments)
    taken = taker.moments(2)
    assert taken.steps == 3
    assert np.array_equal(taken.mean, moments.mean)
    assert np.array_equal(taken.square, moments.square)


def test_a_step_that_is_given_up_draws_its_dropout_again() -> None:
    class Dropping(Sum):
        def forward(self, tokens: Tensor) -> Tensor:
            return nn.functional.dropout(super().forward(tokens), 0.5, self.training)

    model = Model(Dropping, next_token, column_of)
    config, trainers = config_of("optimizer.micro_batch_sequences=2"), []
    for stops in (False, True):
        trainers.append(own_trainer(model, config, model.layout(config), CPU))
        trainers[-1].adopt((0, 2), start_of(config), 0)
        torch.manual_seed(3)
        if stops:
            assert trainers[-1].train_step_unless(batch_of(1), lambda share: share == 0.5) is None
        trainers[-1].train_step(batch_of(1))
    assert same_bits(values_of(trainers[0]), values_of(trainers[1]))

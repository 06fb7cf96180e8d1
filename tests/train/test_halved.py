"""Training with masters in two halves, as on a GPU in bf16: the same as with whole ones beside bf16 copies of them."""

from __future__ import annotations

import copy
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from spes_p2p.checkpoint.private import read_private, write_private
from spes_p2p.config.schema import Config
from spes_p2p.experts import bank
from spes_p2p.experts.masters import halves_of, nearest_bf16
from spes_p2p.experts.stores import Dense, Part
from spes_p2p.model.params import masters_of
from spes_p2p.train import worker
from spes_p2p.train.ddp import Ranks, connect
from spes_p2p.train.trainer import Trainer
from tests.train.small import (
    CPU,
    batch_of,
    in_bf16,
    initial,
    same_bits,
    small_config,
    small_layout,
    trainer_of,
    values_of,
)

IN_PARTS = ("optimizer.micro_batch_sequences=2",)
MUON = ("optimizer.name=muon",)


def halved_trainer(config: Config, owned: tuple[int, ...] = (1, 4)) -> Trainer:
    with in_bf16():
        trainer = Trainer(config, small_layout(config), CPU)
    trainer.adopt(owned, initial(config), 0)
    return trainer


def masters(trainer: Trainer) -> list[nn.Parameter]:
    return list(masters_of(trainer.learner.model))


def are_away(trainer: Trainer) -> bool:
    """Whether all masters are in halves, which are all that there is of them."""
    assert all(halves_of(master) is not None for master in masters(trainer))
    return not any(master.untyped_storage().nbytes() for master in masters(trainer))


def two_rounds(trainer: Trainer, config: Config) -> list[float]:
    """Columns that change hands between, one of which stays."""
    losses = []
    for step, owned in ((0, (1, 4)), (3, (0, 4, 5))):
        trainer.adopt(owned, initial(config), step)
        losses += [trainer.train_step(batch_of(step + index)).loss for index in range(3)]
    return losses


@pytest.mark.parametrize("options", [(), IN_PARTS, MUON])
def test_it_trains_bit_for_bit_as_with_whole_masters(options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where copies in bf16 are rounded alike: of what is halfway between two, torch takes the even one."""

    def refresh(self: Dense, part: Part, masters: nn.Parameter) -> None:
        self.matrices(part)[: len(masters)].copy_(nearest_bf16(masters.detach()))

    config = small_config(*options)
    halved = halved_trainer(config)
    assert are_away(halved)
    losses = two_rounds(halved, config)
    assert are_away(halved)
    monkeypatch.setattr(Dense, "refresh", refresh)
    monkeypatch.setattr(bank, "halve", lambda master, bf16: bf16.copy_(nearest_bf16(master.detach())))
    whole = halved_trainer(config)
    assert two_rounds(whole, config) == losses
    assert same_bits(values_of(halved), values_of(whole))
    column = small_layout(config).blocks[1].size
    assert whole.learner.held.model - halved.learner.held.model == 2 * len(whole.learner.owned) * column


def test_what_was_committed_is_held_to_the_bit() -> None:
    config = small_config()
    trainer = halved_trainer(config)
    assert all(np.array_equal(values, initial(config).block(block)) for block, values in values_of(trainer).items())
    trainer.train_step(batch_of(0))
    before = values_of(trainer)
    trainer.learner.set_owned((1, 2, 4), keep_moments=True, ramp_fresh=True)
    assert all(np.array_equal(trainer.contribution(block), values) for block, values in before.items())


@pytest.mark.parametrize("options", [(), MUON])
def test_it_resumes_bit_for_bit_from_a_checkpoint_of_either_kind(options: tuple[str, ...], tmp_path: Path) -> None:
    config = small_config(*options)
    trainer = halved_trainer(config)
    trainer.train_step(batch_of(0))
    write_private(tmp_path, trainer.private_state())
    saved, values = read_private(tmp_path), values_of(trainer)
    loss = trainer.train_step(batch_of(1)).loss
    resumed = halved_trainer(config, (3,))
    resumed.load_private_state(saved)
    assert are_away(resumed)
    assert same_bits(values_of(resumed), values)
    resumed.park()
    assert not any(parts.lower.untyped_storage().nbytes() for parts in map(halves_of, masters(resumed)) if parts)
    assert resumed.train_step(batch_of(1)).loss == loss
    assert same_bits(values_of(resumed), values_of(trainer))
    whole = trainer_of(config, (3,))  # a peer that has no halves takes it over, and gives it back
    whole.load_private_state(saved)
    assert same_bits(values_of(whole), values)
    again = halved_trainer(config, (3,))
    again.load_private_state(copy.deepcopy(whole.private_state()))
    assert same_bits(values_of(again), values)
    assert again.train_step(batch_of(1)).loss == loss


def rank_0(ranks: Ranks) -> tuple[list[float], list[str], bool]:
    """Losses, hashes of all ranks' values, and whether all masters are in halves."""
    torch.set_num_threads(1)
    config = small_config("optimizer.load_balancing_weight=0.0", "optimizer.eps=1e-3")
    with in_bf16():
        trainer = Trainer(config, small_layout(config), CPU, ranks)
    losses, hashes = two_rounds(trainer, config), trainer.value_hashes()
    trainer.close()
    return losses, hashes, are_away(trainer)


def a_rank(rank: int, folder: Path) -> tuple[list[float], list[str], bool]:
    """The same as a process; rank 1 does what rank 0 says, and knows of its own masters alone."""
    ranks = connect(Ranks(rank, 2, CPU), dist.FileStore(str(folder / "store"), 2))
    if rank == 0:
        return rank_0(ranks)
    made: list[Trainer] = []

    def make(*given: Any) -> Trainer:
        made.append(Trainer(*given))
        return made[0]

    with in_bf16(), patch.object(worker, "Trainer", make):
        worker.serve(ranks)
    return [], [], are_away(made[0])


def test_two_ranks_train_like_one(tmp_path: Path) -> None:
    alone, _, _ = rank_0(Ranks())
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        calls = [pool.submit(a_rank, rank, tmp_path) for rank in range(2)]
        (losses, hashes, is_away_there), (_, _, is_away_here) = [call.result() for call in calls]
    assert losses == pytest.approx(alone, rel=1e-3)
    assert len(hashes) == 2
    assert hashes[0] == hashes[1]
    assert is_away_there
    assert is_away_here

"""What is to hold of ranks that share their work, with experts in fp32 or, as on a GPU, in bf16.

In bf16 masters are halved, and can be dealt; a process has one group of ranks at a time, so each kind has its file.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from spes_p2p.config.schema import Config
from spes_p2p.planning.memory import OPTIMIZER, Workload, predict
from spes_p2p.train import worker
from spes_p2p.train.ddp import Ranks
from spes_p2p.train.moment_store import MOMENTS
from spes_p2p.train.rank import RankTrainer
from spes_p2p.train.trainer import Trainer
from spes_p2p.train.worker import Child, LocalRanks
from tests.train.small import (
    CPU,
    InBf16,
    batch_of,
    initial,
    largest_difference,
    same_bits,
    small_config,
    small_layout,
    values_of,
)

PLAIN = "optimizer.load_balancing_weight=0.0", "optimizer.eps=1e-3", "optimizer.micro_batch_sequences=1"
WIDE = "model.d_model=256", "model.num_heads=4", "model.expert_ffn=256", "sync.tile_values=1048576"
ZERO2, ZERO3 = "optimizer.sharding=zero2", "optimizer.sharding=zero3"
EIGHT_BIT = "optimizer.name=adamw8bit", "optimizer.gradient_dtype=bf16"


def ranks_of(count: int, in_bf16: bool) -> LocalRanks:
    def child(rank: int, command: list[str], *more: Any) -> Child:
        return Child(rank, [*command[:2], "tests.train.bf16_rank", *command[3:]], *more)

    with patch.object(worker, "Child", child if in_bf16 else Child):
        return LocalRanks(count, CPU)


def trainer_in(config: Config, in_bf16: bool, ranks: Ranks | None = None) -> Trainer:
    """Without values yet."""
    make = partial(RankTrainer, make_model=InBf16) if in_bf16 else RankTrainer
    return Trainer(config, small_layout(config), CPU, ranks, rank_trainer=make)


def rounds(trainer: Trainer) -> list[float]:
    """Two rounds with a change of columns between: losses and gradient norms."""
    numbers = []
    for start, owned in ((0, (1, 4)), (3, (0, 4, 5))):
        trainer.adopt(owned, initial(trainer.rank.config), start)
        results = [trainer.train_step(batch_of(start + index, masked=(0, 1, 2))) for index in range(3)]
        numbers += [number for result in results for number in (result.loss, result.grad_norm)]
    return numbers


def check_that_they_train_like_one_rank(ranks: LocalRanks, sharding: str, in_bf16: bool) -> None:
    """A vocabulary and a router that no number of ranks divides, a gradient that is clipped, and what follows."""
    uneven = (*PLAIN, "model.vocab_size=33", "model.num_experts=7", "optimizer.grad_clip=0.5")
    one, config = trainer_in(small_config(*uneven), in_bf16), small_config(*uneven, sharding)
    losses, close = (1e-3, 1e-3) if in_bf16 else (1e-4, 1e-5)  # products in bf16 are of other parts of the batch
    some, count = trainer_in(config, in_bf16, ranks.ranks), ranks.ranks.world_size
    assert rounds(some) == pytest.approx(rounds(one), rel=losses)
    assert largest_difference(values_of(some), values_of(one)) < close
    assert some.evaluate([batch_of(9), batch_of(8, 3)]) == pytest.approx(
        one.evaluate([batch_of(9), batch_of(8, 3)]), rel=losses
    )
    assert len(set(some.value_hashes())) == 1
    assert some.rank.held.gradients == pytest.approx(one.rank.held.gradients / count, rel=0.05)
    work = Workload.of(config, len(some.rank.owned), ranks=count)
    planned = predict(work).parts[OPTIMIZER]
    assert some.rank.held.moments == pytest.approx(planned, rel=0.05)
    assert planned == pytest.approx(one.rank.held.moments / count, rel=0.01)
    all_here = Workload.of(one.rank.config, len(some.rank.owned))
    saved = all_here.shared_bytes - work.shared_bytes + (all_here.masters_bytes - work.masters_bytes) * in_bf16
    assert one.rank.held.model - some.rank.held.model == pytest.approx(saved, rel=0.05, abs=0)
    for given, wanted in zip(some.private_state()["groups"], one.private_state()["groups"], strict=True):  # all ranks'
        assert given["steps"] == wanted["steps"]
        for name, entry in wanted["tensors"].items():
            mean = entry[MOMENTS[0]].cpu().numpy()
            assert np.allclose(given["tensors"][name][MOMENTS[0]].cpu().numpy(), mean, atol=close)


def check_that_they_resume(ranks: LocalRanks, sharding: str, in_bf16: bool, small: tuple[str, ...]) -> None:
    """Saved whole, so that another number of ranks goes on from it, too. Codes of 8 bits stay codes."""
    config = small_config(*PLAIN, *WIDE, *small, sharding)
    whole = trainer_in(config, in_bf16, ranks.ranks)
    whole.adopt((1, 4), initial(config), 0)
    whole.train_step(batch_of(0))
    assert whole.train_step_unless(batch_of(8), lambda share: share >= 0.5) is None
    state = copy.deepcopy(whole.private_state())
    matrix = state["groups"][1]["tensors"]["layers.1.down"]
    assert matrix[MOMENTS[0]].dtype == (torch.uint8 if small else torch.float32)
    loss = whole.train_step(batch_of(1)).loss
    values = values_of(whole)
    resumed = trainer_in(config, in_bf16, ranks.ranks)
    resumed.adopt((3,), initial(config), 0)
    resumed.load_private_state(state)
    resumed.park()
    assert resumed.train_step(batch_of(1)).loss == loss
    assert same_bits(values_of(resumed), values)
    alone = trainer_in(small_config(*PLAIN, *WIDE, *small), in_bf16)
    alone.adopt((3,), initial(config), 0)
    alone.load_private_state(state)
    assert alone.train_step(batch_of(1)).loss == pytest.approx(loss, rel=1e-3)
    assert largest_difference(values_of(alone), values) < (2e-2 if small else 1e-3 if in_bf16 else 1e-5)

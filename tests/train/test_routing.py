"""The load of experts: what the model counts, over micro-batches and steps, against a count by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from spes_p2p.model.router import Router, Routing
from spes_p2p.train.routing import LoadMeter
from spes_p2p.train.step import StepResult
from tests.train.small import batch_of, small_config, trainer_of

RESULT = StepResult(7, 2.0, 1.0, 1.0, 1.0, 96, 0.5, 1e-3, 0.1, False, ((4, 0, 4), (8, 0, 0)))


@pytest.mark.parametrize("micro", [8, 2])
def test_a_step_counts_where_its_tokens_went(micro: int) -> None:
    """Those of masked sequences too; each layer routes every token to top_k experts."""
    trainer = trainer_of(small_config(f"optimizer.micro_batch_sequences={micro}"))
    seen: dict[nn.Module, list[Tensor]] = {}

    def note(router: nn.Module, inputs: object, routing: Routing) -> None:
        seen.setdefault(router, []).append(routing.expert_TK.flatten())

    for module in trainer.learner.model.modules():
        if isinstance(module, Router):
            module.register_forward_hook(note)
    batch = batch_of(0, masked=(0, 1))
    counts = trainer.train_step(batch).expert_counts
    by_hand = [torch.bincount(torch.cat(chosen), minlength=6).tolist() for chosen in seen.values()]
    assert [list(layer) for layer in counts] == by_hand
    assert {sum(layer) for layer in counts} == {batch.tokens.size * trainer.learner.config.model.top_k}


def test_steps_add_up_to_a_load_over_an_even_share() -> None:
    meter = LoadMeter()
    for step in (8, 9):
        meter.add(replace(RESULT, step=step))
    meter.add(replace(RESULT, step=10, skipped=True, expert_counts=((0, 99, 0), (0, 99, 0))))
    load = meter.take(3)
    assert load is not None
    assert (load.round, load.step, load.tokens) == (3, 9, 192)
    assert load.mean == (2.25, 0.0, 0.75)
    assert (load.highest, load.lowest) == ((3.0, 0.0, 1.5), (1.5, 0.0, 0.0))
    assert np.mean(load.mean) == 1.0
    assert meter.take(4) is None

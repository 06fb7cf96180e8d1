"""Sums of gradients in bf16 that stay right however many micro-batches a step has."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from spes_p2p.experts import gradients
from spes_p2p.experts.gradients import add_rounded
from tests.train.small import batch_of, same_bits, small_config, trainer_of, values_of


def summed(count: int, exactly: bool) -> float:
    """How far the mean of many sums of `count` equal terms in bf16 is off, as a share of it."""
    noise = torch.Generator().manual_seed(1)
    term, total = torch.linspace(1.0, 2.0, 4096), torch.zeros(4096, dtype=torch.bfloat16)
    for _ in range(count):
        if exactly:
            add_rounded(total, term, noise)
        else:
            total += term
    return float((total.float() / (count * term) - 1).mean())


def test_a_thousand_terms_are_all_counted_where_rounding_to_nearest_loses_most() -> None:
    assert abs(summed(1024, exactly=True)) < 2e-3
    assert summed(1024, exactly=False) < -0.5


def test_no_sum_is_far_off_and_none_that_is_not_finite_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "ROUNDED_VALUES", 100)  # several pieces, the last one smaller
    noise, term = torch.Generator().manual_seed(2), torch.randn(37, 21, generator=torch.Generator().manual_seed(3))
    total = torch.zeros_like(term, dtype=torch.bfloat16)
    for _ in range(512):
        add_rounded(total, term, noise)
    assert float((total.float() / (512 * term) - 1).abs().max()) < 6 * math.sqrt(512) / 1000
    all_ones = torch.tensor([-1], dtype=torch.int32).view(torch.float32)  # as a GPU writes NaN
    for bad in (all_ones, torch.tensor([math.inf]), torch.tensor([-math.inf]), torch.tensor([math.nan])):
        spoilt = torch.zeros(1, dtype=torch.bfloat16)
        add_rounded(spoilt, bad, noise)
        assert not spoilt.isfinite().item()


def test_what_a_bf16_value_holds_exactly_is_not_changed() -> None:
    total, noise = torch.tensor([1.0, -2.5, 0.0], dtype=torch.bfloat16), torch.Generator().manual_seed(0)
    add_rounded(total, torch.tensor([1.0, 0.5, 0.0]), noise)
    assert total.tolist() == [2.0, -2.0, 0.0]


def test_a_step_of_many_micro_batches_is_near_the_one_in_fp32_and_comes_out_the_same_again() -> None:
    config = "optimizer.batch_sequences=64", "optimizer.micro_batch_sequences=1", "optimizer.eps=1e-3"
    exact = trainer_of(small_config(*config))
    one, again = (trainer_of(small_config(*config, "optimizer.gradient_dtype=bf16")) for _ in range(2))
    norms = [trainer.train_step(batch_of(0, sequences=64)).grad_norm for trainer in (exact, one, again)]
    assert norms[1] == norms[2]
    assert norms[1] / norms[0] - 1 < 1e-2
    assert same_bits(values_of(one), values_of(again))
    for block, wanted in values_of(exact).items():
        assert np.abs(values_of(one)[block] - wanted).max() < 2e-3

"""Sums in bf16 by Triton's kernel: rounded at random as plain torch does it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from spes_p2p.experts import gradients_kernels
from tests.kernels import DEVICE, there


def added(total: Tensor, term: Tensor, seed: int = 1, times: int = 1) -> Tensor:
    (sum_there, term_there), noise = there(total.clone(), term), torch.Generator(DEVICE).manual_seed(seed)
    for _ in range(times):
        gradients_kernels.add_rounded(sum_there, term_there, noise)
    return sum_there.cpu()


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 1023, 8192, 20_001])
def test_a_sum_is_one_of_its_two_neighbours_as_often_as_makes_the_mean_exact(size: int, dtype: torch.dtype) -> None:
    """A program takes 8,192 values: one that is full, several, and parts of one."""
    generator = torch.Generator().manual_seed(size)
    total, term = (torch.randn(size, generator=generator) for _ in range(2))
    total, term = total.bfloat16(), term.to(dtype)
    exact = total.float() + term.float()
    below = (exact.view(torch.int32) & -(2**16)).view(torch.float32)
    above = ((exact.view(torch.int32) & -(2**16)) + 2**16).view(torch.float32)
    got = added(total, term).float()
    assert ((got == below) | (got == above) | (got == exact)).all()
    share = (exact - below) / (above - below)
    off = float(((got == above).float() - share).sum())
    assert abs(off) <= 4 * math.sqrt(float((share * (1 - share)).sum())) + 1
    assert not torch.equal(got, added(total, term, seed=2).float()) or size == 1
    assert torch.equal(got, added(total, term).float())


@pytest.mark.kernels
def test_every_value_is_rounded_by_a_number_of_its_own() -> None:
    """No slice follows another one, in halves of one random number, in slices or in programs."""
    got = added(torch.ones(16_384, dtype=torch.bfloat16), torch.full((16_384,), 2.0**-8))
    ups = (got > 1).view(16, 1024)
    assert ((ups.float().mean(1) - 0.5).abs() < 0.08).all()
    agreeing = (ups[:, None] == ups[None, :]).float().mean(2)
    assert ((agreeing - 0.5).abs()[~torch.eye(16, dtype=torch.bool)] < 0.1).all()


@pytest.mark.kernels
def test_many_terms_are_all_counted_and_none_that_is_not_finite_is_hidden() -> None:
    term = torch.linspace(1.0, 2.0, 500)
    total = added(torch.zeros(500, dtype=torch.bfloat16), term, times=200)
    assert abs(float((total.float() / (200 * term) - 1).mean())) < 2e-3
    all_ones = torch.tensor([-1], dtype=torch.int32).view(torch.float32)  # as a GPU writes NaN
    bad = torch.cat([all_ones, torch.tensor([math.inf, -math.inf, math.nan])])
    assert not added(torch.zeros(4, dtype=torch.bfloat16), bad).isfinite().any()
    whole = added(torch.tensor([1.0, -2.5, 0.0], dtype=torch.bfloat16), torch.tensor([1.0, 0.5, 0.0]))
    assert whole.tolist() == [2.0, -2.0, 0.0]


@pytest.mark.kernels
def test_the_kernel_does_nothing_with_nothing_and_passes_its_trial() -> None:
    assert added(torch.zeros(0, dtype=torch.bfloat16), torch.zeros(0)).shape == (0,)
    gradients_kernels.try_kernels(DEVICE)

"""One byte a value: how far off, and what becomes of zeros, outliers and odd widths."""

from __future__ import annotations

import pytest
import torch

from spes_p2p.experts.quantise import BLOCK, Kind, block_of, dequantise, empty, quantise


@pytest.mark.parametrize(("kind", "worst"), [("int8", 0.5 / 127), ("fp8", 2**-4)])
@pytest.mark.parametrize("shape", [(3, 4, 2 * BLOCK), (2, 7), (1, 1)])
def test_values_come_back_to_within_half_a_step(kind: Kind, worst: float, shape: tuple[int, ...]) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    back = dequantise(quantise(kind, values), torch.empty(shape))
    blocks = (values - back).unflatten(-1, (-1, block_of(shape[-1]))).abs().amax(-1)
    largest = values.unflatten(-1, (-1, block_of(shape[-1]))).abs().amax(-1)
    assert (blocks <= 1.01 * worst * largest).all()


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_an_outlier_spoils_its_block_alone(kind: Kind) -> None:
    values = torch.full((1, 2 * BLOCK), 0.01)
    values[0, 0] = 100.0
    back = dequantise(quantise(kind, values), torch.empty_like(values))
    assert back[0, 0] == pytest.approx(100.0)
    assert torch.allclose(back[0, BLOCK:], values[0, BLOCK:], rtol=1e-2)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_zeros_stay_zeros_and_nothing_yet_is_nan(kind: Kind) -> None:
    zeros = torch.zeros(2, BLOCK)
    assert torch.equal(dequantise(quantise(kind, zeros), torch.empty_like(zeros)), zeros)
    nothing = empty(kind, (2, BLOCK), None)
    assert dequantise(nothing, torch.empty(2, BLOCK)).isnan().all()
    assert nothing.codes.element_size() == 1
    assert dequantise(quantise(kind, torch.full((1, BLOCK), torch.nan)), torch.empty(1, BLOCK)).isnan().all()

"""Eight and four bits a value: how far off, and what becomes of zeros, outliers and odd widths."""

from __future__ import annotations

import pytest
import torch

from spes_p2p.experts import quantise_kernels
from spes_p2p.experts.quantise import BLOCKS, Kind, block_of, dequantise, empty, nf4_levels, quantise, try_kernels
from tests.kernels import DEVICE, there

KINDS: tuple[Kind, ...] = ("int8", "nf4")
WORST = {"int8": 0.5 / 127, "nf4": 0.152}
"""Half of the widest step, in parts of a block's largest value."""
WIDTH = 256


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(3, 4, WIDTH), (2, 7), (1, 1)])
def test_values_come_back_to_within_half_a_step(kind: Kind, shape: tuple[int, ...]) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    back = dequantise(quantise(kind, values), torch.empty(shape))
    block = block_of(kind, shape[-1])
    blocks = (values - back).unflatten(-1, (-1, block)).abs().amax(-1)
    largest = values.unflatten(-1, (-1, block)).abs().amax(-1)
    assert (blocks <= 1.01 * WORST[kind] * largest).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_largest_value_of_every_block_is_kept_exactly(kind: Kind, dtype: torch.dtype) -> None:
    values = torch.randn(64, 8 * WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)
    back = dequantise(quantise(kind, values), torch.empty_like(values))
    blocks, kept = (tensor.unflatten(-1, (-1, BLOCKS[kind])) for tensor in (values, back))
    at = blocks.abs().argmax(-1, keepdim=True)
    assert torch.equal(kept.gather(-1, at), blocks.gather(-1, at))


@pytest.mark.parametrize("kind", KINDS)
def test_an_outlier_spoils_its_block_alone(kind: Kind) -> None:
    values = torch.full((1, WIDTH), 0.01)
    values[0, 0] = 100.0
    back = dequantise(quantise(kind, values), torch.empty_like(values))
    assert back[0, 0] == pytest.approx(100.0)
    assert torch.allclose(back[0, BLOCKS[kind] :], values[0, BLOCKS[kind] :], rtol=1e-2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [128, 7])
def test_zeros_stay_zeros_and_nothing_yet_is_nan(kind: Kind, width: int) -> None:
    zeros = torch.zeros(2, width)
    assert torch.equal(dequantise(quantise(kind, zeros), torch.empty_like(zeros)), zeros)
    nothing = empty(kind, (2, width), None)
    assert dequantise(nothing, torch.empty(2, width)).isnan().all()
    assert nothing.codes.nbytes == 2 * (-(-width // 2) if kind == "nf4" else width)
    made = quantise(kind, zeros)
    assert [tensor.shape for tensor in made] == [tensor.shape for tensor in nothing]
    for bad in (torch.nan, torch.inf):
        values = torch.ones(1, width)
        values[0, 0] = bad
        back = dequantise(quantise(kind, values), torch.empty(1, width))
        assert not back[:, : block_of(kind, width)].isfinite().any()


def test_the_levels_of_nf4_are_those_of_the_paper() -> None:
    published = [
        -1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0,
        0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0,
    ]  # fmt: skip
    torch.testing.assert_close(torch.tensor(nf4_levels()), torch.tensor(published), atol=1e-6, rtol=0)


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(3, 4, WIDTH), (2, 3, 6), (5, 1024), (0, 4, 128)])
def test_the_kernels_give_the_same_bits(kind: Kind, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    quantised = quantise(kind, values) if values.numel() else empty(kind, shape, None)
    want = dequantise(quantised, torch.empty(shape, dtype=dtype))
    codes, scales, out = there(*quantised, torch.empty(shape, dtype=dtype))
    quantise_kernels.dequantise(codes, scales, out)
    rounds = dtype != torch.bfloat16 or DEVICE.type != "cpu"  # Triton's interpreter cuts bits off instead
    torch.testing.assert_close(out.cpu(), want, rtol=0 if rounds else 2**-7, atol=0)


@pytest.mark.kernels
def test_the_trial_runs() -> None:
    try_kernels(DEVICE)

"""The initial state: the same bits everywhere (golden hashes), any part alone, and the distribution it promises."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from numpy.random import Philox

from spes_p2p.ids import sha256
from spes_p2p.state.initial import InitialState, cut_sums
from spes_p2p.state.layout import Layout, StateTensor
from tests.state.small import small_layout

SIGMA = 65536
GOLDEN = {  # SHA-256 of the blocks of `golden_layout`, little-endian fp32: these bits are protocol, never change them
    (0, 0.02): (
        "351e7ead297ccb5e2893fdaa215d74bf421223a68dc32d0db4bc84844558e2e7",
        "1e60e9155bf696577a4dabcbcdd862555d7d24778bf5c69873f42ea2ef694269",
    ),
    (2**64 - 1, 0.006): (
        "d57d9b227ed0007c567834ca74db1128dc890bd000f4ed483874c03042a160ab",
        "59c0639577ecdd61d0537421e158dd5fd9e04f318950f92d7733c9b4183f8e70",
    ),
}


def golden_layout() -> Layout:
    tensors = [
        StateTensor("embed", (300, 401), None, "normal"),
        StateTensor("norm", (100,), None, "ones"),
        StateTensor("bias", (100,), None, "zeros"),
        StateTensor("expert", (1000, 77), 0, "normal"),
    ]
    return Layout(tensors, 1000)


@pytest.mark.parametrize(("seed", "init_std"), GOLDEN)
def test_bits_never_change(seed: int, init_std: float) -> None:
    layout = golden_layout()
    initial = InitialState(layout, seed, init_std)
    found = [sha256(initial.block(block).tobytes()).hex() for block in (0, 1)]
    assert found == list(GOLDEN[seed, init_std])


def test_any_tile_can_be_made_alone() -> None:
    layout = small_layout(tile_values=5)
    initial = InitialState(layout, seed=3, init_std=0.02)
    blocks = [initial.block(block.index) for block in layout.blocks]
    for tile in reversed(layout.tiles):
        assert initial(tile).tobytes() == blocks[tile.block][tile.start : tile.stop].tobytes()


def test_values_do_not_depend_on_where_a_part_starts() -> None:
    whole = cut_sums(5, 2, 0, 100_000)
    cuts = [0, 1, 2, 3, 7, 33_333, 33_334, 99_999, 100_000]
    parts = [cut_sums(5, 2, start, stop - start) for start, stop in pairwise(cuts)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_values_are_those_of_the_docstring() -> None:
    def word(stream: int, counter: int, number: int) -> int:
        key = np.array([9, 4 * 6 + stream], np.uint64)
        return int(Philox(key=key, counter=counter).random_raw(4)[number])

    def candidate(words: list[int]) -> int:
        return sum((one >> shift) & 0xFFFF for one in words for shift in (0, 16, 32, 48)) - 6 * 65535

    first = 5_000
    found = cut_sums(9, 6, first, 2_000)
    seconds = 0
    for i, value in enumerate(found.tolist(), first):
        expected = candidate([word(k, i // 4, i % 4) for k in range(3)])
        if abs(expected) > 3 * SIGMA:
            seconds += 1
            expected = max(-3 * SIGMA, min(3 * SIGMA, candidate([word(3, i, k) for k in range(3)])))
        assert value == expected
    assert seconds > 0


def test_distribution_is_a_cut_normal() -> None:
    sigmas = cut_sums(11, 0, 0, 400_000) / SIGMA
    assert abs(sigmas).max() <= 3
    assert abs(sigmas.mean()) < 0.01
    assert abs(sigmas.std() - 0.990) < 0.01
    assert abs((abs(sigmas) < 1).mean() - 0.682) < 0.01
    assert abs((abs(sigmas) < 2).mean() - 0.955) < 0.01


def test_seeds_and_tensors_differ() -> None:
    streams = {cut_sums(seed, tensor, 0, 8).tobytes() for seed in range(4) for tensor in range(4)}
    assert len(streams) == 16


def test_ones_and_zeros_are_exact() -> None:
    layout = golden_layout()
    block = InitialState(layout, 0, 0.02).block(0)
    assert (layout.view(block, "norm") == 1).all()
    assert (layout.view(block, "bias") == 0).all()

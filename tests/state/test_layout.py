"""The grid covers every value once, whatever the tensors; names lead to their values."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_p2p.errors import ConfigError
from spes_p2p.ids import sha256
from spes_p2p.state.layout import Layout, StateTensor
from tests.state.small import small_layout

_shapes = st.lists(st.integers(1, 7), min_size=0, max_size=3).map(tuple)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    columns = draw(st.integers(0, 4))
    owners = draw(st.permutations([*range(columns), *draw(st.lists(st.sampled_from([None, *range(columns)])))]))
    tensors = [StateTensor(f"t{at}", draw(_shapes), column, "zeros") for at, column in enumerate(owners)]
    return Layout(tensors, draw(st.integers(1, 20)))


@given(layouts())
def test_tiles_cover_each_value_once(layout: Layout) -> None:
    covered = [np.zeros(block.size, int) for block in layout.blocks]
    for number, tile in enumerate(layout.tiles):
        assert tile.id == number
        assert 0 < tile.size <= layout.tile_values
        covered[tile.block][tile.start : tile.stop] += 1
    assert all((count == 1).all() for count in covered)
    assert [tile for block in layout.blocks for tile in layout.tiles_of(block.index)] == list(layout.tiles)


@given(layouts())
def test_tensors_lie_side_by_side_in_their_blocks(layout: Layout) -> None:
    blocks = [np.full(block.size, -1) for block in layout.blocks]
    for number, tensor in enumerate(layout.tensors):
        block, offset, shape = layout.locate(tensor.name)
        assert block == (0 if tensor.column is None else 1 + tensor.column)
        view = layout.view(blocks[block], tensor.name)
        assert view.shape == shape == tensor.shape
        assert (view == -1).all()
        view[...] = number
        assert layout.tensor_at(block, offset).tensor == tensor
    assert all((block >= 0).all() for block in blocks)
    assert layout.num_values == sum(tensor.size for tensor in layout.tensors)


def test_tiles_are_counted_through_the_blocks_and_are_shorter_at_the_end() -> None:
    layout = small_layout(columns=1, tile_values=16)
    assert [(t.id, t.block, t.start, t.stop) for t in layout.tiles[:4]] == [
        (0, 0, 0, 16),
        (1, 0, 16, 24),
        (2, 1, 0, 16),
        (3, 1, 16, 32),
    ]


def test_a_root_is_the_hash_of_the_hashes() -> None:
    hashes = [sha256(b"a"), sha256(b"b")]
    assert Layout.root_of(hashes) == hashlib.sha256(hashes[0] + hashes[1]).digest()


@pytest.mark.parametrize("columns", [[1], [0, 2]])
def test_columns_with_gaps_are_refused(columns: list[int]) -> None:
    with pytest.raises(ConfigError, match="expert columns"):
        Layout([StateTensor(f"t{column}", (1,), column, "zeros") for column in columns], 8)


def test_one_name_twice_and_tiles_of_nothing_are_refused() -> None:
    tensor = StateTensor("t", (1,), None, "zeros")
    with pytest.raises(ConfigError, match="the same name"):
        Layout([tensor, tensor], 8)
    with pytest.raises(ConfigError, match="tile_values is 0"):
        Layout([tensor], 0)

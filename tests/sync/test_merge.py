"""The merge of similar experts: when, with whom, and exactly which bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_p2p.consensus.rules import merge_alpha_for
from spes_p2p.errors import ConfigError, LocalProtocolError
from spes_p2p.state.layout import Layout, StateTensor, Values
from spes_p2p.sync.merge import (
    layer_spans,
    merge_alpha,
    merge_columns,
    merge_values,
    nearest_experts,
)
from tests.simulation.sim_state import run_rules
from tests.state.small import new_values, small_layout, small_store, stage_round

MATRICES = ("gate", "up", "down")


class Blocks:
    """A block source in memory that also takes merged tiles."""

    def __init__(self, layout: Layout, blocks: list[Values]) -> None:
        self.layout = layout
        self.blocks = blocks

    def block(self, index: int) -> Values:
        return self.blocks[index]

    def write(self, tile_id: int, values: Values) -> None:
        tile = self.layout.tiles[tile_id]
        self.blocks[tile.block][tile.start : tile.stop] = values

    def matrix(self, layer: int, expert: int, matrix: str) -> Values:
        name = f"model.layers.{layer}.mlp.experts.{expert}.{matrix}_proj.weight"
        return self.layout.view(self.blocks[1 + expert], name)


def random_blocks(layout: Layout, seed: int = 1) -> Blocks:
    return Blocks(layout, new_values(layout, seed))


def merged(before: Blocks, neighbours: tuple[tuple[tuple[int, ...], ...], ...], alpha: float) -> Blocks:
    after = Blocks(before.layout, [values.copy() for values in before.blocks])
    merge_columns(before.layout, before, neighbours, alpha, after.write)
    return after


@pytest.mark.parametrize(("step", "alpha"), [(0, 0.05), (5_000, 0.025), (7_500, 0.0125), (10_000, 0.0), (20_000, 0.0)])
def test_alpha_falls_linearly_to_zero(step: int, alpha: float) -> None:
    assert merge_alpha(0.05, 10_000, step) == float(np.float32(alpha))


def test_without_decay_steps_nothing_is_merged() -> None:
    assert merge_alpha(0.05, 0, 0) == 0.0


@given(st.floats(0, 1), st.integers(1, 10**6), st.integers(0, 10**6))
def test_alpha_is_exact_in_fp32(base: float, decay_steps: int, step: int) -> None:
    alpha = merge_alpha(base, decay_steps, step)
    assert float(np.float32(alpha)) == alpha


@pytest.mark.parametrize(
    ("before", "after", "interval", "due"),
    [
        (0, 499, 500, False),
        (499, 500, 500, True),
        (500, 600, 500, False),
        (400, 1600, 500, True),
        (0, 10, 0, False),
    ],
)
def test_a_merge_is_due_when_a_multiple_of_the_interval_was_passed(
    before: int, after: int, interval: int, due: bool
) -> None:
    rules = replace(run_rules(columns=1), merge_interval=interval, merge_alpha=lambda step: 0.1)
    assert bool(merge_alpha_for(rules, before, after)) is due


@pytest.mark.parametrize("tile_values", [5, 1024])
def test_all_matrices_move_towards_the_neighbours_of_their_layer(tile_values: int) -> None:
    before = random_blocks(small_layout(columns=4, tile_values=tile_values))
    neighbours = (((1, 2), (3, 0), (0, 1), (2, 1)), ((3, 1), (2, 3), (3, 0), (0, 2)))
    alpha = merge_alpha(0.05, 100, 10)
    after = merged(before, neighbours, alpha)
    for layer, of_layer in enumerate(neighbours):
        for expert, others in enumerate(of_layer):
            for matrix in MATRICES:
                own = before.matrix(layer, expert, matrix).astype(np.float64)
                mean = np.mean([before.matrix(layer, other, matrix) - own for other in others], axis=0)
                np.testing.assert_allclose(
                    after.matrix(layer, expert, matrix), own + alpha * mean, rtol=1e-5, atol=1e-6
                )
    np.testing.assert_array_equal(after.blocks[0], before.blocks[0])


def test_the_order_of_the_operations_is_that_of_the_docstring() -> None:
    rng = np.random.default_rng(0)
    own, one, two, three = (rng.standard_normal(200).astype(np.float32) for _ in range(4))
    alpha = merge_alpha(0.05, 1000, 7)
    found = merge_values(own, [two, one, three], alpha)
    for at in range(len(own)):
        difference = two[at] - own[at]
        difference = difference + (one[at] - own[at])
        difference = difference + (three[at] - own[at])
        assert found[at] == difference * np.float32(alpha / 3) + own[at]


def test_a_second_merge_of_two_experts_does_not_use_the_first_ones_new_values() -> None:
    layout = small_layout(columns=2)
    before = Blocks(layout, [np.full(block.size, block.index, np.float32) for block in layout.blocks])
    after = merged(before, (((1,), (0,)),) * 2, 0.5)
    assert (after.blocks[1] == 1.5).all()
    assert (after.blocks[2] == 1.5).all()


def test_neighbours_are_the_most_similar_gates_of_the_layer() -> None:
    blocks = random_blocks(small_layout(columns=5))
    found = nearest_experts(blocks.layout, blocks, 3)
    for layer, of_layer in enumerate(found):
        gates = np.stack([blocks.matrix(layer, expert, "gate").ravel() for expert in range(5)]).astype(np.float64)
        gates /= np.linalg.norm(gates, axis=1, keepdims=True)
        for expert, others in enumerate(of_layer):
            ranked = sorted(set(range(5)) - {expert}, key=lambda other: -(gates[expert] @ gates[other]))
            assert list(others) == ranked[:3]


def test_only_the_gate_of_the_layer_counts() -> None:
    blocks = random_blocks(small_layout(columns=3))
    blocks.matrix(1, 0, "gate")[:] = 7 * blocks.matrix(1, 2, "gate")
    before = nearest_experts(blocks.layout, blocks, 1)
    assert before[1][0] == (2,)
    for column in blocks.blocks[1:]:
        span = layer_spans(blocks.layout)[0]
        column[span.gate_stop : span.stop] = 0
    assert nearest_experts(blocks.layout, blocks, 1) == before


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_ties_go_to_the_lower_index(value: float) -> None:
    layout = small_layout(columns=4)
    same = Blocks(layout, [np.full(block.size, value, np.float32) for block in layout.blocks])
    assert nearest_experts(layout, same, 2) == (((1, 2), (0, 2), (0, 1), (0, 1)),) * 2


def test_no_more_neighbours_than_other_experts() -> None:
    blocks = random_blocks(small_layout(columns=3))
    assert {len(others) for of_layer in nearest_experts(blocks.layout, blocks, 4) for others in of_layer} == {2}


@pytest.mark.parametrize(
    "neighbours",
    [
        (((1,), (0,)),),  # a layer too few
        (((1,),), ((1,),)),  # an expert too few
        (((1,), (1,)),) * 2,  # oneself
        (((1,), (2,)),) * 2,  # nobody
        (((1, 1), (0,)),) * 2,  # twice
        (((), (0,)),) * 2,
    ],
)
def test_neighbours_that_do_not_fit_are_refused(neighbours: tuple[tuple[tuple[int, ...], ...], ...]) -> None:
    with pytest.raises(LocalProtocolError, match="neighbours"):
        merged(random_blocks(small_layout(columns=2)), neighbours, 0.5)


def test_an_alpha_that_is_not_exact_in_fp32_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match=r"0\.05 is not exact"):
        merged(random_blocks(small_layout(columns=2)), (((1,), (0,)),) * 2, 0.05)


def test_columns_of_different_shapes_are_refused() -> None:
    name = "model.layers.0.mlp.experts.{}.gate_proj.weight"
    layout = Layout([StateTensor(name.format(at), (at + 1,), at, "normal") for at in range(2)], 8)
    with pytest.raises(ConfigError, match="2 different shapes"):
        layer_spans(layout)


def test_a_merge_in_the_store_gives_the_same_bits_as_in_memory(tmp_path: Path) -> None:
    layout = small_layout(columns=4)
    store = small_store(tmp_path, layout)
    staging = stage_round(store, 1, [0, 1, 3])
    neighbours = nearest_experts(layout, staging, 2)
    expected = merged(Blocks(layout, [staging.block(index) for index in range(5)]), neighbours, 0.25)
    merge_columns(layout, staging, neighbours, 0.25, staging.write_state)
    staging.finish()
    version = staging.publish()
    for index, values in enumerate(expected.blocks):
        np.testing.assert_array_equal(version.block(index), values)
    store.version(1).verify()

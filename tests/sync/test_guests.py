"""What owners take in of guests' changes, and the bases: against the formula written out with matrices in fp64."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from spes_p2p.config.load import bundled_config, load_config
from spes_p2p.consensus.manifest import Contribution, Slice
from spes_p2p.ids import Hash, PeerId
from spes_p2p.interop.hf import state_layout
from spes_p2p.state.basis import Basis, Coordinates, first_basis, matrices, next_basis
from spes_p2p.state.layout import Layout, Values
from spes_p2p.sync.guests import coordinate_bytes, read_coordinates, sent_coordinates, take_in
from spes_p2p.sync.reduce import TOO_LARGE
from spes_p2p.sync.slice_mean import unfit_guests
from tests.simulation.sim_state import run_rules

RANK = 3
MARK = Hash(b"m" * 32)
MODEL = ("model.d_model=16", "model.num_layers=2", "model.num_heads=2", "model.expert_ffn=24", "model.num_experts=2")
COLUMN, BLOCK = 1, 2


def layout_of(*more: str) -> Layout:
    overrides = (*MODEL, f"model.guest_rank={RANK}", "swarm.experts_per_peer=1", "sync.tile_values=96", *more)
    return state_layout(load_config(bundled_config("tiny"), overrides))


@pytest.fixture(scope="module")
def layout() -> Layout:
    return layout_of()


def unfit(found: dict[PeerId, Values], steps: dict[str, int] | None = None, turns: int = 1) -> dict[PeerId, str]:
    """Guests of a slice of which that is said, by a roster in which a peer made as many steps as here, else 10."""
    rules = dataclasses.replace(run_rules(columns=2, shared_tiles=1), expert_rounds=turns)
    roster = {peer: Contribution(peer, 8, (steps or {}).get(peer, 10), 8) for peer in found}
    return unfit_guests(rules, Slice(BLOCK, 5, 1, PeerId("owner"), (PeerId("owner"),)), roster, found)


def normal(size: int, seed: int) -> Values:
    return np.random.default_rng(seed).standard_normal(size, dtype=np.float32)


def test_tiles_of_columns_hold_whole_rows_and_coordinates_are_counted_by_row(layout: Layout) -> None:
    tiles, total = layout.tiles_of(BLOCK), 0
    assert len(tiles) > 10
    for tile in tiles:
        first, last = (layout.coordinates_before(BLOCK, at) for at in (tile.start, tile.stop))
        assert first == total
        total = last
        assert coordinate_bytes(layout, [tile]) == 32 + 2 * (last - first)
    rows = sum(placed.tensor.shape[0] for placed in layout.blocks[BLOCK].tensors)
    assert total == RANK * rows


def expected(layout: Layout, mean: Values, before: Values, basis: Basis, weights: list[int], b: list[Values]) -> Values:
    """D + [ (w_o D Q + sum_j w_j B_j) / sum w - D Q ] Qᵀ, matrix by matrix, in fp64."""
    made, at, q_at = np.zeros(len(mean)), 0, 0
    for placed in layout.blocks[BLOCK].tensors:
        (out, width), part = placed.tensor.shape, slice(placed.offset, placed.offset + placed.tensor.size)
        q = basis.values[q_at : q_at + width * RANK].reshape(width, RANK).astype(np.float64)
        d = (mean[part].astype(np.float64) - before[part]).reshape(out, width)
        own = [each[at : at + out * RANK].reshape(out, RANK).astype(np.float64) for each in b]
        inside = weights[0] * (d @ q) + sum(weight * each for weight, each in zip(weights[1:], own))
        made[part] = (before[part].reshape(out, width) + d + (inside / sum(weights) - d @ q) @ q.T).reshape(-1)
        at, q_at = at + out * RANK, q_at + width * RANK
    return made.astype(np.float32)


@pytest.mark.parametrize("guests", [1, 3])
def test_what_is_handed_out_is_the_mean_inside_the_basis_and_the_owners_outside(layout: Layout, guests: int) -> None:
    size = layout.blocks[BLOCK].size
    before, mean, basis = normal(size, 0), normal(size, 1), first_basis(layout, COLUMN, MARK)
    coordinates = [normal(layout.coordinates_before(BLOCK, size), 10 + at) for at in range(guests)]
    weights = [7, 5, 3, 1][: guests + 1]
    whole = expected(layout, mean, before, basis, weights, coordinates)
    pairs = list(zip(weights[1:], coordinates))
    made = take_in(layout, layout.tiles_of(BLOCK), mean, before, basis, weights[0], pairs)
    np.testing.assert_allclose(made, whole, atol=2e-6)
    parts = []
    for first in range(0, len(layout.tiles_of(BLOCK)), 2):  # slice by slice, as they are reduced
        tiles = layout.tiles_of(BLOCK)[first : first + 2]
        part = slice(tiles[0].start, tiles[-1].stop)
        at = slice(*(layout.coordinates_before(BLOCK, end) for end in (tiles[0].start, tiles[-1].stop)))
        some = [(weight, each[at]) for weight, each in pairs]
        parts.append(take_in(layout, tiles, mean[part], before[part], basis, weights[0], some))
    np.testing.assert_allclose(np.concatenate(parts), whole, atol=2e-6)


def test_a_guest_that_trained_what_the_owner_did_changes_nothing(layout: Layout) -> None:
    size, tiles = layout.blocks[BLOCK].size, layout.tiles_of(BLOCK)
    before, mean, basis = normal(size, 0), normal(size, 1), first_basis(layout, COLUMN, MARK)
    same = [
        (mean - before)[placed.offset :][: placed.tensor.size].reshape(placed.tensor.shape) @ q
        for placed, q in matrices(layout, COLUMN, basis.values)
    ]
    joined = np.concatenate([each.reshape(-1) for each in same])
    np.testing.assert_allclose(take_in(layout, tiles, mean, before, basis, 1, [(4, joined)]), mean, atol=2e-6)


def bases_of(layout: Layout, basis: Basis) -> list[NDArray[np.float32]]:
    return [q for _, q in matrices(layout, COLUMN, basis.values)]


def test_every_basis_is_orthonormal_whatever_was_changed(layout: Layout) -> None:
    size = layout.blocks[BLOCK].size
    before = normal(size, 0)
    few = before.copy()
    few[: layout.blocks[BLOCK].tensors[0].tensor.shape[1]] += 1  # one row of one matrix: a change of rank one
    tiny = before + np.float32(1e-6) * normal(size, 1)
    for after in (before, few, tiny, np.full(size, np.nan, np.float32), before + normal(size, 2)):
        for q in bases_of(layout, next_basis(layout, COLUMN, MARK, before, after)):
            np.testing.assert_allclose(q.T @ q, np.eye(RANK), atol=1e-5)


def test_the_next_basis_has_the_leading_right_singular_vectors_of_the_change(layout: Layout) -> None:
    before, after, leading = np.zeros(layout.blocks[BLOCK].size, np.float32), [], []
    for at, placed in enumerate(layout.blocks[BLOCK].tensors):
        out, width = placed.tensor.shape
        left, right = (np.linalg.qr(normal(n * n, 20 + at).reshape(n, n))[0] for n in (out, width))
        strengths = np.full(min(out, width), 0.1)
        strengths[:RANK] = 9, 7, 5
        after.append(((left[:, : len(strengths)] * strengths) @ right[:, : len(strengths)].T).reshape(-1))
        leading.append(right[:, :RANK])
    found = bases_of(layout, next_basis(layout, COLUMN, MARK, before, np.concatenate(after).astype(np.float32)))
    for q, right in zip(found, leading, strict=True):
        assert np.linalg.svd(right.T @ q)[1].min() > 0.9999  # cosines of the angles between the two subspaces


def test_the_next_basis_hardly_changes_where_arithmetic_differs_in_the_last_bits(layout: Layout) -> None:
    size = layout.blocks[BLOCK].size
    before, after = normal(size, 0), normal(size, 1)
    elsewhere = (after.astype(np.float64) * (1 + 1e-7 * normal(size, 2))).astype(np.float32)
    one, other = (bases_of(layout, next_basis(layout, COLUMN, MARK, before, values)) for values in (after, elsewhere))
    assert max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True)) < 1e-4


@pytest.mark.parametrize(("codec", "error"), [("fp32", 0.0), ("bf16", 0.004), ("int8", 0.01), ("int4", 0.15)])
def test_coordinates_travel_in_their_codec_and_do_not_count_in_another_basis(codec: str, error: float) -> None:
    layout = layout_of(f"sync.guest_codec={codec}")
    tiles = layout.tiles_of(BLOCK)[1:3]
    first, last = (layout.coordinates_before(BLOCK, at) for at in (tiles[0].start, tiles[-1].stop))
    basis, values = first_basis(layout, COLUMN, MARK), normal(last - first, 0)
    sent = sent_coordinates(layout, Coordinates(MARK, values))
    assert len(sent) == coordinate_bytes(layout, tiles)
    read = read_coordinates(layout, tiles, sent, basis)
    assert read is not None
    assert np.linalg.norm(read - values) <= error * np.linalg.norm(values)
    assert read_coordinates(layout, tiles, b"n" * 32 + sent[32:], basis) is None


def test_bf16_sends_the_nearest_and_two_bytes_a_coordinate() -> None:
    layout = layout_of()
    tiles, values = layout.tiles_of(BLOCK)[:1], normal(layout.coordinates_before(BLOCK, layout.tiles[0].stop), 3)
    sent = sent_coordinates(layout, Coordinates(MARK, values))
    read = read_coordinates(layout, tiles, sent, first_basis(layout, COLUMN, MARK))
    assert len(sent) == 32 + 2 * len(values)
    np.testing.assert_array_equal(read, torch.from_numpy(values).bfloat16().float().numpy())


def test_coordinates_that_are_not_finite_arrive_so_that_they_are_found() -> None:
    for codec in ("fp32", "bf16", "int8", "int4"):
        layout = layout_of(f"sync.guest_codec={codec}")
        tiles = layout.tiles_of(BLOCK)
        values = normal(layout.coordinates_before(BLOCK, tiles[-1].stop), 0)
        values[7] = np.nan
        sent = sent_coordinates(layout, Coordinates(MARK, values))
        read = read_coordinates(layout, tiles, sent, first_basis(layout, COLUMN, MARK))
        assert read is not None
        assert set(unfit({PeerId("a"): read})) == {"a"}


def test_coordinates_that_are_unfit_stay_out() -> None:
    found = {PeerId(name): normal(50, seed) for seed, name in enumerate("abcd")}
    found[PeerId("b")] = found[PeerId("b")] * 100
    found[PeerId("c")] = np.full(50, np.inf, np.float32)
    assert set(unfit(found)) == {"b", "c"}
    assert unfit({}) == {}


@pytest.mark.parametrize("turns", [1, 3])
def test_a_guest_that_is_a_hundred_times_as_fast_is_fit(turns: int) -> None:
    """As contributors are: it goes further, not for each step."""
    found = {PeerId(name): normal(50, seed) for seed, name in enumerate("abcde")}
    found[PeerId("b")] = found[PeerId("b")] * 100
    found[PeerId("c")] = found[PeerId("c")] * 1e5
    assert unfit(found, {"b": 1000, "c": 1000}, turns) == {"c": TOO_LARGE}

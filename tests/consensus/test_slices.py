"""Plans: every value is reduced exactly once, by somebody who contributes, in proportion to uplinks."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given

from spes_p2p.consensus.manifest import Slice
from spes_p2p.consensus.slices import Reach, Turn, plan_slices, reducer_order
from spes_p2p.consensus.turns import Ranges, Vocabulary, due_columns, due_tiles
from spes_p2p.ids import PeerId
from spes_p2p.ownership.assign import Ownership

NAMES = [PeerId(f"peer-{index}") for index in range(6)]
EIGHT = [PeerId(f"peer-{index}") for index in range(8)]


def tiles_of(ranges: Ranges) -> list[int]:
    return [at for first, number in ranges for at in range(first, first + number)]


@st.composite
def swarms(draw: st.DrawFn) -> tuple[list[PeerId], Ownership, dict[PeerId, int], list[int], int]:
    roster = sorted(draw(st.sets(st.sampled_from(NAMES), min_size=1)))
    owners = st.sets(st.sampled_from(NAMES)).map(lambda chosen: tuple(sorted(chosen)))
    ownership = tuple(draw(st.lists(owners, max_size=6)))
    uplinks = draw(st.dictionaries(st.sampled_from(NAMES), st.integers(1, 10**9)))
    tiles = draw(st.lists(st.integers(0, 40), min_size=1 + len(ownership), max_size=1 + len(ownership)))
    return roster, ownership, uplinks, tiles, draw(st.integers(1, 16))


def test_seldom_vocabulary_and_the_rest_go_to_different_peers() -> None:
    """Two ranges of equally many slices, fewer than there are peers: nobody gets two while another has none."""
    turn = Turn(shared=((0, 4), (8, 4)))
    slices = plan_slices(EIGHT, (), {}, [12], 1, turn=turn)
    assert len({piece.reducer for piece in slices}) == len(slices) == 8


def test_slices_stay_where_they_are_while_uplinks_change_a_little() -> None:
    """Who reduces a tile keeps what its mean left out."""
    rng = random.Random(0)
    plans = []
    for _ in range(20):
        uplinks = {peer: int(10**6 * rng.uniform(0.98, 1.02)) for peer in EIGHT}
        plans.append([piece.reducer for piece in plan_slices(EIGHT, (), uplinks, [64], 1)])
    moved = [sum(a != b for a, b in zip(*pair, strict=True)) for pair in itertools.pairwise(plans)]
    assert sum(moved) < 0.1 * 64 * len(moved)
    assert all(max(Counter(plan).values()) <= 10 for plan in plans)


@given(swarms())
def test_every_tile_for_which_somebody_has_values_is_covered_exactly_once(
    swarm: tuple[list[PeerId], Ownership, dict[PeerId, int], list[int], int],
) -> None:
    roster, ownership, uplinks, tiles, slice_tiles = swarm
    slices = plan_slices(roster, ownership, uplinks, tiles, slice_tiles)
    covered = Counter(tile for piece in slices for tile in range(piece.first_tile, piece.first_tile + piece.tiles))
    expected: list[int] = []
    first = 0
    for block, count in enumerate(tiles):
        if block == 0 or set(ownership[block - 1]) & set(roster):
            expected += range(first, first + count)
        first += count
    assert covered == Counter(expected)


def reduced_by(slices: tuple[Slice, ...]) -> Counter[PeerId]:
    """How many tiles each peer reduces."""
    counts: Counter[PeerId] = Counter()
    for piece in slices:
        counts[piece.reducer] += piece.tiles
    return counts


def test_who_cannot_be_dialled_reduces_only_what_nobody_else_can() -> None:
    ownership = ((NAMES[0],), (NAMES[0], NAMES[1]))
    slices = plan_slices(NAMES[:3], ownership, {}, [30, 4, 4], 16, reach=Reach(private={NAMES[0], NAMES[2]}))
    by_block = [reduced_by(tuple(piece for piece in slices if piece.block == block)) for block in range(3)]
    assert [set(found) for found in by_block] == [{NAMES[1]}, {NAMES[0]}, {NAMES[1]}]
    everybody = plan_slices(NAMES[:3], ownership, {}, [30, 4, 4], 16, reach=Reach(private=set(NAMES[:3])))
    assert everybody == plan_slices(NAMES[:3], ownership, {}, [30, 4, 4], 16)


def test_an_unknown_uplink_counts_as_the_median_of_the_others() -> None:
    uplinks = {NAMES[0]: 1_000_000, NAMES[1]: 2_000_000, NAMES[2]: 8_000_000}
    found = reduced_by(plan_slices(NAMES[:4], (), uplinks, [1300], 1))
    assert [found[name] for name in NAMES[:4]] == [100, 200, 800, 200]


@given(swarms())
def test_contributors_are_those_who_have_values_and_one_of_them_reduces(
    swarm: tuple[list[PeerId], Ownership, dict[PeerId, int], list[int], int],
) -> None:
    roster, ownership, uplinks, tiles, slice_tiles = swarm
    for piece in plan_slices(roster, ownership, uplinks, tiles, slice_tiles):
        may = roster if piece.block == 0 else [peer for peer in roster if peer in ownership[piece.block - 1]]
        assert piece.contributors == tuple(may)
        assert 0 < piece.tiles <= slice_tiles
        order = reducer_order(piece, roster)
        assert order[0] == piece.reducer
        assert sorted(order) == sorted(piece.contributors)


@given(swarms(), st.data())
def test_who_is_no_elector_reduces_only_what_it_alone_has(
    swarm: tuple[list[PeerId], Ownership, dict[PeerId, int], list[int], int], data: st.DataObject
) -> None:
    roster, ownership, uplinks, tiles, slice_tiles = swarm
    electors = data.draw(st.sets(st.sampled_from(roster), min_size=1))
    for piece in plan_slices(roster, ownership, uplinks, tiles, slice_tiles, reach=Reach(electors)):
        order = reducer_order(piece, electors)
        assert order[0] == piece.reducer
        assert order == piece.contributors if len(piece.contributors) == 1 else electors.issuperset(order)
        assert len(set(order)) == len(order)


def test_of_what_strangers_alone_have_nothing_is_made() -> None:
    ownership = ((NAMES[1], NAMES[2]), (NAMES[0], NAMES[2]), (NAMES[2],))
    reach = Reach({NAMES[0]}, strangers={NAMES[1], NAMES[2]})
    slices = plan_slices(NAMES[:3], ownership, {}, [4, 4, 4, 4], 16, reach=reach)
    assert [(piece.block, piece.reducer, piece.contributors) for piece in slices] == [
        (0, NAMES[0], tuple(NAMES[:3])),
        (2, NAMES[0], (NAMES[0], NAMES[2])),
    ]
    assert not plan_slices(NAMES[1:3], ownership, {}, [4, 4, 4, 4], 16, reach=reach)


@given(swarms())
def test_the_plan_is_the_same_at_everybody(
    swarm: tuple[list[PeerId], Ownership, dict[PeerId, int], list[int], int],
) -> None:
    roster, ownership, uplinks, tiles, slice_tiles = swarm
    again = dict(reversed(list(uplinks.items())))
    one = plan_slices(roster, ownership, uplinks, tiles, slice_tiles)
    assert one == plan_slices(list(roster), ownership, again, list(tiles), slice_tiles)


def test_shared_slices_are_dealt_in_proportion_to_uplinks() -> None:
    uplinks = {NAMES[0]: 10, NAMES[1]: 30, NAMES[2]: 60}
    slices = plan_slices(NAMES[:3], (), uplinks, [1000], 1)
    dealt = Counter(piece.reducer for piece in slices)
    assert dealt == {NAMES[0]: 100, NAMES[1]: 300, NAMES[2]: 600}


def test_small_blocks_are_cut_so_that_everybody_gets_a_part() -> None:
    slices = plan_slices(NAMES[:4], (), {}, [8], 16)
    assert len({piece.reducer for piece in slices}) == 4


def test_a_column_with_one_owner_is_its_owners_alone() -> None:
    slices = plan_slices(NAMES[:3], ((NAMES[1],),), {}, [3, 5], 16)
    assert {(piece.reducer, piece.contributors) for piece in slices if piece.block == 1} == {(NAMES[1], (NAMES[1],))}


@pytest.mark.parametrize(("seldom", "rounds"), [(12, 4), (7, 3), (2, 5), (0, 2), (5, 1)])
def test_vocabulary_is_cut_into_parts_that_are_nearly_equal(seldom: int, rounds: int) -> None:
    parts = [tiles_of(due_tiles(seldom, round, Vocabulary(seldom, rounds))) for round in range(rounds, 2 * rounds)]
    assert [at for part in parts for at in part] == list(range(seldom))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("tiles", [12, 7, 4, 9])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_vocabulary_takes_turns_of_its_own(tiles: int, rounds: int) -> None:
    """A part in each round, each tile once in that many rounds; the rest as if it were alone."""
    vocabulary = Vocabulary(4, rounds)
    parts = [tiles_of(due_tiles(tiles, round, vocabulary)) for round in range(rounds)]
    times = Counter(at for part in parts for at in part)
    assert times == {at: rounds if at >= 4 else 1 for at in range(tiles)}
    assert all(part == sorted(part) for part in parts)
    if rounds > 1:
        assert max(sum(at < 4 for at in part) for part in parts) == -(-4 // rounds)


@pytest.mark.parametrize(("peers", "columns", "every"), [(4, 8, 2), (4, 8, 4), (4, 16, 4), (3, 9, 2), (2, 8, 4)])
def test_no_uplink_carries_a_round_of_turns_alone(peers: int, columns: int, every: int) -> None:
    """Also where columns were dealt out to one peer after the other, as `assign` does with a new swarm."""
    ownership = tuple((NAMES[column % peers],) for column in range(columns))
    for round in range(every):
        due = due_columns(ownership, round, every)
        owned = [sum(ownership[column] == (name,) for column in due) for name in NAMES[:peers]]
        assert max(owned) <= -(-columns // (peers * every))


def test_parts_of_the_shared_block_are_planned_where_they_stand() -> None:
    slices = plan_slices(NAMES[:2], ((NAMES[0],),), {}, [9, 3], 2, turn=Turn(shared=((0, 1), (3, 3))))
    assert [piece.key for piece in slices if piece.block == 0] == [(0, 1), (3, 2), (5, 1)]
    assert [piece.key for piece in slices if piece.block == 1] == [(9, 2), (11, 1)]


def test_columns_take_turns() -> None:
    mine, theirs = (NAMES[0],), (NAMES[1],)
    turns = [due_columns(8 * (mine,), round, 4) for round in range(1, 9)]
    assert turns[:4] == turns[4:] == [{1, 5}, {2, 6}, {3, 7}, {0, 4}]
    assert due_columns((mine, theirs, ()), 7, 1) == {0, 1, 2}
    uneven = [len(due_columns(5 * (mine,), round, 3)) for round in range(3)]
    assert sorted(uneven) == [1, 2, 2]
    slices = plan_slices(NAMES[:2], ((NAMES[0],), (NAMES[1],)), {}, [4, 4, 4], 16, turn=Turn({1}))
    assert {piece.block for piece in slices} == {0, 2}

"""Leases: nothing is held twice, nothing is lost, everybody computes the same."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spes_p2p import wire
from spes_p2p.data.leases import Leases, Ranges, count, joined, next_leases, take
from spes_p2p.ids import PeerId

PEERS = [PeerId(name) for name in "abcde"]
A, B, C = PEERS[:3]

Commits = list[tuple[dict[PeerId, int], set[PeerId], dict[PeerId, int]]]
"""used, members, demand of each commit"""

commits = st.lists(
    st.tuples(
        st.dictionaries(st.sampled_from(PEERS), st.integers(-1, 60)),
        st.sets(st.sampled_from(PEERS)),
        st.dictionaries(st.sampled_from(PEERS), st.integers(-1, 40)),
    ),
    max_size=8,
)


def positions(ranges: Ranges) -> list[int]:
    return [position for span in ranges for position in range(*span)]


@settings(max_examples=50, deadline=None)
@given(commits, st.integers(1, 9))
def test_every_position_below_the_cursor_is_used_held_or_returned_once(commits: Commits, block: int) -> None:
    leases, used_up = Leases(), []
    for used, members, demand in commits:
        for peer, ranges in leases.held:
            used_up += positions(take(ranges, used.get(peer, 0))[0])
        leases = next_leases(leases, used, members, demand, block)
        held = [position for _, ranges in leases.held for position in positions(ranges)]
        assert sorted(used_up + held + positions(leases.returned)) == list(range(leases.cursor))


@settings(max_examples=50, deadline=None)
@given(commits, st.integers(1, 9))
def test_members_hold_enough_in_whole_blocks_and_keep_the_order(commits: Commits, block: int) -> None:
    leases = Leases()
    for used, members, demand in commits:
        before, leases = leases, next_leases(leases, used, members, demand, block)
        assert [peer for peer, _ in leases.held] == sorted(members)
        assert leases.cursor % block == 0
        for peer, ranges in leases.held:
            kept = positions(take(before.of(peer), used.get(peer, 0))[1])
            wanted = max(2 * demand.get(peer, 0), block)
            assert positions(ranges)[: len(kept)] == kept
            assert wanted <= count(ranges) < max(len(kept) + 1, wanted + block)


@settings(max_examples=50, deadline=None)
@given(commits, st.randoms())
def test_the_order_of_the_mappings_does_not_matter(commits: Commits, rng: random.Random) -> None:
    leases = Leases()
    for used, members, demand in commits:
        shuffled = [dict(rng.sample(list(mapping.items()), len(mapping))) for mapping in (used, demand)]
        again = next_leases(leases, shuffled[0], rng.sample(sorted(members), len(members)), shuffled[1], 8)
        leases = next_leases(leases, used, members, demand, 8)
        assert again == leases
        assert wire.unpack(Leases, wire.pack(leases)) == leases


def test_a_lost_peers_unused_part_is_leased_again_first() -> None:
    first = next_leases(Leases(), {}, [A, B], {A: 8, B: 8}, 8)
    assert first == Leases(32, (), ((A, ((0, 16),)), (B, ((16, 32),))))
    lost = next_leases(first, {A: 4, B: 10}, [B], {B: 8}, 8)
    assert lost == Leases(32, (), ((B, ((26, 32), (4, 16))),))


def test_whole_blocks_come_from_what_was_returned_before_the_cursor_moves() -> None:
    leases = Leases(64, ((3, 8), (16, 40)), ((A, ((60, 64),)),))
    after = next_leases(leases, {}, [A, C], {A: 6, C: 8}, 8)
    assert after == Leases(64, (), ((A, ((60, 64), (3, 8), (16, 24))), (C, ((24, 40),))))


def test_take_and_joined() -> None:
    ranges = ((4, 8), (0, 2))
    assert take(ranges, 5) == (((4, 8), (0, 1)), ((1, 2),))
    assert take(ranges, 0) == ((), ranges)
    assert take(ranges, 99) == (ranges, ())
    assert joined([(0, 2), (2, 4), (6, 7)]) == ((0, 4), (6, 7))


@pytest.mark.parametrize(
    ("cursor", "returned", "held"),
    [
        (8, ((0, 4),), ((A, ((3, 8),)),)),
        (8, (), ((A, ((4, 9),)),)),
        (8, ((4, 4),), ()),
        (8, ((-1, 4),), ()),
        (8, (), ((B, ((0, 1),)), (A, ((1, 2),)))),
    ],
)
def test_impossible_leases_are_refused(cursor: int, returned: Ranges, held: tuple[tuple[PeerId, Ranges], ...]) -> None:
    with pytest.raises(ValueError, match="lease"):
        Leases(cursor, returned, held)

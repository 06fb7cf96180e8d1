"""Ownership over random histories of joins, losses and changed minds: what holds after each of them."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from spes_p2p.ids import PeerId
from spes_p2p.ownership.assign import Ownership, OwnershipRequest, assign, columns_of, nobody, orphans

NAMES = [PeerId(name) for name in "abcdef"]
COLUMNS = 8
quickly = settings(max_examples=30)
Members = dict[PeerId, OwnershipRequest]
Change = tuple[Ownership, Members, Ownership, Members]
"""Ownership and members before, and after."""


@st.composite
def histories(draw: st.DrawFn, ample: bool = False, claiming: bool = False) -> tuple[int, list[Change]]:
    """(target replicas, changes): in each one somebody joins, is lost, or says something else than before."""
    rooms = st.just(COLUMNS) if ample else st.integers(0, COLUMNS)
    named = st.lists(st.integers(0, COLUMNS - 1), max_size=3).map(tuple) if claiming else st.just(())
    wish = st.builds(OwnershipRequest, rooms, named, named)
    replicas, members, ownership = draw(st.integers(1, 3)), dict[PeerId, OwnershipRequest](), nobody(COLUMNS)
    changes: list[Change] = []
    for name, new in draw(st.lists(st.tuples(st.sampled_from(NAMES), st.none() | wish), min_size=1, max_size=12)):
        before = dict(members)
        members.pop(name, None)
        if new is not None:
            members[name] = new
        after = assign(ownership, members, replicas)
        changes.append((ownership, before, after, dict(members)))
        ownership = after
    return replicas, changes


def most_replicas(members: Members, replicas: int) -> int:
    """The most owners that all columns can have together: the smallest cut between columns and peers."""
    rooms = [wish.max_columns for wish in members.values()]
    return min(replicas * (COLUMNS - cut) + sum(min(room, cut) for room in rooms) for cut in range(COLUMNS + 1))


@quickly
@given(histories(claiming=True))
def test_nobody_ever_owns_more_than_fits_or_what_it_released(history: tuple[int, list[Change]]) -> None:
    for _, _, after, members in history[1]:
        for peer, wish in members.items():
            assert len(columns_of(after, peer)) <= wish.max_columns
            assert not set(columns_of(after, peer)) & set(wish.releases)
        assert {owner for owners in after for owner in owners} <= set(members)


@quickly
@given(histories(claiming=True))
def test_nothing_moves_when_nothing_changes(history: tuple[int, list[Change]]) -> None:
    for _, _, after, members in history[1]:
        assert assign(after, members, history[0]) == after


@quickly
@given(histories())
def test_columns_have_their_replicas_wherever_there_is_room(history: tuple[int, list[Change]]) -> None:
    replicas, changes = history
    for _, _, after, members in changes:
        assert sum(len(owners) for owners in after) == most_replicas(members, replicas)
        assert len(orphans(after)) == COLUMNS - most_replicas(members, 1)


@quickly
@given(histories(claiming=True))
def test_an_orphan_is_adopted_by_whoever_has_room_claims_or_not(history: tuple[int, list[Change]]) -> None:
    for _, _, after, members in history[1]:
        for column in orphans(after):
            for peer, wish in members.items():
                assert len(columns_of(after, peer)) == wish.max_columns or column in wish.releases


@quickly
@given(histories(ample=True))
def test_with_two_replicas_no_single_loss_leaves_a_column_without_owner(history: tuple[int, list[Change]]) -> None:
    replicas, changes = history
    for _, _, after, members in changes:
        if replicas > 1 and len(members) > 1:
            for lost in members:
                assert all(set(owners) - {lost} for owners in after)


@quickly
@given(histories(ample=True))
def test_all_own_about_the_same_number(history: tuple[int, list[Change]]) -> None:
    for _, _, after, members in history[1]:
        loads = [len(columns_of(after, peer)) for peer in members]
        assert max(loads, default=0) - min(loads, default=0) <= 1


@quickly
@given(histories(ample=True))
def test_a_loss_moves_nothing_but_what_was_lost(history: tuple[int, list[Change]]) -> None:
    """With one owner a column; replicas may have to swap places, so as not to meet at one peer."""
    replicas, changes = history
    for before, old, after, new in changes:
        if replicas == 1 and new.keys() < old.keys():
            for was, now in zip(before, after, strict=True):
                assert now == was or not set(was) & new.keys()


@quickly
@given(histories(ample=True))
def test_a_newcomer_takes_its_share_and_nobody_else_gains(history: tuple[int, list[Change]]) -> None:
    replicas, changes = history
    for before, old, after, new in changes:
        if replicas == 1 and old and old.keys() < new.keys():
            for was, now in zip(before, after, strict=True):
                assert set(now) - set(was) <= new.keys() - old.keys()

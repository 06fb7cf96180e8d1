"""Who owns what next: budgets, claims, replicas, balance; whatever the members wish."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from spes_p2p.ids import PeerId
from spes_p2p.ownership.assign import Ownership, OwnershipRequest, assign, columns_of, nobody, orphans

ANNA, BEA, CARL, DORA = (PeerId(name) for name in ("anna", "bea", "carl", "dora"))

wishes = st.builds(
    OwnershipRequest,
    max_columns=st.integers(0, 6),
    claims=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    releases=st.lists(st.integers(0, 9), max_size=2).map(tuple),
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Ownership, dict[PeerId, OwnershipRequest], int]:
    names = st.sampled_from([ANNA, BEA, CARL, DORA])
    present = draw(st.lists(st.sets(names).map(lambda owners: tuple(sorted(owners))), min_size=1, max_size=8))
    return tuple(present), draw(st.dictionaries(names, wishes, min_size=1)), draw(st.integers(1, 3))


@given(cases())
def test_only_members_own_and_nobody_gets_more_than_fits(
    case: tuple[Ownership, dict[PeerId, OwnershipRequest], int],
) -> None:
    before, wanted, replicas = case
    after = assign(before, wanted, replicas)
    assert len(after) == len(before)
    for peer, wish in wanted.items():
        assert len(columns_of(after, peer)) <= wish.max_columns
        assert not set(columns_of(after, peer)) & set(wish.releases)
    assert all(owner in wanted for owners in after for owner in owners)
    assert all(list(owners) == sorted(set(owners)) for owners in after)


@given(cases())
def test_a_column_stays_without_owner_only_when_nobody_could_take_it(
    case: tuple[Ownership, dict[PeerId, OwnershipRequest], int],
) -> None:
    before, wanted, replicas = case
    after = assign(before, wanted, replicas)
    for column in orphans(after):
        for peer, wish in wanted.items():
            assert len(columns_of(after, peer)) >= wish.max_columns or column in wish.releases


@given(cases(), st.sets(st.integers(0, 7)))
def test_of_kept_columns_no_owner_that_stays_loses_one(
    case: tuple[Ownership, dict[PeerId, OwnershipRequest], int], kept: set[int]
) -> None:
    before, wanted, replicas = case
    after = assign(before, wanted, replicas, kept)
    for column, owners in enumerate(before):
        assert column not in kept or {owner for owner in owners if owner in wanted} <= set(after[column])
    for peer, wish in wanted.items():
        held = [column for column in kept if column < len(before) and peer in before[column]]
        assert len(columns_of(after, peer)) <= max(wish.max_columns, len(held))


@given(cases())
def test_the_order_in_which_wishes_came_does_not_matter(
    case: tuple[Ownership, dict[PeerId, OwnershipRequest], int],
) -> None:
    before, wanted, replicas = case
    backwards = dict(reversed(list(wanted.items())))
    assert assign(before, wanted, replicas) == assign(before, backwards, replicas)


@given(cases())
def test_nothing_moves_when_nothing_changes(case: tuple[Ownership, dict[PeerId, OwnershipRequest], int]) -> None:
    before, wanted, replicas = case
    settled = assign(before, wanted, replicas)
    assert assign(settled, wanted, replicas) == settled


def test_the_first_members_share_all_columns_evenly() -> None:
    after = assign(nobody(8), {peer: OwnershipRequest(3) for peer in (ANNA, BEA, CARL)}, 1)
    assert orphans(after) == ()
    assert sorted(len(columns_of(after, peer)) for peer in (ANNA, BEA, CARL)) == [2, 3, 3]


def test_columns_of_a_lost_owner_go_to_those_with_room() -> None:
    before = assign(nobody(4), {peer: OwnershipRequest(2) for peer in (ANNA, BEA)}, 1)
    assert orphans(assign(before, {ANNA: OwnershipRequest(4)}, 1)) == ()
    assert len(orphans(assign(before, {ANNA: OwnershipRequest(2)}, 1))) == 2


def test_a_newcomer_takes_its_share_from_who_has_most() -> None:
    before = assign(nobody(8), {ANNA: OwnershipRequest(8)}, 1)
    after = assign(before, {ANNA: OwnershipRequest(8), BEA: OwnershipRequest(8)}, 1)
    assert [len(columns_of(after, peer)) for peer in (ANNA, BEA)] == [4, 4]
    assert all(len(owners) == 1 for owners in after)


def test_replicas_are_of_different_peers() -> None:
    after = assign(nobody(4), {peer: OwnershipRequest(4) for peer in (ANNA, BEA, CARL)}, 2)
    assert all(len(owners) == 2 for owners in after)


def test_a_claim_is_granted_beside_the_present_owner() -> None:
    before = assign(nobody(4), {ANNA: OwnershipRequest(4)}, 1)
    after = assign(before, {ANNA: OwnershipRequest(4), BEA: OwnershipRequest(1, claims=(2,))}, 1)
    assert columns_of(after, BEA) == (2,)


def test_who_named_its_columns_adopts_others_only_where_nobody_else_has_room() -> None:
    named = OwnershipRequest(4, claims=(0, 1))
    before = assign(nobody(4), {ANNA: named, BEA: OwnershipRequest(2)}, 1)
    assert (columns_of(before, ANNA), columns_of(before, BEA)) == ((0, 1), (2, 3))
    alone = assign(before, {ANNA: named}, 1)
    assert columns_of(alone, ANNA) == (0, 1, 2, 3)
    assert columns_of(assign(alone, {ANNA: named, CARL: OwnershipRequest(4)}, 1), ANNA) == (0, 1)


def test_a_claim_takes_the_place_of_a_column_that_was_adopted() -> None:
    before = assign(nobody(4), {ANNA: OwnershipRequest(2), BEA: OwnershipRequest(2)}, 1)
    wanted = {ANNA: OwnershipRequest(2, claims=columns_of(before, BEA)), BEA: OwnershipRequest(2)}
    after = assign(before, wanted, 1)
    assert columns_of(after, ANNA) == columns_of(before, BEA)
    assert orphans(after) == ()  # Bea is relieved of two columns, and takes Anna's


def test_a_replica_gives_way_to_a_column_that_has_no_owner() -> None:
    before = assign(nobody(4), {peer: OwnershipRequest(4) for peer in (ANNA, BEA)}, 2)
    assert orphans(assign(before, {ANNA: OwnershipRequest(2), BEA: OwnershipRequest(2)}, 2)) == ()


def test_a_peer_with_less_room_than_before_gives_up_the_rest() -> None:
    before = assign(nobody(4), {ANNA: OwnershipRequest(4)}, 1)
    after = assign(before, {ANNA: OwnershipRequest(1), BEA: OwnershipRequest(3)}, 1)
    assert (len(columns_of(after, ANNA)), orphans(after)) == (1, ())


def test_replicas_change_places_where_that_makes_room() -> None:
    """Carl has room, but owns all that lacks a replica: he takes over from Bea, who takes that."""
    before = ((ANNA, BEA), (ANNA, BEA), (CARL,))
    after = assign(before, {ANNA: OwnershipRequest(2), BEA: OwnershipRequest(2), CARL: OwnershipRequest(2)}, 2)
    assert all(len(owners) == 2 for owners in after)


STRANGERS = (PeerId("x"), PeerId("y"), PeerId("z"))


@given(cases())
def test_strangers_own_nothing_alone_and_take_nothing_from_others(
    case: tuple[Ownership, dict[PeerId, OwnershipRequest], int],
) -> None:
    before, wanted, replicas = case
    alone = assign(before, wanted, replicas)
    strange = {peer: OwnershipRequest(2, claims=(0,)) for peer in STRANGERS}
    after = assign(before, wanted | strange, replicas, strangers=STRANGERS)
    assert tuple(tuple(peer for peer in owners if peer not in STRANGERS) for owners in after) == alone
    assert all(owned or not owners for owned, owners in zip(alone, after, strict=True))
    assert all(len(columns_of(after, peer)) <= 2 for peer in STRANGERS)


def test_each_column_has_as_many_strangers_as_it_should_have_owners() -> None:
    trusted = {peer: OwnershipRequest(2) for peer in (ANNA, BEA)}
    strange = {peer: OwnershipRequest(2) for peer in STRANGERS}
    after = assign(nobody(4), trusted | strange, 1, strangers=STRANGERS)
    assert [len(owners) for owners in after] == [2, 2, 2, 2]
    gone = assign(after, {ANNA: OwnershipRequest(2)} | strange, 1, strangers=STRANGERS)
    assert sum(bool(owners) for owners in gone) == 2, "what no trusted peer has room for is nobody's"
    assert columns_of(gone, ANNA) == tuple(at for at, owners in enumerate(gone) if owners)

"""Who takes part and who leads: pure functions over members."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from spes_p2p.consensus.membership import (
    LINK_PRIVATE,
    LINK_PUBLIC,
    MAX_BANNED,
    MAX_ELECTORS,
    MAX_MEMBERS,
    MAX_VOUCHED,
    Admission,
    Member,
    Roll,
    electors,
    leader_order,
    next_members,
    with_votes,
)
from spes_p2p.ids import PeerId, sha256

PARENT = sha256(b"parent")
NAMES = [PeerId(name) for name in ("anna", "bea", "carl", "dora", "emil")]


def member(name: str, incarnation: int = 1, elector: bool = True, link_class: int = LINK_PUBLIC) -> Member:
    return Member(PeerId(name), incarnation, elector, link_class)


def test_leaders_come_in_an_order_that_each_parent_draws_anew() -> None:
    everybody = [member(name) for name in NAMES]
    orders = {leader_order(sha256(bytes([at])), everybody) for at in range(20)}
    assert all(sorted(order) == sorted(NAMES) for order in orders)
    assert len({order[0] for order in orders}) == len(NAMES)


def test_who_cannot_be_dialled_leads_last_and_who_has_no_vote_never() -> None:
    everybody = [member("anna", link_class=LINK_PRIVATE), member("bea"), member("carl", elector=False)]
    assert leader_order(PARENT, everybody) == ("bea", "anna")


def test_members_vote_from_the_second_manifest_that_names_them_on() -> None:
    first = (member("anna"), member("bea"))
    second = next_members(first, first, [member("carl")], [])
    assert [(m.peer, m.elector) for m in second] == [("anna", True), ("bea", True), ("carl", False)]
    third = next_members(second, second, [], [])
    assert all(m.elector for m in third)


def test_who_came_back_without_its_record_is_a_newcomer() -> None:
    first = (member("anna"), member("bea", incarnation=1))
    second = next_members(first, [member("anna")], [member("bea", incarnation=2)], [])
    assert [m.peer for m in electors(second)] == ["anna"]


def test_leavers_are_out_and_if_no_elector_is_left_all_vote() -> None:
    first = (member("anna"), member("bea", elector=False))
    assert [m.peer for m in next_members(first, first, [], [PeerId("bea")])] == ["anna"]
    heirs = next_members(first, first, [member("carl")], [PeerId("anna")])
    assert [(m.peer, m.elector) for m in heirs] == [("bea", True), ("carl", False)]
    strangers = next_members(first, [], [member("carl"), member("dora")], [PeerId("anna"), PeerId("bea")])
    assert [(m.peer, m.elector) for m in strangers] == [("carl", True), ("dora", True)]


def test_votes_follow_from_the_members_alone() -> None:
    claimed = (member("anna"), member("bea"))
    assert with_votes((member("anna"),), claimed) == (member("anna"), member("bea", elector=False))


def test_one_round_names_so_many_new_peers_and_a_swarm_grows_all_the_same() -> None:
    crowd = [member(f"new {number:02}") for number in range(64)]
    here: tuple[Member, ...] = (member("anna"), member("bea"))
    sizes = []
    for _ in range(7):
        waiting = [one for one in crowd if one.peer not in {m.peer for m in here}]
        here = next_members(here, here, [member("anna", 9), *waiting], [])
        sizes.append(len(here))
    assert sizes == [6, 12, 24, 48, 66, 66, 66]


def test_who_comes_back_in_another_incarnation_takes_no_place_of_a_new_peer() -> None:
    here = tuple(member(name) for name in ("anna", "bea", "carl", "dora", "emil"))
    again, new = [replace(one, incarnation=7) for one in here], [member(f"new {number}") for number in range(9)]
    named = next_members(here, [], [*new, *again], [])
    assert {m.peer for m in named} == {m.peer for m in (*here, *new[:5])}


def test_where_there_is_no_room_for_all_the_newcomers_wait() -> None:
    here, new = [member("carl"), member("dora")], [member("anna", 3), member("bea"), member("dora", 9)]
    names = [m.peer for m in next_members(here, here, new, (), most=3)]
    assert names == ["anna", "carl", "dora"]
    assert [m.peer for m in next_members(here, here, new, (), most=1)] == ["carl", "dora"]
    assert [m.peer for m in next_members(here, here, new, (PeerId("carl"),), most=3)] == ["anna", "bea", "dora"]


ROLL = Roll(sha256(b"run"), 1, (PeerId("anna"), PeerId("bea")), (PeerId("mallory"),))
VOUCHED = Admission(ROLL, True, PeerId("organiser"))


def test_only_who_is_vouched_for_votes_and_the_organiser() -> None:
    names = ("anna", "organiser", "stranger")
    here = tuple(member(name) for name in names)
    assert [m.peer for m in electors(with_votes(here, here, VOUCHED))] == ["anna", "organiser"]
    newcomers = with_votes((), [member("stranger"), member("bea")], VOUCHED)
    assert [m.peer for m in electors(newcomers)] == ["bea"]
    assert not electors(with_votes(here, [member("stranger")], VOUCHED))
    assert not electors(with_votes(here, here, Admission(None, True))), "nobody, before a word of the organiser"


def test_a_stranger_that_is_vouched_for_later_votes_from_then_on() -> None:
    here = (member("anna"), member("carl", elector=False))
    later = Admission(replace(ROLL, number=2, vouched=(PeerId("anna"), PeerId("carl"))), True)
    assert [m.peer for m in electors(next_members(here, here, [], [], later))] == ["anna", "carl"]
    assert [m.peer for m in electors(next_members(here, here, [], [], VOUCHED))] == ["anna"]


def test_no_number_of_strangers_takes_the_places_of_those_who_are_vouched_for() -> None:
    here: tuple[Member, ...] = (member("anna"),)
    crowd = [member(f"key {number:04}") for number in range(4 * MAX_MEMBERS)]
    for _ in range(20):
        named = {m.peer for m in here}
        here = next_members(here, here, [one for one in crowd if one.peer not in named], [], VOUCHED)
    assert len(here) == MAX_MEMBERS - MAX_VOUCHED
    assert [m.peer for m in electors(here)] == ["anna"]
    here = next_members(here, here, [*crowd, member("bea")], [], VOUCHED)
    assert "bea" in {m.peer for m in here}
    assert len(here) == MAX_MEMBERS - MAX_VOUCHED + 1


@pytest.mark.parametrize("admission", [VOUCHED, Admission(ROLL)])
def test_who_is_banned_is_no_member_whatever_it_says(admission: Admission) -> None:
    here = (member("anna"), member("mallory"))
    assert [m.peer for m in next_members(here, here, [member("mallory", 2)], [], admission)] == ["anna"]
    assert [m.peer for m in next_members(here[:1], here[:1], [member("mallory")], [], admission)] == ["anna"]


@pytest.mark.parametrize(
    "changes",
    [
        {"vouched": (PeerId("b"), PeerId("a"))},
        {"vouched": (PeerId("a"), PeerId("a"))},
        {"vouched": (PeerId("mallory"),)},
        {"vouched": tuple(PeerId(f"{at:03}") for at in range(MAX_VOUCHED + 1))},
        {"banned": tuple(PeerId(f"{at:03}") for at in range(MAX_BANNED + 1))},
        {"number": 0},
    ],
    ids=str,
)
def test_a_roll_that_is_not_in_order_is_none(changes: dict[str, Any]) -> None:
    assert ROLL.is_sane()
    assert not replace(ROLL, **changes).is_sane()


def voters(current: tuple[Member, ...], chosen: tuple[Member, ...], admission: Admission) -> frozenset[PeerId]:
    return frozenset(m.peer for m in electors(with_votes(current, chosen, admission)))


@pytest.mark.parametrize("has_strangers", [True, False])
def test_of_many_who_are_trusted_some_are_drawn_for_an_epoch(has_strangers: bool) -> None:
    names = tuple(PeerId(f"{at:02}") for at in range(MAX_ELECTORS + 20))
    here, roll = tuple(member(name) for name in names), replace(ROLL, vouched=names)

    def drawn(epoch: bytes, members: tuple[Member, ...] = here) -> set[PeerId]:
        admission = Admission(roll, has_strangers, epoch=sha256(epoch))
        return {one.peer for one in electors(with_votes(here, members, admission))}

    assert len(drawn(b"one")) == MAX_ELECTORS
    assert drawn(b"one") == drawn(b"one") != drawn(b"two")
    gone = min(drawn(b"two"))
    left = tuple(one for one in here if one.peer != gone)
    assert drawn(b"two") - {gone} < drawn(b"two", left), "who stays drawn stays"

"""When a peer trains: hours that go over midnight, batteries, keys, and who overrides whom."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_p2p.consensus.membership import Member
from spes_p2p.consensus.messages import Intent
from spes_p2p.errors import ConfigError
from spes_p2p.ids import PeerId
from spes_p2p.peer.connection import heirs
from spes_p2p.peer.pausing import MINUTES, PauseSwitch, PauseTriggers, Schedule
from spes_p2p.peer.wishes import PATIENT_LOOKS, Wishes

ANNA, BEA, CARL = PeerId("anna"), PeerId("bea"), PeerId("carl")
NIGHT = Schedule.parse("22:00-08:00")


def at(text: str) -> int:
    hours, minutes = text.split(":")
    return 60 * int(hours) + int(minutes)


@pytest.mark.parametrize(("time", "trains"), [("21:59", False), ("22:00", True), ("03:00", True), ("08:00", False)])
def test_a_night_goes_over_midnight(time: str, trains: bool) -> None:
    assert NIGHT.allows(at(time)) == trains


def test_several_spans_and_whole_days() -> None:
    some = Schedule.parse("12:00-13:00, 22:00-08:00")
    assert [some.allows(at(time)) for time in ("12:30", "13:00", "23:00")] == [True, False, True]
    assert (some.next_start(at("09:00")), some.next_start(at("13:00"))) == ("12:00", "22:00")
    assert all(Schedule.parse("0:00-24:00").allows(minute) for minute in range(MINUTES))


@pytest.mark.parametrize("text", ["", "22-8", "22:00", "25:00-08:00", "22:60-08:00", "22:00-08:00,x"])
def test_no_hours_are_told_with_the_value(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a list of hours") as caught:
        Schedule.parse(text)
    assert "22:00-08:00" in caught.value.fix


@pytest.mark.parametrize("text", ["08:00-08:00", "22:00-08:00,09:00-09:00"])
def test_hours_without_length_are_told_apart_from_what_is_no_list(text: str) -> None:
    with pytest.raises(ConfigError, match="hours that end when they begin") as caught:
        Schedule.parse(text)
    assert "leave --schedule out" in caught.value.fix


@given(st.integers(0, MINUTES - 1), st.integers(0, MINUTES - 1), st.integers(0, MINUTES - 1))
def test_a_span_and_the_rest_of_the_day_are_the_whole_day(first: int, last: int, minute: int) -> None:
    if first != last:
        assert Schedule(((first, last),)).allows(minute) != Schedule(((last, first),)).allows(minute)


def test_the_key_pauses_and_resumes() -> None:
    said: list[str] = []
    switch = PauseSwitch()
    switch.on_change(said.append)
    switch.toggle()
    assert (switch.active, switch.why) == (True, "by key")
    switch.toggle()
    assert not switch.active
    assert said == ["by key", ""]


def test_who_resumes_by_hand_overrides_until_the_reason_comes_anew() -> None:
    said: list[str] = []
    switch = PauseSwitch()
    switch.on_change(said.append)
    for _ in range(2):
        switch.set("schedule", "until 22:00")
        switch.set("schedule", "until 22:00")
        assert switch.active
        switch.toggle()
        switch.set("schedule", "until 22:00")
        assert not switch.active
        switch.set("schedule", "")
    assert said == ["until 22:00", "", "until 22:00", ""]


def test_clock_and_battery_are_looked_at() -> None:
    switch, minute, battery = PauseSwitch(), [at("12:00")], [False]
    watch = PauseTriggers(switch, None, False, lambda: minute[0], lambda: battery[0])
    assert not switch.active
    watch = PauseTriggers(switch, NIGHT, True, lambda: minute[0], lambda: battery[0])
    watch.close()
    assert switch.why == "until 22:00 (--schedule)"
    minute[0], battery[0] = at("23:00"), True
    watch.look()
    assert switch.why == "on battery (--pause-on-battery)"
    battery[0] = False
    watch.look()
    assert not switch.active


def test_a_machine_without_battery_is_never_paused_by_it() -> None:
    switch = PauseSwitch()
    PauseTriggers(switch, None, True, battery=lambda: None).close()
    assert not switch.active


def test_who_paused_while_alone_gives_its_columns_up_when_others_come() -> None:
    told: list[Intent] = []
    others: list[PeerId] = []
    wishes = Wishes(told.append, ANNA, lambda: others)
    wishes.want(Intent(joining=True, max_columns=2, claims=(1,)), may_shrink=True)
    wishes.begin()
    told.clear()

    async def play() -> None:
        beats = asyncio.get_running_loop().create_task(wishes.look_around(0.001))
        wishes.pause(True)
        await asyncio.sleep(0.01)
        assert not told  # nobody else could train them
        others.append(BEA)
        while not told:
            await asyncio.sleep(0.001)
        others.clear()
        while len(told) < 2:
            await asyncio.sleep(0.001)
        beats.cancel()

    asyncio.run(asyncio.wait_for(play(), 60.0))
    assert [(wish.max_columns, wish.claims) for wish in told] == [(0, ()), (2, (1,))]


def test_who_has_given_its_columns_up_does_not_take_them_back_when_another_pauses() -> None:
    told: list[Intent] = []
    heirs = [ANNA, CARL]
    wishes = Wishes(told.append, BEA, lambda: heirs)
    wishes.want(Intent(joining=True, max_columns=2), may_shrink=True)
    wishes.begin()
    wishes.pause(True)
    heirs.remove(ANNA)
    wishes.pause(True)
    assert [wish.max_columns for wish in told] == [2, 0]


def looks(paused: dict[PeerId, bool], most: dict[PeerId, int], late: int = 1) -> list[dict[PeerId, int]]:
    """What each asks for after each of nine looks; all look at once, and hear what others asked for `late` looks ago.

    Who is `paused` is so from the first look on; `most`: what each asks for before it.
    """
    told, heard = dict(most), dict[PeerId, int]()

    def make(me: PeerId) -> Wishes:
        def tell(intent: Intent) -> None:
            told[me] = intent.max_columns

        return Wishes(tell, me, lambda: [peer for peer, asked in heard.items() if asked and peer != me])

    seen: list[dict[PeerId, int]] = []
    everybody = {peer: make(peer) for peer in most}
    for peer, wishes in everybody.items():
        wishes.want(Intent(joining=True, max_columns=most[peer]), may_shrink=True)
        wishes.begin()
    for _ in range(9):
        heard.update(seen[-late] if len(seen) >= late else most)
        for peer, wishes in everybody.items():
            wishes.pause(paused[peer])
        seen.append(dict(told))
    return seen


@pytest.mark.parametrize("late", [1, PATIENT_LOOKS])
def test_of_those_who_pause_at_once_one_keeps_its_columns_all_the_while(late: int) -> None:
    seen = looks({BEA: True, ANNA: True, CARL: True}, {BEA: 2, ANNA: 2, CARL: 2}, late)
    assert seen == [{ANNA: 2, BEA: 0, CARL: 0}] * len(seen)


def test_all_who_pause_give_their_columns_up_to_who_trains() -> None:
    seen = looks({ANNA: True, BEA: True, CARL: False}, {ANNA: 2, BEA: 2, CARL: 2})
    assert seen[-1] == {ANNA: 0, BEA: 0, CARL: 2}


def test_who_asks_for_no_columns_is_no_company() -> None:
    seen = looks({ANNA: False, BEA: True, CARL: True}, {ANNA: 0, BEA: 2, CARL: 2})  # anna with --max-experts 0
    assert seen == [{ANNA: 0, BEA: 2, CARL: 0}] * len(seen)


def test_columns_go_to_members_that_train_and_stay() -> None:
    members = [Member(peer, 1, True, 0, trains=peer != BEA) for peer in (ANNA, BEA, CARL)]

    def given(peer: PeerId, incarnation: int = 1, **intent: Any) -> bool:
        said: Any = SimpleNamespace(
            peer=peer, incarnation=incarnation, intent=Intent(**{"joining": True, "max_columns": 2} | intent)
        )
        return heirs([said], members) == {peer}

    assert given(ANNA)
    assert not given(ANNA, leaving=True)
    assert not given(ANNA, max_columns=0)  # it pauses, too
    assert not given(ANNA, incarnation=2)
    assert not given(BEA)  # `bootstrap --serve`
    assert not given(PeerId("dora"))  # it comes with the next round


def test_who_pauses_before_it_is_in_joins_without_columns() -> None:
    told: list[Intent] = []
    wishes = Wishes(told.append, ANNA, lambda: [BEA])
    wishes.pause(True)
    wishes.want(Intent(joining=True, max_columns=2), may_shrink=True)
    assert (wishes.intent.joining, wishes.intent.max_columns) == (True, 0)
    assert not told
    wishes.begin()
    assert [wish.max_columns for wish in told] == [0]


def test_columns_that_somebody_has_set_stay() -> None:
    told: list[Intent] = []
    wishes = Wishes(told.append, ANNA, lambda: [BEA])
    wishes.begin()
    for may_shrink in (False, True):
        wishes.want(Intent(joining=True, max_columns=4), may_shrink)
        assert wishes.limit_columns(3) is may_shrink
    assert not wishes.limit_columns(3)
    assert [wish.max_columns for wish in told] == [0, 3]

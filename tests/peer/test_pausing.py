"""When a peer trains: hours that go over midnight, batteries, keys, and who overrides whom."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_p2p.consensus.messages import Intent
from spes_p2p.errors import ConfigError
from spes_p2p.ids import PeerId
from spes_p2p.peer.pausing import MINUTES, PauseSwitch, PauseTriggers, Schedule
from spes_p2p.peer.wishes import Wishes, change_vouches, vouches_in

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
    others: list[str] = []
    wishes = Wishes(told.append, lambda: bool(others))
    wishes.want(Intent(joining=True, max_columns=2, claims=(1,)), may_shrink=True)
    wishes.begin()
    told.clear()

    async def play() -> None:
        beats = asyncio.get_running_loop().create_task(wishes.look_around(0.001))
        wishes.pause(True)
        await asyncio.sleep(0.01)
        assert not told  # nobody else could train them
        others.append("b")
        while not told:
            await asyncio.sleep(0.001)
        others.clear()
        while len(told) < 2:
            await asyncio.sleep(0.001)
        beats.cancel()

    asyncio.run(asyncio.wait_for(play(), 60.0))
    assert [(wish.max_columns, wish.claims) for wish in told] == [(0, ()), (2, (1,))]


def test_who_pauses_before_it_is_in_joins_without_columns() -> None:
    told: list[Intent] = []
    wishes = Wishes(told.append, lambda: True)
    wishes.pause(True)
    wishes.want(Intent(joining=True, max_columns=2), may_shrink=True)
    assert (wishes.intent.joining, wishes.intent.max_columns) == (True, 0)
    assert not told
    wishes.begin()
    assert [wish.max_columns for wish in told] == [0]


def test_columns_that_somebody_has_set_stay() -> None:
    told: list[Intent] = []
    wishes = Wishes(told.append, lambda: True)
    wishes.begin()
    for may_shrink in (False, True):
        wishes.want(Intent(joining=True, max_columns=4), may_shrink)
        assert wishes.limit_columns(3) is may_shrink
    assert not wishes.limit_columns(3)
    assert [wish.max_columns for wish in told] == [0, 3]


def test_for_whom_a_peer_vouches_it_says_as_soon_as_its_owner_does(tmp_path: Path) -> None:
    told: list[Intent] = []
    with pytest.raises(ConfigError, match="holds no run of a peer"):
        change_vouches(tmp_path, [PeerId("b")], undo=False)
    (tmp_path / "run").mkdir()
    wishes = Wishes(told.append, lambda: True, lambda: vouches_in(tmp_path))
    wishes.begin()

    async def play() -> None:
        beats = asyncio.get_running_loop().create_task(wishes.look_around(0.001))
        assert change_vouches(tmp_path, [PeerId("c"), PeerId("b")], undo=False) == ("b", "c")
        while len(told) < 2:
            await asyncio.sleep(0.001)
        assert change_vouches(tmp_path, [PeerId("c")], undo=True) == ("b",)
        while len(told) < 3:
            await asyncio.sleep(0.001)
        beats.cancel()

    asyncio.run(asyncio.wait_for(play(), 60.0))
    assert [wish.vouches for wish in told] == [(), ("b", "c"), ("b",)]
    with pytest.raises(ConfigError, match="71 peers to vouch for"):
        change_vouches(tmp_path, [PeerId(f"{at}") for at in range(70)], undo=False)

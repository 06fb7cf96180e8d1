"""Rates of holders and the order of transfers: who will be done first, and what fewest have."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from spes_p2p.errors import PeerSilent
from spes_p2p.exchange.rates import FIRST, MOST_PLACES, MOST_REMEMBERED, Place, Rates, Turns, at_once
from spes_p2p.ids import PeerId
from tests.simulation.virtual_time import run_virtual

A, B, C = (PeerId(name) for name in "abc")


class Time:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def fetched(rates: Rates, time: Time, peer: PeerId, size: int, seconds: float, came: int | None = None) -> None:
    with rates.asking(peer, size) as done:
        time.now += seconds
        done(size if came is None else came)


def broken_off(rates: Rates, time: Time, peer: PeerId, size: int, seconds: float) -> None:
    with rates.asking(peer, size):
        time.now += seconds
        raise PeerSilent("no byte")


def test_the_fastest_first_and_who_is_not_known_counts_as_the_best() -> None:
    time = Time()
    rates = Rates(time)
    fetched(rates, time, A, 1000, 10.0)
    fetched(rates, time, B, 1000, 1.0)
    assert rates.fastest([A, B, C], 1000) == [B, C, A]
    with rates.asking(B, 500):
        assert rates.fastest([A, B, C], 1000) == [C, B, A], "it has something to send already"


def test_streams_of_one_holder_count_together() -> None:
    time = Time()
    rates = Rates(time)
    with rates.asking(A, 1000) as one, rates.asking(A, 1000) as other:
        time.now += 10.0
        one(1000)
        other(1000)
    assert rates.rate(A) == pytest.approx(200.0, rel=0.3)


def test_small_answers_say_nothing_and_broken_ones_count_against_their_holder() -> None:
    time = Time()
    rates = Rates(time)
    fetched(rates, time, A, 1000, 1.0, came=10)
    assert rates.rate(A) == 0.0
    fetched(rates, time, A, 1000, 1.0)
    with pytest.raises(PeerSilent):
        broken_off(rates, time, A, 1000, 5.0)
    assert rates.rate(A) == 50.0
    assert rates.fastest([A, B], 1) == [A, B], "nobody else is known to be better"


def test_what_is_remembered_is_bounded() -> None:
    time = Time()
    rates = Rates(time)
    for number in range(3 * MOST_REMEMBERED):
        fetched(rates, time, PeerId(f"p{number}"), 1, 1.0)
    assert len(rates._holders) <= MOST_REMEMBERED


def test_what_comes_from_the_least_busy_goes_first_and_then_what_is_rare() -> None:
    rates = Rates(Time())
    assert rates.place([]) == FIRST
    with rates.asking(A, 1000), rates.asking(A, 1), rates.asking(B, 1):
        places = [[A], [A, B], [B], [B, C], [C]]
        assert sorted(places, key=rates.place) == [[C], [B, C], [B], [A, B], [A]]


def test_turns_are_given_to_the_smallest_place_and_come_back_from_who_is_cancelled() -> None:
    order: list[int] = []
    copies = {1: 3, 2: 1, 3: 3, 4: 2}

    async def main() -> None:
        turns = Turns(1)

        async def one(number: int) -> None:
            async with turns.turn(lambda: (0, copies[number])):
                order.append(number)
                await asyncio.sleep(1.0)

        tasks = [asyncio.create_task(one(number)) for number in copies]
        await asyncio.sleep(0.5)
        tasks[3].cancel()
        copies[3] = 0
        await asyncio.gather(*tasks, return_exceptions=True)
        async with turns.turn():
            pass

    run_virtual(main(), 100.0)
    assert order == [1, 3, 2]


def test_behind_many_others_goes_at_once_what_must() -> None:
    order: list[int] = []
    asked = 0

    def place_of(number: int) -> Callable[[], Place]:
        def place() -> Place:
            nonlocal asked
            asked += 1
            return (1, MOST_PLACES * 3 - number)

        return place

    async def main() -> None:
        turns = Turns(1)

        async def one(number: int, place: Callable[[], Place]) -> None:
            async with turns.turn(place):
                order.append(number)
                await asyncio.sleep(1.0)

        waiting = [one(number, place_of(number)) for number in range(2 * MOST_PLACES)]
        await asyncio.gather(*waiting, one(-1, at_once))

    run_virtual(main())
    assert order[:3] == [0, -1, MOST_PLACES], "the first has the turn before the others come"
    assert sorted(order) == list(range(-1, 2 * MOST_PLACES))
    assert asked <= 2 * MOST_PLACES * (MOST_PLACES + 1)

"""Rates at the door: nobody takes more than its own, strangers together no more than theirs, members always get in."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_p2p.errors import NetworkError, RemoteProtocolError
from spes_p2p.ids import PeerId
from spes_p2p.swarm import door
from spes_p2p.swarm.calls import CALL_BYTES, CALLS, MAX_CALL_BYTES, answer_limits
from spes_p2p.swarm.door import Door, DoorLimits, Rate
from spes_p2p.swarm.memory_backend import MemoryNetwork
from spes_p2p.swarm.ports import Blob
from spes_p2p.swarm.stream_server import STREAMS
from tests.simulation.virtual_time import run_virtual

A, B, STRANGER = PeerId("a"), PeerId("b"), PeerId("stranger")
MEMBERS = {A, B}
LIMITS = DoorLimits(Rate(10.0, 20.0), Rate(2.0, 4.0), Rate(5.0, 10.0))


class Clock:
    seconds = 0.0

    def now(self) -> float:
        return self.seconds


def admitted(at: Door, caller: PeerId, tries: int) -> int:
    return sum(at.admits(caller) for _ in range(tries))


def test_a_caller_has_a_burst_and_then_its_rate() -> None:
    clock = Clock()
    at = Door(LIMITS, MEMBERS.__contains__, clock)
    assert admitted(at, A, 100) == 20
    assert admitted(at, B, 100) == 20
    clock.seconds += 0.5
    assert admitted(at, A, 100) == 5
    clock.seconds += 1000.0
    assert admitted(at, A, 100) == 20
    assert not at.admits(A, 21.0)


def test_any_number_of_strangers_share_what_there_is_for_them_and_members_lose_nothing() -> None:
    clock = Clock()
    at = Door(LIMITS, MEMBERS.__contains__, clock)
    assert admitted(at, STRANGER, 100) == 4
    assert sum(admitted(at, PeerId(f"key {number}"), 100) for number in range(100)) == 6
    assert admitted(at, A, 100) == 20
    clock.seconds += 1.0
    assert sum(admitted(at, PeerId(f"key {number}"), 100) for number in range(100)) == 5


def test_who_becomes_a_member_has_a_members_rate() -> None:
    members = set[PeerId]()
    at = Door(LIMITS, members.__contains__, Clock())
    assert admitted(at, A, 100) == 4
    members.add(A)
    assert admitted(at, A, 100) == 20


def test_it_forgets_old_keys_not_what_strangers_took() -> None:
    at = Door(LIMITS, MEMBERS.__contains__, Clock())
    for number in range(2 * door.MOST_CALLERS):
        at.admits(PeerId(f"key {number}"))
    assert len(at._callers) == door.MOST_CALLERS
    assert not at.admits(STRANGER)


def test_who_took_more_than_it_had_is_refused_until_that_is_paid() -> None:
    clock = Clock()
    at = Door(LIMITS, MEMBERS.__contains__, clock)
    assert at.admits(STRANGER, 0.0)
    at.charge(STRANGER, 8.0)  # 4 more than its burst
    assert not at.admits(STRANGER, 0.0)
    assert at.admits(PeerId("another stranger"), 0.0)
    clock.seconds += 1.9
    assert not at.admits(STRANGER, 0.0)
    clock.seconds += 0.2
    assert at.admits(STRANGER, 0.0)


def test_answers_to_strangers_are_a_part_of_a_limited_upload() -> None:
    assert answer_limits(None) == answer_limits(1e9) == CALL_BYTES
    tight = answer_limits(100_000.0)
    assert tight.member == CALL_BYTES.member
    assert tight.strangers == tight.stranger == Rate(25_000.0, 200_000.0)


def test_large_answers_are_given_as_often_as_the_door_allows() -> None:
    class Talkative(Counting):
        async def on_call(self, caller: PeerId, request: bytes) -> bytes:
            self.calls += 1
            return bytes(MAX_CALL_BYTES)

    async def main() -> int:
        network, handler = MemoryNetwork(), Talkative()
        await network.peer("server").transport.serve(handler, MEMBERS.__contains__)
        asking = network.peer(STRANGER).transport
        for _ in range(100):
            with contextlib.suppress(RemoteProtocolError):
                await asking.call(PeerId("server"), b"more", 60.0)
        return handler.calls * MAX_CALL_BYTES

    assert run_virtual(main()) <= CALL_BYTES.stranger.burst + 60.0 * CALL_BYTES.stranger.per_second + MAX_CALL_BYTES


@given(st.lists(st.tuples(st.floats(0.0, 3.0), st.sampled_from([A, B, STRANGER]), st.floats(0.0, 30.0)), max_size=60))
def test_over_any_time_nobody_takes_more_than_rate_and_burst(asked: list[tuple[float, PeerId, float]]) -> None:
    clock, taken = Clock(), dict.fromkeys((A, B, STRANGER), 0.0)
    at = Door(LIMITS, MEMBERS.__contains__, clock)
    for pause, caller, amount in asked:
        clock.seconds += pause
        taken[caller] += amount if at.admits(caller, amount) else 0.0
    for caller, amount in taken.items():
        rate = LIMITS.member if caller in MEMBERS else LIMITS.stranger
        assert amount <= rate.burst + clock.seconds * rate.per_second + 1e-6


class Counting:
    calls = fetches = 0

    async def on_call(self, caller: PeerId, request: bytes) -> bytes:
        self.calls += 1
        return b""

    async def on_fetch(self, caller: PeerId, request: bytes) -> Blob:
        self.fetches += 1
        return Blob(b"data")


def flooded(callers: list[PeerId]) -> Counting:
    """What reaches a peer of 3,000 calls and 3,000 streams at once, while a member makes 50 of each."""

    async def main() -> Counting:
        network, handler = MemoryNetwork(), Counting()
        server = PeerId("server")
        await network.peer(server).transport.serve(handler, MEMBERS.__contains__)
        from_all = [network.peer(callers[number % len(callers)]).transport for number in range(3000)]
        calls = [one.call(server, b"more", 60.0) for one in from_all]
        streams = [one.fetch(server, b"", 60.0, 100) for one in from_all]
        flood = asyncio.gather(*calls, *streams, return_exceptions=True)
        member = network.peer(B).transport
        for _ in range(50):
            assert await member.call(server, b"", 5.0) == b""
            assert bytes((await member.fetch(server, b"", 5.0, 100))[1]) == b"data"
        refused = [answer for answer in await flood if isinstance(answer, BaseException)]
        assert all(isinstance(answer, RemoteProtocolError | NetworkError) for answer in refused)
        assert handler.calls + handler.fetches + len(refused) == 6100
        return handler

    return run_virtual(main())


@pytest.mark.parametrize("keys", [1, 300])
def test_of_a_flood_little_reaches_the_handler_and_a_member_is_served(keys: int) -> None:
    handler = flooded([PeerId(f"key {number}") for number in range(keys)])
    most = CALLS.stranger if keys == 1 else CALLS.strangers
    assert handler.calls <= 50 + most.burst + 60.0 * most.per_second
    assert handler.calls < 1500
    assert handler.fetches < 1000


def test_one_large_call_is_never_too_much() -> None:
    for limits in (CALLS, CALL_BYTES, STREAMS):
        assert min(limits.member.burst, limits.stranger.burst, limits.strangers.burst) >= 1
    assert min(rate.burst for rate in (CALL_BYTES.member, CALL_BYTES.stranger, CALL_BYTES.strangers)) >= MAX_CALL_BYTES

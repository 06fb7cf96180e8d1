"""When relays are used, and what a relay can be made to do. Real circuits: tests/swarm/test_relay.py."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from google.protobuf.wrappers_pb2 import BytesValue
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, P2PHandlerError
from hivemind.utils.multiaddr import Multiaddr

from spes_p2p import wire
from spes_p2p.ids import PeerId, sha256
from spes_p2p.swarm.calls import NOT_SERVING
from spes_p2p.swarm.hivemind_backend import relay
from spes_p2p.swarm.hivemind_backend.dial import parse_address, relay_of, through
from spes_p2p.swarm.hivemind_backend.relay import RelayDesk, RelayFinding, RelayReply, RelayRequest, try_relays

RELAYS = [
    PeerId(name)
    for name in (
        "QmSoLV4Bbm51jM9C4gDYZQ9Cy3U6aXMJDAbzgu2fzaDs64",
        "QmQHXcqZ5Fx8AUSY26uqxtWHShUhT6vN3WDAnfvrsUBKyy",
        "QmWuVsqCU17Y448LWNQeAoCcizP5pv9K3WhDWU3cRXnKRQ",
        "Qmeh1CnufaTWXhYfjGKHqzdLg9htTaxHnjj58xxd2K4wGF",
    )
]
ME = PeerId("QmZfSGLV17vxFY2NHJkGzP5Bw1BJwc8YAEdVfwfh6cexCx")
DIRECT = "/ip4/11.0.0.7/tcp/4001"
LIMIT = 98_304
"""What comes through a relay that cuts: measured."""


def _circuit(name: PeerId, at: int = 1) -> str:
    return f"/ip4/11.0.0.{at}/tcp/4001/p2p/{name}/p2p-circuit/p2p/{ME}"


class Stream:
    """A circuit of a fake: carries up to `limit` bytes, then ends silently."""

    def __init__(self, limit: int) -> None:
        self.reader, self.asked = asyncio.StreamReader(), asyncio.StreamReader()
        self._left = limit

    def write(self, data: bytes) -> None:
        self.reader.feed_data(data[: self._left])
        self._left -= len(data)
        if self._left < 0:
            self.reader.feed_eof()

    async def drain(self) -> None:
        if self._left < 0:
            raise ConnectionResetError("the circuit was reset")

    def close(self) -> None:
        if not self.reader.at_eof():
            self.reader.feed_eof()


class Machine:
    """A P2P behind NAT with places at `relays`; each carries so many bytes, or None: it does not know the question."""

    def __init__(self, relays: dict[PeerId, int | None], circuits: list[str] | None = None) -> None:
        self.relays = relays
        self.circuits = [_circuit(name) for name in relays] if circuits is None else circuits
        self.handlers: dict[str, Callable[..., Any]] = {}
        self.asked: list[PeerId] = []
        self.over = _circuit(RELAYS[0]).rpartition("/p2p/")[0]

    async def get_visible_maddrs(self, latest: bool = False) -> list[str]:
        if not self.circuits:
            raise ValueError("no address")
        return self.circuits

    async def add_binary_stream_handler(self, name: str, handler: Callable[..., Any]) -> None:
        self.handlers[name] = handler

    async def remove_binary_stream_handler(self, name: str) -> None:
        del self.handlers[name]

    async def call_protobuf_handler(self, peer: Any, name: str, request: BytesValue, kind: Any) -> BytesValue:
        asked = PeerId(peer.to_base58())
        self.asked.append(asked)
        limit = self.relays[asked]
        if limit is None:
            raise P2PHandlerError("no such handler")
        came = await self._carry(wire.unpack(RelayRequest, request.value, max_bytes=1024).nonce, limit)
        return BytesValue(value=wire.pack(RelayReply(True, len(came), sha256(came))))

    async def _carry(self, nonce: bytes, limit: int) -> bytes:
        stream = Stream(limit)
        stream.asked.feed_data(nonce)
        info = SimpleNamespace(addr=self.over)
        serving = asyncio.create_task(self.handlers[relay.RELAY_STREAM_NAME](info, stream.asked, stream))
        came = b""
        while len(came) < relay.TEST_BYTES and (piece := await stream.reader.read(2**16)):
            came += piece
        stream.asked.feed_eof()
        await serving
        return came


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "ADDRESS_SECONDS", 0.01)
    monkeypatch.setattr(relay, "_POLL_SECONDS", 0.001)


def _try(machine: Machine, initial: list[PeerId] = RELAYS) -> RelayFinding:
    found = asyncio.run(try_relays(cast(Any, machine), initial))
    assert not machine.handlers, "nobody serves the test when it is over"
    return found


def test_relays_that_carry_the_whole_test_are_used_and_others_are_not() -> None:
    found = _try(Machine({RELAYS[0]: 2**32, RELAYS[1]: LIMIT}))
    assert found.passed == (RELAYS[0],)
    assert found.words.startswith("1 of 2 relays carried a test of 256 KiB")


def test_where_each_cuts_none_is_used_and_the_line_says_at_what() -> None:
    found = _try(Machine({RELAYS[0]: LIMIT, RELAYS[1]: 65_536}))
    assert found == RelayFinding((), "no relay is used: each cut a test of 256 KiB (at most 96 KiB came through)")


def test_relays_that_do_not_make_the_test_are_not_used() -> None:
    assert _try(Machine({RELAYS[0]: None})) == RelayFinding((), "no relay is used: none has made the test")


def test_what_did_not_come_over_a_circuit_does_not_count() -> None:
    machine = Machine({RELAYS[0]: 2**32})
    machine.over = DIRECT
    assert not _try(machine).passed


def test_no_address_at_a_relay_in_time() -> None:
    assert "in 0.01 s" in _try(Machine({}, [])).words


def test_only_initial_peers_are_asked() -> None:
    stranger = PeerId("QmU8V44NzgewAMUH7Ugt3t1ss2uhu68GupNosJJx88XyVG")
    machine = Machine({RELAYS[1]: 2**32}, [DIRECT, _circuit(stranger), _circuit(RELAYS[1])])
    assert _try(machine).passed == (RELAYS[1],)
    assert machine.asked == [RELAYS[1]]


def test_too_few_initial_peers_are_told_at_once() -> None:
    machine = Machine({RELAYS[0]: 2**32})
    assert "only 3 of the initial peers" in _try(machine, [*RELAYS[:3], RELAYS[0]]).words
    assert not machine.asked


class Scout:
    """A fresh daemon of a relay; `carried` is what the caller's stream brings, None: the circuit cannot be opened."""

    def __init__(self, carried: bytes | None) -> None:
        self.carried = carried
        self.dialled: list[tuple[str, list[Multiaddr]]] = []
        self.said: list[bytes] = []
        self.running = 0
        self.let_go = asyncio.Event()
        self.let_go.set()
        self._client = SimpleNamespace(connect=self._connect)

    async def start(self) -> Any:
        self.running += 1
        assert self.running == 1, "one after the other"
        await self.let_go.wait()
        return self

    async def _connect(self, peer: Any, addresses: list[Multiaddr]) -> None:
        self.dialled.append((peer.to_base58(), addresses))
        if self.carried is None:
            raise P2PDaemonError("NO_RESERVATION")

    async def call_binary_stream_handler(self, peer: Any, name: str) -> tuple[Any, asyncio.StreamReader, Any]:
        assert self.carried is not None
        reader = asyncio.StreamReader()
        reader.feed_data(self.carried)
        reader.feed_eof()

        async def drain() -> None:
            return None

        return None, reader, SimpleNamespace(write=self.said.append, drain=drain, close=lambda: None)

    async def shutdown(self) -> None:
        self.running -= 1


async def _at_home(latest: bool = False) -> list[str]:
    return [f"{DIRECT}/p2p/{RELAYS[0]}", _circuit(RELAYS[1])]


NONCE = b"n" * 16


def _desk(scout: Scout, carries: bool = True, clock: Callable[[], float] = lambda: 0.0) -> RelayDesk:
    return RelayDesk(cast(Any, SimpleNamespace(get_visible_maddrs=_at_home)), scout.start, carries, clock)


async def _answer(desk: RelayDesk, request: bytes | None = None) -> RelayReply:
    said = wire.pack(RelayRequest(NONCE)) if request is None else request
    return wire.unpack(RelayReply, await desk.answer(ME, said), max_bytes=1024)


def test_a_relay_dials_its_caller_through_itself_and_nobody_else() -> None:
    async def main() -> None:
        payload = b"x" * relay.TEST_BYTES
        scout = Scout(payload)
        assert await _answer(_desk(scout)) == RelayReply(True, len(payload), sha256(payload))
        assert scout.dialled == [(ME, [through(f"{DIRECT}/p2p/{RELAYS[0]}")])]
        assert scout.said == [NONCE]
        assert scout.running == 0

    asyncio.run(main())


def test_a_relay_reads_no_more_than_the_test() -> None:
    async def main() -> None:
        assert (await _answer(_desk(Scout(b"x" * (2 * relay.TEST_BYTES))))).received == relay.TEST_BYTES
        cut = await _answer(_desk(Scout(b"x" * LIMIT)))
        assert (cut.tried, cut.received) == (True, LIMIT)
        assert (await _answer(_desk(Scout(None)))).received == 0

    asyncio.run(main())


def test_one_test_at_a_time_and_so_many_an_hour() -> None:
    async def main() -> None:
        now, scout = [0.0], Scout(b"")
        desk = _desk(scout, clock=lambda: now[0])
        scout.let_go.clear()
        first = asyncio.create_task(_answer(desk))
        await asyncio.sleep(0)
        assert await _answer(desk) == RelayReply(False)
        scout.let_go.set()
        assert (await first).tried
        replies = [await _answer(desk) for _ in range(relay.MOST_AN_HOUR)]
        assert [reply.tried for reply in replies] == [True] * (relay.MOST_AN_HOUR - 1) + [False]
        now[0] = 3600.0
        assert (await _answer(desk)).tried

    asyncio.run(main())


def test_who_carries_no_circuits_starts_nothing() -> None:
    async def main() -> None:
        assert await _answer(_desk(Scout(b""), carries=False)) == RelayReply(False)
        for bad in (b"", b"\x91\xc4\x01x", wire.pack(RelayRequest(NONCE)) * 100):
            assert await _desk(Scout(b"")).answer(ME, bad) == NOT_SERVING

    asyncio.run(main())


def test_the_daemon_is_told_of_a_relay_as_it_reads_it() -> None:
    """hivemind's own bytes (a CID) make the daemon refuse the request, with all addresses in it."""
    told = parse_address(_circuit(RELAYS[1])).maddr.to_bytes().hex()
    multihash = "1220" + "1cea9d212cb51c9fee79b57b4a6526c9575444fead150e71783a89e428bee3b0"
    assert told == "040b000001" + "060fa1" + "a50322" + multihash + "a202"
    assert parse_address(DIRECT).maddr == Multiaddr(DIRECT)
    assert relay_of(_circuit(RELAYS[1])) == RELAYS[1]
    assert relay_of(f"{DIRECT}/p2p/{ME}") is None

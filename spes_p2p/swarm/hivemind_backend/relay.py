"""`--use-relay`: whether libp2p relays carry to a machine that nobody can dial what they must, found out by a test.

libp2p reserves places at relays among the initial peers. Two relay services compete in each daemon of hivemind 1.1.12:
one cuts a circuit after 128 KiB, the other after 4 GiB, and nothing says which of them has won
(`scripts/bench_relay.py` counts). So a relay is used only if more than that went through it in one piece. It tests its
own circuit: a daemon of its own, which knows nobody, dials the asker through it, so that nobody can be made to dial a
third. Leaves out direct dials (`reach`); nothing depends on what is found out here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from google.protobuf.wrappers_pb2 import BytesValue
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, P2PHandlerError

from spes_p2p import wire
from spes_p2p.errors import NetworkError, RemoteProtocolError
from spes_p2p.ids import PeerId, sha256
from spes_p2p.swarm.calls import NOT_SERVING
from spes_p2p.swarm.hivemind_backend.dial import relay_of, through

RELAY_TEST_NAME = "spes-p2p/1::SwarmServicer.rpc_relay_test"
RELAY_STREAM_NAME = "spes-p2p/1::relay-test"
TEST_BYTES = 2**18
"""What a circuit must carry in one piece: twice what libp2p's defaults allow."""
LEAST_RELAYS = 4
"""libp2p chooses among so many; where there are fewer, it waits for three minutes before it takes any."""
ADDRESS_SECONDS = 5.0
"""In which a relay must have given us an address; it takes less than one where it comes."""
TEST_SECONDS = 5.0
ANSWER_SECONDS = 8.0
MOST_AN_HOUR = 32
"""Tests that a relay makes; one at a time."""
_POLL_SECONDS = 0.2
_NONCE_BYTES = 16
_READ_BYTES = 2**16
_MAX_BYTES = 1024
_BROKEN = (OSError, asyncio.IncompleteReadError, P2PDaemonError, P2PHandlerError, NetworkError, RemoteProtocolError)


@dataclass(frozen=True)
class RelayRequest:
    """Names no address: the one that is dialled is the caller."""

    nonce: bytes
    """Said again by who opens the stream."""

    def __post_init__(self) -> None:
        if len(self.nonce) != _NONCE_BYTES:
            raise ValueError(f"a nonce has {_NONCE_BYTES} bytes, not {len(self.nonce)}")


@dataclass(frozen=True)
class RelayReply:
    tried: bool
    """False: it carries no circuits, or has no time."""
    received: int = 0
    """Bytes that came over the circuit."""
    digest: bytes = b""
    """Their SHA-256."""


@dataclass(frozen=True)
class RelayFinding:
    """What came of `--use-relay`: the relays to use, and a line for a person."""

    passed: tuple[PeerId, ...]
    words: str


class RelayDesk:
    """The relay's side. `start_scout()` gives a fresh daemon that listens nowhere; `carries`: we are a relay at all."""

    def __init__(
        self,
        p2p: P2P,
        start_scout: Callable[[], Awaitable[P2P]],
        carries: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._p2p, self._start_scout, self._carries, self._clock = p2p, start_scout, carries, clock
        self._busy = asyncio.Lock()
        self._tests: deque[float] = deque(maxlen=MOST_AN_HOUR)

    async def answer(self, caller: PeerId, request: bytes) -> bytes:
        try:
            nonce = wire.unpack(RelayRequest, request, max_bytes=_MAX_BYTES).nonce
        except RemoteProtocolError:
            return NOT_SERVING
        if not self._carries or self._busy.locked() or self._has_made_enough():
            return wire.pack(RelayReply(False))
        async with self._busy:
            self._tests.append(self._clock())
            return wire.pack(await self._test(caller, nonce))

    def _has_made_enough(self) -> bool:
        return len(self._tests) == MOST_AN_HOUR and self._clock() - self._tests[0] < 3600.0

    async def _test(self, caller: PeerId, nonce: bytes) -> RelayReply:
        scout = await self._start_scout()
        received = bytearray()
        try:
            with contextlib.suppress(TimeoutError, ValueError, *_BROKEN):  # no circuit, or one that was cut
                async with asyncio.timeout(TEST_SECONDS):
                    own = [str(maddr) for maddr in await self._p2p.get_visible_maddrs()]
                    circuits = [through(address) for address in own if relay_of(address) is None]
                    await scout._client.connect(PeerID.from_base58(caller), circuits)
                    await _receive(scout, caller, nonce, received)
        finally:
            await scout.shutdown()
        return RelayReply(True, len(received), sha256(bytes(received)))


async def _receive(scout: P2P, caller: PeerId, nonce: bytes, received: bytearray) -> None:
    """Reads what the caller sends, up to its end, and no more than it should be."""
    _, reader, writer = await scout.call_binary_stream_handler(PeerID.from_base58(caller), RELAY_STREAM_NAME)
    try:
        writer.write(nonce)
        await writer.drain()
        while len(received) < TEST_BYTES and (piece := await reader.read(min(_READ_BYTES, TEST_BYTES - len(received)))):
            received += piece
    finally:
        writer.close()


async def try_relays(p2p: P2P, initial: Sequence[PeerId]) -> RelayFinding:
    """Which relays among `initial` (peers that answer) carry a test; takes 13 s at most. Auto-relay must be on."""
    if len(set(initial)) < LEAST_RELAYS:
        few = f"only {len(set(initial))} of the initial peers answer, and libp2p chooses relays among {LEAST_RELAYS}"
        return RelayFinding((), f"no relay is used: {few}")
    relays = await _reserved(p2p, frozenset(initial))
    if not relays:
        return RelayFinding((), f"no relay is used: none has given this machine an address in {ADDRESS_SECONDS:g} s")
    replies = await _tested(p2p, relays)
    passed = tuple(relay for relay, (reply, good) in replies.items() if good)
    size = f"{TEST_BYTES // 2**10} KiB"
    if passed:
        count = f"{len(passed)} of {len(relays)} {'relay' if len(relays) == 1 else 'relays'}"
        return RelayFinding(passed, f"{count} carried a test of {size}; who has --use-relay can call through them")
    came = max(reply.received for reply, _ in replies.values()) // 2**10
    if not any(reply.tried for reply, _ in replies.values()):
        return RelayFinding((), "no relay is used: none has made the test")
    return RelayFinding((), f"no relay is used: each cut a test of {size} (at most {came} KiB came through)")


async def _reserved(p2p: P2P, initial: frozenset[PeerId]) -> tuple[PeerId, ...]:
    """The relays at which libp2p has a place for us; waits for the first ones."""
    deadline = asyncio.get_running_loop().time() + ADDRESS_SECONDS
    while True:
        found = await circuits_of(p2p)
        relays = tuple(dict.fromkeys(relay for address in found if (relay := relay_of(address)) in initial and relay))
        if relays or asyncio.get_running_loop().time() >= deadline:
            return relays
        await asyncio.sleep(_POLL_SECONDS)


async def circuits_of(p2p: P2P) -> list[str]:
    """Our addresses at relays."""
    try:
        return [str(maddr) for maddr in await p2p.get_visible_maddrs(latest=True) if relay_of(str(maddr)) is not None]
    except ValueError:  # no address at all
        return []


async def _tested(p2p: P2P, relays: Sequence[PeerId]) -> dict[PeerId, tuple[RelayReply, bool]]:
    """The answer of each relay, and whether all came through it as it was sent."""
    payloads = {os.urandom(_NONCE_BYTES): os.urandom(TEST_BYTES) for _ in relays}

    async def serve(info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(TimeoutError, *_BROKEN):  # the reply will tell
                async with asyncio.timeout(TEST_SECONDS):
                    payload = payloads.get(await reader.readexactly(_NONCE_BYTES))
                    if payload is not None and relay_of(str(info.addr)) is not None:
                        writer.write(payload)
                        await writer.drain()
                        await reader.read(1)  # until the other end has it all
        finally:
            writer.close()

    await p2p.add_binary_stream_handler(RELAY_STREAM_NAME, serve)
    try:
        replies = await asyncio.gather(*(_ask(p2p, *pair) for pair in zip(relays, payloads, strict=True)))
    finally:
        await p2p.remove_binary_stream_handler(RELAY_STREAM_NAME)
    sent = map(sha256, payloads.values())
    return {relay: (reply, reply.digest == own) for relay, reply, own in zip(relays, replies, sent, strict=True)}


async def _ask(p2p: P2P, relay: PeerId, nonce: bytes) -> RelayReply:
    value = BytesValue(value=wire.pack(RelayRequest(nonce)))
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            reply = await p2p.call_protobuf_handler(PeerID.from_base58(relay), RELAY_TEST_NAME, value, BytesValue)
            return wire.unpack(RelayReply, reply.value, max_bytes=_MAX_BYTES)
    except (TimeoutError, *_BROKEN):
        return RelayReply(False)

"""Whether this machine can be dialled from outside: peers that we are connected to are asked to try.

A helper dials only the address from which it sees the asker, so that nobody can be made to dial a third; with a fresh
daemon, since its own would use the connection that is there. One success is enough to count as public; to count as
private, all helpers that tried must have failed, since a helper may be cut off itself, or lie.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

from google.protobuf.wrappers_pb2 import BytesValue
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, P2PHandlerError

from spes_p2p import wire
from spes_p2p.bounds import Bounded, between
from spes_p2p.errors import NetworkError, RemoteProtocolError
from spes_p2p.ids import PeerId
from spes_p2p.swarm.calls import NOT_SERVING
from spes_p2p.swarm.door import Door, DoorLimits, Rate
from spes_p2p.swarm.hivemind_backend.dial import Address, Dialled, dial, parse_address

DIAL_BACK_NAME = "spes-p2p/1::SwarmServicer.rpc_dial_back"
MAX_PORTS = 4
HANDSHAKE_SECONDS = 3.0
ANSWER_SECONDS = 5.5
"""Longest wait for a helper's answer: TCP dials, a daemon's start, a handshake, and a wait for its turn."""
ASKED_AT_ONCE = 3
MOST_TRIES = 8
"""Most askers that a helper serves at once, each with a daemon of its own; handshakes run one after another."""
TRIES = DoorLimits(Rate(0.2, 3.0), Rate(0.2, 3.0), Rate(1.0, 20.0))
"""Handshakes that a helper makes: a daemon each. A newcomer asks for one."""
_BUSY_SECONDS = 0.5
_MAX_BYTES = 1024


class Reach(enum.Enum):
    """What was found out."""

    PUBLIC = "public"
    PRIVATE = "private"
    UNKNOWN = "unknown"
    """Nobody could try."""


@dataclass(frozen=True)
class DialBackRequest(Bounded):
    ports: tuple[Annotated[int, between(1, 2**16 - 1)], ...]
    """On which the asker listens."""


@dataclass(frozen=True)
class DialBackReply:
    tried: bool
    """False: the helper is busy, or sees no plain address of the asker."""
    address: str = ""
    """The one that answered, with the asker's identity; empty: none did."""
    busy: bool = False
    """It may be asked again."""


class DialBackHandler:
    """The helper's side. `start_scout()` gives a fresh daemon that listens nowhere."""

    def __init__(self, p2p: P2P, start_scout: Callable[[], Awaitable[P2P]]) -> None:
        self._p2p, self._start_scout = p2p, start_scout
        self._served: set[PeerId] = set()
        self._scouting = asyncio.Lock()
        self._door = Door(TRIES, lambda peer: False)

    async def answer(self, caller: PeerId, request: bytes) -> bytes:
        try:
            ports = wire.unpack(DialBackRequest, request, max_bytes=_MAX_BYTES).ports
        except RemoteProtocolError:
            return NOT_SERVING
        if caller in self._served or len(self._served) >= MOST_TRIES or not self._door.admits(caller):
            return wire.pack(DialBackReply(False, busy=True))
        self._served.add(caller)
        try:
            return wire.pack(await self._try(caller, ports))
        except TimeoutError:  # others' handshakes come first
            return wire.pack(DialBackReply(False, busy=True))
        finally:
            self._served.remove(caller)

    async def _try(self, caller: PeerId, ports: Sequence[int]) -> DialBackReply:
        # the IP addresses from which the caller is connected to us
        infos = await self._p2p.list_peers()
        found = {parse_address(str(m)).host for info in infos if info.peer_id.to_base58() == caller for m in info.addrs}
        hosts = sorted(found - {""})
        if not hosts or not ports or len(ports) > MAX_PORTS:
            return DialBackReply(False)
        return DialBackReply(True, await self._dial(caller, hosts, ports))

    async def _dial(self, caller: PeerId, hosts: Sequence[str], ports: Sequence[int]) -> str:
        kinds = {host: "ip6" if ":" in host else "ip4" for host in hosts}
        addresses = [parse_address(f"/{kinds[host]}/{host}/tcp/{port}") for host in hosts for port in ports]
        found = await asyncio.gather(*(dial(address) for address in addresses))
        accepting = [one for one, how in zip(addresses, found, strict=True) if how is Dialled.ACCEPTED]
        if not accepting:
            return ""
        async with asyncio.timeout(ANSWER_SECONDS):
            await self._scouting.acquire()
        try:
            return await self._shake_hands(caller, accepting)
        finally:
            self._scouting.release()

    async def _shake_hands(self, caller: PeerId, addresses: Sequence[Address]) -> str:
        """The first address at which it is really the caller that listens."""
        scout = await self._start_scout()
        try:
            for address in addresses:
                try:
                    async with asyncio.timeout(HANDSHAKE_SECONDS):
                        await scout._client.connect(PeerID.from_base58(caller), [address.maddr])
                    return address.text
                except (TimeoutError, P2PDaemonError):  # somebody else listens there
                    continue
        finally:
            await scout.shutdown()
        return ""


async def find_reach(p2p: P2P, helpers: Sequence[PeerId], ports: Sequence[int]) -> tuple[Reach, str]:
    """(what was found, the address at which we were dialled). Asks a few at once, others where none of them tried."""
    asked = wire.pack(DialBackRequest(tuple(ports)[:MAX_PORTS]))
    for first in range(0, len(helpers), ASKED_AT_ONCE):
        asking = [asyncio.ensure_future(_ask(p2p, one, asked)) for one in helpers[first : first + ASKED_AT_ONCE]]
        reach, address = await _best_of(asking)
        if reach is not Reach.UNKNOWN:
            return reach, address
    return Reach.UNKNOWN, ""


async def _best_of(asking: Sequence[asyncio.Future[DialBackReply]]) -> tuple[Reach, str]:
    """Does not wait for the others once one has reached us."""
    found = Reach.UNKNOWN
    try:
        for next_reply in asyncio.as_completed(asking):
            reply = await next_reply
            if reply.address:
                return Reach.PUBLIC, reply.address
            if reply.tried:
                found = Reach.PRIVATE
    finally:
        for one in asking:
            one.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    return found, ""


async def _ask(p2p: P2P, helper: PeerId, asked: bytes) -> DialBackReply:
    """Again while it is busy; "not tried" where it does not answer in time."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            while (said := await _ask_once(p2p, helper, asked)).busy:
                await asyncio.sleep(_BUSY_SECONDS)
            return said
    except (TimeoutError, P2PDaemonError, P2PHandlerError, NetworkError, RemoteProtocolError):
        return DialBackReply(False)


async def _ask_once(p2p: P2P, helper: PeerId, asked: bytes) -> DialBackReply:
    value = BytesValue(value=asked)
    reply = await p2p.call_protobuf_handler(PeerID.from_base58(helper), DIAL_BACK_NAME, value, BytesValue)
    return wire.unpack(DialBackReply, reply.value, max_bytes=_MAX_BYTES)

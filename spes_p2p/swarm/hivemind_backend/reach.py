"""Whether this machine can be dialled from outside: a peer that we are connected to is asked to try.

The helper dials only the address from which it sees the asker, so that nobody can be made to dial a third; with a fresh
daemon, since its own would use the connection that is there. One try at a time.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from google.protobuf.wrappers_pb2 import BytesValue
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, P2PHandlerError

from spes_p2p import wire
from spes_p2p.errors import NetworkError, RemoteProtocolError
from spes_p2p.ids import PeerId
from spes_p2p.swarm.calls import NOT_SERVING
from spes_p2p.swarm.hivemind_backend.dial import Dialled, dial, parse_address

DIAL_BACK_NAME = "spes-p2p/1::SwarmServicer.rpc_dial_back"
MAX_PORTS = 4
HANDSHAKE_SECONDS = 3.0
ANSWER_SECONDS = 5.5
"""What one helper may take: its TCP dials, the start of its daemon, a handshake."""
_MAX_BYTES = 1024


class Reach(enum.Enum):
    """What was found out."""

    PUBLIC = "public"
    PRIVATE = "private"
    UNKNOWN = "unknown"
    """Nobody could try."""


@dataclass(frozen=True)
class DialBackRequest:
    ports: tuple[int, ...]
    """On which the asker listens."""

    def __post_init__(self) -> None:
        for port in self.ports:
            if not 0 < port < 2**16:
                raise ValueError(f"port {port} is none")


@dataclass(frozen=True)
class DialBackReply:
    tried: bool
    """False: the helper is busy, or sees no plain address of the asker."""
    address: str = ""
    """The one that answered, with the asker's identity; empty: none did."""


class DialBackDesk:
    """The helper's side. `start_scout()` gives a fresh daemon that listens nowhere."""

    def __init__(self, p2p: P2P, start_scout: Callable[[], Awaitable[P2P]]) -> None:
        self._p2p, self._start_scout = p2p, start_scout
        self._busy = asyncio.Lock()

    async def answer(self, caller: PeerId, request: bytes) -> bytes:
        try:
            ports = wire.unpack(DialBackRequest, request, max_bytes=_MAX_BYTES).ports
        except RemoteProtocolError:
            return NOT_SERVING
        hosts = await self._hosts_of(caller)
        if self._busy.locked() or not hosts or not ports or len(ports) > MAX_PORTS:
            return wire.pack(DialBackReply(False))
        async with self._busy:
            return wire.pack(DialBackReply(True, await self._dial(caller, hosts, ports)))

    async def _hosts_of(self, caller: PeerId) -> list[str]:
        """The IP addresses from which the caller is connected to us."""
        infos = await self._p2p.list_peers()
        found = {parse_address(str(m)).host for info in infos if info.peer_id.to_base58() == caller for m in info.addrs}
        return sorted(found - {""})

    async def _dial(self, caller: PeerId, hosts: Sequence[str], ports: Sequence[int]) -> str:
        kinds = {host: "ip6" if ":" in host else "ip4" for host in hosts}
        addresses = [parse_address(f"/{kinds[host]}/{host}/tcp/{port}") for host in hosts for port in ports]
        found = await asyncio.gather(*(dial(address) for address in addresses))
        accepting = [one for one, how in zip(addresses, found, strict=True) if how is Dialled.ACCEPTED]
        if not accepting:
            return ""
        scout = await self._start_scout()
        try:
            for address in accepting:
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
    """(what was found, the address at which we were dialled). Asks one helper after the other until one has tried."""
    asked = wire.pack(DialBackRequest(tuple(ports)[:MAX_PORTS]))
    for helper in helpers:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                reply = await p2p.call_protobuf_handler(
                    PeerID.from_base58(helper), DIAL_BACK_NAME, BytesValue(value=asked), BytesValue
                )
            said = wire.unpack(DialBackReply, reply.value, max_bytes=_MAX_BYTES)
        except (TimeoutError, P2PDaemonError, P2PHandlerError, NetworkError, RemoteProtocolError):
            continue
        if said.tried:
            return (Reach.PUBLIC, said.address) if said.address else (Reach.PRIVATE, "")
    return Reach.UNKNOWN, ""

"""The first word between two peers, before the DHT is joined: what time it is, and whether an identity is in use.

Leaves out what the run is about.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from google.protobuf.wrappers_pb2 import BytesValue
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, P2PHandlerError

from spes_p2p import wire
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import PeerId
from spes_p2p.swarm.calls import NOT_SERVING

HELLO_NAME = "spes-p2p/1::SwarmServicer.rpc_hello"
_ALIVE_SECONDS = 2.0
_MAX_HELLO_BYTES = 1024


@dataclass(frozen=True)
class HelloRequest:
    ask_about: str
    """A peer id, or empty."""


@dataclass(frozen=True)
class HelloReply:
    wall_seconds: float
    alive: bool
    """The peer asked about is connected to the one that answers, and answered it just now."""


@dataclass(frozen=True)
class Met:
    """What a greeting told us about a peer."""

    ahead_seconds: float
    """How far its clock is ahead of ours (negative: behind), at least; 0 within the time that the greeting took."""
    alive: bool


class HelloHandler:
    """Answers greetings."""

    def __init__(self, p2p: P2P, wall_clock: Callable[[], float]) -> None:
        self._p2p, self._wall_clock = p2p, wall_clock

    async def answer(self, request: bytes) -> bytes:
        try:
            asked = wire.unpack(HelloRequest, request, max_bytes=_MAX_HELLO_BYTES).ask_about
        except RemoteProtocolError:
            return NOT_SERVING
        alive = bool(asked) and await self._is_alive(PeerId(asked))
        return wire.pack(HelloReply(self._wall_clock(), alive))

    async def _is_alive(self, peer: PeerId) -> bool:
        """Asks only whom we are connected to, so that nobody can make us dial."""
        connected = {info.peer_id.to_base58() for info in await self._p2p.list_peers()}
        if peer not in connected:
            return False
        try:
            async with asyncio.timeout(_ALIVE_SECONDS):
                await greet(self._p2p, peer, self._wall_clock)
        except (TimeoutError, P2PDaemonError, P2PHandlerError, RemoteProtocolError):
            return False
        return True


async def greet(p2p: P2P, peer: PeerId, wall_clock: Callable[[], float], ask_about: PeerId | str = "") -> Met:
    """Greets `peer`. Raises what hivemind raises, and RemoteProtocolError for an invalid answer."""
    before = wall_clock()
    reply = await p2p.call_protobuf_handler(
        PeerID.from_base58(peer), HELLO_NAME, BytesValue(value=wire.pack(HelloRequest(ask_about))), BytesValue
    )
    after = wall_clock()
    said = wire.unpack(HelloReply, reply.value, max_bytes=_MAX_HELLO_BYTES)
    return Met(max(said.wall_seconds - after, 0.0) + min(said.wall_seconds - before, 0.0), said.alive)

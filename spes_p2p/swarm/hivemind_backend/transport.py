"""Calls and streams over libp2p, with failures told apart (ports.Transport).

A call is one unary RPC of a hivemind servicer, a fetch is one binary stream. How others are reached is up to
`connections`. Leaves out how the network is joined.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from google.protobuf.wrappers_pb2 import BytesValue
from hivemind.p2p import P2P, P2PContext, ServicerBase
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo

from spes_p2p.ids import PeerId
from spes_p2p.swarm import calls
from spes_p2p.swarm.hivemind_backend.connections import Background, Connections, identity_of, peer_of
from spes_p2p.swarm.hivemind_backend.daemon import DAEMON_GONE, Daemon
from spes_p2p.swarm.hivemind_backend.gate import guard
from spes_p2p.swarm.hivemind_backend.hello import HelloHandler
from spes_p2p.swarm.hivemind_backend.pipe import Incoming, PipeStream
from spes_p2p.swarm.hivemind_backend.reach import DialBackHandler
from spes_p2p.swarm.ports import Handler, anybody
from spes_p2p.swarm.stream_server import StreamLimits, StreamServer
from spes_p2p.swarm.streams import Partial, fetch_stream

NAMESPACE = "spes-p2p/1"
_STREAM_NAME = f"{NAMESPACE}::fetch"
_ADDRESS_REFRESH_SECONDS = 30.0


class SwarmServicer(ServicerBase):
    """The unary RPCs of a peer."""

    def __init__(self, transport: HivemindTransport, hello: HelloHandler, dial_back: DialBackHandler) -> None:
        self._transport, self._hello, self._dial_back = transport, hello, dial_back

    async def rpc_call(self, request: BytesValue, context: P2PContext) -> BytesValue:
        return BytesValue(value=await self._transport.answer(peer_of(context.remote_id), request.value))

    async def rpc_hello(self, request: BytesValue, context: P2PContext) -> BytesValue:
        return BytesValue(value=await self._hello.answer(request.value))

    async def rpc_dial_back(self, request: BytesValue, context: P2PContext) -> BytesValue:
        return BytesValue(value=await self._dial_back.answer(peer_of(context.remote_id), request.value))


class OwnAddresses:
    """Where others may dial us: what the daemon knows, what it does not, and what another peer has tried."""

    def __init__(self, peer_id: PeerId) -> None:
        self._peer_id = peer_id
        self.names: tuple[str, ...] = ()
        """`/dnsaddr/` names by which others may find us, which the daemon knows nothing of."""
        self._dialled: tuple[str, ...] = ()
        self._visible: tuple[str, ...] = ()

    def all(self) -> tuple[str, ...]:
        """With our id."""
        return tuple(dict.fromkeys((*self.names, *self._dialled, *self._visible)))

    def note_dialled(self, address: str) -> None:
        """Another peer has reached us at this address, which the daemon may not know: a router forwards a port."""
        self._dialled = (f"{address}/p2p/{self._peer_id}",)

    async def refresh(self, p2p: P2P) -> None:
        """Asks the daemon, which learns more with time."""
        try:
            self._visible = tuple(str(maddr) for maddr in await p2p.get_visible_maddrs(latest=True))
        except ValueError:  # it listens nowhere
            self._visible = ()

    async def follow(self, daemon: Daemon) -> None:
        """As long as this daemon runs."""
        with contextlib.suppress(*DAEMON_GONE):
            while not daemon.ended.is_set():
                await asyncio.sleep(_ADDRESS_REFRESH_SECONDS)
                await self.refresh(daemon.p2p)


class HivemindTransport:
    """The Transport of one peer; `attach` before use, and again when another daemon has taken the place of one."""

    def __init__(self, daemon: Daemon, limits: StreamLimits) -> None:
        self._daemon, self._limits = daemon, limits
        self.peer_id = peer_of(daemon.p2p.peer_id)
        self._background = Background()
        self._following: asyncio.Task[None] | None = None
        self.own_addresses = OwnAddresses(self.peer_id)
        self.connections = Connections(daemon, self._background)
        self.traffic = limits.traffic()
        """With this peer's own limits, for what goes other ways too."""
        self._is_member: Callable[[PeerId], bool] = lambda peer: False
        self._door = calls.CallDoor(self.traffic, self.is_member)
        self._handler: Handler | None = None
        self._server: StreamServer | None = None

    async def attach(self, hello: HelloHandler, dial_back: DialBackHandler, weighing: dict[str, calls.Weigh]) -> None:
        """Registers what this peer answers, and starts to follow its own addresses. `weighing`: see GuardedHandlers."""
        p2p = self._daemon.p2p
        guard(p2p, self._door, weighing)
        self.connections.forget()
        await SwarmServicer(self, hello, dial_back).add_p2p_handlers(p2p, namespace=NAMESPACE)
        await p2p.add_binary_stream_handler(_STREAM_NAME, self._serve_stream)
        await self.own_addresses.refresh(p2p)
        if self._following is not None:
            self._following.cancel()
        self._following = self._background.spawn(self.own_addresses.follow(self._daemon))

    def is_member(self, peer: PeerId) -> bool:
        """Whether the handler that serves requests knows `peer` as a member of its run."""
        return self._is_member(peer)

    @property
    def addresses(self) -> tuple[str, ...]:
        return self.own_addresses.all()

    def learn(self, peer: PeerId, addresses: tuple[str, ...]) -> None:
        self.connections.book.learn(peer, addresses)

    async def serve(self, handler: Handler, is_member: Callable[[PeerId], bool] = anybody) -> None:
        self._is_member = is_member
        self._handler = handler
        self._server = StreamServer(handler, self.traffic, self._limits, self.peer_id, is_member)

    async def close(self) -> None:
        """Ends what is being served; the daemon is the network's to end."""
        self._handler = self._server = None
        await self._background.stop()

    # ---- asking ----

    async def call(self, peer: PeerId, request: bytes, timeout_seconds: float) -> bytes:
        calls.check_request(request)
        stub = SwarmServicer.get_stub(self._daemon.p2p, identity_of(peer), namespace=NAMESPACE)
        self.traffic.count_sent(len(request))
        reply = await self.connections.reach(peer, timeout_seconds, lambda: stub.rpc_call(BytesValue(value=request)))
        self.traffic.count_received(len(reply.value))
        return calls.unwrap(peer, reply.value)

    async def fetch(
        self,
        peer: PeerId,
        request: bytes,
        timeout_seconds: float,
        max_bytes: int,
        patient: bool = False,
        partial: Partial | None = None,
    ) -> tuple[bytes, memoryview]:
        async def open_stream() -> Incoming:
            p2p, identity = self._daemon.p2p, identity_of(peer)
            _, reader, writer = await self.connections.reach(
                peer, timeout_seconds, lambda: p2p.call_binary_stream_handler(identity, _STREAM_NAME)
            )
            return Incoming(reader, writer)

        return await fetch_stream(
            open_stream, peer, request, timeout_seconds, max_bytes, self.traffic, patient, partial
        )

    async def check_refused(self, peer: PeerId) -> bool:
        return await self.connections.check_refused(peer)

    # ---- serving ----

    async def answer(self, caller: PeerId, request: bytes) -> bytes:
        self.connections.heard(caller)
        return calls.NOT_SERVING if self._handler is None else await calls.answer(self._handler, caller, request)

    async def _serve_stream(self, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        caller, server = peer_of(info.peer_id), self._server
        self.connections.heard(caller)
        if server is None:
            writer.close()
            return
        await asyncio.wait((self._background.spawn(server.serve(caller, PipeStream(reader, writer))),))

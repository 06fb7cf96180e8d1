"""Calls and streams over libp2p, with failures told apart (ports.Transport).

A call is one unary RPC of a hivemind servicer, a fetch is one binary stream. Before the daemon dials, we dial by plain
TCP (see `dial`), and again to find out why an exchange broke. Leaves out how the network is joined.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import TypeVar

from google.protobuf.wrappers_pb2 import BytesValue
from hivemind.p2p import P2P, P2PContext, PeerID, ServicerBase
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, P2PHandlerError

from spes_p2p.errors import NetworkError, PeerClosed, PeerRefused, PeerSilent, RemoteProtocolError
from spes_p2p.ids import PeerId, short
from spes_p2p.swarm import calls
from spes_p2p.swarm.hivemind_backend.daemon import DAEMON_GONE
from spes_p2p.swarm.hivemind_backend.dial import (
    Address,
    AddressBook,
    Dialled,
    dial_all,
    parse_address,
    said_of,
)
from spes_p2p.swarm.hivemind_backend.hello import HelloHandler
from spes_p2p.swarm.hivemind_backend.pipe import Incoming, PipeStream
from spes_p2p.swarm.hivemind_backend.reach import DialBackHandler
from spes_p2p.swarm.pacing import Pacer
from spes_p2p.swarm.ports import Handler, anybody
from spes_p2p.swarm.speed import SpeedHandler, measure_speed
from spes_p2p.swarm.stream_server import StreamLimits, StreamServer
from spes_p2p.swarm.streams import fetch_stream

NAMESPACE = "spes-p2p/1"
_STREAM_NAME = f"{NAMESPACE}::fetch"
_SPEED_NAME = f"{NAMESPACE}::speed"
_BACKOFF_PAUSE_SECONDS = 0.5
_ADDRESS_REFRESH_SECONDS = 30.0
_AFTERTHOUGHT_SECONDS = 0.5
_NEVER_LEFT = ("failed to dial", "dial backoff", "failed to find any peer", "routing: not found", "no addresses")
"""In these words the daemon says that nothing was sent, so that a second try cannot do anything twice."""
T = TypeVar("T")
logger = logging.getLogger(__name__)


class SwarmServicer(ServicerBase):
    """The unary RPCs of a peer."""

    def __init__(self, transport: HivemindTransport, hello: HelloHandler, dial_back: DialBackHandler) -> None:
        self._transport, self._hello, self._dial_back = transport, hello, dial_back

    async def rpc_call(self, request: BytesValue, context: P2PContext) -> BytesValue:
        return BytesValue(value=await self._transport.answer(_peer(context.remote_id), request.value))

    async def rpc_hello(self, request: BytesValue, context: P2PContext) -> BytesValue:
        return BytesValue(value=await self._hello.answer(request.value))

    async def rpc_dial_back(self, request: BytesValue, context: P2PContext) -> BytesValue:
        return BytesValue(value=await self._dial_back.answer(_peer(context.remote_id), request.value))


class HivemindTransport:
    """The Transport of one peer; `attach` before use, and again to every daemon that takes the place of another."""

    def __init__(self, p2p: P2P, limits: StreamLimits, daemon_ended: asyncio.Event) -> None:
        self._p2p, self._limits, self._daemon_ended = p2p, limits, daemon_ended
        self._peer_id = _peer(p2p.peer_id)
        self._addresses: tuple[str, ...] = ()
        self.names: tuple[str, ...] = ()
        """`/dnsaddr/` names by which others may find us, which the daemon knows nothing of."""
        self._dialled: tuple[str, ...] = ()
        self._book = AddressBook()
        self._connected: set[PeerId] = set()
        self._dialling: defaultdict[PeerId, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._traffic = limits.traffic()
        self._speed_desk = SpeedHandler(self._traffic)
        self._handler: Handler | None = None
        self._is_member: Callable[[PeerId], bool] = lambda peer: False
        self._server: StreamServer | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def attach(self, p2p: P2P, hello: HelloHandler, dial_back: DialBackHandler) -> None:
        """Registers what this peer answers, and starts to follow its own addresses."""
        self._p2p = p2p
        self._connected.clear()
        await SwarmServicer(self, hello, dial_back).add_p2p_handlers(p2p, namespace=NAMESPACE)
        await p2p.add_binary_stream_handler(_STREAM_NAME, self._serve_stream)
        await p2p.add_binary_stream_handler(_SPEED_NAME, self._serve_speed)
        await self.refresh_addresses()
        self._spawn(self._follow_addresses(p2p))

    @property
    def download(self) -> Pacer:
        """This peer's own limit, for what comes over other ways too."""
        return self._traffic.download

    def is_member(self, peer: PeerId) -> bool:
        """Whether who serves takes `peer` for no stranger."""
        return self._is_member(peer)

    def known_addresses(self) -> list[str]:
        """Where other peers may be dialled, as far as we know; with their ids."""
        return self._book.texts()

    @property
    def peer_id(self) -> PeerId:
        return self._peer_id

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.names, *self._dialled, *self._addresses)))

    def note_dialled(self, address: str) -> None:
        """Another peer has reached us at this address, which the daemon may not know: a router forwards a port."""
        self._dialled = (f"{address}/p2p/{self.peer_id}",)

    @property
    def bytes_sent(self) -> int:
        return self._traffic.sent

    @property
    def bytes_received(self) -> int:
        return self._traffic.received

    def measured_uplink(self) -> float:
        return self._traffic.meter.rate()

    def learn(self, peer: PeerId, addresses: tuple[str, ...]) -> None:
        self._book.learn(peer, addresses)

    async def serve(self, handler: Handler, is_member: Callable[[PeerId], bool] = anybody) -> None:
        self._handler, self._is_member = handler, is_member
        self._server = StreamServer(handler, self._traffic, self._limits, self.peer_id, is_member)

    async def close(self) -> None:
        """Ends what is being served; the daemon is the network's to end."""
        self._handler = self._server = None
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def refresh_addresses(self) -> None:
        """Asks the daemon where others may dial us; it learns more with time."""
        try:
            self._addresses = tuple(str(maddr) for maddr in await self._p2p.get_visible_maddrs(latest=True))
        except ValueError:  # it listens nowhere
            self._addresses = ()

    # ---- asking ----

    async def call(self, peer: PeerId, request: bytes, timeout_seconds: float) -> bytes:
        calls.check_request(request)
        stub = SwarmServicer.get_stub(self._p2p, _identity(peer), namespace=NAMESPACE)
        self._traffic.count_sent(len(request))
        reply = await self._in_time(
            peer, timeout_seconds, self._reach(peer, lambda: stub.rpc_call(BytesValue(value=request)))
        )
        self._traffic.count_received(len(reply.value))
        return calls.unwrap(peer, reply.value)

    async def fetch(
        self, peer: PeerId, request: bytes, timeout_seconds: float, max_bytes: int, patient: bool = False
    ) -> tuple[bytes, memoryview]:
        async def open_stream() -> Incoming:
            opened = self._reach(peer, lambda: self._open_stream(peer))
            return Incoming(*await self._in_time(peer, timeout_seconds, opened))

        return await fetch_stream(open_stream, peer, request, timeout_seconds, max_bytes, self._traffic, patient)

    async def measure_speed(self, peer: PeerId, upload: bool, timeout_seconds: float) -> float:
        """Bytes a second to or from `peer`, see `speed`. Raises NetworkError, RemoteProtocolError."""

        async def open_stream() -> PipeStream:
            opened = self._reach(peer, lambda: self._open_stream(peer, _SPEED_NAME))
            return PipeStream(*await self._in_time(peer, timeout_seconds, opened))

        return await measure_speed(open_stream, upload)

    async def _open_stream(
        self, peer: PeerId, name: str = _STREAM_NAME
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        _, reader, writer = await self._p2p.call_binary_stream_handler(_identity(peer), name)
        return reader, writer

    async def check_refused(self, peer: PeerId) -> bool:
        evidence = self._book.evidence(peer)
        if not evidence or self._daemon_ended.is_set() or await self._is_connected(peer):
            return False
        return all(found is Dialled.REFUSED for found in await dial_all(evidence))

    async def _in_time(self, peer: PeerId, timeout_seconds: float, work: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(timeout_seconds):
                return await work
        except TimeoutError as error:
            self._connected.discard(peer)
            # the daemon may have spent the time on looking for one that is gone
            with contextlib.suppress(TimeoutError, *DAEMON_GONE):
                async with asyncio.timeout(_AFTERTHOUGHT_SECONDS):
                    if await self.check_refused(peer):
                        raise _unreached(peer, [Dialled.REFUSED], "") from error
            raise PeerSilent(f"{short(peer)} did not answer within {timeout_seconds:g} s") from error

    async def _reach(self, peer: PeerId, exchange: Callable[[], Awaitable[T]]) -> T:
        """`exchange` with a connected peer; tried a second time only where the first one sent nothing."""
        if self._daemon_ended.is_set():
            raise NetworkError("the libp2p daemon has ended", fix="start this peer again")
        try:
            if peer in self._connected:
                with contextlib.suppress(_NothingSent):
                    return await self._exchange(peer, exchange)
            await self._connect(peer)
            return await self._exchange(peer, exchange)
        except _NothingSent as error:
            raise await self._why(peer, str(error)) from error
        except DAEMON_GONE as error:
            raise NetworkError(f"the libp2p daemon does not answer: {error}", fix="start this peer again") from error

    async def _exchange(self, peer: PeerId, exchange: Callable[[], Awaitable[T]]) -> T:
        try:
            outcome = await exchange()
        except P2PHandlerError as error:
            raise RemoteProtocolError(f"{short(peer)} failed: {calls.printable(str(error).encode())}") from error
        except P2PDaemonError as error:
            self._connected.discard(peer)
            if any(words in str(error) for words in _NEVER_LEFT):
                raise _NothingSent(str(error)) from error
            raise await self._why(peer, str(error)) from error
        self._heard(peer)
        return outcome

    async def connect(self, peer: PeerId) -> None:
        """Opens a connection where there is none. Raises NetworkError."""
        if self._daemon_ended.is_set():
            raise NetworkError("the libp2p daemon has ended", fix="start this peer again")
        try:
            await self._connect(peer)
        except DAEMON_GONE as error:
            raise NetworkError(f"the libp2p daemon does not answer: {error}", fix="start this peer again") from error

    async def _connect(self, peer: PeerId) -> None:
        async with self._dialling[peer]:
            if peer in self._connected or await self._is_connected(peer):
                return
            plain = self._book.plain(peer)
            found = await dial_all(plain)
            if found and Dialled.ACCEPTED not in found:
                raise _unreached(peer, found, "no address of it accepts a connection")
            await self._daemon_connect(peer, [one for one, how in zip(plain, found) if how is Dialled.ACCEPTED])
            self._heard(peer)

    async def _daemon_connect(self, peer: PeerId, accepting: list[Address]) -> None:
        addresses = [address.maddr for address in self._book.known(peer)]
        while True:
            try:
                await self._p2p._client.connect(_identity(peer), addresses)
                return
            except P2PDaemonError as error:
                words = str(error)
                if not any("dial backoff" in said_of(address, words) for address in accepting):
                    raise await self._why(peer, words) from error
            # the host accepts, but an earlier failure keeps the daemon from dialling; it forgets that after seconds
            await asyncio.sleep(_BACKOFF_PAUSE_SECONDS)

    async def _why(self, peer: PeerId, words: str) -> NetworkError:
        """The error for an exchange that the daemon ended with `words`."""
        said = calls.printable(words.replace("\n", " ").encode())
        if "protocols not supported" in words:
            return PeerClosed(f"{short(peer)} does not serve this protocol, or not yet")
        if "peer id mismatch" in words:
            return PeerRefused(f"another peer answers at the address of {short(peer)}")
        found = await dial_all(self._book.known(peer))
        if not found:
            return PeerClosed(f"{short(peer)} is not connected, and no address of it is known ({said})")
        return _unreached(peer, found, said)

    # ---- serving ----

    async def answer(self, caller: PeerId, request: bytes) -> bytes:
        self._heard(caller)
        handler = self._handler
        if handler is None:
            return calls.NOT_SERVING
        self._traffic.count_received(len(request))
        reply = await calls.answer(handler, caller, request)
        self._traffic.count_sent(len(reply))
        return reply

    async def _serve_stream(self, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        caller, server = _peer(info.peer_id), self._server
        self._heard(caller)
        if server is None:
            writer.close()
            return
        await asyncio.wait((self._spawn(server.serve(caller, PipeStream(reader, writer))),))

    async def _serve_speed(self, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.wait((self._spawn(self._speed_desk.serve(PipeStream(reader, writer))),))

    # ---- who is connected ----

    def _heard(self, peer: PeerId) -> None:
        if peer not in self._connected:
            self._connected.add(peer)
            self._spawn(self._note_place(peer))

    async def _note_place(self, peer: PeerId) -> None:
        with contextlib.suppress(*DAEMON_GONE):
            self._book.met(peer, [place for found, place in await self._connections() if found == peer])

    async def _is_connected(self, peer: PeerId) -> bool:
        return any(found == peer for found, _ in await self._connections())

    async def _connections(self) -> list[tuple[PeerId, tuple[str, int]]]:
        """(peer, (host, port)) of all open connections."""
        infos = await self._p2p.list_peers()
        pairs = [(_peer(info.peer_id), parse_address(str(maddr))) for info in infos for maddr in info.addrs]
        return [(peer, (address.host, address.port)) for peer, address in pairs]

    async def _follow_addresses(self, p2p: P2P) -> None:
        with contextlib.suppress(*DAEMON_GONE):
            while self._p2p is p2p and not self._daemon_ended.is_set():
                await asyncio.sleep(_ADDRESS_REFRESH_SECONDS)
                await self.refresh_addresses()

    def _spawn(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        assert isinstance(task, asyncio.Task)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class _NothingSent(Exception):
    """The daemon could not open a stream, so nothing was sent."""


def _unreached(peer: PeerId, found: list[Dialled], words: str) -> NetworkError:
    if Dialled.ACCEPTED in found:
        return PeerClosed(f"{short(peer)} broke off the exchange ({words})")
    if all(one is Dialled.REFUSED for one in found):
        return PeerRefused(f"the host of {short(peer)} refuses connections: its process is gone")
    return PeerSilent(f"{short(peer)} does not answer at its addresses ({words})")


def _identity(peer: PeerId) -> PeerID:
    try:
        return PeerID.from_base58(peer)
    except ValueError as error:
        raise RemoteProtocolError(f"{calls.printable(peer.encode())!r} is no libp2p peer id") from error


def _peer(identity: PeerID) -> PeerId:
    return PeerId(identity.to_base58())

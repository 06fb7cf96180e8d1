"""Who is connected with us, how others are reached, and why they are not: one libp2p daemon and an address book.

Before the daemon dials, we dial by plain TCP (see `dial`), and again to find out why an exchange broke.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TypeVar
from weakref import WeakValueDictionary

from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, P2PHandlerError

from spes_p2p.errors import NetworkError, PeerClosed, PeerRefused, PeerSilent, RemoteProtocolError
from spes_p2p.ids import PeerId, short
from spes_p2p.swarm import calls
from spes_p2p.swarm.hivemind_backend.daemon import DAEMON_GONE, Daemon
from spes_p2p.swarm.hivemind_backend.dial import (
    MOST_PEERS,
    Address,
    AddressBook,
    Dialled,
    dial_all,
    parse_address,
    said_of,
)

_BACKOFF_PAUSE_SECONDS = 0.5
_AFTERTHOUGHT_SECONDS = 0.5
_NEVER_LEFT = ("failed to dial", "dial backoff", "failed to find any peer", "routing: not found", "no addresses")
"""In these words the daemon says that nothing was sent, so that a second try cannot do anything twice."""
T = TypeVar("T")


class Background:
    """Tasks that end with their owner."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        assert isinstance(task, asyncio.Task)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def stop(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)


class Connections:
    """Of one peer's daemon; `forget` them when another takes its place."""

    def __init__(self, daemon: Daemon, background: Background) -> None:
        self._daemon, self._background = daemon, background
        self.book = AddressBook()
        """Where other peers may be dialled, as far as we know."""
        self._connected: set[PeerId] = set()
        self._dialling: WeakValueDictionary[PeerId, asyncio.Lock] = WeakValueDictionary()

    def forget(self) -> None:
        """Nobody is connected yet."""
        self._connected.clear()

    async def reach(self, peer: PeerId, timeout_seconds: float, exchange: Callable[[], Awaitable[T]]) -> T:
        """What `exchange` gives with a connected peer. Raises as `ports.Transport` says."""
        try:
            async with asyncio.timeout(timeout_seconds):
                return await self._reach(peer, exchange)
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
        with self._daemon.answering():
            try:
                if peer in self._connected:
                    with contextlib.suppress(_NothingSent):
                        return await self._exchange(peer, exchange)
                await self._connect(peer)
                return await self._exchange(peer, exchange)
            except _NothingSent as error:
                raise await self._why(peer, str(error)) from error

    async def _exchange(self, peer: PeerId, exchange: Callable[[], Awaitable[T]]) -> T:
        try:
            outcome = await exchange()
        except P2PHandlerError as error:
            raise RemoteProtocolError(
                f"{short(peer)} answered with an error: {calls.printable(str(error).encode())}"
            ) from error
        except P2PDaemonError as error:
            self._connected.discard(peer)
            if any(words in str(error) for words in _NEVER_LEFT):
                raise _NothingSent(str(error)) from error
            raise await self._why(peer, str(error)) from error
        self.heard(peer)
        return outcome

    async def check_refused(self, peer: PeerId) -> bool:
        """See `ports.Transport`."""
        evidence = self.book.evidence(peer)
        if not evidence or self._daemon.ended.is_set() or await self._is_connected(peer):
            return False
        return all(found is Dialled.REFUSED for found in await dial_all(evidence))

    async def connect(self, peer: PeerId) -> None:
        """Opens a connection where there is none. Raises NetworkError."""
        with self._daemon.answering():
            await self._connect(peer)

    async def _connect(self, peer: PeerId) -> None:
        async with self._dialling.setdefault(peer, asyncio.Lock()):
            if peer in self._connected or await self._is_connected(peer):
                return
            plain = self.book.plain(peer)
            found = await dial_all(plain)
            if found and Dialled.ACCEPTED not in found:
                raise _unreached(peer, found, "none of its addresses accepts connections")
            await self._daemon_connect(peer, [one for one, how in zip(plain, found) if how is Dialled.ACCEPTED])
            self.heard(peer)

    async def _daemon_connect(self, peer: PeerId, accepting: list[Address]) -> None:
        addresses = [address.maddr for address in self.book.known(peer)]
        while True:
            try:
                await self._daemon.p2p._client.connect(identity_of(peer), addresses)
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
            return PeerClosed(f"{short(peer)} does not serve this protocol (yet)")
        if "peer id mismatch" in words:
            return PeerRefused(f"another peer answers at the address of {short(peer)}")
        found = await dial_all(self.book.known(peer))
        if not found:
            return PeerClosed(f"{short(peer)} is not connected, and no address of it is known ({said})")
        return _unreached(peer, found, said)

    def heard(self, peer: PeerId) -> None:
        """It has spoken with us just now."""
        if peer not in self._connected:
            if len(self._connected) >= MOST_PEERS:  # strangers that came and went; the daemon knows who is there
                self._connected.clear()
            self._connected.add(peer)
            self._background.spawn(self._note_place(peer))

    async def _note_place(self, peer: PeerId) -> None:
        with contextlib.suppress(*DAEMON_GONE):
            self.book.met(peer, [place for found, place in await self._connections() if found == peer])

    async def _is_connected(self, peer: PeerId) -> bool:
        return any(found == peer for found, _ in await self._connections())

    async def _connections(self) -> list[tuple[PeerId, tuple[str, int]]]:
        """(peer, (host, port)) of all open connections."""
        infos = await self._daemon.p2p.list_peers()
        pairs = [(peer_of(info.peer_id), parse_address(str(maddr))) for info in infos for maddr in info.addrs]
        return [(peer, (address.host, address.port)) for peer, address in pairs]


class _NothingSent(Exception):
    """The daemon could not open a stream, so nothing was sent."""


def _unreached(peer: PeerId, found: list[Dialled], words: str) -> NetworkError:
    if Dialled.ACCEPTED in found:
        return PeerClosed(f"{short(peer)} broke off the exchange ({words})")
    if all(one is Dialled.REFUSED for one in found):
        return PeerRefused(f"the host of {short(peer)} refuses connections: its process is gone")
    return PeerSilent(f"{short(peer)} does not answer at its addresses ({words})")


def identity_of(peer: PeerId) -> PeerID:
    """Raises RemoteProtocolError for what is none."""
    try:
        return PeerID.from_base58(peer)
    except ValueError as error:
        raise RemoteProtocolError(f"{calls.printable(peer.encode())!r} is not a libp2p peer id") from error


def peer_of(identity: PeerID) -> PeerId:
    """As everybody but hivemind writes it."""
    return PeerId(identity.to_base58())

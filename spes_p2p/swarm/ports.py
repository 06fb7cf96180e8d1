"""The interface between the project and a network, as small Protocols; the implementations are beside this file.

`hivemind_backend` speaks libp2p through hivemind, `memory_backend` runs a whole swarm inside one event loop on a
virtual clock. Nothing here knows rounds, tensors or files. All coroutines run on one asyncio loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from spes_p2p.ids import PeerId

if TYPE_CHECKING:
    from spes_p2p.swarm.pacing import Traffic
    from spes_p2p.swarm.streams import Partial

CHUNK_BYTES = 256 * 2**10
"""Size of one message of a stream: the best of the sizes measured on libp2p streams."""


class Clock(Protocol):
    """Monotonic seconds; deadlines never come from wall clocks."""

    def now(self) -> float: ...


class LoopClock:
    """The clock of the running asyncio loop: monotonic on a real loop, virtual on a virtual one."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()


class MonotonicClock:
    """That of the machine, for any thread. It goes on while the machine sleeps, as `time.monotonic` does not."""

    def now(self) -> float:
        return time.clock_gettime(_ALSO_ASLEEP)


_ALSO_ASLEEP: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Of Linux; macOS counts sleep in CLOCK_MONOTONIC."""


class Signer(Protocol):
    """Signs with this peer's own libp2p key."""

    @property
    def peer_id(self) -> PeerId: ...

    @property
    def public_key(self) -> bytes: ...

    def sign(self, data: bytes) -> bytes: ...


class Verifier(Protocol):
    """Checks signatures of others."""

    def verify(self, peer: PeerId, public_key: bytes, data: bytes, signature: bytes) -> bool:
        """True when `public_key` hashes to `peer` and `signature` over `data` was made with it; never raises."""


@dataclass(frozen=True)
class Blob:
    """What a handler answers to a fetch: a buffer that must stay valid until it was sent."""

    data: bytes | memoryview
    header: bytes = b""
    """Small, goes before the data (at most 64 KiB)."""
    on_sent: Callable[[int], None] | None = None
    """Is told of bytes of the data as they leave."""


class Handler(Protocol):
    """The serving side of one peer. `caller` is the authenticated peer id of the connection."""

    async def on_call(self, caller: PeerId, request: bytes) -> bytes:
        """Answers one small message. May raise RemoteProtocolError to refuse, PeerClosed where it serves no more."""

    async def on_fetch(self, caller: PeerId, request: bytes) -> Blob:
        """Finds the bytes that `request` names. May raise RemoteProtocolError to refuse."""


def anybody(peer: PeerId) -> bool:
    """An `is_member` that accepts every peer."""
    return True


class Transport(Protocol):
    """Calls and byte streams between peers.

    Every method raises PeerRefused (host refuses: process is gone), PeerClosed (cut), PeerSilent (nothing arrived for
    `timeout_seconds`), or RemoteProtocolError (the other side refused the request, with its words).
    """

    @property
    def peer_id(self) -> PeerId: ...

    @property
    def addresses(self) -> tuple[str, ...]:
        """Our own multiaddresses, with /p2p/ id, as others should dial them."""

    def learn(self, peer: PeerId, addresses: tuple[str, ...]) -> None:
        """Remembers where a peer may be dialled."""

    async def serve(self, handler: Handler, is_member: Callable[[PeerId], bool] = anybody) -> None:
        """Answers requests through `handler` from now on. Non-members share fewer streams and wait longer."""

    async def call(self, peer: PeerId, request: bytes, timeout_seconds: float) -> bytes:
        """The handler's answer. The request may arrive although this raises, and may arrive twice."""

    async def fetch(
        self,
        peer: PeerId,
        request: bytes,
        timeout_seconds: float,
        max_bytes: int,
        patient: bool = False,
        partial: Partial | None = None,
    ) -> tuple[bytes, memoryview]:
        """(header, data) of the Blob that the peer's handler answers; the data is in memory of its own.

        `patient` says that others may go first: on both sides it gets few streams, and little of a limited rate.
        `partial` is what an earlier fetch of the same has got, and is told how this one gets on.

        `timeout_seconds` is the longest pause between two chunks, not the whole transfer. The stream carries its length
        and a checksum; a cut stream is resumed at its offset, and PeerClosed is raised where that brings nothing a few
        times. A Blob larger than `max_bytes` is refused (RemoteProtocolError) before it is read.
        """

    async def check_refused(self, peer: PeerId) -> bool:
        """True when a fresh TCP dial to the peer is refused by its host: the process is gone. Any doubt is False."""

    @property
    def traffic(self) -> Traffic:
        """What went over all calls and streams so far, and how fast this peer's uplink is."""

    async def close(self) -> None: ...


class Directory(Protocol):
    """The DHT: small signed records under a key, one per publishing peer, that expire."""

    async def publish(self, key: str, value: bytes, ttl_seconds: float) -> None:
        """Stores `value` under (key, own peer id), signed with the own key.

        Raises NetworkError when no other peer took it although there are others, and LocalProtocolError when it is too
        large for `key`, nothing is kept there (records.bounds_of), or it lives too long (envelope.MAX_TTL_SECONDS).
        """

    async def read(self, key: str, timeout_seconds: float = 10.0) -> Mapping[PeerId, bytes]:
        """All valid records under `key`: badly signed, expired or oversized ones are dropped and counted.

        Raises PeerSilent when the answer takes longer than `timeout_seconds`.
        """

    async def acquaint(self, peers: Collection[PeerId]) -> None:
        """Adds those of `peers` that can be reached to the directory unless they are in it; never raises.

        A directory falls apart when the nodes that held it together are restarted: they know nobody, and peers that
        could not reach them no longer ask them.
        """

    @property
    def dropped(self) -> int:
        """Records that were refused so far."""


class Network(Protocol):
    """One peer's place in the network, with all that it offers."""

    @property
    def transport(self) -> Transport: ...

    @property
    def directory(self) -> Directory: ...

    @property
    def signer(self) -> Signer: ...

    @property
    def verifier(self) -> Verifier: ...

"""The fetch protocol on one byte stream: frames, length, hash, and the asking side with resume and stall time-outs.

Knows no network library: a backend brings a ByteStream and gets `fetch_stream`; the serving side is
`stream_server`. On the wire:

    asker   REQUEST (offset, max_bytes, body)
    server  WAIT*                      one a second while the request waits for a free slot, or its blob is made
            REFUSED words | BLOB (total_bytes, header), then the bytes from offset to the end, then CRC-32
    asker   closes; the server holds the stream open until then, since closing it earlier may cut off its tail

The CRC-32 goes over the blob's head and all its bytes, also those of earlier attempts, and follows the data, so that
neither side has to read the data twice. A stream that ends early has no valid one and is never taken for a whole one.
It is against mistakes, not against liars: libp2p authenticates every stream, who sends may send what it likes, and what
must be certain bytes (tiles, lists, pieces of data) is hashed by who asked for it.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Annotated, Protocol, TypeVar

from spes_p2p import wire
from spes_p2p.bounds import Bounded, between, length
from spes_p2p.errors import LocalProtocolError, PeerClosed, PeerSilent, RemoteProtocolError
from spes_p2p.ids import PeerId, short
from spes_p2p.swarm.calls import printable
from spes_p2p.swarm.pacing import Traffic

MAX_REQUEST_BYTES = 64 * 2**10
MAX_HEADER_BYTES = 64 * 2**10
MAX_RESUMES = 4
RESUMED_BYTES = 4 * 2**10
"""A stream that brought so much before it was cut is no failure: who serves many cuts it for the others' sake."""
_RESUME_PAUSE_SECONDS = 0.05
CHECKSUM_BYTES = 4
REQUEST, WAIT, REFUSED, BLOB = b"Q", b"W", b"N", b"B"
FRAME_SLACK = 64

SMALL_BYTES = 2**20

T = TypeVar("T")


class BlobTooLarge(RemoteProtocolError):
    """A blob of more bytes than were asked for at most; none of them was read."""


class WrongBytes(RemoteProtocolError):
    """All bytes came, and they are not what they should be."""


class ByteStream(Protocol):
    """One open two-way stream; both methods raise PeerClosed when it broke."""

    async def read(self, max_bytes: int) -> bytes:
        """The next 1 to `max_bytes` bytes; b"" at the end, which may also mean that the stream was cut."""

    async def read_into(self, room: memoryview) -> int:
        """The same, into `room`: how many bytes of it are filled now, 0 at the end. Not touched after that."""

    async def write(self, data: bytes | memoryview) -> None:
        """Takes `data`; returns once more may follow (at most a few chunks are in flight)."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class FetchRequest:
    """`patient`: the asker can wait; what others need for the running round goes before it."""

    offset: int
    max_bytes: int
    body: bytes
    patient: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.offset <= self.max_bytes:
            raise ValueError(f"offset {self.offset} is not between 0 and {self.max_bytes}")


@dataclass(frozen=True)
class BlobHead(Bounded):
    total_bytes: Annotated[int, between(0, 2**63)]
    header: Annotated[bytes, length(0, MAX_HEADER_BYTES)]


@dataclass
class Partial:
    """What has come of a blob so far, over all streams; a later fetch of the same blob may go on with it.

    `is_sent`: a fetch is under way and bytes of the blob come; else it waits in line.
    """

    is_sent: bool = False
    head: BlobHead | None = None
    data: memoryview = field(default_factory=lambda: memoryview(b""))
    received: int = 0
    checksum: int = 0


async def write_frame(stream: ByteStream, kind: bytes, body: bytes = b"") -> None:
    await stream.write(kind + len(body).to_bytes(4, "big") + body)


async def read_frame(stream: ByteStream, max_bytes: int) -> tuple[bytes, bytes]:
    """(kind, body) of the next frame. Raises RemoteProtocolError when it announces more than `max_bytes`."""
    start = await read_exactly(stream, 5)
    size = int.from_bytes(start[1:], "big")
    if size > max_bytes:
        raise RemoteProtocolError(f"a frame has {size} bytes, but at most {max_bytes} are allowed")
    return start[:1], await read_exactly(stream, size)


async def read_exactly(stream: ByteStream, size: int) -> bytes:
    pieces, missing = [], size
    while missing:
        piece = await stream.read(missing)
        if not piece:
            raise PeerClosed(f"the stream ended {missing} bytes early")
        pieces.append(piece)
        missing -= len(piece)
    return b"".join(pieces)


def checksum_bytes(checksum: int) -> bytes:
    """A CRC-32 as it travels."""
    return checksum.to_bytes(CHECKSUM_BYTES, "big")


async def fetch_stream(  # noqa: PLR0913 (what a transport knows of one fetch)
    open_stream: Callable[[], Awaitable[ByteStream]],
    peer: PeerId,
    request: bytes,
    timeout_seconds: float,
    max_bytes: int,
    traffic: Traffic,
    patient: bool = False,
    partial: Partial | None = None,
) -> tuple[bytes, memoryview]:
    """(header, data) of the blob of `peer` that `request` names.

    Opens a stream, and another one at the offset reached when it is cut, at most MAX_RESUMES times one after the other
    that bring next to nothing. Raises PeerClosed, PeerSilent (no byte for `timeout_seconds`), RemoteProtocolError
    (refused, too large, wrong hash) and what `open_stream` raises. Nothing is copied: the bytes lie where they came
    from the stream.
    """
    if len(request) > MAX_REQUEST_BYTES:
        raise LocalProtocolError(
            f"a fetch request has {len(request)} bytes, but at most {MAX_REQUEST_BYTES} are allowed"
        )
    download = _Download(short(peer), request, timeout_seconds, max_bytes, traffic, patient, partial or Partial())
    failures = 0
    while True:
        before = download.partial.received
        stream = await open_stream()
        try:
            return await download.run(stream)
        except PeerClosed:
            failures = 0 if download.partial.received - before >= RESUMED_BYTES else failures + 1
            if failures > MAX_RESUMES:
                raise
        finally:
            stream.close()
            download.partial.is_sent = False
        await asyncio.sleep(_RESUME_PAUSE_SECONDS * 2**failures)


class _Download:
    """One fetch, over all its streams."""

    def __init__(
        self,
        name: str,
        request: bytes,
        timeout_seconds: float,
        max_bytes: int,
        traffic: Traffic,
        patient: bool,
        partial: Partial,
    ) -> None:
        self._name = name
        self._request, self._timeout_seconds, self._max_bytes = request, timeout_seconds, max_bytes
        self._patient = patient
        self._traffic = traffic
        self.partial = partial

    async def run(self, stream: ByteStream) -> tuple[bytes, memoryview]:
        partial = self.partial
        ask = FetchRequest(partial.received, self._max_bytes, self._request, self._patient)
        await self._in_time(write_frame(stream, REQUEST, wire.pack(ask)))
        head = self._accept(await self._read_head(stream))
        partial.is_sent = True
        while partial.received < head.total_bytes:
            room = partial.data[partial.received : partial.received + self._traffic.download.piece_bytes]
            count = await self._in_time(stream.read_into(room))
            if not count:
                raise PeerClosed(f"{self._name} cut the stream after {partial.received} of {head.total_bytes} bytes")
            partial.checksum = zlib.crc32(room[:count], partial.checksum)
            partial.received += count
            self._traffic.received += count
            self._traffic.patient_received += count if self._patient else 0
            await self._traffic.download.take(count, not self._patient)
        if await self._in_time(read_exactly(stream, CHECKSUM_BYTES)) != checksum_bytes(partial.checksum):
            raise WrongBytes(f"{self._name} sent {head.total_bytes} bytes with a wrong checksum")
        return head.header, partial.data

    async def _read_head(self, stream: ByteStream) -> BlobHead:
        kind, body = await self._in_time(read_frame(stream, MAX_HEADER_BYTES + FRAME_SLACK))
        while kind == WAIT:
            kind, body = await self._in_time(read_frame(stream, MAX_HEADER_BYTES + FRAME_SLACK))
        if kind == REFUSED:
            raise RemoteProtocolError(f"{self._name} refused: {printable(body)}")
        if kind != BLOB:
            raise RemoteProtocolError(f"{self._name} sent a frame of kind {kind!r} instead of a blob")
        return wire.unpack(BlobHead, body)

    def _accept(self, head: BlobHead) -> BlobHead:
        if head.total_bytes > self._max_bytes:
            raise BlobTooLarge(
                f"{self._name} sent a blob of {head.total_bytes} bytes, but at most {self._max_bytes} are allowed"
            )
        partial = self.partial
        if partial.head is None:
            partial.head = head
            partial.checksum = zlib.crc32(wire.pack(head))
            partial.data = _room(head.total_bytes)
        if head != partial.head:
            raise RemoteProtocolError(f"the blob of {self._name} changed while it was being fetched")
        return head

    async def _in_time(self, step: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self._timeout_seconds):
                return await step
        except TimeoutError as error:
            raise PeerSilent(
                f"{self._name} sent no byte for {self._timeout_seconds:g} s after {self.partial.received} bytes"
            ) from error


def _room(size: int) -> memoryview:
    """Memory for a blob; of a large one it is taken only as it is written to, since a liar may promise much."""
    if size <= SMALL_BYTES:
        return memoryview(bytearray(size))
    import numpy as np  # here, since who only looks at a run fetches little

    return np.empty(size, np.uint8).data

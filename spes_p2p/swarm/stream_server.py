"""The serving side of the fetch protocol (see `streams`): how many streams at once, who waits, who is refused.

Strangers, who are no members of the run, share a few places, so that members always find some. Leaves out where blobs
come from (a Handler), who is a member, and what carries the bytes (a ByteStream).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from spes_p2p import failpoints, wire
from spes_p2p.errors import NetworkError, RemoteProtocolError
from spes_p2p.failpoints import reached
from spes_p2p.ids import NOBODY, PeerId
from spes_p2p.swarm.calls import MAX_WORDS
from spes_p2p.swarm.door import Door, DoorLimits, Rate
from spes_p2p.swarm.pacing import Pacer
from spes_p2p.swarm.ports import CHUNK_BYTES, Blob, Handler, anybody
from spes_p2p.swarm.streams import (
    BLOB,
    FRAME_SLACK,
    MAX_REQUEST_BYTES,
    REFUSED,
    REQUEST,
    WAIT,
    BlobHead,
    ByteStream,
    FetchRequest,
    Traffic,
    checksum_bytes,
    read_frame,
    write_frame,
)

KEEPALIVE_SECONDS = 1.0
STREAMS = DoorLimits(Rate(200.0, 2000.0), Rate(50.0, 500.0), Rate(200.0, 2000.0))
_CHECKED_PER_TURN = 16
_NO_WORDS = 2
"""If more than this many times the allowed number of streams are open, a new one is closed without being read."""
T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StreamLimits:
    """What a server of streams allows, so that no asker can take its memory or block the others."""

    max_streams: int = 16
    max_streams_per_peer: int = 8
    max_open_per_peer: int = 64
    """Streams of one asker that are served or wait, or whose request has not come: above what a peer ever asks for."""
    max_waiting: int = 256
    """Most streams of members that may wait, in addition to those being served. Strangers have a queue of their own."""
    max_patient: int = 4
    """Streams at once to members that can wait: the others are for the running round."""
    max_strangers: int = 8
    """Of `max_streams`, those that may go to strangers; at most `max_patient` to those that can wait."""
    max_strangers_waiting: int = 120
    stall_seconds: float = 60.0
    """An asker that takes no byte for so long loses its stream; so does one whose blob takes so long to be made."""
    upload_bytes_per_second: float | None = None
    download_bytes_per_second: float | None = None
    """Most that this peer sends and receives, all streams together; None: as much as goes."""

    def traffic(self) -> Traffic:
        """A fresh account, paced by these limits."""
        return Traffic(Pacer(self.upload_bytes_per_second), Pacer(self.download_bytes_per_second))


DEFAULT_LIMITS = StreamLimits()


class _Places:
    """What the askers of one kind, members or strangers, share."""

    def __init__(self, streams: int, waiting: int, patient: int) -> None:
        self.slots = asyncio.Semaphore(streams)
        self.patient_slots = asyncio.Semaphore(patient)
        self.room = streams + waiting
        self.open = 0


class StreamServer:
    """Serves the blobs of one handler: `max_streams` at once, the others wait in line.

    `is_member` is asked as each stream comes.
    """

    def __init__(
        self,
        handler: Handler,
        traffic: Traffic,
        limits: StreamLimits = DEFAULT_LIMITS,
        me: PeerId = NOBODY,
        is_member: Callable[[PeerId], bool] = anybody,
    ) -> None:
        self._handler, self._traffic, self._limits, self._me = handler, traffic, limits, me
        self._is_member = is_member
        self._door = Door(STREAMS, is_member)
        self._slots = asyncio.Semaphore(limits.max_streams)
        self._members = _Places(limits.max_streams, limits.max_waiting, limits.max_patient)
        self._strangers = _Places(limits.max_strangers, limits.max_strangers_waiting, limits.max_patient)
        self._peer_slots: dict[PeerId, asyncio.Semaphore] = {}
        self._open: Counter[PeerId] = Counter()
        self.lost = 0
        """Streams that ended before the asker had everything."""

    async def serve(self, caller: PeerId, stream: ByteStream) -> None:
        """Serves one stream to its end; never raises because of what the other side does."""
        places = self._members if self._is_member(caller) else self._strangers
        crowd = max(self._open[caller] / self._limits.max_open_per_peer, places.open / places.room)
        self._open[caller] += 1
        places.open += 1
        try:
            if crowd < _NO_WORDS:
                await self._serve(caller, stream, places, self._door.admits(caller) and crowd < 1)
        except (NetworkError, RemoteProtocolError, TimeoutError) as error:
            self.lost += 1
            logger.debug("a stream to %s ended early: %s", caller, error)
        finally:
            stream.close()
            places.open -= 1
            self._open[caller] -= 1
            if not self._open[caller]:
                del self._open[caller]
                self._peer_slots.pop(caller, None)

    async def _serve(self, caller: PeerId, stream: ByteStream, places: _Places, has_place: bool) -> None:
        kind, body = await self._in_time(read_frame(stream, MAX_REQUEST_BYTES + FRAME_SLACK))
        with contextlib.ExitStack() as measured:
            try:
                if kind != REQUEST:
                    raise RemoteProtocolError(f"got a frame of kind {kind!r} where a request was expected")
                request = wire.unpack(FetchRequest, body)
                if not has_place:
                    raise RemoteProtocolError("too many streams are waiting, or came in too short a time")
                async with self._slot(caller, stream, places, request.patient):
                    blob = await self._found(caller, stream, request)
                    if not request.patient:
                        measured.enter_context(self._traffic.meter.sending())
                    await self._send(caller, stream, request, blob)
            except RemoteProtocolError as error:
                await self._in_time(write_frame(stream, REFUSED, str(error).encode()[:MAX_WORDS]))
            await self._in_time(stream.read(1))  # the asker closes when it has everything

    async def _found(self, caller: PeerId, stream: ByteStream, request: FetchRequest) -> Blob:
        """The blob for a request. Sends WAIT frames while it is made, since some must be read or encoded first."""
        search = asyncio.ensure_future(self._find(caller, request))
        try:
            async with asyncio.timeout(self._limits.stall_seconds):
                await self._keep_waiting(search, stream)
                return await search
        except TimeoutError as error:  # a disk that hangs must not keep the asker for ever
            raise RemoteProtocolError("the blob could not be made in time") from error
        finally:
            search.cancel()

    async def _find(self, caller: PeerId, request: FetchRequest) -> Blob:
        try:
            blob = await self._handler.on_fetch(caller, request.body)
        except RemoteProtocolError:
            raise
        except Exception as error:  # a bug of ours: the asker must not wait for its time-out because of it
            logger.exception("the handler of a fetch failed")
            raise RemoteProtocolError("the handler failed") from error
        size = memoryview(blob.data).nbytes
        if size > request.max_bytes or request.offset > size:
            raise RemoteProtocolError(
                f"the blob has {size} bytes, but bytes {request.offset} to {request.max_bytes} at most were asked for"
            )
        return blob

    async def _send(self, caller: PeerId, stream: ByteStream, request: FetchRequest, blob: Blob) -> None:
        data = memoryview(blob.data).cast("B")
        head = wire.pack(BlobHead(data.nbytes, blob.header))
        checksum = zlib.crc32(head)
        await self._in_time(write_frame(stream, BLOB, head))
        for start in range(0, request.offset, CHUNK_BYTES):  # what the asker has already
            checksum = zlib.crc32(data[start : min(start + CHUNK_BYTES, request.offset)], checksum)
            if start // CHUNK_BYTES % _CHECKED_PER_TURN == 0:
                await asyncio.sleep(0)
        upload, size = self._traffic.upload, self._traffic.upload.piece_bytes
        for start in range(request.offset, data.nbytes, size):
            chunk = data[start : start + size]
            checksum = zlib.crc32(chunk, checksum)
            await upload.take(chunk.nbytes, not request.patient)
            await self._in_time(stream.write(chunk))
            self._traffic.sent += chunk.nbytes
            self._traffic.meter.sent(chunk.nbytes)
            if blob.on_sent is not None:
                blob.on_sent(chunk.nbytes)
            sent = start + chunk.nbytes
            reached(failpoints.STREAM, peer=self._me, to=caller, request=request.body, sent=sent, size=data.nbytes)
        await self._in_time(stream.write(checksum_bytes(checksum)))

    @asynccontextmanager
    async def _slot(self, caller: PeerId, stream: ByteStream, places: _Places, patient: bool) -> AsyncIterator[None]:
        mine = self._peer_slots.setdefault(caller, asyncio.Semaphore(self._limits.max_streams_per_peer))
        # the shared ones last: strangers wait for their own places without being in the way of members
        order = (mine, *((places.patient_slots,) if patient else ()), places.slots, self._slots)
        async with AsyncExitStack() as held:
            for slots in order:
                await held.enter_async_context(self._acquired(slots, stream))
            yield

    @asynccontextmanager
    async def _acquired(self, slots: asyncio.Semaphore, stream: ByteStream) -> AsyncIterator[None]:
        """Holds one of `slots`; tells the asker while it waits for it."""
        turn = asyncio.ensure_future(slots.acquire())
        try:
            await self._keep_waiting(turn, stream)
            yield
        finally:
            if turn.done() and not turn.cancelled():
                slots.release()
            else:
                turn.cancel()

    async def _keep_waiting(self, turn: asyncio.Future[Any], stream: ByteStream) -> None:
        """Until `turn` is done; its exception stays in it."""
        while not turn.done():
            await asyncio.wait((turn,), timeout=KEEPALIVE_SECONDS)
            if not turn.done():
                await self._in_time(write_frame(stream, WAIT))

    async def _in_time(self, step: Awaitable[T]) -> T:
        async with asyncio.timeout(self._limits.stall_seconds):
            return await step

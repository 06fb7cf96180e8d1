"""The serving side of the fetch protocol (see `streams`): how many streams at once, who waits, who is refused.

Leaves out where blobs come from (a Handler) and what carries the bytes (a ByteStream).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import zlib
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from spes_p2p import steps, wire
from spes_p2p.errors import NetworkError, RemoteProtocolError
from spes_p2p.ids import PeerId
from spes_p2p.steps import reached
from spes_p2p.swarm.calls import MAX_WORDS
from spes_p2p.swarm.pacing import Pacer
from spes_p2p.swarm.ports import CHUNK_BYTES, Blob, Handler
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
NOBODY = PeerId("")
_CHECKED_PER_TURN = 16
T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StreamLimits:
    """What a server of streams allows, so that no asker can take its memory or block the others."""

    max_streams: int = 16
    max_streams_per_peer: int = 8
    max_waiting: int = 256
    max_patient: int = 4
    """Streams at once to askers that can wait: the others are for the running round."""
    stall_seconds: float = 60.0
    """An asker that takes no byte for so long loses its stream; so does one whose blob takes so long to be made."""
    upload_bytes_per_second: float | None = None
    download_bytes_per_second: float | None = None
    """Most that this peer sends and receives, all streams together; None: as much as goes."""

    def traffic(self) -> Traffic:
        """A fresh account, paced by these limits."""
        return Traffic(Pacer(self.upload_bytes_per_second), Pacer(self.download_bytes_per_second))


DEFAULT_LIMITS = StreamLimits()


class StreamServer:
    """Serves the blobs of one handler: `max_streams` at once, the others wait in line."""

    def __init__(
        self, handler: Handler, traffic: Traffic, limits: StreamLimits = DEFAULT_LIMITS, me: PeerId = NOBODY
    ) -> None:
        self._handler, self._traffic, self._limits, self._me = handler, traffic, limits, me
        self._slots = asyncio.Semaphore(limits.max_streams)
        self._patient_slots = asyncio.Semaphore(limits.max_patient)
        self._peer_slots: dict[PeerId, asyncio.Semaphore] = {}
        self._users: dict[PeerId, int] = {}
        self.lost = 0
        """Streams that ended before the asker had everything."""

    async def serve(self, caller: PeerId, stream: ByteStream) -> None:
        """Serves one stream to its end; never raises because of what the other side does."""
        try:
            await self._serve(caller, stream)
        except (NetworkError, RemoteProtocolError, TimeoutError) as error:
            self.lost += 1
            logger.debug("a stream to %s ended early: %s", caller, error)
        finally:
            stream.close()

    async def _serve(self, caller: PeerId, stream: ByteStream) -> None:
        kind, body = await self._in_time(read_frame(stream, MAX_REQUEST_BYTES + FRAME_SLACK))
        with contextlib.ExitStack() as measured:
            try:
                if kind != REQUEST:
                    raise RemoteProtocolError(f"a frame of kind {kind!r} where a request was expected")
                request = wire.unpack(FetchRequest, body)
                async with self._slot(caller, stream, request.patient):
                    blob = await self._found(caller, stream, request)
                    if not request.patient:
                        measured.enter_context(self._traffic.meter.sending())
                    await self._send(caller, stream, request, blob)
            except RemoteProtocolError as error:
                await self._in_time(write_frame(stream, REFUSED, str(error).encode()[:MAX_WORDS]))
            await self._in_time(stream.read(1))  # the asker closes when it has everything

    async def _found(self, caller: PeerId, stream: ByteStream, request: FetchRequest) -> Blob:
        """Tells the asker while the blob is made: some must be read or encoded first."""
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
                f"the blob has {size} bytes, asked for {request.offset} to at most {request.max_bytes}"
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
            reached(steps.STREAM, peer=self._me, to=caller, request=request.body, sent=sent, size=data.nbytes)
        await self._in_time(stream.write(checksum_bytes(checksum)))

    @asynccontextmanager
    async def _slot(self, caller: PeerId, stream: ByteStream, patient: bool) -> AsyncIterator[None]:
        if sum(self._users.values()) >= self._limits.max_streams + self._limits.max_waiting:
            raise RemoteProtocolError("too many streams are waiting here")
        mine = self._peer_slots.setdefault(caller, asyncio.Semaphore(self._limits.max_streams_per_peer))
        self._users[caller] = self._users.get(caller, 0) + 1
        try:
            async with AsyncExitStack() as held:
                for slots in (mine, self._patient_slots, self._slots) if patient else (mine, self._slots):
                    await held.enter_async_context(self._acquired(slots, stream))
                yield
        finally:
            self._users[caller] -= 1
            if not self._users[caller]:
                del self._users[caller], self._peer_slots[caller]

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

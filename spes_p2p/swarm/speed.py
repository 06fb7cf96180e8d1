"""How fast bytes go to and from one peer: a few seconds on one byte stream, for `spes-p2p doctor`.

Strangers may ask for it, so serving is bounded: one asker at a time, at most MAX_BYTES each, an hourly budget, at most
SERVE_SECONDS and MOST_OPEN streams, and at low priority if the peer has an upload limit. On the wire:

    asker   ASK (upload or download)
    server  REFUSED words | GO, then
            download: zeros until the asker closes or MAX_BYTES have gone
            upload:   the count of bytes that have come so far, 8 bytes big-endian, after each piece

An upload is measured by what has arrived, not by what was written, since buffers on the way take megabytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from spes_p2p import wire
from spes_p2p.errors import NetworkError, PeerSilent, RemoteProtocolError
from spes_p2p.swarm.calls import printable
from spes_p2p.swarm.ports import CHUNK_BYTES
from spes_p2p.swarm.streams import ByteStream, Traffic, read_exactly, read_frame, write_frame

MAX_BYTES = 8 * 2**20
BUDGET_BYTES, BUDGET_SECONDS = 32 * MAX_BYTES, 3600.0
MEASURE_SECONDS = 4.0
SERVE_SECONDS = 8.0
MOST_OPEN = 16
"""Streams at a time, with those that have said nothing: each is an open file here. More are closed without a word."""
ANSWER_SECONDS = 5.0
ASK, REFUSED, GO = b"V", b"N", b"G"
PIECE_BYTES = 32 * 2**10
"""Small enough that a slow link shows its speed in seconds."""
_COUNT_BYTES = 8
_MAX_FRAME_BYTES = 1024
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SpeedRequest:
    """`upload`: the asker sends; else the server does."""

    upload: bool


class SpeedHandler:
    """The serving side of one peer."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._busy = False
        self._open = 0
        self._given: deque[float] = deque()
        """When measurements of the last hour began; each may have taken MAX_BYTES."""

    async def serve(self, stream: ByteStream) -> None:
        """Serves one stream to its end; never raises because of what the other side does."""
        self._open += 1
        try:
            if self._open <= MOST_OPEN:
                async with asyncio.timeout(SERVE_SECONDS):
                    await self._serve(stream)
        except (NetworkError, RemoteProtocolError, TimeoutError) as error:
            logger.debug("a measurement of speed ended early: %s", error)
        finally:
            self._open -= 1
            stream.close()

    async def _serve(self, stream: ByteStream) -> None:
        kind, body = await read_frame(stream, _MAX_FRAME_BYTES)
        if kind != ASK:
            raise RemoteProtocolError(f"got a frame of kind {kind!r} where a request was expected")
        upload = wire.unpack(SpeedRequest, body).upload
        if self._busy or not self._may_give():
            await write_frame(stream, REFUSED, b"busy: try again later")
            await stream.read(1)  # the asker closes
            return
        self._busy = True
        try:
            await write_frame(stream, GO)
            await (self._take(stream) if upload else self._give(stream))
        finally:
            self._busy = False

    def _may_give(self) -> bool:
        now = asyncio.get_running_loop().time()
        while self._given and now - self._given[0] > BUDGET_SECONDS:
            self._given.popleft()
        if len(self._given) * MAX_BYTES >= BUDGET_BYTES:
            return False
        self._given.append(now)
        return True

    async def _give(self, stream: ByteStream) -> None:
        size = min(PIECE_BYTES, self._traffic.upload.piece_bytes)
        for start in range(0, MAX_BYTES, size):
            piece = bytes(min(size, MAX_BYTES - start))
            await self._traffic.upload.take(len(piece), urgent=False)
            await stream.write(piece)
            self._traffic.sent += len(piece)
        await stream.read(1)  # the asker closes when it has everything

    async def _take(self, stream: ByteStream) -> None:
        taken, size = 0, self._traffic.download.piece_bytes
        while taken < MAX_BYTES and (piece := await stream.read(min(size, MAX_BYTES - taken))):
            taken += len(piece)
            self._traffic.received += len(piece)
            await self._traffic.download.take(len(piece), urgent=False)
            await stream.write(taken.to_bytes(_COUNT_BYTES, "big"))
        await stream.read(1)


async def measure_speed(open_stream: Callable[[], Awaitable[ByteStream]], upload: bool) -> float:
    """Bytes a second to (`upload`) or from the peer behind the stream; takes MEASURE_SECONDS at most once it goes.

    Raises NetworkError (PeerSilent where nothing moves), RemoteProtocolError where the peer refuses.
    """
    stream = await open_stream()
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            await write_frame(stream, ASK, wire.pack(SpeedRequest(upload)))
            kind, body = await read_frame(stream, _MAX_FRAME_BYTES)
        if kind != GO:
            raise RemoteProtocolError(f"the peer refused a speed measurement: {printable(body)}")
        return await (_upload(stream) if upload else _download(stream))
    except TimeoutError as error:
        raise PeerSilent(f"no answer within {ANSWER_SECONDS:g} s") from error
    finally:
        stream.close()


class _Meter:
    """Bytes by the time of their arrival; how long the first ones were on their way is no matter of speed."""

    def __init__(self) -> None:
        self._clock = asyncio.get_running_loop().time
        self._asked_at = self._clock()
        self._first = (0, 0.0)
        self.count, self._at = 0, 0.0

    def note(self, count: int) -> None:
        self.count, self._at = count, self._clock()
        self._first = self._first if self._first[0] else (count, self._at)

    def rate(self) -> float:
        count, since = self._first
        if not self.count:
            raise PeerSilent(f"nothing arrived within {MEASURE_SECONDS:g} s")
        if self.count == count:
            count, since = 0, self._asked_at
        return (self.count - count) / max(self._at - since, 1e-6)


async def _download(stream: ByteStream) -> float:
    meter = _Meter()
    with contextlib.suppress(TimeoutError):  # what has come by then is the measure
        async with asyncio.timeout(MEASURE_SECONDS):
            while meter.count < MAX_BYTES and (piece := await stream.read(CHUNK_BYTES)):
                meter.note(meter.count + len(piece))
    return meter.rate()


async def _upload(stream: ByteStream) -> float:
    meter = _Meter()
    sending = asyncio.ensure_future(_send_all(stream))
    try:
        with contextlib.suppress(TimeoutError):  # what has arrived by then is the measure
            async with asyncio.timeout(MEASURE_SECONDS):
                while meter.count < MAX_BYTES:
                    meter.note(int.from_bytes(await read_exactly(stream, _COUNT_BYTES), "big"))
    finally:
        sending.cancel()
        await asyncio.wait((sending,))
    return meter.rate()


async def _send_all(stream: ByteStream) -> None:
    piece = bytes(PIECE_BYTES)
    for _ in range(MAX_BYTES // len(piece)):
        await stream.write(piece)

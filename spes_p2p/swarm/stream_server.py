"""The serving side of the fetch protocol (see `streams`): how many streams at once, who waits, who is refused.

Strangers, who are no members of the run, share a few places, so that members always find some. Who reads slowly gives
its place up while others wait for one. Leaves out where blobs come from (a Handler), who is a member, and what carries
the bytes (a ByteStream).
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
from spes_p2p.swarm.pacing import Pacer, Traffic
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
    checksum_bytes,
    read_frame,
    write_frame,
)

KEEPALIVE_SECONDS = 1.0
STREAMS = DoorLimits(Rate(200.0, 2000.0), Rate(50.0, 500.0), Rate(200.0, 2000.0))
MOST_SKIPPED = STREAMS.stranger.burst / 5
"""What it costs at most to go on after an offset: a cut ends all four streams of a newcomer whose tiles are large."""
TURN_SECONDS = 20.0
LEAST_BYTES_PER_SECOND = 32 * 2**10
"""A stream has its place for TURN_SECONDS, and longer while it takes its bytes at this rate. After that it is cut as
soon as another asker waits, and can go on at its offset when it is its turn again."""
_CHECKED_AT_ONCE = 16
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


@dataclass(eq=False)
class _Asked:
    """One open stream; `limit` ends it. `since`: when its turn began, None while it is not being sent anything.

    `has_place`: it waits or is served, else it is refused.
    """

    caller: PeerId
    limit: asyncio.Timeout
    has_place: bool
    patient: bool = False
    since: float | None = None
    sent: int = 0

    def is_turn_over(self, now: float) -> bool:
        return self.since is not None and now - self.since > TURN_SECONDS + self.sent / LEAST_BYTES_PER_SECOND


class _Places:
    """So many streams at once, so many of them patient, and more may wait.

    The next free place is for the asker that has fewest, and for who came first among these. Of its streams the one
    that is furthest goes on: if all that were cut took turns, none would end in its time.
    """

    def __init__(self, streams: int, patient: int, waiting: int = 0) -> None:
        self._room = streams + waiting
        self._open: dict[_Asked, None] = {}
        self._free, self._patient_free = streams, patient
        self._held: Counter[PeerId] = Counter()
        self._waiting: dict[asyncio.Future[None], tuple[PeerId, bool, int]] = {}

    @property
    def crowd(self) -> float:
        """Open streams over how many there may be."""
        return len(self._open) / self._room

    @asynccontextmanager
    async def opened(self, caller: PeerId, has_place: bool) -> AsyncIterator[_Asked]:
        """Around one open stream. Raises TimeoutError where it was ended for another asker's sake."""
        limit = asyncio.timeout(None)
        asked = _Asked(caller, limit, has_place)
        self._open[asked] = None
        try:
            async with limit:
                yield asked
        finally:
            self._open.pop(asked, None)

    async def acquire(self, caller: PeerId, patient: bool, offset: int) -> None:
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[granted] = caller, patient, offset
        self._let_in()
        try:
            await granted
        except asyncio.CancelledError:
            self._waiting.pop(granted, None)
            if not granted.cancelled():
                self.release(caller, patient)
            raise

    def release(self, caller: PeerId, patient: bool) -> None:
        self._free += 1
        self._patient_free += patient
        self._held[caller] -= 1
        if not self._held[caller]:
            del self._held[caller]
        self._let_in()

    def _let_in(self) -> None:
        while self._free:
            able = [one for one, (_, patient, _) in self._waiting.items() if self._patient_free or not patient]
            if not able:
                return
            caller = min((self._waiting[one][0] for one in able), key=lambda peer: self._held[peer])
            own = [one for one in able if self._waiting[one][0] == caller]
            granted = max(own, key=lambda one: self._waiting[one][2])
            _, patient, _ = self._waiting.pop(granted)
            if not granted.cancelled():
                self._free -= 1
                self._patient_free -= patient
                self._held[caller] += 1
                granted.set_result(None)

    def end_turn(self, caller: PeerId, patient: bool) -> bool:
        """Ends a turn of another asker that is over, if there is one, so that `caller` finds a place."""
        now, any_will_do = asyncio.get_running_loop().time(), self._patient_free or not patient
        for asked in self._open:
            if asked.caller != caller and (asked.patient or any_will_do) and asked.is_turn_over(now):
                self._end(asked)
                return True
        return False

    def has_room_for(self, caller: PeerId) -> bool:
        """Whether one more may wait. Where the line is full, the newest stream goes of who has most waiting there, if
        `caller` has fewer.
        """
        taken = [asked for asked in self._open if asked.has_place]
        if len(taken) < self._room:
            return True
        waiting = [asked for asked in taken if asked.since is None]
        counts = Counter(asked.caller for asked in waiting)
        most = max(counts.values(), default=0)
        if most <= counts[caller] + 1:
            return False
        last = next(asked for asked in reversed(waiting) if counts[asked.caller] == most)
        self._end(last)
        return True

    def _end(self, asked: _Asked) -> None:
        del self._open[asked]
        asked.limit.reschedule(asyncio.get_running_loop().time())


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
        self._all = _Places(limits.max_streams, limits.max_streams)
        self._members = _Places(limits.max_streams, limits.max_patient, limits.max_waiting)
        self._strangers = _Places(limits.max_strangers, limits.max_patient, limits.max_strangers_waiting)
        self._of_peer: dict[PeerId, _Places] = {}
        self._open: Counter[PeerId] = Counter()
        self.lost = 0
        """Streams that ended before the asker had everything."""

    async def serve(self, caller: PeerId, stream: ByteStream) -> None:
        """Serves one stream to its end; never raises because of what the other side does."""
        places = self._members if self._is_member(caller) else self._strangers
        crowd = self._open[caller] / self._limits.max_open_per_peer
        has_place = crowd < 1 and self._door.admits(caller) and places.has_room_for(caller)
        if not has_place:
            crowd = max(crowd, places.crowd)
        self._open[caller] += 1
        try:
            async with places.opened(caller, has_place) as asked:
                if crowd < _NO_WORDS:
                    await self._serve(asked, stream, places)
        except (NetworkError, RemoteProtocolError, TimeoutError) as error:
            self.lost += 1
            logger.debug("a stream to %s ended early: %s", caller, error)
        finally:
            stream.close()
            self._open[caller] -= 1
            if not self._open[caller]:
                del self._open[caller]
                self._of_peer.pop(caller, None)

    async def _serve(self, asked: _Asked, stream: ByteStream, places: _Places) -> None:
        kind, body = await self._in_time(read_frame(stream, MAX_REQUEST_BYTES + FRAME_SLACK))
        with contextlib.ExitStack() as measured:
            try:
                if kind != REQUEST:
                    raise RemoteProtocolError(f"got a frame of kind {kind!r} where a request was expected")
                request = wire.unpack(FetchRequest, body)
                # what a stranger leaves out is read and hashed all the same, and no upload paces it
                skipped = 0 if places is self._members else min(request.offset / CHUNK_BYTES, MOST_SKIPPED)
                if not (asked.has_place and self._door.admits(asked.caller, skipped)):
                    raise RemoteProtocolError("too many streams are waiting, or came in too short a time")
                async with self._slot(asked.caller, stream, places, request):
                    blob = await self._found(asked.caller, stream, request)
                    if not request.patient and places is self._members:  # a stranger may read as slowly as it likes
                        measured.enter_context(self._traffic.meter.sending())
                    asked.patient, asked.since = request.patient, asyncio.get_running_loop().time()
                    await self._send(asked, stream, request, blob)
                    asked.since = None
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

    async def _send(self, asked: _Asked, stream: ByteStream, request: FetchRequest, blob: Blob) -> None:
        data = memoryview(blob.data).cast("B")
        head = wire.pack(BlobHead(data.nbytes, blob.header))
        checksum = zlib.crc32(head)
        await self._in_time(write_frame(stream, BLOB, head))
        for start in range(0, request.offset, CHUNK_BYTES):  # what the asker has already
            checksum = zlib.crc32(data[start : min(start + CHUNK_BYTES, request.offset)], checksum)
            if start // CHUNK_BYTES % _CHECKED_AT_ONCE == 0:
                await asyncio.sleep(0)
        upload, size = self._traffic.upload, self._traffic.upload.piece_bytes
        for start in range(request.offset, data.nbytes, size):
            chunk = data[start : start + size]
            checksum = zlib.crc32(chunk, checksum)
            await upload.take(chunk.nbytes, not request.patient)
            await self._in_time(stream.write(chunk))
            asked.sent += chunk.nbytes
            self._traffic.sent += chunk.nbytes
            self._traffic.meter.sent(chunk.nbytes)
            if blob.on_sent is not None:
                blob.on_sent(chunk.nbytes)
            sent = start + chunk.nbytes
            to, body = asked.caller, request.body
            reached(failpoints.STREAM, peer=self._me, to=to, request=body, sent=sent, size=data.nbytes)
        await self._in_time(stream.write(checksum_bytes(checksum)))

    @asynccontextmanager
    async def _slot(
        self, caller: PeerId, stream: ByteStream, places: _Places, request: FetchRequest
    ) -> AsyncIterator[None]:
        most, patient = self._limits.max_streams_per_peer, request.patient
        mine = self._of_peer.setdefault(caller, _Places(most, most))
        # the shared ones last: strangers wait for their own places without being in the way of members
        order: tuple[tuple[_Places, Callable[[], object]], ...] = (
            (mine, lambda: None),
            (places, lambda: places.end_turn(caller, patient)),
            (self._all, lambda: self._end_any_turn(caller, places)),
        )
        async with AsyncExitStack() as held:
            for shared, make_room in order:
                await held.enter_async_context(self._acquired(shared, caller, request, stream, make_room))
            yield

    def _end_any_turn(self, caller: PeerId, places: _Places) -> None:
        """All streams are taken. A stranger's goes first; for a stranger no member's goes."""
        if not self._strangers.end_turn(caller, False) and places is self._members:
            self._members.end_turn(caller, False)

    @asynccontextmanager
    async def _acquired(
        self,
        places: _Places,
        caller: PeerId,
        request: FetchRequest,
        stream: ByteStream,
        make_room: Callable[[], object],
    ) -> AsyncIterator[None]:
        """Holds one of `places`; tells the asker while it waits for it."""
        granted = asyncio.ensure_future(places.acquire(caller, request.patient, request.offset))
        try:
            await self._keep_waiting(granted, stream, make_room)
            yield
        finally:
            if granted.done() and not granted.cancelled():
                places.release(caller, request.patient)
            else:
                granted.cancel()

    async def _keep_waiting(
        self, turn: asyncio.Future[Any], stream: ByteStream, meanwhile: Callable[[], object] = lambda: None
    ) -> None:
        """Until `turn` is done; its exception stays in it."""
        while not turn.done():
            await asyncio.wait((turn,), timeout=KEEPALIVE_SECONDS)
            if not turn.done():
                meanwhile()
                await self._in_time(write_frame(stream, WAIT))

    async def _in_time(self, step: Awaitable[T]) -> T:
        async with asyncio.timeout(self._limits.stall_seconds):
            return await step

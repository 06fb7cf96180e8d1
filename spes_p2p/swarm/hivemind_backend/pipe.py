"""Byte streams through the libp2p daemon's socket, for large data: few system calls, few turns of the loop, no copies.

asyncio's reader copies what comes into a buffer and out again, and wakes its task for every 32 KiB that the daemon
hands on; its writer copies what the socket does not take at once. Leaves out how streams are opened.
"""

from __future__ import annotations

import asyncio
import socket

from spes_p2p.errors import PeerClosed

_GATHER_SECONDS = 0.005
"""A reader wakes up when its buffer is full, or this long after the first byte."""
_AHEAD_BYTES = 2**16
"""Bytes to take from the socket while nobody reads, before reading from it pauses."""
_DIRECT_BYTES = 2**14
"""From here on data goes into the socket as it is."""
_SOCKET_BYTES = 2**20
"""What the kernel may hold of it, if it agrees: the daemon takes 32 KiB at a time."""


class PipeStream:
    """A stream that others have opened (streams.ByteStream): they ask, much is written."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._socket: socket.socket | None = None
        writer.transport.set_write_buffer_limits(high=0)  # nothing is left there when `write` returns

    async def read(self, max_bytes: int) -> bytes:
        try:
            return await self._reader.read(max_bytes)
        except OSError as error:
            raise PeerClosed(f"the stream broke: {error}") from error

    async def read_into(self, room: memoryview) -> int:
        piece = await self.read(len(room))
        room[: len(piece)] = piece
        return len(piece)

    async def write(self, data: bytes | memoryview) -> None:
        try:
            if len(data) < _DIRECT_BYTES:
                self._writer.write(data)
                await self._writer.drain()
            else:
                await asyncio.get_running_loop().sock_sendall(self._direct(), data)
        except OSError as error:
            raise PeerClosed(f"the stream broke: {error}") from error

    def _direct(self) -> socket.socket:
        """The same socket under another descriptor, which asyncio lets us write to."""
        if self._socket is None:
            self._socket = self._writer.get_extra_info("socket").dup()
            self._socket.setblocking(False)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        return self._socket

    def close(self) -> None:
        self._writer.close()
        if self._socket is not None:
            self._socket.close()


class Incoming(asyncio.BufferedProtocol):
    """A stream that we have opened and on which nothing was said yet (streams.ByteStream): much is read.

    What comes goes where the reader wants it, in one step. A reader that is cancelled loses what came meanwhile.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._loop = asyncio.get_running_loop()
        assert isinstance(writer.transport, asyncio.Transport)
        self._transport = writer.transport
        self._opened = reader, writer  # asyncio ends a stream when one of them is gone
        self._room: memoryview | None = None
        self._filled = 0
        self._full: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ahead = self._spare = memoryview(b"")
        self._ended = reader.at_eof() or self._transport.is_closing()
        self._error: Exception | None = None
        self._transport.set_protocol(self)

    # ---- a reader ----

    async def read(self, max_bytes: int) -> bytes:
        room = memoryview(bytearray(max_bytes))
        return bytes(room[: await self.read_into(room)])

    async def read_into(self, room: memoryview) -> int:
        if self._ahead:
            count = min(len(self._ahead), len(room))
            room[:count], self._ahead = self._ahead[:count], self._ahead[count:]
            return count
        if not self._ended:
            self._room, self._filled, self._full = room, 0, self._loop.create_future()
            self._transport.resume_reading()
            try:
                await self._full
            finally:
                self._let_go()
        else:
            self._filled = 0
        if not self._filled and self._error is not None:
            raise PeerClosed(f"the stream broke: {self._error}") from self._error
        return self._filled

    async def write(self, data: bytes | memoryview) -> None:
        """Small things: what the socket does not take at once is held here."""
        if self._ended:
            raise PeerClosed("the stream broke")
        self._transport.write(data)

    def close(self) -> None:
        self._transport.close()

    # ---- what the loop tells ----

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._room is not None:
            return self._room[self._filled :]
        self._spare = memoryview(bytearray(_AHEAD_BYTES))
        return self._spare

    def buffer_updated(self, nbytes: int) -> None:
        if self._room is None:
            self._ahead = self._spare[:nbytes]
            self._transport.pause_reading()
            return
        self._filled += nbytes
        if self._filled == len(self._room):
            self._let_go()
        elif self._timer is None:
            self._timer = self._loop.call_later(_GATHER_SECONDS, self._let_go)

    def eof_received(self) -> None:
        self._ended = True
        self._let_go()

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended, self._error = True, self._error or exc
        self._let_go()

    def _let_go(self) -> None:
        """The reader's room is its own again."""
        self._room = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._full is not None and not self._full.done():
            self._full.set_result(None)

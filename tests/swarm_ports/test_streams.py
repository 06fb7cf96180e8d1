"""The fetch protocol against an other side that says anything: only known errors, bounded memory, no wrong data."""

from __future__ import annotations

import asyncio
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_p2p import wire
from spes_p2p.errors import NetworkError, PeerClosed, RemoteProtocolError
from spes_p2p.ids import PeerId
from spes_p2p.swarm.pacing import Traffic
from spes_p2p.swarm.ports import Blob
from spes_p2p.swarm.stream_server import StreamServer
from spes_p2p.swarm.streams import BlobHead, FetchRequest, checksum_bytes, fetch_stream
from tests.simulation.virtual_time import run_virtual

PEER = PeerId("peer")


class Scripted:
    """The other side says `script` and no more; what is written to it is kept."""

    def __init__(self, script: bytes) -> None:
        self._script = script
        self.written = b""
        self.closed = False

    async def read(self, max_bytes: int) -> bytes:
        await asyncio.sleep(0)
        said, self._script = self._script[:max_bytes], self._script[max_bytes:]
        return said

    async def read_into(self, room: memoryview) -> int:
        said = await self.read(len(room))
        room[: len(said)] = said
        return len(said)

    async def write(self, data: bytes | memoryview) -> None:
        self.written += bytes(data)

    def close(self) -> None:
        self.closed = True


class Refuser:
    async def on_call(self, caller: PeerId, request: bytes) -> bytes:
        return b""

    async def on_fetch(self, caller: PeerId, request: bytes) -> Blob:
        return Blob(b"data")


def frame(kind: bytes, body: bytes) -> bytes:
    return kind + len(body).to_bytes(4, "big") + body


def fetch(script: bytes, max_bytes: int = 1000) -> tuple[bytes, bytes]:
    async def main() -> tuple[bytes, bytes]:
        async def open_stream() -> Scripted:
            return Scripted(script)

        header, data = await fetch_stream(open_stream, PEER, b"request", 1.0, max_bytes, Traffic())
        return header, bytes(data)

    return run_virtual(main())


HEAD = wire.pack(BlobHead(4, b"head"))
WHOLE = frame(b"B", HEAD) + b"data" + checksum_bytes(zlib.crc32(HEAD + b"data"))


def test_a_whole_blob_is_taken() -> None:
    assert fetch(frame(b"W", b"") * 3 + WHOLE) == (b"head", b"data")


@pytest.mark.parametrize(
    ("script", "error", "words"),
    [
        (frame(b"B", HEAD) + b"", PeerClosed, "cut the stream after 0 of 4 bytes"),
        (WHOLE[:-1] + b"!", RemoteProtocolError, "wrong checksum"),
        (frame(b"N", b"no\x1b[2J"), RemoteProtocolError, r"refused: no\?\[2J"),
        (frame(b"B", wire.pack(BlobHead(1001, b""))), RemoteProtocolError, "at most 1000"),
        (b"B\xff\xff\xff\xff", RemoteProtocolError, "a frame has 4294967295 bytes"),
        (frame(b"?", b""), RemoteProtocolError, "instead of a blob"),
    ],
)
def test_what_is_no_whole_blob_is_not(script: bytes, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        fetch(script)


@given(script=st.binary(max_size=200), place=st.integers(0, 200))
def test_an_asker_survives_any_bytes(script: bytes, place: int) -> None:
    for said in (script, WHOLE[: place % len(WHOLE)] + script):
        try:
            assert fetch(said) == (b"head", b"data")
        except (NetworkError, RemoteProtocolError):
            continue


@given(script=st.binary(max_size=200))
def test_a_server_survives_any_bytes(script: bytes) -> None:
    async def main() -> Scripted:
        stream = Scripted(script)
        await StreamServer(Refuser(), Traffic()).serve(PEER, stream)
        return stream

    assert run_virtual(main()).closed


def test_a_server_serves_from_the_offset_on() -> None:
    async def main() -> bytes:
        stream = Scripted(frame(b"Q", wire.pack(FetchRequest(1, 10, b""))))
        await StreamServer(Refuser(), Traffic()).serve(PEER, stream)
        return stream.written

    head = wire.pack(BlobHead(4, b""))
    assert run_virtual(main()) == frame(b"B", head) + b"ata" + checksum_bytes(zlib.crc32(head + b"data"))


@pytest.mark.parametrize("is_member", [True, False])
def test_what_a_stranger_leaves_out_counts_as_if_it_asked_for_it(is_member: bool) -> None:
    """It is read and hashed before anything is sent, or nothing is."""
    asked = 0

    class Giver(Refuser):
        async def on_fetch(self, caller: PeerId, request: bytes) -> Blob:
            nonlocal asked
            asked += 1
            return Blob(bytes(2**20))

    async def main() -> None:
        server = StreamServer(Giver(), Traffic(), is_member=lambda peer: is_member)
        for _ in range(500):
            stream = Scripted(frame(b"Q", wire.pack(FetchRequest(2**20, 2**20, b""))))
            await server.serve(PEER, stream)

    run_virtual(main())
    assert asked == 500 if is_member else asked <= 100


def test_a_stranger_goes_on_with_large_blobs_where_they_were_cut() -> None:
    """A tile may have 256 MiB. What costs more than a stranger may ever take would be refused for ever."""
    blob = bytes(2**27)

    class Giver(Refuser):
        async def on_fetch(self, caller: PeerId, request: bytes) -> Blob:
            return Blob(blob)

    async def main() -> list[bytes]:
        server = StreamServer(Giver(), Traffic(), is_member=lambda peer: False)
        streams = [Scripted(frame(b"Q", wire.pack(FetchRequest(2**27, 2**27, b"")))) for _ in range(4)]
        await asyncio.gather(*(server.serve(PEER, stream) for stream in streams))
        return [stream.written[:1] for stream in streams]

    assert run_virtual(main()) == [b"B"] * 4

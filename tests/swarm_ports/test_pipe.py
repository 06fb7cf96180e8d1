"""Streams through the daemon's socket, on a socket alone: all bytes, in order, at the right place, and their ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import socket
from collections.abc import Awaitable, Callable

import pytest

from spes_p2p.errors import PeerClosed
from spes_p2p.swarm.hivemind_backend.pipe import Incoming, PipeStream

SIZE = 3_000_000
DATA = random.Random(7).randbytes(SIZE)


def play(story: Callable[[Incoming, PipeStream], Awaitable[None]]) -> None:
    """`story` has both ends of a stream, as an asker and a server have them."""

    async def main() -> None:
        here, there = socket.socketpair()
        asker = Incoming(*await asyncio.open_unix_connection(sock=here))
        server = PipeStream(*await asyncio.open_unix_connection(sock=there))
        gc.collect()  # nobody but the streams knows what asyncio opened
        try:
            async with asyncio.timeout(60.0):
                await story(asker, server)
        finally:
            asker.close()
            server.close()

    asyncio.run(main())


async def filled(asker: Incoming, room: memoryview) -> None:
    """Reads until `room` is full."""
    at = 0
    while at < len(room):
        count = await asker.read_into(room[at : at + 2**18])
        assert count > 0
        at += count


@pytest.mark.parametrize("pieces", [(1, 5, 16_383), (2**18,), (1, 2**18, 40, 2**20), (SIZE,)])
def test_all_bytes_arrive_in_order(pieces: tuple[int, ...]) -> None:
    async def story(asker: Incoming, server: PipeStream) -> None:
        async def send() -> None:
            at, turn = 0, 0
            while at < SIZE:
                size = pieces[turn % len(pieces)] if turn < 100 else 2**17
                await server.write(memoryview(DATA)[at : at + size])
                at, turn = at + size, turn + 1

        await asker.write(b"what I want")
        assert await server.read(100) == b"what I want"
        sending = asyncio.create_task(send())
        start = await asker.read(5)
        room = memoryview(bytearray(SIZE - len(start)))
        await filled(asker, room)
        await sending
        assert start + bytes(room) == DATA

    play(story)


def test_who_does_not_read_holds_the_sender_up_and_loses_nothing() -> None:
    async def story(asker: Incoming, server: PipeStream) -> None:
        sending = asyncio.create_task(server.write(DATA))
        done, _ = await asyncio.wait((sending,), timeout=0.1)
        assert not done
        assert len(asker._ahead) <= 2**16
        room = memoryview(bytearray(SIZE))
        await filled(asker, room)
        await sending
        assert bytes(room) == DATA

    play(story)


def test_an_end_is_told_after_what_came_before() -> None:
    async def story(asker: Incoming, server: PipeStream) -> None:
        await server.write(b"the last words")
        server.close()
        room = memoryview(bytearray(100))
        assert bytes(room[: await asker.read_into(room)]) == b"the last words"
        assert await asker.read_into(room) == 0
        assert await asker.read(5) == b""
        with pytest.raises(PeerClosed):
            await asker.write(b"more")

    play(story)


def test_an_asker_that_is_gone_ends_the_sender() -> None:
    async def story(asker: Incoming, server: PipeStream) -> None:
        sending = asyncio.create_task(server.write(DATA))
        await asker.read(5)
        asker.close()
        with pytest.raises(PeerClosed):
            await sending

    play(story)


def test_a_reader_that_gave_up_is_not_written_to() -> None:
    async def story(asker: Incoming, server: PipeStream) -> None:
        room = memoryview(bytearray(1000))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await asker.read_into(room)
        await server.write(b"too late")
        assert await asker.read(8) == b"too late"
        assert bytes(room) == bytes(1000)

    play(story)


def test_no_descriptor_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of these sockets: what else goes on in this process opens and closes others meanwhile."""
    made: list[str] = []
    socketpair = socket.socketpair

    def noted() -> tuple[socket.socket, socket.socket]:
        both = socketpair()
        made.extend(os.readlink(f"/proc/self/fd/{one.fileno()}") for one in both)
        return both

    def there() -> list[str]:
        found = []
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):
                found.append(os.readlink(f"/proc/self/fd/{name}"))
        return [one for one in found if one in made]

    async def story(asker: Incoming, server: PipeStream) -> None:
        assert sorted(there()) == sorted(made)
        sending = asyncio.create_task(server.write(DATA))
        await filled(asker, memoryview(bytearray(SIZE)))
        await sending

    monkeypatch.setattr(socket, "socketpair", noted)
    play(story)
    assert len(made) >= 2
    assert there() == []

"""A peer whose streams never pause and never end: bounded memory, and no round of the others is lost to it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spes_p2p import wire
from spes_p2p.consensus.members import Members
from spes_p2p.consensus.messages import Status
from spes_p2p.errors import PeerClosed, RemoteProtocolError
from spes_p2p.exchange.patience import LEAST_BYTES_PER_SECOND, NeverEnding, Patience, fetch_within
from spes_p2p.exchange.requests import CHAIN, TILES, VALUES, kind_of, unpack_request
from spes_p2p.ids import PeerId, sha256
from spes_p2p.swarm import stream_server
from spes_p2p.swarm.memory_backend import MemoryNetwork
from spes_p2p.swarm.ports import Blob
from spes_p2p.swarm.stream_server import StreamLimits, StreamServer
from spes_p2p.swarm.streams import (
    BLOB,
    REFUSED,
    WAIT,
    BlobHead,
    ByteStream,
    FetchRequest,
    Partial,
    fetch_stream,
    read_frame,
    write_frame,
)
from tests.simulation.memory_swarm import MemorySwarm
from tests.simulation.virtual_time import run_virtual
from tests.sync.swarm_cases import check_agreement, check_leases, counts, in_swarm, small_config, until

LIAR = PeerId("d")


class Liar:
    """The serving side of one peer: answers some kinds of requests for ever, by waiting words or a byte at a time."""

    def __init__(self, kind: str, trickles: bool) -> None:
        self.kind, self.trickles, self.is_lying = kind, trickles, True

    async def serve(self, server: StreamServer, asked: Any, stream: ByteStream) -> None:
        _, body = await read_frame(stream, 2**20)
        request = wire.unpack(FetchRequest, body)
        try:
            blob = await server._find(asked.caller, request)
        except RemoteProtocolError as error:
            await write_frame(stream, REFUSED, str(error).encode())
            return
        if not self.is_lying or kind_of(unpack_request(request.body)) != self.kind:
            await server._send(asked, stream, request, blob)
            await stream.read(1)
        elif self.trickles:
            await self._trickle(stream, blob)
        else:
            while True:
                await write_frame(stream, WAIT)
                await asyncio.sleep(1.0)

    async def _trickle(self, stream: ByteStream, blob: Blob) -> None:
        data = memoryview(blob.data).cast("B")
        await write_frame(stream, BLOB, wire.pack(BlobHead(data.nbytes, blob.header)))
        for at in range(data.nbytes):
            await stream.write(data[at : at + 1])
            await asyncio.sleep(1.0)


def lie(patch: pytest.MonkeyPatch, liar: Liar) -> None:
    real = StreamServer._serve

    async def serve(server: StreamServer, asked: Any, stream: ByteStream, *places: Any) -> None:
        if server._me != LIAR:
            await real(server, asked, stream, *places)
        else:
            await liar.serve(server, asked, stream)

    patch.setattr(stream_server.StreamServer, "_serve", serve)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [VALUES, TILES])
@pytest.mark.parametrize("trickles", [False, True], ids=["waits", "trickles"])
def test_the_others_go_on_and_an_honest_end_is_counted_again(folder: Path, kind: str, trickles: bool) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start("abcd")
        await swarm.until_round(2)
        with pytest.MonkeyPatch.context() as patch:
            liar = Liar(kind, trickles)
            lie(patch, liar)
            stood = max(life.round for life in swarm.up)
            async with asyncio.timeout(600.0):
                await swarm.until_round(stood + 8, "abc")
            liar.is_lying = False
            async with asyncio.timeout(600.0):
                await until(counts(swarm, LIAR), 600.0)
        check_agreement(swarm)
        check_leases(swarm)
        named = {notice.peer for life in swarm.up for notice in life.notices if notice.kind == "left out"}
        assert named == {LIAR}

    in_swarm(folder, play, small_config(peers=4))


@pytest.mark.parametrize("trickles", [False, True], ids=["waits", "trickles"])
def test_who_claims_to_be_far_ahead_and_never_shows_it_holds_nobody_up(folder: Path, trickles: bool) -> None:
    """Those who train go on, a newcomer gets in, and the bootstrap node knows the newest round."""

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start("abcd")
        await swarm.until_round(2)
        organiser = swarm.organiser
        assert organiser is not None
        with pytest.MonkeyPatch.context() as patch:
            lie(patch, Liar(CHAIN, trickles))
            claim_far_ahead(patch)
            async with asyncio.timeout(300.0):
                await swarm.until_round(8, "abc")
                newcomer = await swarm.add("e")
                await until(newcomer.driver.core.state.is_member, 200.0)
                await until(lambda: organiser.chain.length > newcomer.round, 100.0)
        assert not [notice for life in swarm.up for notice in life.notices if notice.kind == "fork"]

    in_swarm(folder, play, small_config(peers=4))


def claim_far_ahead(patch: pytest.MonkeyPatch) -> None:
    honest = Members.own_status

    def claim(members: Members) -> Status:
        status = honest(members)
        return status if status.peer != LIAR else replace(status, round=10**9, head=sha256(b"nowhere"))

    patch.setattr(Members, "own_status", claim)


def test_a_slow_link_has_time_and_who_wastes_it_has_less() -> None:
    patience = Patience(least_seconds=lambda: 10.0, round_seconds=lambda: 100.0)
    assert patience.seconds(LIAR, 1000) == 50.0
    assert patience.seconds(LIAR, 100 * LEAST_BYTES_PER_SECOND) == 100.0
    waits = []
    for _ in range(5):
        waits.append(patience.seconds(LIAR, 1000))
        patience.note_timeout(LIAR, NeverEnding("it trickles", only_waited=False))
    assert waits == [50.0, 25.0, 12.5, 10.0, 10.0]
    assert patience.was_given_up(LIAR)
    patience.note_success(LIAR)
    assert patience.seconds(LIAR, 1000) == 50.0
    assert not patience.was_given_up(LIAR)


def test_who_has_a_long_line_is_asked_later_and_given_as_much_time() -> None:
    patience = Patience(least_seconds=lambda: 10.0, round_seconds=lambda: 100.0)
    patience.note_timeout(LIAR, NeverEnding("others are first", only_waited=True))
    assert patience.seconds(LIAR, 1000) == 50.0
    assert patience.was_given_up(LIAR)


class Holder:
    """Has a blob of as many bytes as the request says, at once."""

    async def on_call(self, caller: PeerId, request: bytes) -> bytes:
        return b""

    async def on_fetch(self, caller: PeerId, request: bytes) -> Blob:
        return Blob(bytes(int(request)))


def test_many_who_can_wait_all_get_theirs_from_one_slow_holder() -> None:
    """All together need ten times as long as one may take; what they wait must not be taken for the holder's lies."""
    size = 2 * LEAST_BYTES_PER_SECOND
    limits = StreamLimits(upload_bytes_per_second=4 * size / 1.6)  # 1.6 s for a blob, four at a time

    async def main() -> None:
        network = MemoryNetwork(0)
        await network.peer(LIAR, limits).transport.serve(Holder())

        async def ask(name: str) -> None:
            transport, patience = network.peer(name).transport, Patience(lambda: 1.0, lambda: 0.0)
            assert patience.seconds(LIAR, size) == 2.0
            while True:
                try:
                    await fetch_within(
                        transport, LIAR, b"%d" % size, 60.0, size, lambda: patience.seconds(LIAR, size), patient=True
                    )
                    return
                except NeverEnding as error:
                    patience.note_timeout(LIAR, error)

        await asyncio.gather(*(ask(f"newcomer {number}") for number in range(48)))

    run_virtual(main(), 100.0)


def test_who_can_wait_waits_and_is_sent_for_as_long_each() -> None:
    async def main() -> None:
        network = MemoryNetwork(0)
        await network.peer(LIAR, StreamLimits(upload_bytes_per_second=32000.0)).transport.serve(Late())
        transport = network.peer(PeerId("me")).transport
        loop = asyncio.get_running_loop()
        began = loop.time()  # 5 s until it comes, then 4 s until it is here
        await fetch_within(transport, LIAR, b"5 128000", 60.0, 10**6, lambda: 6.0, patient=True)
        assert loop.time() - began > 6.0
        for seconds, size, patient, only_waited in (
            (5, 128000, False, False),
            (7, 1, True, True),
            (1, 288000, True, False),
        ):
            words = b"%d %d" % (seconds, size)
            with pytest.raises(NeverEnding) as caught:
                await fetch_within(transport, LIAR, words, 60.0, 10**6, lambda: 6.0, patient=patient)
            assert caught.value.only_waited is only_waited

    run_virtual(main(), 1000.0)


class Late(Holder):
    """Has a blob some seconds later: a request says how many, and of how many bytes."""

    async def on_fetch(self, caller: PeerId, request: bytes) -> Blob:
        seconds, size = map(int, request.split())
        await asyncio.sleep(seconds)
        return Blob(bytes(size))


def test_who_was_cut_off_waits_in_line_again() -> None:
    async def main() -> None:
        network, partial, began = MemoryNetwork(0), Partial(), list[bool]()
        await network.peer(LIAR).transport.serve(Holder())
        transport = network.peer(PeerId("me")).transport

        class Cut:
            def __init__(self, stream: ByteStream) -> None:
                self.read, self.write, self.close = stream.read, stream.write, stream.close

            async def read_into(self, room: memoryview) -> int:
                raise PeerClosed("cut")

        async def open_stream() -> ByteStream:
            began.append(partial.is_sent)
            stream = await transport._open_stream(LIAR)
            return stream if len(began) > 1 else Cut(stream)

        await fetch_stream(open_stream, LIAR, b"1000", 60.0, 1000, transport.traffic, True, partial)
        assert began == [False, False]

    run_virtual(main(), 1000.0)


def test_a_fetch_is_given_up_as_a_whole() -> None:
    async def main() -> None:
        network = MemoryNetwork(0)
        await network.peer(LIAR).transport.serve(Late())
        transport = network.peer(PeerId("me")).transport
        assert len((await fetch_within(transport, LIAR, b"5 10", 60.0, 10, lambda: 6.0))[1]) == 10
        with pytest.raises(NeverEnding, match="did not finish within 6"):
            await fetch_within(transport, LIAR, b"50 10", 60.0, 10, lambda: 6.0)

    run_virtual(main(), 1000.0)

"""A rate that a person chose is kept, shared fairly, and what is urgent goes first."""

from __future__ import annotations

import asyncio

import pytest

from spes_p2p.ids import PeerId
from spes_p2p.swarm.memory_backend import MemoryNetwork, MemoryPeer
from spes_p2p.swarm.pacing import BURST_SECONDS, Pacer
from spes_p2p.swarm.ports import CHUNK_BYTES, Blob
from spes_p2p.swarm.stream_server import StreamLimits
from tests.simulation.virtual_time import run_virtual

RATE = 2_500_000.0  # 20 Mbit/s


class Library:
    """Answers every fetch with as many bytes as the request says."""

    async def on_call(self, caller: PeerId, request: bytes) -> bytes:
        return request

    async def on_fetch(self, caller: PeerId, request: bytes) -> Blob:
        return Blob(bytes(int(request)))


async def send_for(pacer: Pacer, seconds: float, urgent: bool = True) -> int:
    sent, end = 0, asyncio.get_running_loop().time() + seconds
    while True:
        await pacer.take(pacer.piece_bytes, urgent)
        if asyncio.get_running_loop().time() > end:
            return sent
        sent += pacer.piece_bytes


@pytest.mark.parametrize("streams", [1, 16])
def test_a_rate_is_kept_within_five_percent_over_ten_seconds(streams: int) -> None:
    async def main() -> None:
        pacer = Pacer(RATE)
        sent = sum(await asyncio.gather(*(send_for(pacer, 10.0) for _ in range(streams))))
        assert sent == pytest.approx(10 * RATE, rel=0.05)

    run_virtual(main(), 100.0)


def test_an_idle_time_is_made_up_for_by_no_more_than_a_burst() -> None:
    async def main() -> None:
        pacer = Pacer(RATE)
        await pacer.take(1)
        await asyncio.sleep(100.0)
        assert await send_for(pacer, 1.0) <= RATE * (1.0 + BURST_SECONDS) + pacer.piece_bytes

    run_virtual(main(), 200.0)


def test_late_timers_cost_no_rate() -> None:
    async def main() -> None:
        pacer = Pacer(RATE)
        for _ in range(100):
            await pacer.take(int(RATE / 10))
        assert asyncio.get_running_loop().time() == pytest.approx(10.0, abs=0.3)

    run_virtual(main(), 100.0)


def test_the_patient_get_a_tenth_while_there_is_something_urgent_and_all_without() -> None:
    async def main() -> None:
        pacer = Pacer(RATE)
        urgent, patient = await asyncio.gather(send_for(pacer, 10.0), send_for(pacer, 10.0, urgent=False))
        assert urgent + patient == pytest.approx(10 * RATE, rel=0.05)
        assert patient == pytest.approx(RATE, rel=0.2)
        assert await send_for(pacer, 10.0, urgent=False) == pytest.approx(10 * RATE, rel=0.05)

    run_virtual(main(), 100.0)


def test_who_gives_up_takes_no_turn() -> None:
    async def main() -> None:
        pacer = Pacer(RATE)
        await pacer.take(int(RATE))
        waiting = [asyncio.ensure_future(pacer.take(int(RATE))) for _ in range(3)]
        await asyncio.sleep(0.1)
        waiting[0].cancel()
        waiting[1].cancel()
        await waiting[2]
        assert asyncio.get_running_loop().time() < 2.1

    run_virtual(main(), 100.0)


def test_without_a_limit_nothing_waits() -> None:
    async def main() -> None:
        pacer = Pacer()
        assert pacer.piece_bytes == CHUNK_BYTES
        for _ in range(1000):
            await pacer.take(2**30)
        assert asyncio.get_running_loop().time() == 0.0

    run_virtual(main(), 1.0)


def test_a_rate_that_nobody_could_live_with_is_refused() -> None:
    with pytest.raises(ValueError, match="below the least rate, 32000"):
        Pacer(1000.0)


@pytest.mark.parametrize("side", ["upload", "download"])
def test_all_streams_of_a_peer_share_its_rate(side: str) -> None:
    async def main() -> None:
        network = MemoryNetwork(0)
        server = network.peer("server", StreamLimits(upload_bytes_per_second=RATE if side == "upload" else None))
        asker = network.peer("asker", StreamLimits(download_bytes_per_second=RATE if side == "download" else None))
        await server.transport.serve(Library())
        size = int(RATE)

        async def get(peer: MemoryPeer) -> None:
            await peer.transport.fetch(server.peer_id, str(size).encode(), 5.0, size)

        await asyncio.gather(*(get(asker) for _ in range(10)))
        assert asyncio.get_running_loop().time() == pytest.approx(10.0, rel=0.05)

    run_virtual(main(), 100.0)


def test_a_joiner_holds_up_no_round() -> None:
    async def main() -> None:
        network = MemoryNetwork(0)
        server = network.peer(PeerId("server"), StreamLimits(upload_bytes_per_second=RATE))
        await server.transport.serve(Library())
        loop, size = asyncio.get_running_loop(), int(RATE)
        joiner, member = network.peer(PeerId("joiner")), network.peer(PeerId("member"))
        downloads = [
            asyncio.ensure_future(joiner.transport.fetch(server.peer_id, str(size).encode(), 4.0, size, True))
            for _ in range(8)
        ]
        await asyncio.sleep(1.0)
        began = loop.time()
        await member.transport.fetch(server.peer_id, str(5 * size).encode(), 4.0, 5 * size)
        assert loop.time() - began == pytest.approx(5.0 / 0.9, rel=0.1)
        await asyncio.gather(*downloads)  # nobody took the server for dead meanwhile
        assert loop.time() == pytest.approx(13.0, rel=0.1)

    run_virtual(main(), 100.0)

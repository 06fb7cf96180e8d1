"""The speed of a link is measured as it is, whatever the buffers; who serves is bounded whatever is asked."""

from __future__ import annotations

import asyncio
import random

import pytest

from spes_p2p.errors import NetworkError, PeerSilent, RemoteProtocolError
from spes_p2p.ids import PeerId
from spes_p2p.swarm.memory_links import LinkShape, MemoryStream, Roads, stream_pair
from spes_p2p.swarm.pacing import Pacer
from spes_p2p.swarm.speed import (
    BUDGET_BYTES,
    BUDGET_SECONDS,
    MAX_BYTES,
    MOST_OPEN,
    SERVE_SECONDS,
    SpeedHandler,
    measure_speed,
)
from spes_p2p.swarm.streams import ByteStream, Traffic, write_frame
from tests.simulation.virtual_time import run_virtual

PROMPT = (0.001, 0.001)
HOME, HOST = PeerId("home"), PeerId("host")


class Net:
    """A home link to a host that serves, in memory."""

    def __init__(self, up: float, down: float, traffic: Traffic | None = None) -> None:
        self._roads = Roads(random.Random(0), LinkShape())
        self._roads.set_shape(HOME, HOST, LinkShape(PROMPT, up))  # a stream in memory holds no more than four pieces
        self._roads.set_shape(HOST, HOME, LinkShape(PROMPT, down))
        self.traffic = traffic or Traffic()
        self.desk = SpeedHandler(self.traffic)
        self.tasks: list[asyncio.Task[None]] = []

    async def open(self) -> ByteStream:
        ours, theirs = stream_pair(self._roads, HOME, HOST, None)
        self.tasks.append(asyncio.ensure_future(self.desk.serve(theirs)))
        return ours

    async def measure(self) -> tuple[float, float]:
        found = []
        for upload in (True, False):
            found.append(await measure_speed(self.open, upload))
            await asyncio.wait(self.tasks)
        return found[0], found[1]


@pytest.mark.parametrize(("up", "down"), [(2_500_000.0, 12_500_000.0), (50_000.0, 20_000_000.0), (1e6, 4e4)])
def test_both_directions_are_measured(up: float, down: float) -> None:
    found = run_virtual(Net(up, down).measure())
    assert found == pytest.approx((up, down), rel=0.15)


def test_the_limit_of_who_serves_is_kept() -> None:
    net = Net(1e8, 1e8, Traffic(Pacer(1e6), Pacer(1e6)))
    up, down = run_virtual(net.measure())
    assert max(up, down) == pytest.approx(1e6, rel=0.15)
    assert 0 < net.traffic.sent <= MAX_BYTES
    assert 0 < net.traffic.received <= MAX_BYTES


def test_one_at_a_time_and_so_much_an_hour() -> None:
    async def main() -> None:
        net = Net(1e9, 1e9)
        slow = await net.open()
        await write_frame(slow, b"V", b"\x91\xc2")
        await asyncio.sleep(0.1)
        with pytest.raises(RemoteProtocolError, match="busy"):
            await measure_speed(net.open, upload=False)
        slow.close()
        await asyncio.sleep(SERVE_SECONDS)
        for _ in range(BUDGET_BYTES // MAX_BYTES - 1):
            await measure_speed(net.open, upload=False)
            await asyncio.sleep(1)
        with pytest.raises(RemoteProtocolError, match="busy"):
            await measure_speed(net.open, upload=False)
        await asyncio.sleep(BUDGET_SECONDS)
        await measure_speed(net.open, upload=False)

    run_virtual(main(), 2 * BUDGET_SECONDS)


@pytest.mark.parametrize(
    "said", [b"", b"V", b"X\0\0\0\0", b"V\xff\xff\xff\xff", b"V\0\0\0\1\xc0", b"V\0\0\0\2\x91\xc2"]
)
def test_whoever_says_anything_is_gone_in_time(said: bytes) -> None:
    async def main() -> float:
        net = Net(1e6, 1e6)
        stream = await net.open()
        await stream.write(said)
        started = asyncio.get_running_loop().time()
        await asyncio.wait(net.tasks)
        return asyncio.get_running_loop().time() - started

    assert run_virtual(main()) <= SERVE_SECONDS + 1


def test_streams_that_say_nothing_are_few() -> None:
    async def main() -> None:
        net = Net(1e6, 1e6)
        silent = [await net.open() for _ in range(100)]
        await asyncio.sleep(1.0)
        assert sum(not task.done() for task in net.tasks) == MOST_OPEN
        assert await silent[-1].read(1) == b""
        await asyncio.sleep(SERVE_SECONDS)
        await measure_speed(net.open, upload=False)

    run_virtual(main())


@pytest.mark.parametrize("upload", [True, False])
def test_a_server_that_goes_silent_is_told(upload: bool) -> None:
    async def main() -> None:
        ends: list[MemoryStream] = []
        roads = Roads(random.Random(0), LinkShape())

        async def open_stream() -> ByteStream:
            ours, theirs = stream_pair(roads, HOME, HOST, None)
            await write_frame(theirs, b"G")
            ends.append(theirs)
            return ours

        with pytest.raises(PeerSilent):
            await measure_speed(open_stream, upload)

    run_virtual(main())


def test_a_server_that_breaks_off_is_a_known_error() -> None:
    async def main() -> None:
        async def open_stream() -> ByteStream:
            ours, theirs = stream_pair(Roads(random.Random(0), LinkShape()), HOME, HOST, None)
            theirs.close()
            return ours

        with pytest.raises(NetworkError):
            await measure_speed(open_stream, upload=True)

    run_virtual(main())

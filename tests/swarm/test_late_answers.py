"""An answer that comes in the very moment in which we give up waiting for it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from spes_p2p.errors import PeerSilent
from spes_p2p.ids import PeerId
from spes_p2p.swarm.hivemind_backend import HivemindNetwork, NetworkThread
from spes_p2p.swarm.ports import Blob

pytestmark = pytest.mark.swarm
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
WAIT_SECONDS = 30.0
PATIENCE_SECONDS = 2.0


class SlowEcho:
    """Answers `late` once whoever asked is stuck, and everything else at once."""

    def __init__(self) -> None:
        self.is_asked, self.asker_is_stuck = threading.Event(), threading.Event()

    async def on_call(self, caller: PeerId, request: bytes) -> bytes:
        if request == b"late":
            self.is_asked.set()
            await asyncio.to_thread(self.asker_is_stuck.wait, WAIT_SECONDS)
        return request

    async def on_fetch(self, caller: PeerId, request: bytes) -> Blob:
        return Blob(request)


@pytest.fixture
def threads() -> Iterator[tuple[NetworkThread, NetworkThread]]:
    """Two loops, so that one answers while the other is stuck."""
    with NetworkThread() as first, NetworkThread() as second:
        yield first, second


def test_a_peer_that_was_stuck_when_an_answer_came_too_late_still_hears(
    threads: tuple[NetworkThread, NetworkThread],
) -> None:
    here, there = threads
    other, echo = there.run(HivemindNetwork.start(host_maddrs=LOOPBACK)), SlowEcho()
    there.run(other.transport.serve(echo))
    own = here.run(HivemindNetwork.start(other.transport.addresses, host_maddrs=LOOPBACK))
    peer = other.transport.peer_id

    async def give_up_as_the_answer_comes() -> None:
        assert await own.transport.call(peer, b"0", 20.0) == b"0"  # connected
        call = asyncio.ensure_future(own.transport.call(peer, b"late", PATIENCE_SECONDS))
        while not echo.is_asked.is_set() and not call.done():
            await asyncio.sleep(0.01)
        echo.asker_is_stuck.set()  # from here on the loop is held up, as by a busy interpreter, until it is too late
        time.sleep(PATIENCE_SECONDS)
        with pytest.raises(PeerSilent):
            await call

    async def hear() -> bytes:
        return await own.transport.call(peer, b"0", 20.0)

    try:
        here.run(give_up_as_the_answer_comes())
        assert here.run(hear()) == b"0"
        assert not own.daemon.ended.is_set()
    finally:
        here.run(own.close())
        there.run(other.close())

"""What one stranger can do with single messages: a node keeps its memory, goes on answering, and sends little.

The node is a process of its own, the stranger speaks to it as any libp2p program could, without our bounds.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgpack
import psutil
import pytest
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, P2PHandlerError
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer

from spes_p2p.errors import NetworkError, RemoteProtocolError
from spes_p2p.swarm.calls import CALL_BYTES, CALLS, answer_limits
from spes_p2p.swarm.hivemind_backend import HivemindNetwork, NetworkThread
from spes_p2p.swarm.hivemind_backend.hello import HELLO_NAME
from spes_p2p.swarm.hivemind_backend.network import MAX_MESSAGE_BYTES
from spes_p2p.swarm.hivemind_backend.reach import DIAL_BACK_NAME
from spes_p2p.swarm.hivemind_backend.storage import FIND, MOST_ASKED_KEYS, PING, STORE
from spes_p2p.swarm.records import heads_key
from tests.swarm.micro import is_daemon
from tests.swarm.test_hivemind_backend import LOOPBACK, Child, child

pytestmark = [pytest.mark.swarm, pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs /proc")]
MIB = 2**20
CALL = "spes-p2p/1::SwarmServicer.rpc_call"
FETCH = "spes-p2p/1::fetch"
UNARY = {CALL, HELLO_NAME, DIAL_BACK_NAME, FIND, STORE, PING}
KEY = heads_key("run")
RECORD_BYTES = 20_000
MOST_MORE = MAX_MESSAGE_BYTES + 64 * MIB
ANSWER_SECONDS = 20.0


class Stranger:
    """A network of its own, with a node under attack."""

    def __init__(self, network: HivemindNetwork, node: Child) -> None:
        self.network, self.node = network, node
        self._to = PeerID.from_base58(node.peer)

    async def say(self, name: str, data: bytes) -> bytes:
        """Whatever handler there is gets it. Raises P2PHandlerError where it refuses."""
        async with asyncio.timeout(ANSWER_SECONDS):
            return await self.network.daemon.p2p._client.control.call_unary_handler(self._to, name, data)

    async def is_refused(self, name: str, data: bytes, words: str = "") -> bool:
        try:
            await self.say(name, data)
        except P2PHandlerError as error:
            return words in str(error)
        return False

    async def most_more_bytes(self, *messages: tuple[str, bytes]) -> int:
        """How far the node's memory grew at most during these messages; it answers others meanwhile."""
        before = self._start_measuring()
        for name, data in messages:
            await asyncio.gather(self.is_refused(name, data), self.say(PING, b""))
        return self._resident("VmHWM") - before

    def _start_measuring(self) -> int:
        Path(f"/proc/{self.node.process.pid}/clear_refs").write_text("5")  # the peak begins again
        return self._resident("VmRSS")

    def _resident(self, kind: str) -> int:
        lines = Path(f"/proc/{self.node.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(kind))


@pytest.fixture(scope="module")
def thread() -> Iterator[NetworkThread]:
    with NetworkThread() as running:
        yield running


@asynccontextmanager
async def stranger(node: Child) -> AsyncIterator[Stranger]:
    network = await HivemindNetwork.start([node.address], host_maddrs=LOOPBACK)
    try:
        yield Stranger(network, node)
    finally:
        await network.close()


def find(*keys: bytes) -> bytes:
    return dht_pb2.FindRequest(keys=keys).SerializeToString()


def hashed(key: str) -> bytes:
    return DHTID.generate(source=key).to_bytes()


def test_no_message_takes_a_node_more_memory_than_a_few_times_its_size(thread: NetworkThread) -> None:
    async def scenario(node: Child) -> None:
        async with stranger(node) as one:
            await one.network.directory.publish(KEY, os.urandom(RECORD_BYTES), 60.0)
            found = dht_pb2.FindResponse.FromString(await one.say(FIND, find(hashed(KEY))))
            assert len(found.results[0].value) > RECORD_BYTES
            repeated, unknown = find(*[hashed(KEY)] * 40_000), find(*(os.urandom(20) for _ in range(700_000)))
            assert await one.is_refused(FIND, repeated, "bytes")
            assert await one.is_refused(FIND, find(*[hashed(KEY)] * (MOST_ASKED_KEYS + 1)), "at most 16")
            assert await one.most_more_bytes((FIND, repeated), (FIND, unknown)) < MOST_MORE
            large = os.urandom(MAX_MESSAGE_BYTES - 200)
            assert await one.most_more_bytes(*((name, large) for name in sorted(UNARY))) < MOST_MORE

    with child("--strangers") as node:
        thread.run(scenario(node))


@pytest.mark.parametrize("records", [50_000, 400_000])
def test_a_dictionary_of_tiny_records_is_not_unpacked(thread: NetworkThread, records: int) -> None:
    tiny = MSGPackSerializer.dumps([None, 1e10, [[number, b"", 1e10] for number in range(records)]])
    asked = dht_pb2.StoreRequest(
        keys=[hashed(KEY)], subkeys=[b""], values=[msgpack.packb(msgpack.ExtType(0x50, tiny))], expiration_time=[1e10],
        in_cache=[False],
    ).SerializeToString()  # fmt: skip

    async def scenario(node: Child) -> None:
        async with stranger(node) as one:
            words = "one by one" if records == 50_000 else "bytes"
            assert await one.is_refused(STORE, asked, words)
            assert await one.most_more_bytes((STORE, asked)) < MOST_MORE

    with child("--strangers") as node:
        thread.run(scenario(node))


def test_a_key_asked_for_again_and_again_is_part_of_the_upload(thread: NetworkThread) -> None:
    upload = 200_000.0
    limits = answer_limits(upload).strangers

    async def scenario(node: Child) -> None:
        async with stranger(node) as one:
            await one.network.directory.publish(KEY, os.urandom(RECORD_BYTES), 60.0)
            began, got, refused = time.monotonic(), 0, 0
            for _ in range(int(CALLS.stranger.burst)):
                try:
                    got += len(await one.say(FIND, find(hashed(KEY))))
                except P2PHandlerError:
                    refused += 1
            seconds = time.monotonic() - began
            assert got <= limits.burst + limits.per_second * seconds + RECORD_BYTES + 1000
            assert got >= limits.burst / 2
            assert refused

    with child("--strangers", "--upload", str(upload)) as node:
        thread.run(scenario(node))


def test_a_daemon_that_keeps_half_sent_messages_is_replaced_and_the_node_stays(thread: NetworkThread) -> None:
    """Each stream announces 16 MiB, brings 8 and stops. Another daemon, under the same address, has none of that."""
    streams, each = 30, 8 * MIB

    async def scenario(node: Child) -> None:
        first = psutil.Process(node.daemon)
        async with stranger(node) as one:
            p2p = one.network.daemon.p2p
            for _ in range(streams):
                if not is_daemon(first):
                    break
                with contextlib.suppress(P2PDaemonError, OSError):  # it is ended while it is sent to
                    _, _, writer = await p2p.call_binary_stream_handler(PeerID.from_base58(node.peer), CALL)
                    writer.write(b"\x80\x80\x80\x07" + bytes(each))
                    async with asyncio.timeout(ANSWER_SECONDS):
                        await writer.drain()
            async with asyncio.timeout(ANSWER_SECONDS):
                while is_daemon(first):
                    await asyncio.sleep(0.1)
        async with asyncio.timeout(ANSWER_SECONDS):
            while True:
                with contextlib.suppress(NetworkError):
                    async with stranger(node) as another:
                        assert await another.network.transport.call(node.peer, b"hello", 5.0)
                        return

    with child("--strangers", "--daemon-bytes", str(100 * MIB)) as node:
        thread.run(scenario(node))


def test_every_handler_of_a_node_is_behind_the_door(thread: NetworkThread) -> None:
    """Those of libraries, and one that comes later."""

    async def scenario() -> None:
        network = await HivemindNetwork.start(host_maddrs=LOOPBACK)
        try:
            control = network.daemon.p2p._client.control

            async def later(request: bytes, remote: PeerID) -> bytes:
                return b""

            await control.add_unary_handler("later", later)
            assert set(control.unary_handlers) == UNARY | {"later"}
            for number, handler in enumerate(control.unary_handlers.values()):
                key = PeerID(b"\x12\x20" + random.Random(number).randbytes(32))
                refused = 0
                for _ in range(int(CALLS.stranger.burst) + 200):
                    answers = await asyncio.gather(handler(b"", key), return_exceptions=True)
                    refused += "too many calls" in str(answers)
                assert refused > 100
                with pytest.raises(RemoteProtocolError, match="bytes, but at most"):
                    await handler(bytes(int(CALL_BYTES.stranger.burst)), key)
            assert set(control.handlers) == {FETCH}  # the StreamServer's: tests/swarm_ports/test_door.py
        finally:
            await network.close()

    thread.run(scenario())

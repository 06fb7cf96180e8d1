"""The real network on loopback: calls, streams, failures told apart, the directory, identities, clocks, clean ends.

Several peers in this process (each with a daemon of its own, all on one network thread) where nobody is killed, and
processes of their own where somebody is.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from hivemind.dht.routing import DHTID

from spes_p2p.errors import (
    ClockSkewed,
    IdentityInUse,
    LocalProtocolError,
    NetworkError,
    PeerRefused,
    PeerSilent,
    RemoteProtocolError,
)
from spes_p2p.ids import PeerId
from spes_p2p.quickstart.processes import stop_process
from spes_p2p.swarm import envelope
from spes_p2p.swarm.hivemind_backend import HivemindNetwork, NetworkThread
from spes_p2p.swarm.hivemind_backend import network as network_module
from spes_p2p.swarm.hivemind_backend.storage import BoundedStorage
from spes_p2p.swarm.ports import Blob
from spes_p2p.swarm.records import heads_key, peers_key
from tests.swarm.micro import runs

pytestmark = pytest.mark.swarm
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
CHILD = Path(__file__).parent / "peer_process.py"
ROOT = Path(__file__).parents[2]
WAIT_SECONDS = 30.0
KEY, OTHER_KEY = heads_key("run"), heads_key("another")
NOBODY = "QmSoLV4Bbm51jM9C4gDYZQ9Cy3U6aXMJDAbzgu2fzaDs64"


def pattern(size: int) -> bytes:
    return b"".join(index.to_bytes(8, "big") for index in range(size // 8 + 1))[:size]


def whole(answer: tuple[bytes, memoryview]) -> tuple[bytes, bytes]:
    """What a fetch gave, to be compared."""
    return answer[0], bytes(answer[1])


class Server:
    async def on_call(self, caller: PeerId, request: bytes) -> bytes:
        return request

    async def on_fetch(self, caller: PeerId, request: bytes) -> Blob:
        return Blob(pattern(int(request)), b"head")


@pytest.fixture(scope="module")
def thread() -> Iterator[NetworkThread]:
    with NetworkThread() as running:
        yield running


Peers = Callable[..., Coroutine[Any, Any, HivemindNetwork]]


@contextlib.asynccontextmanager
async def peers() -> AsyncIterator[Peers]:
    """Starts peers, and ends all of them."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(*others: HivemindNetwork, **options: Any) -> HivemindNetwork:
            options.setdefault("host_maddrs", LOOPBACK)
            initial = [address for other in others for address in other.transport.addresses]
            network = await HivemindNetwork.start(options.pop("initial_peers", initial), **options)
            stack.push_async_callback(network.close)
            await network.transport.serve(Server())
            return network

        yield start


@dataclass
class Child:
    process: subprocess.Popen[str]
    address: str
    daemon: int
    folder: Path

    @property
    def peer(self) -> PeerId:
        return PeerId(self.address.rpartition("/")[2])


@contextlib.contextmanager
def child(*initial_peers: str) -> Iterator[Child]:
    command = [sys.executable, str(CHILD), *initial_peers]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            ready = selector.select(WAIT_SECONDS)
        facts = json.loads(process.stdout.readline() if ready else "{}")
        yield Child(process, facts["address"], facts["daemon"], Path(facts["folder"]))
    finally:
        process.kill()
        process.wait(WAIT_SECONDS)
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


def until(condition: Callable[[], bool]) -> None:
    """Waits, bounded, for something that another process does."""
    end = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    try:
        return not runs(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return True


def test_two_processes_talk_and_failures_are_told_apart(thread: NetworkThread) -> None:
    async def talk(peer: Child) -> None:
        async with peers() as start:
            network = await start(initial_peers=[peer.address])
            transport, own = network.transport, network.transport.peer_id.encode()
            assert await transport.call(peer.peer, b"hello", 10.0) == own + b":hello"
            with pytest.raises(RemoteProtocolError, match="refused: not today"):
                await transport.call(peer.peer, b"no", 10.0)
            with pytest.raises(RemoteProtocolError, match="20000000 bytes"):
                await transport.fetch(peer.peer, b"20000000", 10.0, 10**6)
            assert whole(await transport.fetch(peer.peer, b"20000000", 10.0, 2**25)) == (b"head", pattern(20_000_000))

            stop_process(peer.process.pid)
            with pytest.raises(PeerSilent):
                await transport.call(peer.peer, b"hello", 0.5)
            assert not await transport.check_refused(peer.peer)
            peer.process.send_signal(signal.SIGCONT)
            assert await transport.call(peer.peer, b"hello", 10.0) == own + b":hello"

            peer.process.kill()
            await asyncio.to_thread(until, lambda: is_gone(peer.daemon))
            async with asyncio.timeout(WAIT_SECONDS):  # other threads of a dead process may hold its sockets yet
                while not await transport.check_refused(peer.peer):
                    await asyncio.sleep(0.01)
            for ask in (transport.call(peer.peer, b"x", 10.0), transport.fetch(peer.peer, b"8", 10.0, 8)):
                with pytest.raises(PeerRefused):
                    await ask

    with child() as peer:
        thread.run(talk(peer))


def test_a_process_that_leaves_takes_everything_with_it() -> None:
    with child() as peer:
        assert os.getsid(peer.daemon) == peer.daemon  # a Ctrl-C in the terminal is not for the daemon
        assert peer.folder.exists()
        assert peer.process.stdin is not None
        peer.process.stdin.close()
        assert peer.process.wait(WAIT_SECONDS) == 0
        assert is_gone(peer.daemon)
        assert not peer.folder.exists()


def test_a_cut_connection_is_resumed(thread: NetworkThread) -> None:
    """Through a proxy that breaks the connection twice in the middle of the data."""

    async def scenario() -> None:
        async with peers() as start, cutting_proxy([3_000_000, 5_000_000]) as proxy:
            address = f"/ip4/127.0.0.1/tcp/{proxy.port}"
            server = await start(announce_maddrs=[address])
            proxy.target = server_port(server)
            asker = await start(server)
            size = 12_000_000
            head, data = await asker.transport.fetch(server.transport.peer_id, str(size).encode(), 10.0, size)
            assert (head, bytes(data)) == (b"head", pattern(size))
            assert proxy.cuts == []
            assert size <= asker.transport.traffic.received < size + 1024  # nothing twice, but for a few words

    thread.run(scenario())


def server_port(network: HivemindNetwork) -> int:
    """Where the daemon really listens (it announces the proxy)."""
    listening = psutil.Process(network.daemon.pid).net_connections("tcp4")
    return next(int(one.laddr.port) for one in listening if one.status == psutil.CONN_LISTEN)


@dataclass
class Proxy:
    cuts: list[int]
    port: int = 0
    target: int = 0


@contextlib.asynccontextmanager
async def cutting_proxy(cuts: list[int]) -> AsyncIterator[Proxy]:
    """Passes TCP on to `target`; each connection ends once so many bytes came back from there."""
    proxy = Proxy(cuts)
    tasks: set[asyncio.Task[None]] = set()

    async def passing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit: float) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while (data := await reader.read(2**16)) and passed < limit:
                passed += len(data)
                writer.write(data)
                await writer.drain()
        if passed >= limit:
            proxy.cuts.pop(0)
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back_reader, back_writer = await asyncio.open_connection("127.0.0.1", proxy.target)
        limit = proxy.cuts[0] if proxy.cuts else float("inf")
        there = asyncio.create_task(passing(reader, back_writer, float("inf")))
        back = asyncio.create_task(passing(back_reader, writer, limit))
        tasks.update((there, back))
        await asyncio.wait((there, back), return_when=asyncio.FIRST_COMPLETED)
        writer.close()
        back_writer.close()

    listener = await asyncio.start_server(accept, "127.0.0.1", 0)
    proxy.port = listener.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        listener.close()
        for task in tasks:
            task.cancel()


def test_initial_peers_fail_each_with_its_own_reason(thread: NetworkThread) -> None:
    async def scenario() -> None:
        with bound_socket(listen=False) as unused, bound_socket(listen=True) as mute:
            async with peers() as start:
                alive = await start()
                port = alive.transport.addresses[0].split("/")[4]
                reasons = {
                    f"/ip4/127.0.0.1/tcp/{unused}/p2p/{NOBODY}": "refuses connections",
                    f"/ip4/127.0.0.1/tcp/{mute}/p2p/{NOBODY}": "silent",
                    f"/ip4/127.0.0.1/tcp/{port}/p2p/{NOBODY}": f"wrong peer id: {alive.transport.peer_id} answers",
                    f"/ip4/127.0.0.1/tcp/{port}": "lacks the peer id",
                    "127.0.0.1:4000": "not a multiaddress",
                }
                with pytest.raises(NetworkError) as caught:
                    await start(initial_peers=list(reasons))
                parts = str(caught.value).split("; ")
                for address, reason in reasons.items():
                    assert any(address in part and reason in part for part in parts), (address, parts)
                assert caught.value.fix
                joined = await start(initial_peers=[*reasons, *alive.transport.addresses])  # one live peer is enough
                assert await joined.transport.call(alive.transport.peer_id, b"x", 10.0) == b"x"

    thread.run(scenario())


@contextlib.contextmanager
def bound_socket(listen: bool) -> Iterator[int]:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        if listen:
            bound.listen(16)
        yield bound.getsockname()[1]


def test_the_directory_across_three_nodes_drops_what_is_forged(
    thread: NetworkThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with peers() as start:
            first = await start()
            second = await start(first)
            third = await start(first)
            await first.directory.publish(KEY, b"old", 600.0)
            await first.directory.publish(KEY, b"new", 60.0)
            await second.directory.publish(KEY, b"large" * 60_000, 60.0)
            one, two = first.transport.peer_id, second.transport.peer_id
            assert await third.directory.read(KEY) == {one: b"new", two: b"large" * 60_000}
            assert await third.directory.read(OTHER_KEY) == {}

            # as `one`, signed by the third; under another key; with an end far away; not an envelope at all
            end = time.time() + 100
            forger = _Pretender(third.signer, one)
            forged = [
                (end, envelope.seal(forger, KEY, b"forged", end)),
                (end, envelope.seal(third.signer, OTHER_KEY, b"moved", end)),
                (end + 10**6, envelope.seal(third.signer, KEY, b"for ever", end + 10**6)),
                (float("inf"), b"junk"),
            ]
            for expiration, data in forged:
                assert not await plant(third, first, KEY, one, data, expiration)
            assert first.directory.dropped == len(forged)
            assert await second.directory.read(KEY) == {one: b"new", two: b"large" * 60_000}
            assert all(isinstance(each.directory._node.protocol.storage, BoundedStorage) for each in (first, second))
            with monkeypatch.context() as patch:  # well signed, under a key of nobody's
                patch.setattr(envelope, "_unfit", lambda key, value: "")
                stray = envelope.seal(third.signer, "anything", b"value", end)
            assert not await plant(third, first, "anything", third.transport.peer_id, stray, end)
            with pytest.raises(LocalProtocolError):
                await first.directory.publish(KEY, bytes(2**20), 60.0)

    thread.run(scenario())


@dataclass
class _Pretender:
    """Signs with its own key in the name of another."""

    signer: Any
    peer_id: PeerId

    @property
    def public_key(self) -> bytes:
        return self.signer.public_key

    def sign(self, data: bytes) -> bytes:
        return self.signer.sign(data)


async def plant(
    sender: HivemindNetwork, target: HivemindNetwork, key: str, subkey: str, data: bytes, expiration: float
) -> bool:
    """Asks `target` over the DHT's own protocol to keep a record; True when it did."""
    protocol = sender.directory._node.protocol
    packed = protocol.serializer.dumps(data)
    target_id = target.directory._node.peer_id
    answer = await protocol.call_store(target_id, [DHTID.generate(source=key)], [packed], expiration, [subkey])
    assert answer is not None, "the node did not answer"
    return all(answer)


def test_a_clock_that_was_ahead_and_went_back_hides_no_record(
    thread: NetworkThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with peers() as start:
            first = await start()
            second = await start(first)
            third = await start(first)
            ours = second.directory
            await ours.publish(KEY, b"old", 60.0)
            with monkeypatch.context() as patch:
                patch.setattr(ours, "_wall_clock", lambda: time.time() + 3 * 3600)
                with pytest.raises(NetworkError, match="no node stored"):
                    await ours.publish(KEY, b"ahead", 60.0)
            for value in (b"back", b"later"):
                await ours.publish(KEY, value, 60.0)
                for reader in (first, second, third):
                    assert await reader.directory.read(KEY) == {second.transport.peer_id: value}

    thread.run(scenario())


def test_what_a_node_says_of_its_addresses(thread: NetworkThread) -> None:
    """Its names, then where others have reached it, then what the daemon sees; a name is nothing to dial."""

    async def scenario() -> None:
        async with peers() as start:
            node = await start(announce_maddrs=["/dnsaddr/run.example.org"])
            name, local = node.transport.addresses
            assert name == "/dnsaddr/run.example.org"
            node.transport.own_addresses.note_dialled("/ip4/203.0.113.7/tcp/31337")
            outside = f"/ip4/203.0.113.7/tcp/31337/p2p/{node.transport.peer_id}"
            assert node.transport.addresses == (name, outside, local)
            other = await start(initial_peers=[local])
            other.transport.learn(node.transport.peer_id, (name, local))
            assert other.transport.connections.book.texts(lambda peer: False) == [local]
            assert await other.transport.call(node.transport.peer_id, b"x", 10.0) == b"x"

    thread.run(scenario())


def test_newcomers_join_through_any_peer_once_the_first_is_gone(thread: NetworkThread) -> None:
    async def scenario() -> None:
        async with peers() as start:
            with child() as bootstrap:
                first = await start(initial_peers=[bootstrap.address])
                second = await start(initial_peers=[bootstrap.address])
                await first.directory.publish(KEY, b"value", 600.0)
                bootstrap.process.kill()
                await asyncio.to_thread(until, lambda: is_gone(bootstrap.daemon))
                newcomer = await start(second)
                assert await newcomer.directory.read(KEY) == {first.transport.peer_id: b"value"}
                newcomer.transport.learn(first.transport.peer_id, first.transport.addresses)
                assert await newcomer.transport.call(first.transport.peer_id, b"x", 10.0) == b"x"

    thread.run(scenario())


def test_a_peer_that_listens_nowhere_is_called_over_its_own_connection(thread: NetworkThread) -> None:
    async def scenario() -> None:
        async with peers() as start:
            public = await start()
            private = await start(public, client_mode=True)
            assert private.transport.addresses == ()
            await private.directory.publish(KEY, b"value", 60.0)
            assert await public.directory.read(KEY) == {private.transport.peer_id: b"value"}
            assert await public.transport.call(private.transport.peer_id, b"x", 10.0) == b"x"
            assert not await public.transport.check_refused(private.transport.peer_id)

    thread.run(scenario())


def test_a_forked_child_leaves_the_daemon_and_the_lock_alone(thread: NetworkThread, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with peers() as start:
            first = await start()
            second = await start(first, identity_path=tmp_path / "key")
            forked = os.fork()
            if not forked:
                second.daemon.p2p._terminate()  # what the end of a Python process does to its objects
                os._exit(0)
            assert os.waitpid(forked, 0) == (forked, 0)
            assert await first.transport.call(second.transport.peer_id, b"x", 10.0) == b"x"
            with pytest.raises(IdentityInUse):
                await start(first, identity_path=tmp_path / "key")

    thread.run(scenario())


def test_a_peer_whose_daemon_died_says_so_and_ends_cleanly(thread: NetworkThread) -> None:
    async def scenario() -> None:
        async with peers() as start:
            first = await start()
            second = await start(first)
            os.kill(second.daemon.pid, signal.SIGKILL)
            async with asyncio.timeout(WAIT_SECONDS):
                await second.daemon.ended.wait()
            name = first.transport.peer_id
            for attempt in (
                second.transport.call(name, b"x", 1.0),
                second.transport.fetch(name, b"8", 1.0, 8),
                second.directory.read(KEY),
                second.directory.publish(KEY, b"value", 60.0),
            ):
                with pytest.raises(NetworkError, match="the libp2p daemon has ended"):
                    await attempt
            assert not await second.transport.check_refused(name)

    thread.run(scenario())


def test_a_daemon_that_ended_is_replaced_under_the_same_identity(thread: NetworkThread) -> None:
    """Of the node that founded the DHT, and of one that joined: who used them goes on with the same objects."""

    async def scenario() -> None:
        async with peers() as start:
            first = await start()
            second = await start(first)
            a, b = first.transport.peer_id, second.transport.peer_id
            first.transport.learn(b, second.transport.addresses)  # as peers do from its record
            for broken, name, other, other_name in ((second, b, first, a), (first, a, second, b)):
                said, pid, addresses = list[str](), broken.daemon.pid, broken.transport.addresses
                alive = asyncio.create_task(broken.keep_alive(said.append))
                os.kill(pid, signal.SIGKILL)
                async with asyncio.timeout(WAIT_SECONDS):
                    while not said:
                        await asyncio.sleep(0.01)
                alive.cancel()
                assert is_gone(pid)
                assert broken.daemon.pid != pid
                assert broken.transport.addresses == addresses
                assert await broken.transport.call(other_name, b"hello", 10.0) == b"hello"
                assert await other.transport.call(name, b"hello", 10.0) == b"hello"
                assert whole(await other.transport.fetch(name, b"100000", 10.0, 10**6)) == (b"head", pattern(100_000))
                await broken.directory.publish(peers_key(name), b"value", 60.0)
                assert await other.directory.read(peers_key(name)) == {name: b"value"}

    thread.run(scenario())


def test_a_daemon_that_ends_again_and_again_is_given_up(thread: NetworkThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_module, "MOST_RESTARTS", 0)

    async def scenario() -> None:
        async with peers() as start:
            only = await start()
            os.kill(only.daemon.pid, signal.SIGKILL)
            with pytest.raises(NetworkError, match="ended 1 times") as caught:
                async with asyncio.timeout(WAIT_SECONDS):
                    await only.keep_alive(lambda text: None)
            assert "start again" in caught.value.fix

    thread.run(scenario())


def test_an_identity_is_used_once(thread: NetworkThread, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with peers() as start:
            first = await start()
            owner = await start(first, identity_path=tmp_path / "key")
            with pytest.raises(RemoteProtocolError, match="is not a libp2p peer id"):
                await first.transport.call(PeerId("0OIl"), b"x", 1.0)
            assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
            with pytest.raises(IdentityInUse, match="on this machine") as caught:
                await start(first, identity_path=tmp_path / "key")
            assert "--output DIR" in caught.value.fix
            shutil.copy(tmp_path / "key", tmp_path / "copy")  # as on a second machine
            with pytest.raises(IdentityInUse, match="in this swarm"):
                await start(first, identity_path=tmp_path / "copy")
            with pytest.raises(IdentityInUse, match="in this swarm"):
                await start(owner, identity_path=tmp_path / "copy")
            name = owner.transport.peer_id
            await owner.close()
            again = await start(first, identity_path=tmp_path / "key")
            assert again.transport.peer_id == name

    thread.run(scenario())


@pytest.mark.parametrize(("seconds", "words"), [(-60.0, "behind"), (60.0, "ahead of")])
def test_a_clock_that_is_off_is_refused_with_the_difference(thread: NetworkThread, seconds: float, words: str) -> None:
    async def scenario() -> None:
        async with peers() as start:
            first = await start()
            with pytest.raises(ClockSkewed, match=rf"clock is (5[6-9]|6[0-4])\.\d s {words}") as caught:
                await start(first, wall_clock=lambda: time.time() + seconds)
            assert "timedatectl" in caught.value.fix
            await start(first, wall_clock=lambda: time.time() + seconds / 60)

    thread.run(scenario())


def test_signatures_are_bound_to_the_peer_id(thread: NetworkThread) -> None:
    async def scenario() -> None:
        async with peers() as start:
            network = await start()
            signer, verifier, name = network.signer, network.verifier, network.transport.peer_id
            assert signer.peer_id == name  # the id that libp2p made of the same key
            signature = signer.sign(b"data")
            assert verifier.verify(name, signer.public_key, b"data", signature)
            assert not verifier.verify(name, signer.public_key, b"other", signature)
            assert not verifier.verify(PeerId(NOBODY), signer.public_key, b"data", signature)
            assert not verifier.verify(name, b"junk", b"data", signature)
            assert not verifier.verify(name, signer.public_key, b"data", b"junk")

    thread.run(scenario())

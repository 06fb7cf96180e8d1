"""What a node publishes of itself, and what it learns of others, on the in-memory network and the virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import pytest

from spes_p2p.consensus.manifest import manifest_hash
from spes_p2p.consensus.messages import (
    Commit,
)
from spes_p2p.errors import NetworkError
from spes_p2p.ids import PeerId
from spes_p2p.swarm.memory_backend import MemoryNetwork, MemoryPeer
from spes_p2p.swarm.records import (
    RUNS_KEY,
    HeadRecord,
    PeerRecord,
    RunRecord,
    heads_key,
    parse,
    peers_key,
)
from spes_p2p.sync.announce import EVERY_SECONDS, LOOK_SECONDS, TTL_SECONDS, Announcer
from spes_p2p.sync.genesis import RunInfo
from tests.simulation.virtual_time import run_virtual
from tests.sync.chains import A, B, MadeRun

WALL = 1_700_000_000.0


class Node:
    """An announcer with everything that it is told."""

    def __init__(self, run: MadeRun, peer: MemoryPeer) -> None:
        self.peer = peer
        self.tip: tuple[Commit, float] | None = None
        self.failures: list[BaseException] = []
        self.speed = 10.0
        self.announcer = Announcer(
            self, run.info, peer, self.failures.append, wall_clock=lambda: WALL + asyncio.get_running_loop().time(),
        )  # fmt: skip
        self._info: RunInfo = run.info

    def newest(self) -> tuple[Commit, float] | None:
        return self.tip

    def acquaintances(self) -> tuple[PeerId, ...]:
        return ()

    def learnt(self, known: Mapping[PeerId, PeerRecord]) -> None:
        """Nothing is to be done with it."""

    def describe(self) -> PeerRecord:
        addresses = (f"/ip4/127.0.0.1/tcp/1/p2p/{self.peer.peer_id}",)
        return PeerRecord(
            self._info.run_id, self.peer.peer_id, addresses, "0.1.0", 0, 0, 0, self.speed, (), "peer", False, 1
        )  # fmt: skip


def story(play: Callable[[MadeRun, MemoryNetwork, Node, Node], Awaitable[None]]) -> None:
    async def main() -> None:
        run, network = MadeRun(), MemoryNetwork()
        nodes = [Node(run, network.peer(name)) for name in (A, B)]
        for node in nodes:
            await node.announcer.start()
        await play(run, network, *nodes)
        for node in nodes:
            await node.announcer.stop()

    run_virtual(main())


def test_the_last_record_of_a_node_stays_and_nobody_waits_long_for_it() -> None:
    async def play(run: MadeRun, network: MemoryNetwork, a: Node, b: Node) -> None:
        await a.announcer.stop()
        a.speed = 1.0
        await a.announcer.say_last()
        await asyncio.sleep(3 * EVERY_SECONDS)
        published = await b.peer.directory.read(peers_key(run.info.run_id))
        assert parse(PeerRecord, A, published[A]).tokens_per_second == 1.0
        network.partition([A])
        began = asyncio.get_running_loop().time()
        await a.announcer.say_last()
        assert asyncio.get_running_loop().time() - began < 1.0

    story(play)


async def heads(node: Node, run_id: str) -> dict[PeerId, HeadRecord]:
    published = await node.peer.directory.read(heads_key(run_id))
    return {peer: parse(HeadRecord, peer, data) for peer, data in published.items()}


def test_run_and_peer_are_published_at_once_and_kept_fresh() -> None:
    async def play(run: MadeRun, network: MemoryNetwork, one: Node, other: Node) -> None:
        await asyncio.sleep(4 * TTL_SECONDS)
        runs = await other.peer.directory.read(RUNS_KEY)
        assert {parse(RunRecord, peer, data).fingerprint for peer, data in runs.items()} == {run.info.fingerprint}
        peers = await other.peer.directory.read(peers_key(run.info.run_id))
        written = parse(PeerRecord, A, peers[A]).written_at_seconds
        assert WALL + asyncio.get_running_loop().time() - written < 2 * EVERY_SECONDS
        assert await other.announcer.sources() == [A]

    story(play)


def test_a_peer_that_is_gone_is_forgotten() -> None:
    async def play(run: MadeRun, network: MemoryNetwork, one: Node, other: Node) -> None:
        await one.announcer.stop()
        await asyncio.sleep(2 * TTL_SECONDS)
        assert list(await other.announcer.sources()) == []

    story(play)


def test_the_newest_certificate_is_published_with_the_time_when_it_came() -> None:
    async def play(run: MadeRun, network: MemoryNetwork, one: Node, other: Node) -> None:
        assert await heads(other, run.info.run_id) == {}
        for commit in run.chain(2):
            one.tip = commit, WALL - 100.5
            await asyncio.sleep(2 * LOOK_SECONDS)
            head = (await heads(other, run.info.run_id))[A]
            assert (head.manifest_hash, head.seen_at_seconds) == (manifest_hash(commit.manifest), int(WALL - 101))

    story(play)


def test_a_partition_is_waited_out() -> None:
    async def play(run: MadeRun, network: MemoryNetwork, one: Node, other: Node) -> None:
        network.partition([A], [B])
        await asyncio.sleep(2 * TTL_SECONDS)
        assert list(await other.announcer.sources()) == []
        network.heal()
        await asyncio.sleep(2 * EVERY_SECONDS)
        assert await other.announcer.sources() == [A]
        assert (one.failures, other.failures) == ([], [])

    story(play)


def test_who_finds_no_room_for_its_records_learns_who_is_there_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(run: MadeRun, network: MemoryNetwork, one: Node, other: Node) -> None:
        late = Node(run, network.peer("late"))
        publish = late.peer.directory.publish

        async def full(key: str, value: bytes, ttl_seconds: float) -> None:
            if key == RUNS_KEY:
                raise NetworkError(f"no node stored the record {key!r}")
            await publish(key, value, ttl_seconds)

        with monkeypatch.context() as patch:
            patch.setattr(late.peer.directory, "publish", full)
            await late.announcer.start()
        assert set(late.announcer.known) == {A, B, "late"}  # there was room for its other record
        assert "late" not in await one.peer.directory.read(RUNS_KEY)
        await asyncio.sleep(2 * EVERY_SECONDS)
        assert "late" in await one.peer.directory.read(RUNS_KEY)  # there was room again
        await late.announcer.stop()

    story(play)


def test_what_is_no_matter_of_the_network_is_reported_and_not_hidden() -> None:
    async def play(run: MadeRun, network: MemoryNetwork, one: Node, other: Node) -> None:
        one.speed = float("nan")  # a record that nobody would take
        await asyncio.sleep(2 * EVERY_SECONDS)
        assert [type(error) for error in one.failures] == [ValueError]

    story(play)

"""Keeps a node's records in the DHT fresh, and its knowledge of where others are.

Three records a node: the run it serves, itself, and the newest certificate it has. They expire, so a node that is gone
is forgotten without anybody's doing. Nothing is decided by them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Protocol

from spes_p2p.consensus.manifest import WIRE_VERSION, manifest_hash
from spes_p2p.consensus.messages import Commit
from spes_p2p.errors import NetworkError, PeerSilent
from spes_p2p.ids import PeerId
from spes_p2p.swarm.ports import Network
from spes_p2p.swarm.records import (
    MAX_ADDRESSES,
    MAX_CERTIFICATE_BYTES,
    MAX_MANIFEST_BYTES,
    RUNS_KEY,
    HeadRecord,
    PeerRecord,
    RunRecord,
    fitting,
    heads_key,
    parse_all,
    peers_key,
)
from spes_p2p.sync.genesis import RunInfo
from spes_p2p.sync.tasks import Tasks
from spes_p2p.wire import pack

EVERY_SECONDS = 5.0
LOOK_SECONDS = 1.0
"""How soon a new certificate is published."""
TTL_SECONDS = 45.0
LAST_SECONDS = 0.5
"""Most time for the last record of a node that goes."""
MOST_REMEMBERED = 64
"""Most peers to remember for reconnecting a DHT that has fallen apart."""


class Announced(Protocol):
    """A node, as an Announcer speaks for it."""

    def describe(self) -> PeerRecord:
        """Its own record."""

    def newest(self) -> tuple[Commit, float] | None:
        """Its newest commit with the time when it came (Unix seconds)."""

    def acquaintances(self) -> Iterable[PeerId]:
        """Peers that it knows of apart from the DHT."""

    def learnt(self, known: Mapping[PeerId, PeerRecord]) -> None:
        """Is told of all nodes of the run that the DHT knows, whenever it was read."""


class Announcer:
    """Publishes and learns at intervals, on the network's loop.

    `failed` hears of what is no matter of the network: a node that nobody finds any more must not go on in silence.
    """

    def __init__(
        self,
        node: Announced,
        info: RunInfo,
        network: Network,
        failed: Callable[[BaseException], None],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._node = node
        self._info = info
        self._transport = network.transport
        self._directory = network.directory
        self._wall_clock = wall_clock
        self._tasks = Tasks(failed)
        self._met: dict[PeerId, None] = {}
        self.known: dict[PeerId, PeerRecord] = {}

    async def start(self) -> None:
        """Announces once, so that others find us from now on, then goes on beside.

        Raises PeerSilent when nobody answers. Where nobody takes our records, since strangers have filled what there is
        for them, we know who is there all the same, and try again.
        """
        with contextlib.suppress(NetworkError):
            await self.announce()
        await self.learn()
        self._tasks.spawn(self._for_ever())

    async def stop(self) -> None:
        await self._tasks.stop()

    async def announce(self) -> None:
        """Publishes all records, each where there is room for it. Raises NetworkError when nobody takes one of them."""
        addresses = self._transport.addresses[:MAX_ADDRESSES]
        newest = self._node.newest()
        round, head = (newest[0].manifest.round, manifest_hash(newest[0].manifest)) if newest else (0, b"")
        info = self._info
        run = RunRecord(info.run_id, info.fingerprint, info.organiser, WIRE_VERSION, round, head, addresses)
        records = {RUNS_KEY: pack(run), peers_key(info.run_id): pack(self._own_record())}
        if newest is not None:
            records[heads_key(info.run_id)] = pack(head_record(newest[0], int(newest[1])))
        refused: NetworkError | None = None
        for key, value in records.items():
            try:
                await self._directory.publish(key, value, TTL_SECONDS)
            except PeerSilent:  # so would be those who should take the others
                raise
            except NetworkError as error:
                refused = error
        if refused is not None:
            raise refused

    async def say_last(self) -> None:
        """Publishes the node's own record once more, after `stop`, if somebody takes it soon: it goes."""
        with contextlib.suppress(NetworkError, TimeoutError):
            async with asyncio.timeout(LAST_SECONDS):
                await self._directory.publish(peers_key(self._info.run_id), pack(self._own_record()), TTL_SECONDS)

    def _own_record(self) -> PeerRecord:
        return fitting(replace(self._node.describe(), written_at_seconds=int(self._wall_clock())))

    async def learn(self) -> None:
        """Reads who is there and where; keeps what was known when nobody answers."""
        records = parse_all(PeerRecord, await self._directory.read(peers_key(self._info.run_id)))
        self.known = {peer: record for peer, record in records.items() if record.run_id == self._info.run_id}
        for peer, record in self.known.items():
            if peer != self._transport.peer_id and record.addresses:
                self._transport.learn(peer, record.addresses)
                self._met.pop(peer, None)
                self._met[peer] = None  # the newest last
        for peer in list(self._met)[:-MOST_REMEMBERED]:
            del self._met[peer]
        self._node.learnt(self.known)

    async def sources(self) -> Iterable[PeerId]:
        """Who else is in the run, freshly read, the organiser first."""
        with contextlib.suppress(NetworkError):  # what was known before is as good as it gets
            await self.learn()
        others = [peer for peer in self.known if peer != self._transport.peer_id]
        return sorted(others, key=lambda peer: (peer != self._info.organiser, peer))

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def _for_ever(self) -> None:
        told, next_turn = self._node.newest(), self._now() + EVERY_SECONDS
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            newest, turn = self._node.newest(), self._now() >= next_turn
            if turn or newest != told:
                with contextlib.suppress(NetworkError):  # the next turn tries again; records live for many turns
                    await self.announce()
                told = newest
            if turn:
                next_turn = self._now() + EVERY_SECONDS
                await self._directory.acquaint({self._info.organiser, *self._met, *self._node.acquaintances()})
                with contextlib.suppress(NetworkError):
                    await self.learn()


def head_record(commit: Commit, seen_at_seconds: int) -> HeadRecord:
    """The record of a certificate; what is too large for the DHT is left out and fetched from its publisher."""
    certificate, manifest = pack(commit.certificate), pack(commit.manifest)
    return HeadRecord(
        commit.manifest.round,
        manifest_hash(commit.manifest),
        certificate if len(certificate) <= MAX_CERTIFICATE_BYTES else b"",
        manifest if len(manifest) <= MAX_MANIFEST_BYTES else b"",
        seen_at_seconds,
    )

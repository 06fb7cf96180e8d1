"""A whole swarm in one event loop: real drivers, stores and signatures' structure, an in-memory network, no model.

Peers pretend to train (see `pretend_peer`). On the virtual clock hundreds of rounds run in seconds of real time, and
the same seed gives the same run.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from spes_p2p.config.schema import Config
from spes_p2p.consensus.manifest import Manifest
from spes_p2p.consensus.messages import Intent
from spes_p2p.consensus.rules import RunRules
from spes_p2p.ids import NO_HASH, PeerId, sha256
from spes_p2p.interop.hf import state_layout
from spes_p2p.state.initial import InitialState
from spes_p2p.state.layout import Layout
from spes_p2p.state.store import StateStore
from spes_p2p.swarm.memory_backend import MemoryNetwork, MemoryPeer
from spes_p2p.swarm.ports import LoopClock
from spes_p2p.sync.chain import Chain
from spes_p2p.sync.genesis import RunInfo, describe_run
from spes_p2p.sync.node import Node, Run, RunFiles
from spes_p2p.sync.organising.organiser import Organiser
from spes_p2p.sync.organising.seat import Duty, Seat
from spes_p2p.sync.starting import fetch_genesis
from tests.simulation.pretend_peer import ORGANISER, PretendPeer, PretendWork

__all__ = ["ORGANISER", "MemorySwarm", "PretendPeer", "PretendWork"]

LOOK_SECONDS = 0.05
DAY_SECONDS = 86_400.0
"""What the clocks of machines showed when the swarm began."""


class MemorySwarm:
    """An organiser and any number of peers of one run, on a seeded in-memory network.

    `peer_class`: how its peers train; they only pretend to, unless a subclass says otherwise.

    `leased`: whether the run has a dataset whose positions are leased; else peers use data of their own. `archive`:
    whether the organiser keeps the newest state. `serve`: whether it is a member that trains nothing.
    """

    peer_class: type[PretendPeer] = PretendPeer

    def __init__(
        self,
        config: Config,
        folder: Path,
        seed: int = 0,
        leased: bool = True,
        archive: bool = False,
        serve: bool = False,
    ) -> None:
        self.folder = folder
        self.network = MemoryNetwork(seed)
        self.clock = LoopClock()
        self.archive = archive
        self.serve = serve
        self.server_failures: list[BaseException] = []
        layout = state_layout(config)
        self._start = InitialState(layout, config.run.seed, config.model.init_std)
        self.run = Run(describe_run(config, sha256(b"some data") if leased else NO_HASH, ORGANISER), config, layout)
        self.peers: dict[PeerId, PretendPeer] = {}
        self.lives: list[PretendPeer] = []
        """Every peer that ever was, in the order of their starts; `peers` has the last life of each."""
        self.watch: Callable[[PretendPeer, Manifest], None] = lambda peer, manifest: None
        """Is told of each manifest that a peer comes to stand on, while its state is on that peer's disk."""
        self.mirrors: dict[PeerId, Organiser] = {}
        self._mirror_stores: list[StateStore] = []
        self._incarnations = itertools.count(1)
        self._node_incarnations = itertools.count(1)
        """Numbers that rise, where real peers and bootstrap nodes look at their clock."""
        self.clock_behind_seconds = 0.0
        """Of the machines on which peers start from now on."""

    @property
    def config(self) -> Config:
        return self.run.config

    @property
    def info(self) -> RunInfo:
        return self.run.info

    @property
    def layout(self) -> Layout:
        return self.run.layout

    @property
    def rules(self) -> RunRules:
        return self.run.rules

    async def start(self, names: Iterable[str], work: PretendWork | None = None) -> None:
        """The organiser and the first peers; returns when genesis is there and all have begun."""
        await self.start_organiser()
        await asyncio.gather(*(self.add(name, work) for name in names))

    async def start_organiser(self) -> None:
        net = self.network.peer(ORGANISER) if not hasattr(self, "organiser") else self.network.restart(ORGANISER)
        self._organiser_store = StateStore(self.folder / ORGANISER / "state", self.layout)
        if self._organiser_store.latest() is None:
            self._organiser_store.create_initial(self._start)
        self.organiser_said: list[str] = []
        node, duty = self.node(net, self.organiser_said.append), self._duty()
        chain = Chain(self.folder / ORGANISER / "chain")
        files = RunFiles(self.folder / ORGANISER, chain, self._organiser_store)
        self.seat = self._seat(node, files, duty)
        self.organiser = Organiser(self.seat)
        await self.organiser.start()

    def node(self, net: MemoryPeer, say: Callable[[str], None]) -> Node:
        """A machine of this swarm."""
        now = DAY_SECONDS + self.clock.now() - self.clock_behind_seconds
        incarnations = self._incarnations if net.peer_id in self.peers else self._node_incarnations
        return Node(net, self.clock, say, lambda: next(incarnations), int(1000 * now), net.peer_id.encode())

    def _duty(self) -> Duty:
        if self.serve:
            return Duty.SERVER
        return Duty.ARCHIVE if self.archive else Duty.CERTIFICATES

    def _seat(self, node: Node, files: RunFiles, duty: Duty) -> Seat:
        return Seat(self.run, node, files, duty, self._sources, self.server_failures.append)

    async def add_mirror(self, name: str, said: list[str], serve: bool = False) -> Organiser:
        """One with an archive, or a member that serves; genesis comes from whoever has it. `said` gets its words."""
        net, folder = self.network.peer(name), self.folder / name
        store = StateStore(folder / "state", self.layout)
        store.create_initial(self._start)
        self._mirror_stores.append(store)
        node, files = self.node(net, said.append), RunFiles(folder, Chain(folder / "chain"), store)
        mirror = Organiser(self._seat(node, files, Duty.SERVER if serve else Duty.ARCHIVE))
        self.mirrors[PeerId(name)] = mirror
        await mirror.start()

        async def others() -> Iterable[PeerId]:
            return [ORGANISER, *(one for one in self.mirrors if one != name), *await self._sources()]

        mirror.begun(await fetch_genesis(self.run, net.transport, node.checker.check, others))
        return mirror

    async def sources_of(self, name: PeerId) -> Iterable[PeerId]:
        """Whom a peer may ask: all nodes, and the peers that are up."""
        return [ORGANISER, *self.mirrors, *(one for one in await self._sources() if one != name)]

    async def _sources(self) -> Iterable[PeerId]:
        return [name for name, peer in self.peers.items() if peer.is_up]

    async def kill_organiser(self) -> None:
        self.network.kill(ORGANISER)
        await self.organiser.stop()
        self._organiser_store.close()

    async def add(self, name: str, work: PretendWork | None = None, intent: Intent | None = None) -> PretendPeer:
        """One more peer, or the same again after its end, with the disk that it left."""
        peer_id = PeerId(name)
        if peer_id in self.peers:
            self.network.restart(peer_id)
        wanted = intent or Intent(joining=True, max_columns=self.config.swarm.experts_per_peer)
        peer = self.peer_class(self, peer_id, self.folder / name, work or PretendWork(), wanted)
        self.peers[peer_id] = peer
        self.lives.append(peer)
        await peer.start()
        return peer

    def lose_disk(self, name: str) -> None:
        """What a peer that is down had on disk is gone."""
        shutil.rmtree(self.folder / name)

    @property
    def up(self) -> list[PretendPeer]:
        """The peers that have joined and are running."""
        return [peer for peer in self.peers.values() if peer.is_up and peer.joined]

    async def until_round(self, round: int, names: Iterable[str] | None = None) -> None:
        """Waits until these peers (all that are up) stand on `round` or later. Raises what a driver failed with."""
        while True:
            chosen = self.up if names is None else [self.peers[PeerId(name)] for name in names]
            for peer in chosen:
                if peer.failures or self.server_failures:
                    raise [*peer.failures, *self.server_failures][0]
            if all(peer.round >= round for peer in chosen):
                return
            await asyncio.sleep(LOOK_SECONDS)

    async def stop(self) -> None:
        for peer in self.up:
            await peer.kill()
        await self.kill_organiser()
        for name, mirror in self.mirrors.items():
            self.network.kill(name)
            await mirror.stop()
        for store in self._mirror_stores:
            store.close()

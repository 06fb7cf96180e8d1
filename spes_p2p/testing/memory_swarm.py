"""A whole swarm in one event loop: real drivers, stores and signatures' structure, an in-memory network, no model.

What stands in for training is arithmetic on the state: each peer adds a seeded change to the values it owns. So a test
can compute what a round must give, and hundreds of rounds run in seconds of real time on the virtual clock.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from spes_p2p.config.schema import Config
from spes_p2p.ids import PeerId, sha256
from spes_p2p.interop.hf import state_tensors
from spes_p2p.ownership.expert_map import columns_of
from spes_p2p.state.initial import InitialState
from spes_p2p.state.layout import Layout, Values
from spes_p2p.state.store import StateStore
from spes_p2p.swarm.memory_backend import MemoryNetwork, MemoryPeer
from spes_p2p.sync.actions import Notice
from spes_p2p.sync.chain import Chain
from spes_p2p.sync.driver import Applied, Arithmetic, Disk, Driver
from spes_p2p.sync.genesis import describe_run
from spes_p2p.sync.inputs import Carried, Inputs
from spes_p2p.sync.joining import Joining, rules_of
from spes_p2p.sync.messages import Intent, Manifest, Work, manifest_hash
from spes_p2p.sync.organiser import Organiser
from spes_p2p.sync.round import Core
from spes_p2p.sync.sealing import EnvelopeChecker, KeySealer
from spes_p2p.sync.timing import Pace

ORGANISER = PeerId("organiser")


class LoopClock:
    """Seconds of the running event loop."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()


@dataclass
class PretendWork:
    """How a pretended trainer works: `step_seconds` an inner step, `change` scales what it adds to the state."""

    step_seconds: float = 0.1
    change: float = 0.01
    seed: int = 0
    poison: Callable[[int, Values], Values] = lambda block, values: values


@dataclass
class PretendPeer:
    """One peer of a MemorySwarm."""

    swarm: MemorySwarm
    name: PeerId
    folder: Path
    work: PretendWork
    intent: Intent
    notices: list[Notice] = field(default_factory=list)
    applied_events: list[Applied] = field(default_factory=list)
    failures: list[BaseException] = field(default_factory=list)
    trained: dict[int, dict[int, Values]] = field(default_factory=dict)
    before: dict[int, dict[int, Values]] = field(default_factory=dict)

    async def start(self) -> None:
        """Joins, or goes on from what is on disk."""
        swarm = self.swarm
        self.net: MemoryPeer = swarm.network.peer(self.name)
        self.checker = EnvelopeChecker(self.net.verifier)
        sealer = KeySealer(self.net.signer)
        joining = Joining(
            swarm.info, swarm.config, swarm.layout, self.folder, self.net.transport, self.net.signer,
            self.net.verifier, sealer, lambda text: None,
        )  # fmt: skip
        place = await joining.enter(self.intent, self._sources)
        self.store, self.chain = place.store, place.chain
        self.inputs = Inputs(self.folder / "inputs", swarm.layout)
        now = swarm.clock.now()
        core = Core(
            self.name, place.votes.incarnation, swarm.rules, sealer, self.checker.check,
            Pace(swarm.config.swarm.heartbeat_seconds), place.tip.manifest, now, place.votes.record, self.intent,
            place.tip, first_sequence=int(now * 1000),
        )  # fmt: skip
        core.seeds = tuple(await self._sources())
        self.driver = Driver(
            core, swarm.info, self.net.transport, self.checker,
            Disk(place.store, place.chain, place.votes, self.inputs),
            Arithmetic(swarm.layout, swarm.config.sync.merge_top_k), self, swarm.clock,
        )  # fmt: skip
        self._closing = asyncio.Event()
        self._training: asyncio.Task[None] | None = None
        self._tokens = self._steps = self._sequences = 0
        await self.driver.start()
        if core.is_member():
            self._begin(place.tip.manifest, {})

    async def _sources(self) -> Iterable[PeerId]:
        return [ORGANISER, *(name for name, peer in self.swarm.peers.items() if name != self.name and peer.is_up)]

    is_up = True

    # ---- Hooks ----

    def close_training(self) -> None:
        self._closing.set()

    def notice(self, notice: Notice) -> None:
        self.notices.append(notice)

    def failed(self, error: BaseException) -> None:
        self.failures.append(error)

    def applied(self, event: Applied) -> None:
        self.applied_events.append(event)
        if self._training is not None:
            self._training.cancel()
            self._training = None
        manifest = event.commit.manifest
        carried: dict[int, Values] = {}
        old_round = event.previous.round
        if any(entry.peer == self.name for entry in manifest.roster):
            self._tokens = self._steps = self._sequences = 0
        if event.uncounted and old_round in self.store.rounds():
            view = Carried(
                self.swarm.layout, self.store.version(manifest.round), self.store.version(old_round), self.inputs,
                event.uncounted,
            )  # fmt: skip
            carried = {block: np.array(view.block(block)) for block in self.inputs.blocks}
        if self.driver.core.is_member():
            self._begin(manifest, carried)

    def _begin(self, manifest: Manifest, carried: dict[int, Values]) -> None:
        self._closing.clear()
        self._training = asyncio.get_running_loop().create_task(self._train(manifest, carried))

    async def _train(self, manifest: Manifest, carried: dict[int, Values]) -> None:
        """H steps of arithmetic, or fewer when the round closes."""
        config, steps = self.swarm.config, 0
        started = self.swarm.clock.now()
        leased = sum(stop - start for start, stop in manifest.leases.of(self.name)) - self._sequences
        batch = config.optimizer.batch_sequences
        while steps < manifest.steps_per_round and not self._closing.is_set() and (steps + 1) * batch <= leased:
            await asyncio.sleep(self.work.step_seconds)
            steps += 1
        values = self._trained_values(manifest, carried, steps)
        self.trained[manifest.round] = values
        self._steps += steps
        self._sequences += steps * batch
        self._tokens += steps * batch * config.data.sequence_length
        self.inputs.take(manifest_hash(manifest), tuple(values), lambda block: values[block])
        expected = manifest.steps_per_round * batch * config.data.sequence_length
        seconds = self.swarm.clock.now() - started
        self.driver.ready(Work(True, self._tokens, self._steps, self._sequences, seconds, 0.0, expected))

    def _trained_values(self, manifest: Manifest, carried: dict[int, Values], steps: int) -> dict[int, Values]:
        version = self.store.version(manifest.round)
        values: dict[int, Values] = {}
        for block in (0, *(1 + column for column in columns_of(manifest.ownership, self.name))):
            seed = zlib.crc32(f"{self.work.seed}/{self.name}/{manifest.round}/{block}".encode())
            change = np.random.default_rng(seed).standard_normal(version.block(block).shape, dtype=np.float32)
            base = carried.get(block, version.block(block))
            self.before.setdefault(manifest.round, {})[block] = np.array(base)
            values[block] = self.work.poison(block, base + np.float32(self.work.change * steps) * change)
        return values

    # ---- leaving ----

    async def leave(self) -> None:
        """Says goodbye; what was trained so far counts."""
        from dataclasses import replace

        self.intent = replace(self.intent, leaving=True)
        self._closing.set()
        self.driver.wish(self.intent)

    async def stop(self) -> None:
        """The end of the process, without a word."""
        self.is_up = False
        if self._training is not None:
            self._training.cancel()
        await self.driver.stop()
        self.store.close()
        self.swarm.network.kill(self.name)


class MemorySwarm:
    """An organiser and any number of peers of one run, on a seeded in-memory network."""

    def __init__(self, config: Config, folder: Path, seed: int = 0, leased: bool = True) -> None:
        self.config = config
        self.folder = folder
        self.network = MemoryNetwork(seed)
        self.clock = LoopClock()
        self.layout = Layout(state_tensors(config.model), config.sync.tile_values)
        dataset = sha256(b"some data") if leased else sha256(b"")
        self.info = describe_run(config, dataset, ORGANISER)
        self.rules = rules_of(config, self.info, self.layout)
        self.peers: dict[PeerId, PretendPeer] = {}

    async def start(self, names: Iterable[str], work: PretendWork | None = None) -> None:
        """The organiser and the first peers; returns when genesis is there and all have begun."""
        net = self.network.peer(ORGANISER)
        store = StateStore(self.folder / "organiser" / "state", self.layout)
        store.create_initial(InitialState(self.layout, self.config.run.seed, self.config.model.init_std))
        self.organiser = Organiser(
            self.info, self.rules, self.config.swarm.min_peers, self.config.swarm.heartbeat_seconds, net.transport,
            KeySealer(net.signer), EnvelopeChecker(net.verifier), Chain(self.folder / "organiser" / "chain"), store,
            self.clock, lambda text: None,
        )  # fmt: skip
        await self.organiser.start()
        await asyncio.gather(*(self.add(name, work) for name in names))

    async def add(self, name: str, work: PretendWork | None = None, intent: Intent | None = None) -> PretendPeer:
        """One more peer, or the same again after `stop`."""
        peer_id = PeerId(name)
        if peer_id in self.peers and not self.peers[peer_id].is_up:
            self.network.restart(peer_id)
        wanted = intent or Intent(joining=True, max_columns=self.config.swarm.experts_per_peer)
        peer = PretendPeer(self, peer_id, self.folder / name, work or PretendWork(), wanted)
        self.peers[peer_id] = peer
        await peer.start()
        return peer

    async def until_round(self, round: int, names: Iterable[str] | None = None) -> None:
        """Waits until these peers (all that are up) stand on `round` or later."""
        while True:
            chosen = [self.peers[PeerId(n)] for n in names] if names else [p for p in self.peers.values() if p.is_up]
            for peer in chosen:
                if peer.failures:
                    raise peer.failures[0]
            if all(peer.driver.core.tip.round >= round for peer in chosen):
                return
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        for peer in self.peers.values():
            if peer.is_up:
                await peer.stop()
        await self.organiser.stop()

"""One peer of a MemorySwarm: the real driver and disk, and a pretended trainer that does arithmetic on the state.

Each inner step adds a seeded change to the values that the peer owns, so that a test can compute what a round must
give. What a round does not count is carried as design section 4 says, and training data is used up position by
position, as far as it is leased. There is no model and no thread, unless a `Learner` is given.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from spes_p2p.checkpoint.save import save_checkpoint
from spes_p2p.consensus.actions import Notice
from spes_p2p.consensus.machine import Consensus, Start
from spes_p2p.consensus.messages import Intent, Manifest, Work, manifest_hash
from spes_p2p.consensus.state import Identity
from spes_p2p.consensus.timing import Pace
from spes_p2p.data.leases import Ranges, count, joined, take
from spes_p2p.ids import PeerId
from spes_p2p.ownership.expert_map import columns_of
from spes_p2p.state.layout import BlockSource, Values
from spes_p2p.state.version import Version
from spes_p2p.swarm.memory_backend import MemoryPeer
from spes_p2p.sync.driver import Applied, Arithmetic, Disk, Driver
from spes_p2p.sync.going_over import Parting, told
from spes_p2p.sync.inputs import Carried, Inputs, RunAhead
from spes_p2p.sync.joining import Joining, Place
from spes_p2p.sync.outgoing import Masters
from spes_p2p.sync.residuals import Residuals
from spes_p2p.sync.sealing import EnvelopeChecker, KeySealer

if TYPE_CHECKING:
    from spes_p2p.testing.memory_swarm import MemorySwarm

DAY_SECONDS = 86_400.0
"""What the clocks of machines showed when the swarm began."""
ORGANISER = PeerId("organiser")
LEAVE_SECONDS = 10.0
Alter = Callable[[int, int, Values], Values]


class Learner(Protocol):
    """Trains for real in the place of a pretended trainer (`testing/learning.py`)."""

    def begin(self, owned: tuple[int, ...], values: BlockSource, step: int, round_steps: int = 0) -> None:
        """A round on top of global step `step`, of which `values` have `round_steps` already."""
        ...

    def run_ahead(self) -> None:
        """Steps from now on are those of the next round (`sync.overlap`)."""
        ...

    def train(self, positions: Ranges) -> None:
        """One inner step on these sequences."""
        ...

    def values(self, block: int) -> Values:
        """Present values of block 0 or of an owned column."""
        ...


def _as_trained(round: int, block: int, values: Values) -> Values:
    return values


@dataclass
class PretendWork:
    """How a trainer pretends: `step_seconds` an inner step, each adding normal values times `change`.

    `alter(round, block, values)` may spoil what is handed in on top of a round. `saves`: a checkpoint every round.
    `finishes_steps`: a running step is not broken off when the round closes, as with a real trainer. `learner` trains
    in its place, in no time by the virtual clock.
    """

    step_seconds: float = 0.1
    change: float = 0.01
    seed: int = 0
    alter: Alter = _as_trained
    saves: bool = False
    finishes_steps: bool = False
    learner: Learner | None = None


@dataclass
class HandedIn:
    """What a peer brought into the round on top of `manifest`: flat values by block, and what it had started from."""

    manifest: Manifest
    started: dict[int, Values]
    values: dict[int, Values]


@dataclass
class Lead:
    """What was trained since a snapshot whose round is still being synced (`sync.overlap`), block by block."""

    steps: int = 0
    tokens: int = 0
    values: dict[int, Values] = field(default_factory=dict)


@dataclass
class Turn:
    """`first_steps` of the `steps` were made while the round before was synced: they are in `started`."""

    manifest: Manifest
    base: Version
    masters: Masters
    started: dict[int, Values]
    steps: int = 0
    handed_in: bool = False
    closing: bool = False
    first_steps: int = 0
    lead: Lead = field(default_factory=Lead)


@dataclass
class PretendPeer:
    """One life of one peer, from `start` to `leave` or `kill`."""

    swarm: MemorySwarm
    name: PeerId
    folder: Path
    work: PretendWork
    intent: Intent
    notices: list[Notice] = field(default_factory=list)
    applied_events: list[Applied] = field(default_factory=list)
    failures: list[BaseException] = field(default_factory=list)
    handed_in: dict[int, HandedIn] = field(default_factory=dict)
    ahead: dict[int, dict[int, Values]] = field(default_factory=dict)
    """By round that it stood on: what it trained since its snapshot, until the round's commit came."""
    is_up: bool = True
    joined: bool = False
    _ended: bool = False

    async def start(self) -> None:
        """Joins, or goes on from what is on disk."""
        swarm = self.swarm
        self.net: MemoryPeer = swarm.network.peer(self.name)
        self.checker = EnvelopeChecker(self.net.verifier)
        self.said: list[str] = []
        sealer = KeySealer(self.net.signer)
        joining = Joining(
            swarm.info, swarm.config, swarm.layout, self.folder, self.net.transport, self.net.signer,
            self.net.verifier, sealer, self.said.append, swarm.new_incarnation, self.folder / "checkpoints",
        )  # fmt: skip
        place = await joining.enter(self.intent, self._sources)
        self._turn: Turn | None = None
        self._parting: Parting | None = None
        self._training: asyncio.Task[None] | None = None
        self._used: Ranges = ()
        self._tokens = self._steps = 0
        self._gone = asyncio.Event()
        await self._drive(place, sealer)

    async def _drive(self, place: Place, sealer: KeySealer) -> None:
        swarm, now = self.swarm, self.swarm.clock.now()
        self.store, self.chain, self.votes = place.store, place.chain, place.votes
        self.inputs = Inputs(self.folder / "inputs", swarm.layout)
        self.residuals = Residuals(self.folder / "residuals", swarm.layout)
        first = int(1000 * (DAY_SECONDS + now - swarm.clock_behind_seconds))
        identity = Identity(self.name, swarm.rules, sealer, self.checker.check)
        start = Start(
            place.votes.incarnation, place.tip.manifest, place.tip, place.votes.record, self.intent, first,
            seeds=tuple(await self._sources()),
        )  # fmt: skip
        core = Consensus.begin(identity, start, Pace(swarm.config.swarm.heartbeat_seconds), now)
        self.driver = Driver(
            core, swarm.info, self.net.transport, self.checker,
            Disk(place.store, place.chain, place.votes, self.inputs, self.residuals),
            Arithmetic(swarm.layout, swarm.config.sync.merge_top_k), self,
            swarm.clock, follow=swarm.follow.get(self.name, ""),
        )  # fmt: skip
        await self.driver.start()
        self.joined = True
        swarm.watch(self, place.tip.manifest)
        if core.state.is_member():
            self._begin(place.tip.manifest, None)

    async def _sources(self) -> Iterable[PeerId]:
        return [
            ORGANISER,
            *self.swarm.mirrors,
            *(name for name, peer in self.swarm.peers.items() if name != self.name and peer.is_up),
        ]

    @property
    def round(self) -> int:
        """The round whose state is committed here."""
        return self.driver.core.tip.round

    # ---- Hooks ----

    def close_training(self) -> None:
        if self._turn is not None and self._training is not None and self.work.finishes_steps:
            self._turn.closing = True
        else:
            self._hand_in()

    def rounds_in_use(self) -> frozenset[int]:
        return frozenset()

    def notice(self, notice: Notice) -> None:
        self.notices.append(notice)

    def failed(self, error: BaseException) -> None:
        self.failures.append(error)

    def applied(self, event: Applied) -> None:
        """Goes on from a commit: with the new values, and what it did not count."""
        self.applied_events.append(event)
        self.swarm.watch(self, event.commit.manifest)
        manifest, turn, uncounted = event.commit.manifest, self._turn, event.uncounted
        lead = Lead() if turn is None else turn.lead
        if self._training is not None:
            self._training.cancel()
        if turn is not None and not turn.handed_in:  # decided without us
            self._snapshot(turn)
            uncounted = frozenset(at for block in turn.started for at in self.swarm.layout.tile_ids_of(block))
        carried, parting, first_steps = None, None, lead.steps
        if event.switched:
            first_steps = 0 if turn is None else turn.steps
            carried = self._go_over(event, turn)
        elif turn is not None and self._keeps_its_place(event, lead):
            snapshot, masters = self.inputs.snapshot, self._masters(manifest)
            work = Carried(self.swarm.layout, masters, turn.masters, snapshot, uncounted, turn.base.is_sound)
            owned = tuple(block - 1 for block in turn.started if block)
            parting = Parting.after(event, self.name, turn.manifest, owned, work)
            carried = self._ahead(turn, work) if lead.steps else work
        self._turn, self._parting = None, parting
        if self.driver.core.state.is_member():
            self._begin(manifest, carried, first_steps if carried is not None else 0)
        else:
            self._gone.set()

    def _go_over(self, event: Applied, turn: Turn | None) -> BlockSource | None:
        """What was trained since the histories parted goes on, where its data is still ours; else None."""
        newest, lead = event.commit.manifest, Lead() if turn is None else turn.lead
        way = self._parting.way(self.chain) if self._parting is not None else None
        tokens, steps, used = self._tokens + lead.tokens, self._steps + lead.steps, self._used
        self._used, self._tokens, self._steps = (), 0, 0
        values: BlockSource | None = None
        if turn is not None and way is not None and self._is_ours(newest, left := way.left(used)):
            self._used, (self._tokens, self._steps) = left, way.uncounted(tokens, steps)
            trains = [block - 1 for block in turn.started if block]
            ahead = way.values(newest, self._masters(newest), lambda block: self._now(turn, block), trains)
            values = self.inputs.freeze(ahead, way.blocks(newest))
        for text in told(event.own_tokens + tokens, self._tokens, way):
            self.notice(Notice("own", text))
        return values

    def _is_ours(self, newest: Manifest, used: Ranges) -> bool:
        """Whether a lease begins with what was used of it."""
        return joined(take(newest.leases.of(self.name), count(used))[0]) == joined(used)

    def _masters(self, manifest: Manifest) -> Masters:
        committed, ahead = self.store.version(manifest.round), self.residuals.ahead(manifest_hash(manifest))
        return Masters(self.swarm.layout, committed, ahead)

    def _ahead(self, turn: Turn, new: BlockSource) -> BlockSource:
        """What was trained since the snapshot, on top of what came out of the round."""
        self.ahead[turn.manifest.round] = turn.lead.values
        blocks = tuple(turn.started)
        ahead = RunAhead(new, lambda block: self._now(turn, block), self.inputs.snapshot, blocks)
        return self.inputs.freeze(ahead, blocks)

    def _now(self, turn: Turn, block: int) -> Values:
        """The values of a block while a round is synced."""
        if self.work.learner is not None:
            return self.work.learner.values(block)
        return self.handed_in[turn.manifest.round].values[block] + turn.lead.values.get(block, np.float32(0))

    def _keeps_its_place(self, event: Applied, lead: Lead) -> bool:
        """Whether what was trained and not counted still has its place in the data; else it is lost."""
        left = self._used
        if event.counted is not None:
            left = take(left, event.counted.sequences)[1]
            self._tokens = self._steps = 0
        self._tokens += lead.tokens
        self._steps += lead.steps
        self._used = left
        if self._is_ours(event.commit.manifest, left):
            return True
        self._used, self._tokens, self._steps = (), 0, 0
        return False

    # ---- training ----

    def _begin(self, manifest: Manifest, carried: BlockSource | None, first_steps: int = 0) -> None:
        base = self.store.version(manifest.round)
        masters = self._masters(manifest)
        source = carried or masters
        owned = columns_of(manifest.ownership, self.name)
        if self.work.learner is not None:
            self.work.learner.begin(owned, source, manifest.step, first_steps)
        blocks = (0, *(1 + column for column in owned))
        for block in blocks:
            base.block(block)  # maps it: the store may drop this version while we still need it
        if self.work.saves:
            save_checkpoint(self.folder / "checkpoints", base, manifest.step, {"round": manifest.round}, {}, 2)
        self._started = self._told = self.swarm.clock.now()
        started = {block: np.array(source.block(block)) for block in blocks}
        self._turn = Turn(manifest, base, masters, started, steps=first_steps, first_steps=first_steps)
        if self.intent.leaving and self.swarm.rules.expert_rounds > 1:  # named again: there is something to hand out
            self._hand_in_a_step()
        else:
            self._training = asyncio.get_running_loop().create_task(self._train(self._turn))

    async def _train(self, turn: Turn) -> None:
        """H steps, or as far as the lease goes. Ended from outside when the round closes."""
        while turn.steps < turn.manifest.steps_per_round and not turn.closing:
            data = self._next_data(turn)
            if data is None:
                break
            await asyncio.sleep(self.work.step_seconds)
            self._step(turn, data)
            self._tell(turn)
        self._training = None
        self._hand_in()

    def _next_data(self, turn: Turn) -> Ranges | None:
        """What the next step trains on; None where the lease ends."""
        batch = self.swarm.config.optimizer.batch_sequences
        data, _ = take(take(turn.manifest.leases.of(self.name), count(self._used))[1], batch)
        return None if self.swarm.rules.leased and count(data) < batch else data

    async def _run_ahead(self, turn: Turn) -> None:
        """Steps of the next round, from the snapshot on; ended from outside by its commit."""
        sync, lead = self.swarm.config.sync, turn.lead
        most = min(sync.overlap_steps or turn.manifest.steps_per_round, turn.manifest.steps_per_round)
        while lead.steps < most and (data := self._next_data(turn)) is not None:
            await asyncio.sleep(self.work.step_seconds)
            self._step_ahead(turn, data)

    def _step_ahead(self, turn: Turn, data: Ranges) -> None:
        lead = turn.lead
        if self.work.learner is not None and not lead.steps:
            self.work.learner.run_ahead()
        lead.steps += 1
        lead.tokens += self._step_tokens
        self._use(data)
        if self.work.learner is not None:
            self.work.learner.train(data)
            return
        lead.values = {
            block: np.float32(self.work.change * lead.steps) * self._change(turn, block, "ahead/")
            for block in turn.started
        }

    @property
    def _step_tokens(self) -> int:
        return self.swarm.config.optimizer.batch_sequences * self.swarm.config.data.sequence_length

    def _use(self, data: Ranges) -> None:
        self._used = joined((*self._used, *data)) if self.swarm.rules.leased else ()

    def _step(self, turn: Turn, data: Ranges) -> None:
        turn.steps += 1
        if self.work.learner is not None:
            self.work.learner.train(data)
        self._use(data)
        self._steps += 1
        self._tokens += self._step_tokens

    def _tell(self, turn: Turn) -> None:
        now = self.swarm.clock.now()
        if now - self._told >= self.swarm.config.swarm.heartbeat_seconds:
            self._told = now
            self.driver.training(self._report(turn, ready=False))

    def _report(self, turn: Turn, ready: bool) -> Work:
        config = self.swarm.config
        full_round = turn.manifest.steps_per_round * config.optimizer.batch_sequences * config.data.sequence_length
        return Work(
            ready, self._tokens, self._steps, count(self._used), self.swarm.clock.now() - self._started,
            0.0 if ready else self.work.step_seconds, full_round,
        )  # fmt: skip

    def _hand_in(self) -> None:
        """Snapshots what was trained and says READY; once a round."""
        turn = self._turn
        if turn is None or turn.handed_in:
            return
        if self._training is not None:
            self._training.cancel()
        self._snapshot(turn)
        self.driver.ready(self._report(turn, ready=True))
        if self.swarm.config.sync.overlap and not self.intent.leaving:
            self._training = asyncio.get_running_loop().create_task(self._run_ahead(turn))

    def _snapshot(self, turn: Turn) -> None:
        round = turn.manifest.round
        values = {block: self.work.alter(round, block, self._trained(turn, block)) for block in turn.started}
        turn.handed_in = True
        self.handed_in[round] = HandedIn(turn.manifest, turn.started, values)
        self.inputs.take(manifest_hash(turn.manifest), tuple(values), values.__getitem__)

    def _trained(self, turn: Turn, block: int) -> Values:
        if self.work.learner is not None:
            return self.work.learner.values(block)
        steps = turn.steps - turn.first_steps
        return turn.started[block] + np.float32(self.work.change * steps) * self._change(turn, block)

    def _change(self, turn: Turn, block: int, kind: str = "") -> Values:
        seed = zlib.crc32(f"{self.work.seed}/{self.name}/{turn.manifest.round}/{kind}{block}".encode())
        return np.random.default_rng(seed).standard_normal(turn.started[block].shape, dtype=np.float32)

    def _hand_in_a_step(self) -> None:
        turn = self._turn
        if turn is not None and not turn.handed_in and not self._tokens and self.swarm.rules.expert_rounds > 1:
            leased = turn.manifest.leases.of(self.name)
            data, _ = take(take(leased, count(self._used))[1], self.swarm.config.optimizer.batch_sequences)
            self._step(turn, data)
        self._hand_in()

    # ---- the end ----

    async def leave(self) -> None:
        """Hands in what was trained, says goodbye, and goes when a manifest without this peer is committed.

        With turns that is a step at least: columns are handed out with work that a round counts.
        """
        self._hand_in_a_step()
        self.intent = replace(self.intent, leaving=True)
        self.driver.wish(self.intent)
        try:
            async with asyncio.timeout(LEAVE_SECONDS):
                await self._gone.wait()
        finally:
            await self.kill()

    def die(self, silent: bool = False) -> None:
        """At once nothing more comes from this peer; `kill` must follow, which waits for its tasks."""
        self.is_up = False
        self.swarm.network.kill(self.name, silent)
        if self.joined:  # else whoever started it must cancel that
            self.driver.halt()
            if self._training is not None:
                self._training.cancel()

    async def kill(self, silent: bool = False) -> None:
        """The end of the process, without a word; `silent`: its host answers nobody either."""
        if self._ended:
            return
        self._ended = True
        if self.is_up:
            self.die(silent)
        if self.joined:
            await self.driver.stop()
            self.store.close()

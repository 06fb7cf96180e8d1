"""A run with liars in it: real trainers and the real sync in memory, on the virtual clock.

A liar is an honest peer but for what its attack says. The run leases its data, so that claims have bounds and the work
that is counted is audited, as in a run that is open to strangers.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import numpy as np
import torch

from spes_p2p.config.schema import Config
from spes_p2p.consensus.manifest import Contribution, Manifest
from spes_p2p.consensus.messages import LOST, Intent, Work
from spes_p2p.consensus.parts import Parts
from spes_p2p.consensus.rules import MOST_ROUNDS
from spes_p2p.consensus.table import Table
from spes_p2p.data.leases import Ranges
from spes_p2p.data.loader import Batch
from spes_p2p.data.manifest import Dataset
from spes_p2p.ids import Hash, PeerId
from spes_p2p.state.layout import Values
from spes_p2p.state.staging import TileData
from spes_p2p.sync.interfaces import SliceWork
from spes_p2p.sync.organiser_words import Words, roll
from spes_p2p.sync.sealing import KeySealer
from tests.simulation.attackers import contributions, reducers, talkers
from tests.simulation.attackers.attack import Attack, Liar, Scene
from tests.simulation.attackers.leaders import LEADERS, machine_with
from tests.simulation.pretend_peer import ORGANISER, PretendPeer, PretendWork
from tests.simulation.training_swarm import LOOK_SECONDS, Measure, TrainingPeer, TrainingSwarm
from tests.simulation.virtual_time import run_virtual

ATTACKS: Mapping[str, type[Attack]] = {
    kind.name: kind
    for module in (contributions, reducers, talkers)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Attack) and kind is not Attack
} | {
    name: type(part.__name__, (Attack,), {"__doc__": part.__doc__, "name": name, "part": part})
    for name, part in LEADERS.items()
}
OFTEN = 12.0
"""Times as often as such short rounds pay for is work audited: one peer in six rounds. Long rounds pay for more."""
PATIENCE_DEADLINES = 30.0
"""A run that commits nothing for so long is over: nobody expects more of it."""
NEVER = 2**62
"""A step that is not reached: the loss is measured in the end alone."""


@dataclass
class TrialPeer(TrainingPeer):
    """A peer that lies where its swarm says so."""

    async def start(self) -> None:
        await super().start()
        self.driver.obey(cast(TrialSwarm, self.swarm).words)
        attack = self._attack
        if attack is None:
            return
        candidate, progressed = self.driver._candidate, self.driver.progressed
        write = candidate.write

        def written(first_tile: int, tiles: Iterable[TileData]) -> tuple[Hash, ...]:
            return write(first_tile, reducers.altered(attack, candidate, first_tile, tiles, self._rng(first_tile)))

        def claimed(work: Work) -> None:
            most = MOST_ROUNDS * self._present.turn.manifest.steps_per_round
            progressed(attack.work(work, most) if work.ready else work)

        collector, work = self.driver._executor._collector, self.driver._work
        collect, audit_work, batch = collector._contribution, work.audit_work, self.learner.batch
        swarm = cast(TrialSwarm, self.swarm)

        async def taken(entry: Contribution, parent: Hash, values: SliceWork) -> str:
            is_taken = entry.peer == self.name or attack.takes(entry.peer, swarm.liars)
            return await collect(entry, parent, values) if is_taken else LOST

        async def audited(entry: Contribution) -> str | None:
            return attack.finding(entry.peer in swarm.liars, await audit_work(entry))

        def altered_batch(positions: Ranges) -> Batch:
            return attack.batch(batch(positions), swarm.config.model.vocab_size)

        if attack.part is not None:
            core = self.driver.core
            parts = Parts(core.state, machine_with(attack.part).PART_CLASSES)
            core._parts, core._table = parts, Table(parts)

        vars(candidate)["write"] = written
        vars(self.driver)["progressed"] = claimed
        vars(collector)["_contribution"] = taken
        vars(work)["audit_work"] = audited
        vars(self.learner)["batch"] = altered_batch
        honest = tuple(peer for peer in swarm.peers if peer not in swarm.liars)
        self.net.spawn(attack.beside(Liar(self.name, self.driver, swarm.network, honest, swarm.run.heartbeat_seconds)))

    @property
    def _attack(self) -> Attack | None:
        return cast(TrialSwarm, self.swarm).liars.get(self.name)

    def _rng(self, what: int) -> np.random.Generator:
        text = f"{self.swarm.config.run.seed}/{self.name}/{self.round}/{what}"
        return np.random.default_rng(zlib.crc32(text.encode()))

    def _now(self, block: int) -> Values:
        trained, attack = super()._now(block), self._attack
        if attack is None:
            return trained
        honest = cast(TrialSwarm, self.swarm).honest_values(self._present.turn.manifest, block)
        return attack.values(Scene(self._present.started[block], trained, honest, self._rng(block)))

    def values_on(self, manifest: Manifest, block: int) -> Values | None:
        """What it has trained of a block by now, if that is on top of `manifest`."""
        now = self._pretended
        return (
            now.trained(block) if now is not None and now.turn.manifest == manifest and block in now.started else None
        )


class TrialSwarm(TrainingSwarm):
    """`liars`: which peers attack, and how."""

    peer_class = TrialPeer
    leased = True
    liars: Mapping[PeerId, Attack] = {}
    words = Words()
    """The organiser's."""

    def audit_often(self, times: float) -> None:
        """Before it starts: draws whose work is audited so many times as often as the config would."""
        vars(self.run)["rules"] = replace(self.run.rules, audited_work=times * self.run.rules.audited_work)

    async def start_organiser(self) -> None:
        await super().start_organiser()
        self.seat.obey(self.words)

    async def add(self, name: str, work: PretendWork | None = None, intent: Intent | None = None) -> PretendPeer:
        attack = self.liars.get(PeerId(name))
        if attack is not None and attack.claims_column:
            claims = (sorted(self.liars).index(PeerId(name)),)
            intent = Intent(joining=True, max_columns=self.config.swarm.experts_per_peer, claims=claims)
        return await super().add(name, work, intent)

    def vouch_for(self, names: Sequence[PeerId]) -> None:
        """Before it starts: with swarm.electors=vouched these may vote, liars too, and nobody else."""
        if self.run.rules.by_vouch:
            self.words = roll(self.info, Words(), KeySealer(self.network.keys.signer(ORGANISER)), vouched=names)

    def honest_values(self, manifest: Manifest, block: int) -> tuple[Values, ...]:
        """What those that do not lie have trained of a block by now, in the order of their names."""
        peers = [cast(TrialPeer, self.peers[name]) for name in sorted(self.peers) if name not in self.liars]
        found = (peer.values_on(manifest, block) for peer in peers)
        return tuple(values for values in found if values is not None)


@dataclass(frozen=True)
class Cast:
    """How large a trial is. `peers` counts the liars; `often` is for `TrialSwarm.audit_often`."""

    rounds: int
    peers: int
    liars: int
    often: float = OFTEN


@dataclass(frozen=True)
class Trial:
    """How a run with liars went, as its first peer saw it, who does not lie."""

    loss: float
    """Held-out, of the last committed model: nats a token. NaN where that is not finite any more."""
    rounds: int
    longest_stall_deadlines: float
    """The longest time between two commits, in deadlines of a leader."""
    banned: int
    """Liars that are no members in the end."""
    banned_honest: int
    """Others that are no members in the end."""
    last_ban: int
    """The round from which on the last of these liars was none; 0 where there was no such one."""
    audits: Counter[str]
    """What came of audits of the work of those who do not lie."""
    audits_of_liars: Counter[str]
    bytes_sent: int
    """By all peers together."""
    cpu_seconds: float
    """Of everything together: the liars too, and what it takes to pretend a network."""


def run_trial(config: Config, folder: Path, dataset: Dataset, attack: Attack | None, given: Cast) -> Trial:
    """Trains for so many rounds, or until the run stands still. Without `attack` the liars are absent.

    Not for so many global steps: claimed ones make those grow.
    """
    names = [PeerId(f"peer-{number:03d}") for number in range(given.peers)]
    lying = names[1 : 1 + given.liars]  # of few slices the first names get most
    present = [name for name in names if attack is not None or name not in lying]
    settled = config.model_copy(update={"swarm": config.swarm.model_copy(update={"min_peers": len(present)})})

    async def play() -> Trial:
        swarm = TrialSwarm(settled, folder, dataset, torch.device("cpu"), Measure(NEVER, NEVER))
        swarm.liars = {} if attack is None else dict.fromkeys(lying, attack)
        swarm.audit_often(given.often)
        swarm.vouch_for(present)
        await swarm.start(present)
        trial = await _watched(swarm, cast(TrainingPeer, swarm.peers[names[0]]), given.rounds)
        await swarm.stop()
        for peer in cast("list[TrainingPeer]", list(swarm.peers.values())):
            peer.learner.trainer.close()
        swarm.evaluator.trainer.close()
        return trial

    begin = time.process_time()
    trial = run_virtual(play(), 1e9)
    return replace(trial, cpu_seconds=time.process_time() - begin)


@dataclass
class _Watch:
    """What the first peer commits, and when."""

    swarm: TrialSwarm
    first: TrainingPeer
    moments: list[float] = field(default_factory=list)
    last_seen: dict[PeerId, int] = field(default_factory=dict)
    """The last round that has a peer as a member."""
    audits: Counter[str] = field(default_factory=Counter)
    audits_of_liars: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.moments.append(self.swarm.clock.now())

    def __call__(self, peer: PretendPeer, manifest: Manifest) -> None:
        if peer is not self.first:
            return
        self.moments.append(self.swarm.clock.now())
        self.last_seen |= dict.fromkeys((member.peer for member in manifest.members), manifest.round)
        for found in manifest.audited:
            (self.audits_of_liars if found.peer in self.swarm.liars else self.audits)[found.finding] += 1


async def _watched(swarm: TrialSwarm, first: TrainingPeer, rounds: int) -> Trial:
    deadline = first.driver.core.state.pace.deadline_seconds(0)
    watch = _Watch(swarm, first)
    swarm.watch = watch
    while first.round < rounds and swarm.clock.now() - watch.moments[-1] < PATIENCE_DEADLINES * deadline:
        for peer in swarm.peers.values():
            if peer.failures and peer.name not in swarm.liars:
                raise peer.failures[0]
        await asyncio.sleep(LOOK_SECONDS)
    ends = [*watch.moments[1:], swarm.clock.now()]
    longest = max(end - begin for begin, end in zip(watch.moments, ends, strict=True))
    tip = first.driver.core.tip
    loss = swarm.evaluator.held_out_loss(first.store.version(tip.round), swarm.config.eval.sequences)
    gone = set(swarm.peers) - {member.peer for member in tip.members}
    banned = gone & set(swarm.liars)
    return Trial(
        loss, tip.round, longest / deadline, len(banned), len(gone - banned),
        max((1 + watch.last_seen.get(peer, 0) for peer in banned), default=0),
        watch.audits, watch.audits_of_liars, swarm.bytes_sent(), 0.0,
    )  # fmt: skip

"""A run with liars in it: real trainers and the real sync in memory, on the virtual clock.

A liar is an honest peer but for what its attack says. The run leases its data, so that claims have bounds, as in a
run that is open to strangers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import cast

import torch

from spes_p2p.config.schema import Config
from spes_p2p.consensus.manifest import Contribution, Manifest
from spes_p2p.consensus.messages import LOST, Work
from spes_p2p.consensus.parts import Parts
from spes_p2p.consensus.rules import MOST_ROUNDS
from spes_p2p.consensus.table import Table
from spes_p2p.data.manifest import Dataset
from spes_p2p.ids import Hash, PeerId
from spes_p2p.state.layout import Values
from spes_p2p.sync.interfaces import SliceWork
from spes_p2p.sync.organiser_words import Words, roll
from spes_p2p.sync.sealing import KeySealer
from tests.simulation.attackers import contributions, talkers
from tests.simulation.attackers.attack import Attack, Liar
from tests.simulation.attackers.leaders import LEADERS, machine_with
from tests.simulation.pretend_peer import ORGANISER, PretendPeer
from tests.simulation.training_swarm import LOOK_SECONDS, Measure, TrainingPeer, TrainingSwarm
from tests.simulation.virtual_time import run_virtual

ATTACKS: Mapping[str, type[Attack]] = {
    kind.name: kind
    for module in (contributions, talkers)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Attack) and kind is not Attack
} | {
    name: type(part.__name__, (Attack,), {"__doc__": part.__doc__, "name": name, "part": part})
    for name, part in LEADERS.items()
}
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
        progressed = self.driver.progressed

        def claimed(work: Work) -> None:
            most = MOST_ROUNDS * self._present.turn.manifest.steps_per_round
            progressed(attack.work(work, most) if work.ready else work)

        collector = self.driver._executor._collector
        collect = collector._contribution
        swarm = cast(TrialSwarm, self.swarm)

        async def taken(entry: Contribution, parent: Hash, values: SliceWork) -> str:
            is_taken = entry.peer == self.name or attack.takes(entry.peer, swarm.liars)
            return await collect(entry, parent, values) if is_taken else LOST

        if attack.part is not None:
            core = self.driver.core
            parts = Parts(core.state, machine_with(attack.part).PART_CLASSES)
            core._parts, core._table = parts, Table(parts)

        vars(self.driver)["progressed"] = claimed
        vars(collector)["_contribution"] = taken
        honest = tuple(peer for peer in swarm.peers if peer not in swarm.liars)
        self.net.spawn(attack.beside(Liar(self.name, self.driver, swarm.network, honest, swarm.run.heartbeat_seconds)))

    @property
    def _attack(self) -> Attack | None:
        return cast(TrialSwarm, self.swarm).liars.get(self.name)

    def _now(self, block: int) -> Values:
        trained, attack = super()._now(block), self._attack
        return trained if attack is None else attack.values(trained, self._present.started[block])


class TrialSwarm(TrainingSwarm):
    """`liars`: which peers attack, and how."""

    peer_class = TrialPeer
    leased = True
    liars: Mapping[PeerId, Attack] = {}
    words = Words()
    """The organiser's."""

    async def start_organiser(self) -> None:
        await super().start_organiser()
        self.seat.obey(self.words)

    def vouch_for(self, names: Sequence[PeerId]) -> None:
        """Before it starts: with swarm.trusted=vouched these are trusted, and nobody else."""
        if self.run.rules.has_strangers:
            self.words = roll(self.info, Words(), KeySealer(self.network.keys.signer(ORGANISER)), vouched=names)


@dataclass(frozen=True)
class Cast:
    """How large a trial is. `peers` counts the liars."""

    rounds: int
    peers: int
    liars: int


@dataclass(frozen=True)
class Trial:
    """How a run with liars went, as its first peer saw it, who does not lie."""

    loss: float
    """Held-out, of the last committed model: nats a token. NaN where that is not finite any more."""
    rounds: int
    longest_stall_deadlines: float
    """The longest time between two commits, in deadlines of a leader."""
    dropped: frozenset[PeerId]
    """Who is no member in the end."""


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
        swarm.vouch_for([name for name in present if name not in lying])
        await swarm.start(present)
        trial = await _watched(swarm, cast(TrainingPeer, swarm.peers[names[0]]), given.rounds)
        await swarm.stop()
        for peer in cast("list[TrainingPeer]", list(swarm.peers.values())):
            peer.learner.trainer.close()
        swarm.evaluator.trainer.close()
        return trial

    return run_virtual(play(), 1e9)


async def _watched(swarm: TrialSwarm, first: TrainingPeer, rounds: int) -> Trial:
    deadline = first.driver.core.state.pace.deadline_seconds(0)
    moments = [swarm.clock.now()]

    def watch(peer: PretendPeer, manifest: Manifest) -> None:
        if peer is first:
            moments.append(swarm.clock.now())

    swarm.watch = watch
    while first.round < rounds and swarm.clock.now() - moments[-1] < PATIENCE_DEADLINES * deadline:
        for peer in swarm.peers.values():
            if peer.failures and peer.name not in swarm.liars:
                raise peer.failures[0]
        await asyncio.sleep(LOOK_SECONDS)
    longest = max(end - begin for begin, end in pairwise([*moments, swarm.clock.now()]))
    tip = first.driver.core.tip
    loss = swarm.evaluator.held_out_loss(first.store.version(tip.round), swarm.config.eval.sequences)
    dropped = frozenset(swarm.peers) - {member.peer for member in tip.members}
    return Trial(loss, tip.round, longest / deadline, dropped)

"""A run with liars in it: real trainers and the real sync in memory, on the virtual clock.

A liar is an honest peer but for what its attack says. The same seed gives honest peers the same data with and without
liars, so that losses can be compared.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch

from spes_p2p.config.schema import Config
from spes_p2p.consensus.manifest import Contribution, Manifest
from spes_p2p.consensus.messages import LOST, Intent, Work
from spes_p2p.consensus.rules import MOST_ROUNDS
from spes_p2p.data.loader import Batch
from spes_p2p.data.manifest import Dataset
from spes_p2p.ids import Hash, PeerId
from spes_p2p.state.layout import Values
from spes_p2p.state.staging import TileData
from spes_p2p.sync.collecting import Take
from spes_p2p.sync.organiser_words import Words, roll
from spes_p2p.sync.sealing import KeySealer
from spes_p2p.testing.attackers.attack import Attack, Liar, Scene
from spes_p2p.testing.attackers.contributions import (
    ALittleIsEnough,
    ClaimedFlip,
    Copy,
    Disguised,
    Idle,
    InnerProduct,
    LabelFlip,
    Noise,
    NotFinite,
    SignFlip,
    SoleFlip,
    SoleNoise,
    SoleOwner,
    Thousandfold,
)
from spes_p2p.testing.attackers.reducers import AlteredTile, NamesLost, NoisyTiles, NotFiniteTiles
from spes_p2p.testing.attackers.talkers import EndlessChain, Flood, StrangerKeys
from spes_p2p.testing.pretend_peer import ORGANISER, PretendPeer, PretendWork
from spes_p2p.testing.training_swarm import LOOK_SECONDS, Measure, TrainingPeer, TrainingSwarm
from spes_p2p.testing.virtual_time import run_virtual

ATTACKS: Mapping[str, type[Attack]] = {
    kind.name: kind
    for kind in (
        NotFinite, Thousandfold, SignFlip, Noise, ALittleIsEnough, InnerProduct, Disguised, Idle, ClaimedFlip,
        Copy, LabelFlip, SoleOwner, SoleFlip, SoleNoise, AlteredTile, NoisyTiles, NotFiniteTiles, NamesLost,
        StrangerKeys, EndlessChain, Flood,
    )
}  # fmt: skip
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
            rng = self._rng(first_tile)
            altered = (
                attack.reduced(first_tile + at, tile, rng) if isinstance(tile, np.ndarray) else tile
                for at, tile in enumerate(tiles)
            )
            return write(first_tile, altered)

        def claimed(work: Work) -> None:
            most = MOST_ROUNDS * self._present.turn.manifest.steps_per_round
            progressed(attack.work(work, most) if work.ready else work)

        collector, loader = self.driver._executor._collector, self.learner._loader
        asked, next_batch = collector._asked, loader.next_batch if loader is not None else None
        swarm = cast(TrialSwarm, self.swarm)

        async def taken(entry: Contribution, parent: Hash, take: Take) -> str:
            return await asked(entry, parent, take) if attack.takes(entry.peer, swarm.liars) else LOST

        def altered_batch(sequences: int) -> Batch:
            assert next_batch is not None
            return attack.batch(next_batch(sequences), swarm.config.model.vocab_size)

        vars(candidate)["write"] = written
        vars(self.driver)["progressed"] = claimed
        vars(collector)["_asked"] = taken
        vars(loader)["next_batch"] = altered_batch
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
    liars: Mapping[PeerId, Attack] = {}
    words = Words()
    """The organiser's."""

    async def start_organiser(self) -> None:
        await super().start_organiser()
        self.organiser.obey(self.words)

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


def run_trial(
    config: Config, folder: Path, dataset: Dataset, rounds: int, attack: Attack | None, peers: int, liars: int
) -> Trial:
    """Trains for so many rounds, or until the run stands still. Without `attack` the liars are absent.

    `peers` counts the liars. Not for so many global steps: claimed ones make those grow.
    """
    names = [PeerId(f"peer-{number:03d}") for number in range(peers)]
    honest, lying = names[: peers - liars], names[peers - liars :]
    present = names if attack is not None else honest
    settled = config.model_copy(update={"swarm": config.swarm.model_copy(update={"min_peers": len(present)})})

    async def play() -> Trial:
        swarm = TrialSwarm(settled, folder, dataset, torch.device("cpu"), Measure(NEVER, NEVER))
        swarm.liars = {} if attack is None else dict.fromkeys(lying, attack)
        swarm.vouch_for(present)
        await swarm.start(present)
        first = cast(TrainingPeer, swarm.peers[names[0]])
        trial = await _watched(swarm, first, rounds)
        await swarm.stop()
        for peer in cast("list[TrainingPeer]", list(swarm.peers.values())):
            peer.learner.close()
        swarm.evaluator.close()
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
        await asyncio.sleep(LOOK_SECONDS)
    ends = [*moments[1:], swarm.clock.now()]
    longest = max(end - begin for begin, end in zip(moments, ends, strict=True))
    tip = first.driver.core.tip
    loss = swarm.evaluator.held_out_loss(first.store.version(tip.round), swarm.config.eval.sequences)
    gone = set(swarm.peers) - {member.peer for member in tip.members}
    return Trial(loss, tip.round, longest / deadline, len(gone & set(swarm.liars)), len(gone - set(swarm.liars)))

"""Simulated swarms in which an elector lies when it leads, and what it gets committed.

    python -m tests.simulation.sim_liars

`attackers/leaders` has the attacks.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import ClassVar

from spes_p2p.consensus.electorate import Electorate, Faults
from spes_p2p.consensus.manifest import Manifest, manifest_hash
from spes_p2p.consensus.membership import leader_order
from spes_p2p.ids import PeerId
from tests.simulation.attackers.leaders import LEADERS, machine_with
from tests.simulation.sim import Weather, World

LIAR = PeerId("p0")
STEP_SECONDS = 0.3
WORK_SECONDS = 0.05


class WorldWithLiar(World):
    """Electors may lie, and one of the first members does."""

    faults = Faults.BYZANTINE

    def __init__(self, attack: str | None, seed: int, founders: int, weather: Weather, *more: object) -> None:
        self.liars = {} if attack is None else {LIAR: machine_with(LEADERS[attack])}
        super().__init__(seed, founders, founders, 1, weather, *more)  # type: ignore[arg-type]


@dataclass
class Committed:
    """A round as it was committed: how many electors it counts and names, and how many are a quorum."""

    round: int
    ballot: int
    tokens: int
    by_liar: bool
    seconds: float
    counted: int
    named: int
    quorum: int


class CalmWorld(WorldWithLiar):
    """Five equals and a liar's attack; others join, and one of them dies. Nothing is poisoned or tried."""

    poisoned = 0.0
    founders: ClassVar[int] = 5
    joins_at: ClassVar[tuple[float, ...]] = (3.0, 9.0)
    dies_at: ClassVar[float] = 20.0

    def __init__(self, attack: str | None, seed: int, weather: Weather | None = None) -> None:
        self.committed: list[Committed] = []
        super().__init__(attack, 4 * seed, self.founders, weather or Weather())
        for at in self.joins_at:
            self.at(at, self.join)
        self.at(self.dies_at, self._dies)

    def _dies(self) -> None:
        victim = self.peers[PeerId(f"p{self.founders}")]
        victim.is_gone_for_good = True
        victim.crash()

    def _add(self, name: PeerId, incarnation: int, link_class: int, serving: bool = False) -> None:
        super()._add(name, incarnation, link_class, serving)
        self.peers[name].step_seconds, self.peers[name].work_seconds = STEP_SECONDS, WORK_SECONDS

    def note_commit(self, manifest: Manifest) -> None:
        before, parent = self.last_change, self.judge.known[manifest.parent].manifest
        rounds = {committed.round for committed in self.committed}
        super().note_commit(manifest)
        if manifest.round in rounds or self.last_change == before:
            return
        ballot = min(one.ballot for one in self.judge.known[manifest_hash(manifest)].certificates)
        order = leader_order(manifest.parent, parent.members)
        electorate = Electorate(order, self.faults)
        counted = len({entry.peer for entry in manifest.roster}.intersection(order))
        named = len({member.peer for member in manifest.members}.intersection(order))
        tokens, is_its = sum(entry.tokens for entry in manifest.roster), electorate.leader(ballot) in self.liars
        seconds, quorum = self.now - before, electorate.quorum
        self.committed.append(Committed(manifest.round, ballot, tokens, is_its, seconds, counted, named, quorum))


def play(attack: str | None, seed: int, seconds: float = 60.0, weather: Weather | None = None) -> CalmWorld:
    """A calm run for so long. Raises Violation."""
    world = CalmWorld(attack, seed, weather)
    while world.now < seconds and world.step():
        pass
    return world


def main() -> int:
    parser = argparse.ArgumentParser(description="What a lying leader gets committed.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--attack", choices=LEADERS)
    parser.add_argument("--loss", type=float, default=0.0, help="of messages")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each run")
    options = parser.parse_args()
    names = [options.attack] if options.attack else [None, *LEADERS]
    for name in names:
        worlds = [play(name, seed, options.seconds, Weather(loss=options.loss)) for seed in range(options.seeds)]
        played = [one for world in worlds for one in world.committed]
        led = [one for one in played if one.by_liar]
        least = min((one.counted for one in led), default=0)
        late = sum(one.ballot > 0 for one in played)
        times = sorted(one.seconds for one in played)
        sys.stdout.write(
            f"{name or 'honest':20} {len(played):3} rounds, {late} in a later ballot, {len(led)} led by the liar;"
            f" these count {least} electors at least;"
            f" a round {times[len(times) // 2]:.1f} s, at most {times[-1]:.1f} s\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

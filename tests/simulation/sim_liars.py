"""Simulated swarms in which an elector lies when it leads, and what it gets committed that is not fair.

    python -m tests.simulation.sim_liars

`attackers/leaders` has the attacks. Where nothing else goes wrong whatever is missing of an honest round was left out.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from spes_p2p.consensus.electorate import Electorate, Faults
from spes_p2p.consensus.manifest import Manifest, manifest_hash
from spes_p2p.consensus.membership import electors, leader_order, trainers
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
    """A round as it was committed. `unfair` says what an honest leader would not have done."""

    round: int
    ballot: int
    tokens: int
    by_liar: bool
    seconds: float
    unfair: frozenset[str]


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
        leader = Electorate(order, self.faults).leader(ballot)
        unfair = frozenset(unfair_parts(self, parent, manifest))
        tokens = sum(entry.tokens for entry in manifest.roster)
        is_its = leader in self.liars
        self.committed.append(Committed(manifest.round, ballot, tokens, is_its, self.now - before, unfair))


def unfair_parts(world: World, parent: Manifest, child: Manifest) -> Iterable[str]:
    """What a calm round does not do to those who live and are not banned."""
    up = {peer.name for peer in world.up()} - {*child.banned}
    settled = {member.peer for member in electors(trainers(parent.members))} & up  # others may be late
    if settled - {entry.peer for entry in child.roster}:
        yield "work"
    owned = zip(parent.ownership, child.column_rounds, strict=True)
    if any(set(owners) & settled and last < child.round for owners, last in owned):
        yield "columns"
    before, after = ({member.peer for member in manifest.members} for manifest in (parent, child))
    if before & up - after:
        yield "members"
    if before & after - up:
        yield "dead"
    if any(set(owners) & up - set(new) for owners, new in zip(parent.ownership, child.ownership, strict=True)):
        yield "ownership"
    if any(member.link_class != world.peers[member.peer].intent.link_class for member in child.members):
        yield "links"
    if child.steps_per_round != parent.steps_per_round:
        yield "deadlines"


def play(attack: str | None, seed: int, seconds: float = 60.0, weather: Weather | None = None) -> CalmWorld:
    """A calm run for so long. Raises Violation."""
    world = CalmWorld(attack, seed, weather)
    while world.now < seconds and world.step():
        pass
    return world


def _told(parts: Iterable[str]) -> str:
    """In how many rounds each."""
    return ", ".join(f"{part} {rounds}" for part, rounds in sorted(Counter(parts).items())) or "-"


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
        unfair = _told(part for one in led for part in one.unfair)
        others = _told(part for one in played if not one.by_liar for part in one.unfair)
        late = sum(one.ballot > 0 for one in played)
        times = sorted(one.seconds for one in played)
        sys.stdout.write(
            f"{name or 'honest':20} {len(played):3} rounds, {late} in a later ballot, {len(led)} led by the liar;"
            f" unfair: {unfair} (others: {others});"
            f" a round {times[len(times) // 2]:.1f} s, at most {times[-1]:.1f} s\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Real drivers under seeded misfortune of all kinds at once: in the end all go on, equal, exact, with no data lost."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from spes_p2p.consensus.messages import RENEWAL
from spes_p2p.ids import PeerId
from spes_p2p.swarm.memory_links import LinkShape
from tests.simulation.memory_swarm import MemorySwarm
from tests.sync.swarm_cases import Recorder, check_agreement, check_leases, commits, in_swarm, small_config

SECONDS_OF_MISFORTUNE = 20.0


class Misfortune:
    """Kills, restarts, lost disks, partitions, mute and slow links, cut streams, leavers; a majority stays up."""

    def __init__(self, swarm: MemorySwarm, names: str, rng: random.Random) -> None:
        self.swarm, self.names, self.rng = swarm, names, rng
        self.kinds = [self.kill, self.kill, self.restart, self.restart, self.leave, self.part, self.heal, self.cut]
        self.kinds += [self.shape, self.shape]

    async def strike(self) -> None:
        await asyncio.sleep(self.rng.uniform(0.05, 2.5))
        await self.rng.choice(self.kinds)()

    async def end(self) -> None:
        """Everything is as it should be again."""
        self.swarm.network.heal()
        for name in self.names:
            self.swarm.network.set_link(name, None, LinkShape())
            if not self.swarm.peers[PeerId(name)].is_up:
                await self.swarm.add(name)

    def _may_lose_one(self) -> bool:
        return len(self.swarm.up) > len(self.names) // 2 + 1

    async def kill(self) -> None:
        if self._may_lose_one():
            await self.rng.choice(self.swarm.up).kill(silent=self.rng.random() < 0.3)

    async def leave(self) -> None:
        if self._may_lose_one() and self.rng.random() < 0.4:
            try:
                await self.rng.choice(self.swarm.up).leave()
            except TimeoutError:
                return  # nobody was there to hear it

    async def restart(self) -> None:
        down = [name for name in self.names if not self.swarm.peers[PeerId(name)].is_up]
        if down:
            name = self.rng.choice(down)
            if self.rng.random() < 0.3:
                self.swarm.lose_disk(name)
            self.swarm.network.heal()  # or it might wait for genesis for ever
            await self.swarm.add(name)

    async def part(self) -> None:
        self.swarm.network.partition([self.rng.choice(self.names)])

    async def heal(self) -> None:
        self.swarm.network.heal()

    async def cut(self) -> None:
        self.swarm.network.cut_stream(self.rng.choice(self.names), self.rng.choice([0, 100, 700]), times=10)

    async def shape(self) -> None:
        shape = LinkShape((0.005, 0.1), self.rng.choice([2e4, 1e9]), self.rng.choice([0.0, 0.2]))
        self.swarm.network.set_link(self.rng.choice(self.names), None, shape)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(at, marks=pytest.mark.thorough) for at in range(2, 6))])
def test_a_swarm_outlives_misfortune(folder: Path, seed: int, overlap: bool) -> None:
    rng = random.Random(seed)
    names = "abcde"[: 3 + seed % 3]

    async def play(swarm: MemorySwarm) -> None:
        recorder, misfortune = Recorder(swarm), Misfortune(swarm, names, rng)
        await swarm.start(names)
        await swarm.until_round(1)
        end = swarm.clock.now() + SECONDS_OF_MISFORTUNE
        while swarm.clock.now() < end:
            await misfortune.strike()
        await misfortune.end()
        await swarm.until_round(max(life.round for life in swarm.up) + 3)
        check_agreement(swarm)
        check_leases(swarm)
        if all(commit.certificate.kind != RENEWAL for commit in commits(swarm)):
            recorder.check(commits(swarm))

    config = small_config("sync.merge_interval=15", f"sync.overlap={overlap}", peers=len(names))
    in_swarm(folder, play, config, seed, max_virtual_seconds=600)

"""Nothing piles up: after dozens of rounds, every third of which loses a peer, a survivor holds what it held before.

Memory of real processes over hundreds of rounds is what scripts/chaos.py watches.
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections import Counter
from pathlib import Path

from tests.simulation.memory_swarm import MemorySwarm
from tests.sync.swarm_cases import check_agreement, in_swarm, small_config

WARM_UP, ROUNDS = 18, 54
NAMES = ("a", "b", "c", "d")
MOST_GROWTH = 1.05


def alive() -> Counter[str]:
    """Live objects of the product, by class."""
    gc.collect()
    return Counter(
        type(item).__qualname__ for item in gc.get_objects() if str(type(item).__module__).startswith("spes_p2p.")
    )


async def fewest_tasks() -> int:
    """Of a second: at the moment of a heartbeat there are many for a few milliseconds."""
    found = []
    for _ in range(20):
        found.append(len(asyncio.all_tasks()))
        await asyncio.sleep(0.05)
    return min(found)


def forget_the_books(swarm: MemorySwarm) -> None:
    """What the pretended peers write down for tests is no part of the product; nor are lives that are over."""
    for life in swarm.lives:
        life.applied_events.clear()
        life.handed_in.clear()
        life.notices.clear()
    swarm.lives[:] = swarm.up


async def rounds_with_losses(swarm: MemorySwarm, until: int) -> None:
    """Kills one of the others in every third round, and starts it again in the next."""
    while swarm.peers["a"].round < until:  # type: ignore[index]
        victim = NAMES[1 + swarm.peers["a"].round // 3 % 3]  # type: ignore[index]
        await asyncio.sleep(0.4)
        await swarm.peers[victim].kill()  # type: ignore[index]
        await swarm.until_round(swarm.up[0].round + 1)
        await swarm.add(victim)
        await swarm.until_round(swarm.up[0].round + 2)
        forget_the_books(swarm)


def test_a_survivor_holds_no_more_after_many_rounds(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(NAMES)
        await rounds_with_losses(swarm, WARM_UP)
        early, files = alive(), len(os.listdir("/proc/self/fd"))
        threads, tasks = threading.active_count(), await fewest_tasks()
        await rounds_with_losses(swarm, ROUNDS)
        late = alive()
        grown = {name: (early[name], count) for name, count in late.items() if count > early[name] + 30}
        assert sum(late.values()) <= MOST_GROWTH * sum(early.values()), grown
        assert len(os.listdir("/proc/self/fd")) <= files + 8  # a few streams more or less are open at any moment
        assert threading.active_count() <= threads + 4
        assert await fewest_tasks() <= tasks + 10
        survivor = swarm.peers["a"]  # type: ignore[index]
        assert len(survivor.store.rounds()) <= 3
        assert len(list((survivor.folder / "inputs").iterdir())) == 1
        check_agreement(swarm)

    in_swarm(folder, play, small_config(peers=4))

"""What one slow peer costs the others: tokens a second of a swarm with it, without it, and with it at full speed.

Real drivers, stores and messages on the in-memory network and the virtual clock (`tests/simulation/`), so the
protocol's waiting is measured exactly and repeatably, and computing, disks and real links are not. Training is
pretended: an inner step takes `--step-seconds`, and is not broken off when the round closes.

    python scripts/bench_slow_peer.py --peers 4 --slower 4
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from spes_p2p.config.load import bundled_config, load_config
from spes_p2p.config.schema import Config
from tests.simulation.memory_swarm import MemorySwarm, PretendWork
from tests.simulation.virtual_time import run_virtual

SMALL = (
    "model.d_model=8",
    "model.num_heads=2",
    "model.head_dim=4",
    "model.num_layers=2",
    "model.num_experts=8",
    "model.expert_ffn=4",
    "model.vocab_size=32",
    "model.embedding_rows=32",
    "sync.tile_values=128",
    "sync.slice_tiles=4",
)
SLOW = "slow"


@dataclass(frozen=True)
class Result:
    """One swarm, over its rounds after warm-up."""

    tokens_per_second: float
    slow_tokens_per_second: float
    seconds_per_round: float
    deadline_seconds: float
    steps_by_slow: float
    """Inner steps of the slow peer that a round counted, on average."""


def measure(config: Config, steps_seconds: dict[str, float], rounds: int, warm_up: int) -> Result:
    """Tokens that `rounds` rounds counted in virtual time; `steps_seconds` is the time of an inner step, by peer."""

    async def play() -> Result:
        swarm = MemorySwarm(config, folder)
        await swarm.start_organiser()
        async with asyncio.TaskGroup() as group:
            for name, seconds in steps_seconds.items():
                group.create_task(swarm.add(name, PretendWork(step_seconds=seconds, finishes_steps=True)))
        await swarm.until_round(warm_up)
        first, began = swarm.up[0].round, swarm.clock.now()
        await swarm.until_round(first + rounds)
        took = swarm.clock.now() - began
        life = swarm.up[0]
        rosters = [life.chain.commit(at).manifest.roster for at in range(first + 1, life.round + 1)]
        slow = [entry for roster in rosters for entry in roster if entry.peer == SLOW]
        result = Result(
            sum(entry.tokens for roster in rosters for entry in roster) / took,
            sum(entry.tokens for entry in slow) / took,
            took / len(rosters),
            life.driver.core.state.pace.deadline_seconds(0),
            sum(entry.steps for entry in slow) / len(rosters),
        )
        await swarm.stop()
        return result

    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=parent) as name:
        folder = Path(name)
        return run_virtual(play())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=4, help="with the slow one")
    parser.add_argument("--slower", type=float, default=4.0, help="how many times as long its inner steps take")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=6)
    parser.add_argument("--steps-per-round", type=int, default=100)
    parser.add_argument("--step-seconds", type=float, default=0.2)
    parser.add_argument("overrides", nargs="*", help="config fields as KEY=VALUE")
    asked = parser.parse_args()

    fast = {f"peer-{number}": asked.step_seconds for number in range(asked.peers - 1)}
    swarms = {
        "all at one speed": {**fast, SLOW: asked.step_seconds},
        "without that peer": fast,
        f"that peer {asked.slower:g} times slower": {**fast, SLOW: asked.step_seconds * asked.slower},
    }
    results = {}
    for name, speeds in swarms.items():
        agreed = [f"swarm.min_peers={len(speeds)}", f"sync.steps_per_round={asked.steps_per_round}"]
        config = load_config(bundled_config("tiny"), [*SMALL, *agreed, *asked.overrides])
        results[name] = measure(config, speeds, asked.rounds, asked.warm_up)
    print(f"in memory, virtual clock: {asked.peers} peers, rounds of {asked.steps_per_round} steps")
    print(f"{'swarm':28} {'tokens/s':>10} {'s a round':>10} {'deadline s':>11} {'steps of that peer':>19}")
    for name, one in results.items():
        steps = f"{one.steps_by_slow:.1f}" if SLOW in swarms[name] else "-"
        numbers = f"{one.tokens_per_second:10.1f} {one.seconds_per_round:10.2f} {one.deadline_seconds:11.2f}"
        print(f"{name:28} {numbers} {steps:>19}")
    share = list(results.values())[2].tokens_per_second / list(results.values())[1].tokens_per_second
    print(f"throughput with the slow peer / without it: {share:.3f}")


if __name__ == "__main__":
    main()

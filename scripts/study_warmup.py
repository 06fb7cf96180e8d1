"""Whether a run is better for it when all peers train and average everything at first.

    python scripts/study_warmup.py --first spes diloco --seeds 0 1 2 --first-steps 100 --steps 300

Trains an arm of scripts/compare.py (--then) from where each of the arms --first has come to after its steps. The
learning rate rises in the first steps, stays, and falls over the last fifth of all. Between the two parts moments are
forgotten and the data begins anew, for all alike. The same seed gives the same data and order to each.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from compare import make_data

from scripts.comparison.arms import BENCHMARKS
from scripts.comparison.outcomes import Job
from spes_p2p.consensus.manifest import Manifest
from spes_p2p.state.layout import Tile, Values
from spes_p2p.sync import joining
from tests.simulation import memory_swarm
from tests.simulation.training_swarm import TrainingPeer

WARM_UP = 0.2
"""Share of the steps in which the rate rises, and in which it falls."""


class Start:
    """Values that a run starts from, as `InitialState` gives them."""

    def __init__(self, blocks: Sequence[Values]) -> None:
        self._blocks = blocks

    def __call__(self, tile: Tile) -> Values:
        return self._blocks[tile.block][tile.start : tile.stop]

    def instead(self) -> AbstractContextManager[object]:
        """Inside, new runs start from here."""
        stack = ExitStack()
        for module in (joining, memory_swarm):
            stack.enter_context(patch.object(module, "InitialState", lambda *arguments: self))
        return stack


def run(job: Job, folder: Path, begin: AbstractContextManager[object]) -> tuple[float, Start]:
    """The loss and the state that it ends with."""
    last: list[Start] = []

    def measure(peer: TrainingPeer, manifest: Manifest, usual: Any = TrainingPeer._measure) -> None:
        before = len(peer.points)
        usual(peer, manifest)
        if len(peer.points) > before:
            source = peer.store.version(manifest.round)
            last[:] = [Start([source.block(block.index).copy() for block in peer.swarm.layout.blocks])]

    with begin, patch.object(TrainingPeer, "_measure", measure):
        loss = job.run(folder).loss
    return loss, last[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", nargs="+", default=["spes", "diloco"])
    parser.add_argument("--then", default="spes")
    parser.add_argument("--first-steps", type=int, default=100)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="changes to the config")
    arguments = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = make_data(folder)

        def job(arm: str, seed: int, steps: int, *schedule: str) -> Job:
            given = (*arguments.overrides, "scheduler.name=wsd", *schedule)
            setting = BENCHMARKS["small-cpu"].setting(steps, given)
            setting.check([arm])
            return Job(arm, seed, setting.config_of(arm, seed, data), steps, torch.device("cpu"))

        both = arguments.first_steps + arguments.steps
        rising, falling = (f"scheduler.{part}_steps={round(WARM_UP * both)}" for part in ("warmup", "decay"))
        for seed in arguments.seeds:
            for arm in arguments.first:
                early = job(arm, seed, arguments.first_steps, "scheduler.total_steps=1000000", rising, falling)
                before, start = run(early, folder, nullcontext())
                length = f"scheduler.total_steps={arguments.steps}"
                late = job(arguments.then, seed, arguments.steps, length, "scheduler.warmup_steps=0", falling)
                after, _ = run(late, folder, start.instead())
                print(
                    f"seed {seed}: {arm} for {arguments.first_steps} steps ({before:.4f}), then {arguments.then} "
                    f"for {arguments.steps}: {after:.4f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()

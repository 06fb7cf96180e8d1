"""What the merge does to experts: how alike they are while a run goes on, beside the loss that comes out.

    python scripts/study_merge.py --arms spes merge --seeds 0 1 2 --steps 400
    python scripts/study_merge.py --arms merge --seeds 0 1 2 --steps 400 sync.merge_alpha=0.5

Trains arms of scripts/compare.py and looks at each point of their curves, in the committed model, at the cosine
between the gate projections of two experts of a layer (by which the merge finds neighbours): the mean over all pairs
and layers, and over each expert's nearest one. Everything else is as in a comparison: same data, same order, same
seeds.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from compare import make_data

from scripts.comparison.arms import BENCHMARKS
from scripts.comparison.outcomes import Job
from spes_p2p.consensus.manifest import Manifest
from spes_p2p.state.layout import BlockSource, Layout
from spes_p2p.sync.merge import cosines, layer_spans
from tests.simulation.training_swarm import TrainingPeer

SHOWN = 6
"""Points of a curve."""


def likeness(layout: Layout, source: BlockSource) -> tuple[float, float]:
    """Cosines of two experts of a layer, mean over layers: of all pairs, and of each expert's nearest one."""
    of_all, of_nearest = [], []
    for span in layer_spans(layout):
        found = cosines(layout, source, span)
        others = found[~np.eye(len(found), dtype=bool)].reshape(len(found), -1)
        of_all.append(float(others.mean()))
        of_nearest.append(float(others.max(axis=1).mean()))
    return mean(of_all), mean(of_nearest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", default=["spes", "merge"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="changes to the config")
    arguments = parser.parse_intermixed_args()
    setting = BENCHMARKS["small-cpu"].setting(arguments.steps, arguments.overrides)
    setting.check(arguments.arms)
    with tempfile.TemporaryDirectory() as folder:
        data = make_data(Path(folder))
        for seed in arguments.seeds:
            for arm in arguments.arms:
                found = dict[int, tuple[float, float]]()

                def measure(
                    peer: TrainingPeer, manifest: Manifest, usual: Any = TrainingPeer._measure, found: Any = found
                ) -> None:
                    before = len(peer.points)
                    usual(peer, manifest)
                    if len(peer.points) > before:
                        found[manifest.step] = likeness(peer.swarm.layout, peer.store.version(manifest.round))

                job = Job(arm, seed, setting.config_of(arm, seed, data), arguments.steps, torch.device("cpu"))
                with patch.object(TrainingPeer, "_measure", measure):
                    loss = job.run(Path(folder)).loss
                steps = sorted(found)
                curve = ", ".join(
                    f"{found[step][0]:+.3f} and {found[step][1]:+.3f} at {step}"
                    for step in steps[:: max(1, len(steps) // SHOWN)]
                )
                print(f"seed {seed}, {arm}: loss {loss:.4f}; cosines of all and of nearest: {curve}", flush=True)


if __name__ == "__main__":
    main()

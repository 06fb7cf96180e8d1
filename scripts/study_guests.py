"""Why guests work: how much of what owners change lies in the basis that guests train in, and what variants give.

    python scripts/study_guests.py --variants last mean random --seeds 0 1 --steps 400

Trains one arm of scripts/compare.py with bases that follow from a column's last change (as shipped: `last`), from a
running mean of its changes (`mean`), or from nothing (`random`); as shipped, but with the moments of the coordinates
kept when the basis changes (`kept`), or with guests in one half of the layers alone (`lower`, `upper`). For every
hand-out it is measured which share of the squared change that a column's owner made, who is bound to no basis, lies
inside the basis of that period. Random directions hold rank / width of it. Everything else is as in a comparison: same
data, same order, same seeds.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
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
from spes_p2p.ids import Hash
from spes_p2p.state.basis import Basis, first_basis, matrices, next_basis
from spes_p2p.state.layout import Layout, Tile, Values
from spes_p2p.sync import guests, tensor_work
from spes_p2p.train.guests import GuestWork

VARIANTS = "last", "mean", "random", "kept", "lower", "upper"
KEPT = 0.5
"""Of the running mean, when another change comes."""


@dataclass
class Study:
    """Gives peers another basis, and looks on while owners' changes are averaged."""

    kind: str
    layers: int
    shares: list[float] = field(default_factory=list)
    """Of squared changes, inside the basis: one for each slice that was averaged, in order."""
    _made: dict[tuple[int, Hash], Basis] = field(default_factory=dict)
    _means: dict[int, Values] = field(default_factory=lambda: defaultdict(lambda: np.zeros(1, np.float32)))

    def next_basis(self, layout: Layout, column: int, mark: Hash, before: Values, after: Values) -> Basis:
        """Once for all peers: they all derive the same."""
        if (column, mark) not in self._made:
            self._made[column, mark] = self._in_some_layers(
                layout, column, self._another(layout, column, mark, before, after)
            )
        return self._made[column, mark]

    def first_basis(self, layout: Layout, column: int, mark: Hash) -> Basis:
        return self._in_some_layers(layout, column, first_basis(layout, column, mark))

    def _in_some_layers(self, layout: Layout, column: int, basis: Basis) -> Basis:
        """Without directions, in which nothing is trained, in the layers that this variant leaves out."""
        if self.kind not in ("lower", "upper"):
            return basis
        values = basis.values.copy()
        for placed, q in matrices(layout, column, values):
            layer = int(placed.tensor.name.partition(".layers.")[2].partition(".")[0])
            if (layer < self.layers // 2) != (self.kind == "lower"):
                q[:] = 0
        return Basis(basis.mark, values)

    def _another(self, layout: Layout, column: int, mark: Hash, before: Values, after: Values) -> Basis:
        if self.kind == "random":
            return first_basis(layout, column, mark)
        if self.kind == "mean":
            self._means[column] = KEPT * self._means[column] + (1 - KEPT) * (after - before)
            return next_basis(layout, column, mark, np.zeros_like(before), self._means[column])
        return next_basis(layout, column, mark, before, after)

    @contextmanager
    def taking_part(self) -> Iterator[None]:
        """Inside, peers do as this variant does."""
        with ExitStack() as patches:
            patches.enter_context(patch.object(guests, "first_basis", self.first_basis))
            patches.enter_context(patch.object(guests, "next_basis", self.next_basis))
            patches.enter_context(patch.object(tensor_work, "take_in", self.take_in))
            if self.kind == "kept":
                patches.enter_context(patch.object(GuestWork, "_begin", begin_with_moments))
            yield

    def take_in(
        self, layout: Layout, tiles: Sequence[Tile], mean: Values, before: Values, basis: Basis, *others: Any
    ) -> Values:
        """As shipped, with a look at the owners' `mean` before guests come in."""
        start, stop, block = tiles[0].start, tiles[-1].stop, tiles[0].block
        whole = inside = 0.0
        for placed, q in matrices(layout, block - 1, basis.values):
            low, high = max(start, placed.offset), min(stop, placed.offset + placed.tensor.size)
            if low < high:
                part = slice(low - start, high - start)
                change = np.subtract(mean[part], before[part]).reshape(-1, placed.tensor.shape[1])
                whole += float(np.square(change).sum())
                inside += float(np.square(change @ q).sum())
        if whole > 0:
            self.shares.append(inside / whole)
        return guests.take_in(layout, tiles, mean, before, basis, *others)


def begin_with_moments(work: GuestWork, column: int, mark: Hash, begin: Any = GuestWork._begin) -> None:
    """A basis begins with the moments that were made in the one before."""
    before = work._optimizer.guests.get(column)
    begin(work, column, mark)
    if before is not None:
        work._optimizer.begin_guest(work._model, column, before.steps, before.moments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", default=VARIANTS, choices=VARIANTS)
    parser.add_argument("--arm", default="guests-16")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="changes to the config")
    arguments = parser.parse_intermixed_args()
    setting = BENCHMARKS["small-cpu"].setting(arguments.steps, arguments.overrides)
    setting.check([arguments.arm])
    with tempfile.TemporaryDirectory() as folder:
        data = make_data(Path(folder))
        for seed in arguments.seeds:
            for kind in arguments.variants:
                config = setting.config_of(arguments.arm, seed, data)
                study = Study(kind, config.model.num_layers)
                job = Job(arguments.arm, seed, config, arguments.steps, torch.device("cpu"))
                with study.taking_part():
                    loss = job.run(Path(folder)).loss
                late = study.shares[len(study.shares) // 2 :]
                random = config.model.guest_rank / config.model.d_model
                print(
                    f"seed {seed}, {arguments.arm}, {kind}: loss {loss:.4f}; in the second half of the run "
                    f"{mean(late):.1%} of the owners' squared change lies inside (random directions: {random:.1%})",
                    flush=True,
                )


if __name__ == "__main__":
    main()

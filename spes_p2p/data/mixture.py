"""Several datasets in one stream: which of them stands at which position, by weights that may change on the way.

A pure function of the position, like `order.py`: whoever is leased a position, whenever, finds the same sequence there.
So leases, deaths and renewals need to know nothing of it. Each dataset keeps an order of its own, epoch after epoch,
and goes on in it where it was when the weights change. They change at positions, not at steps: how many sequences a
step takes depends on who takes part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spes_p2p.config.schema import DataConfig
from spes_p2p.data.order import Int64s, Order
from spes_p2p.errors import DataError


@dataclass(frozen=True)
class _Stage:
    """Weights from position `start` on; each cycle of as many positions as they add up to has exactly these numbers."""

    start: int
    weights: NDArray[np.int64]
    before: NDArray[np.int64]
    """Of each dataset: its positions before the stage."""
    pattern: NDArray[np.int64]
    """Of each place in a cycle: its dataset."""
    taken: NDArray[np.int64]
    """[places + 1, datasets]: positions of each dataset before this place."""

    def counts(self, position: int) -> NDArray[np.int64]:
        cycles, place = divmod(position - self.start, len(self.pattern))
        return np.asarray(self.before + cycles * self.weights + self.taken[place])


class Mixture:
    """What `data.mix` says: a stage is [until position, weights...], and 0 stands for no end."""

    def __init__(self, mix: Sequence[Sequence[int]]) -> None:
        self._stages: list[_Stage] = []
        start, before = 0, np.zeros(len(mix[0]) - 1, np.int64)
        for until, *weights in mix:
            stage = _stage(start, np.array(weights, np.int64), before)
            self._stages.append(stage)
            start, before = until, stage.counts(until) if until else before
        self._starts = np.array([stage.start for stage in self._stages], np.int64)

    def at(self, positions: Int64s) -> tuple[Int64s, Int64s]:
        """Of each position its dataset, and how many of that dataset's positions come before."""
        datasets, indices = np.empty_like(positions), np.empty_like(positions)
        stages = np.searchsorted(self._starts, positions, side="right") - 1
        for number in np.unique(stages):
            chosen, stage = stages == number, self._stages[number]
            cycles, places = np.divmod(positions[chosen] - stage.start, len(stage.pattern))
            found = stage.pattern[places]
            datasets[chosen] = found
            indices[chosen] = stage.before[found] + cycles * stage.weights[found] + stage.taken[places, found]
        return datasets, indices

    def counts(self, position: int) -> list[int]:
        """Of each dataset: its positions before this one."""
        stage = self._stages[int(np.searchsorted(self._starts, position, side="right")) - 1]
        found: list[int] = stage.counts(position).tolist()
        return found


class MixedOrder:
    """Position -> sequence, as `Order`, of several datasets whose training sequences are numbered one after the other.

    Raises DataError where one of them has no sequence.
    """

    def __init__(
        self, mix: Sequence[Sequence[int]], names: Sequence[str], training: Sequence[int], seed: int, stream: str
    ) -> None:
        self.sequences = sum(training)
        self._mixture = Mixture(mix)
        for name, sequences in zip(names, training, strict=True):
            if not sequences:
                raise DataError(
                    f"dataset {name} of the mixture has not one training sequence",
                    fix="leave it out of the mixture, or lower data.sequence_length",
                )
        self._orders = [Order(sequences, seed, f"{stream}/{name}") for name, sequences in zip(names, training)]
        self._first = np.cumsum([0, *training])

    def sequences_at(self, positions: Int64s) -> Int64s:
        """The sequence at each of `positions` (int64, any shape, not negative)."""
        datasets, indices = self._mixture.at(positions)
        found = np.empty_like(positions)
        for number in np.unique(datasets):
            chosen = datasets == number
            found[chosen] = self._first[number] + self._orders[number].sequences_at(indices[chosen])
        return found


def handed_out(data: DataConfig, cursor: int) -> dict[str, int]:
    """Of each dataset of a mixture: its sequences before position `cursor`. Nothing where nothing is mixed."""
    if not data.mix or not data.datasets:
        return {}
    return dict(zip((name for name, *_ in data.datasets), Mixture(data.mix).counts(cursor), strict=True))


def _stage(start: int, weights: NDArray[np.int64], before: NDArray[np.int64]) -> _Stage:
    """Places are dealt evenly: each to the dataset that lags most behind its share, of equals the first."""
    total = int(weights.sum())
    taken = np.zeros((total + 1, len(weights)), np.int64)
    pattern = np.empty(total, np.int64)
    for place in range(total):
        pattern[place] = int(np.argmax(weights * (place + 1) - total * taken[place]))
        taken[place + 1] = taken[place]
        taken[place + 1, pattern[place]] += 1
    return _Stage(start, weights, before, pattern, taken)

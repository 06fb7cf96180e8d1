"""Micro-batches are timed before the first step, and the fastest is taken; values are none the wiser."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spes_p2p.train import pace
from tests.train.small import batch_of, largest_difference, small_config, trainer_of, values_of


class Clock:
    """Each micro-batch takes what its size says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float]) -> None:
        self.now, self.seconds, real = 0.0, seconds, pace.accumulate_gradient
        monkeypatch.setattr(pace.time, "perf_counter", lambda: self.now)

        def accumulate(forward: Any, batch: Any, ranks: Any, size: int, *rest: Any, **named: Any) -> Any:
            took = seconds[size]
            if took < 0:
                raise torch.OutOfMemoryError("CUDA out of memory")
            self.now += took
            return real(forward, batch, ranks, size, *rest, **named)

        monkeypatch.setattr(pace, "accumulate_gradient", accumulate)


@pytest.mark.parametrize(
    ("seconds", "fastest"),
    [
        ({4: 4.0, 2: 1.0, 1: 0.9}, 2),
        ({4: 3.9, 2: 2.2, 1: 1.2}, 4),
        ({4: 3.99, 2: 2.2, 1: 1.0}, 1),  # not worth its memory
        ({4: -1.0, 2: 2.0, 1: 2.0}, 2),  # no room for the largest
    ],
)
def test_the_fastest_is_taken_and_nothing_else_changes(
    monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float], fastest: int
) -> None:
    Clock(monkeypatch, seconds)
    timed = trainer_of(small_config("optimizer.micro_batch_sequences=4"))
    plain = trainer_of(small_config(f"optimizer.micro_batch_sequences={fastest}"))
    timed.sizes_to_time = (4, 2, 1)
    results = [[trainer.train_step(batch_of(seed)).loss for seed in range(2)] for trainer in (timed, plain)]
    assert timed.learner.config.optimizer.micro_batch_sequences == fastest
    assert results[0] == results[1]
    assert largest_difference(values_of(timed), values_of(plain)) == 0
    notes = timed.learner.take_notes()
    assert len(notes) == (fastest != 4)
    assert all(f"micro-batches of {fastest} sequences" in note for note in notes)

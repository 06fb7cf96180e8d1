"""Which micro-batch is the fastest: a few are timed with a real batch, and the gradients thrown away."""

from __future__ import annotations

import time

import torch

from spes_p2p.data.loader import Batch
from spes_p2p.model.compiling import as_it_is
from spes_p2p.train.ddp import sum_over_ranks
from spes_p2p.train.learner import Learner
from spes_p2p.train.memory import is_out_of_memory
from spes_p2p.train.step import accumulate_gradient

LEAST_GAIN = 0.02
"""A larger micro-batch must be faster by that share to be worth its memory."""
_RUNS = 2


def take_fastest_micro_batch(learner: Learner, batch: Batch, sizes: tuple[int, ...]) -> str:
    """Times micro-batches of so many sequences, the largest first, and goes on with the fastest.

    Says what it found where that is another one than before.

    What lies between the experts is not compiled for it, which would take a minute a size. All ranks must call it.
    """
    seconds = {size: _seconds_a_sequence(learner, batch, size) for size in sizes}
    best = min(seconds, key=lambda size: seconds[size] * (1 + LEAST_GAIN * (size > min(sizes))))
    if best == learner.config.optimizer.micro_batch_sequences or seconds[best] == float("inf"):
        return ""
    config = learner.config.optimizer.model_copy(update={"micro_batch_sequences": best})
    learner.config = learner.config.model_copy(update={"optimizer": config})
    found = ", ".join(f"{size}: {1 / each:.1f}" for size, each in seconds.items() if each < float("inf"))
    return f"micro-batches of {best} sequences from now on, the fastest of those timed (sequences a second: {found})"


def _seconds_a_sequence(learner: Learner, batch: Batch, size: int) -> float:
    """The fastest of a few runs, over all ranks; infinite where one of them has no room."""
    assert learner.forward is not None
    ranks, took = learner.ranks, float("inf")
    some = batch.first(size * ranks.world_size)
    try:
        with as_it_is():
            for _ in range(1 + _RUNS):
                started = time.perf_counter()
                accumulate_gradient(learner.forward, some, ranks, size, 1.0, exchange=False)
                if ranks.device.type == "cuda":
                    torch.cuda.synchronize(ranks.device)
                took = min(took, time.perf_counter() - started)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        took = float("inf")
    learner.clear_gradients()
    return sum_over_ranks(ranks, torch.tensor([took], device=ranks.device)).item() / (size * ranks.world_size)

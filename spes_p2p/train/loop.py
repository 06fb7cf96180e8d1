"""Inner steps, one after the other, until there are enough, somebody asks to stop, or the leased data runs out."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from spes_p2p.data.loader import LeasedLoader, LocalLoader
from spes_p2p.errors import SpesError
from spes_p2p.failpoints import INNER_STEP, reached
from spes_p2p.observe.events import Event, Warning
from spes_p2p.train.step import ShouldDrop
from spes_p2p.train.trainer import StepResult, Trainer

MOST_SKIPPED_IN_ROW = 10


@dataclass(frozen=True)
class RoundWork:
    """What one call of `run_inner_steps` did."""

    steps: int
    """Optimizer steps, without skipped ones."""
    seconds: float


def run_inner_steps(
    trainer: Trainer,
    loader: LeasedLoader | LocalLoader,
    steps: int,
    should_stop: Callable[[], bool],
    on_step: Callable[[StepResult], None],
    emit: Callable[[Event], None] | None = None,
    should_drop: ShouldDrop | None = None,
) -> RoundWork:
    """Trains up to `steps` more inner steps; looks at `should_stop` between two.

    Inside of a step it asks `should_drop` (without one, `should_stop`) between micro-batches. A step that is given up
    did not happen: its sequences are the next that the loader gives.

    `on_step` hears of every step, skipped or not. A step whose loss or gradient is not finite is skipped; `emit` gets a
    Warning for the first of a row, and for each time that the trainer had to do with less memory.
    Raises SpesError after ten in a row.
    """
    started = time.perf_counter()
    should_drop = should_drop or (lambda share: should_stop())
    size = trainer.learner.config.optimizer.batch_sequences
    done = 0
    while done < steps and not should_stop() and _has(loader, size, should_stop):
        place = loader.state_dict()
        result = trainer.train_step_unless(loader.next_batch(size), should_drop)
        if result is None:
            loader.load_state_dict(place)
            break
        reached(INNER_STEP, seconds=result.seconds)
        _pass_notes_on(trainer, emit)
        if result.skipped:
            _note_skip(trainer, result, emit)
        else:
            done += 1
        on_step(result)
    return RoundWork(done, time.perf_counter() - started)


def _has(loader: LeasedLoader | LocalLoader, sequences: int, should_stop: Callable[[], bool]) -> bool:
    """Whether that many are leased; waits until they are on this machine."""
    if not isinstance(loader, LeasedLoader):
        return True
    return loader.remaining() >= sequences and loader.wait_for_data(sequences, should_stop)


def _pass_notes_on(trainer: Trainer, emit: Callable[[Event], None] | None) -> None:
    for text in trainer.learner.take_notes():
        if emit is not None:
            emit(Warning(text))


def _note_skip(trainer: Trainer, result: StepResult, emit: Callable[[Event], None] | None) -> None:
    what = f"loss {result.loss:g}, gradient norm {result.grad_norm:g}"
    if trainer.skipped_in_row == 1 and emit is not None:
        emit(Warning(f"the step after step {result.step} was skipped: {what}"))
    if trainer.skipped_in_row >= MOST_SKIPPED_IN_ROW:
        raise SpesError(
            f"{trainer.skipped_in_row} steps in a row after step {result.step} were not finite: {what}",
            fix="lower optimizer.lr, or remove the newest checkpoint to use an older one; check this machine's memory",
        )

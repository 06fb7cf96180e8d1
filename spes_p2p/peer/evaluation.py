"""`run_eval`: tasks of lm-evaluation-harness on a Hugging Face folder, a checkpoint, or the newest state of a live run.

What is no Hugging Face folder yet becomes one in the temporary folder first, which takes the room of the model there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from spes_p2p.errors import StorageFull
from spes_p2p.interop.evaluate import Score, chosen_tasks, evaluate, flat
from spes_p2p.observe.events import Tasks
from spes_p2p.observe.sinks import JsonLines
from spes_p2p.peer.devices import choose_device
from spes_p2p.peer.export import ExportOptions, Report, metrics_of, run_export
from spes_p2p.peer.stopping import interrupted_by_signals

Say = Callable[[str], None]


@dataclass(frozen=True)
class EvalOptions:
    """`folder`: a Hugging Face folder; None: what `source` says is exported first (its `output` is not used).

    `suite`: of `interop.evaluate`, or names of tasks.
    """

    folder: Path | None
    source: ExportOptions
    suite: str = "quick"
    limit: int | None = None
    include_path: Path | None = None
    device: str = "auto"
    batch_size: int = 8
    max_length: int | None = None


@dataclass(frozen=True)
class Evaluation:
    """`round` and `step` are 0 where they are not known."""

    scores: tuple[Score, ...]
    round: int
    step: int


def run_eval(options: EvalOptions, say: Say, report: Report = lambda what, done, total: None) -> Evaluation:
    """Scores the model, and appends them to the metrics.jsonl of the peer whose checkpoint it is, if there is one.

    Raises ConfigError, DataError, and what the export raises.
    """
    tasks = chosen_tasks(options.suite)
    device = str(choose_device(options.device))
    metrics = _metrics_file(options)  # now: a checkpoint may be replaced by newer ones meanwhile
    round, step = 0, 0
    with interrupted_by_signals(), TemporaryDirectory(prefix="spes-p2p-eval-") as temporary:
        folder = options.folder
        if folder is None:
            folder = Path(temporary) / "model"
            facts = run_export(replace(options.source, output=folder), say, report)
            round, step = facts.round, facts.step
        scores = evaluate(
            folder, tasks, options.limit, options.include_path, device, options.batch_size, options.max_length
        )
    if metrics is not None:
        try:
            lines = JsonLines(metrics)
            lines.write(time.time(), Tasks(round, step, flat(scores)))
            lines.close()
        except (OSError, StorageFull) as error:  # hours of work are still to be shown
            say(f"the scores are not written to {metrics}: {error}")
    return Evaluation(scores, round, step)


def _metrics_file(options: EvalOptions) -> Path | None:
    if options.folder is not None or options.source.checkpoint is None:
        return None
    file = metrics_of(options.source.checkpoint)
    return file if file.is_file() else None

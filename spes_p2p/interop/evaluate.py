"""A Hugging Face folder under EleutherAI's lm-evaluation-harness (extra `eval`): suites, local task files, scores.

The harness is imported only here, and only when something is evaluated. Which model is meant, and what becomes of the
scores, is up to the callers.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spes_p2p.errors import ConfigError, DataError, first_line

SUITES: Mapping[str, Mapping[str, int | None]] = {
    "spes": {
        "sciq": 0,
        "piqa": 0,
        "winogrande": 0,
        "arc_easy": 0,
        "social_iqa": 0,
        "openbookqa": 0,
        "boolq": 0,
        "arc_challenge": 25,
        "hellaswag": 10,
        "ceval-valid": None,
        "cmmlu": None,
        "mmlu": None,
    },
    "quick": {"sciq": 0, "piqa": 0, "arc_easy": 0},
}
"""Tasks of the harness and their shots; None: as the task itself says. `spes` is the suite of the SPES paper."""


@dataclass(frozen=True)
class Score:
    """One metric of one task, or of a group of tasks."""

    task: str
    metric: str
    value: float
    stderr: float | None
    shots: int | None
    """None for groups."""
    samples: int | None


def chosen_tasks(suite: str) -> Mapping[str, int | None]:
    """A suite by name, or tasks separated by commas, each as it says or as `name:shots`. Raises ConfigError."""
    if suite in SUITES:
        return SUITES[suite]
    tasks: dict[str, int | None] = {}
    for part in suite.split(","):
        name, colon, shots = part.strip().partition(":")
        if not name or (colon and not shots.isdecimal()):
            raise ConfigError(
                f"--suite {suite!r} is neither a suite nor a list of tasks",
                fix=f"give {', '.join(SUITES)}, or names: sciq,arc_challenge:25",
            )
        tasks[name] = int(shots) if colon else None
    return tasks


def find_tasks(tasks: Mapping[str, int | None], include_path: Path | None = None) -> Any:
    """The harness's TaskManager, which has all of `tasks`; neither their data nor a model is loaded.

    Raises ConfigError for unknown tasks and where the harness is not installed.
    """
    try:
        importlib.import_module("lm_eval.models.huggingface")  # what `evaluate` needs
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ConfigError(f"lm-eval cannot be imported: {error}", fix="install it with scripts/venv.sh eval") from error
    if include_path is not None and not include_path.is_dir():
        raise ConfigError(f"--include-path {include_path} is not a folder", fix="give a folder of task files (YAML)")
    with _quiet():
        own = [] if include_path is None else [str(include_path)]
        manager = TaskManager(include_path=own, include_defaults=False)
        if not tasks.keys() <= set(manager.all_tasks):  # to read the harness's own takes a while
            manager = TaskManager(include_path=own)
    unknown = [name for name in tasks if name not in manager.all_tasks]
    if unknown:
        raise ConfigError(
            f"the harness has no task {unknown[0]!r}",
            fix="lm-eval ls tasks lists them; name a folder of your own task files with --include-path",
        )
    return manager


def evaluate(
    folder: Path,
    tasks: Mapping[str, int | None],
    limit: int | None = None,
    include_path: Path | None = None,
    device: str = "cpu",
    batch_size: int = 8,
    max_length: int | None = None,
) -> tuple[Score, ...]:
    """Scores of the model in `folder`.

    `limit`: samples of each task at most. `include_path`: a folder of task files that count beside the harness's own,
    and before them where names are the same. `max_length`: tokens that the model sees at once, by default as many as
    its config says. Raises ConfigError for unknown tasks and where the harness is not
    installed, DataError for a folder or data that cannot be loaded.
    """
    manager = find_tasks(tasks, include_path)
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        raise DataError(
            f"{folder} has no tokenizer, which the harness needs",
            fix="give a Hugging Face folder with one; for a checkpoint or a live run name it with --tokenizer",
        )
    with _quiet():
        wanted = _load(manager, tasks)
        try:
            model = HFLM(str(folder), device=device, batch_size=batch_size, dtype="auto", max_length=max_length)
        except (OSError, ValueError) as error:
            raise DataError(
                f"the model in {folder} cannot be loaded: {first_line(error)}",
                fix="give a Hugging Face folder with a tokenizer, as spes-p2p export makes it",
            ) from error
        try:
            found: dict[str, Any] | None = simple_evaluate(
                model, tasks=wanted, limit=limit, task_manager=manager, log_samples=False, bootstrap_iters=1000
            )
        except AssertionError as error:  # all that the harness says of it
            raise DataError(
                f"a sample is longer than the model's context of {model.max_length} tokens",
                fix="raise --max-length",
            ) from error
    assert found is not None
    return tuple(_scores(found))


def _load(manager: Any, tasks: Mapping[str, int | None]) -> list[Any]:
    """The harness's task and group objects, with the shots that were asked for."""
    wanted: list[Any] = []
    for name, shots in tasks.items():
        try:
            loaded = manager.load(name)
        except Exception as error:  # data sets, hubs and files of others fail in all ways
            raise DataError(
                f"the data of task {name} cannot be loaded: {type(error).__name__}: {first_line(error)}",
                fix="check the connection to the Hugging Face hub, or give local task files with --include-path",
            ) from error
        if shots is not None:
            for task in loaded["tasks"].values():
                task.set_config(key="num_fewshot", value=shots)
        wanted += [loaded["groups"][name]] if name in loaded["groups"] else list(loaded["tasks"].values())
    return wanted


def _scores(found: Mapping[str, Any]) -> Iterator[Score]:
    """Each metric with its standard error; a group's come from `groups`."""
    results: dict[str, dict[str, Any]] = {**found["results"], **found.get("groups", {})}
    for task, metrics in results.items():
        shots = found["n-shot"].get(task) if task in found.get("configs", {}) else None
        samples = found["n-samples"].get(task, {}).get("effective")
        for key, value in metrics.items():
            metric, comma, filtered = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = metrics.get(f"{metric}_stderr,{filtered}")
            name = metric if filtered == "none" else f"{metric},{filtered}"
            yield Score(task, name, float(value), error if isinstance(error, float) else None, shots, samples)


def flat(scores: Sequence[Score]) -> dict[str, float]:
    """`task/metric` to value, for events and dashboards."""
    return {f"{score.task}/{score.metric}": score.value for score in scores}


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the harness's own log lines; errors are still there."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)

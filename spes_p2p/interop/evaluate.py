"""A Hugging Face folder under EleutherAI's lm-evaluation-harness (extra `eval`), which is imported only here.

Which model is meant is up to the callers.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spes_p2p.errors import ConfigError, DataError, first_line

SUITES: Mapping[str, str] = {
    "spes": "sciq:0,piqa:0,winogrande:0,arc_easy:0,social_iqa:0,openbookqa:0,boolq:0,arc_challenge:25,hellaswag:10,"
    "ceval-valid,cmmlu,mmlu",
    "quick": "sciq:0,piqa:0,arc_easy:0",
}
"""Tasks of the harness, with shots or as the task itself says. `spes` is the suite of the SPES paper."""


@dataclass(frozen=True)
class Tasks:
    """Names with their shots (None: as the task says), all of them known to `manager`, a TaskManager."""

    shots: Mapping[str, int | None]
    manager: Any


def find_tasks(suite: str, include_path: Path | None = None) -> Tasks:
    """A suite by name, or tasks separated by commas, each as it says or as `name:shots`. Loads no data and no model.

    `include_path`: a folder of task files that count before the harness's own. Raises ConfigError for what is unknown,
    and where the harness is not installed.
    """
    shots: dict[str, int | None] = {}
    for part in SUITES.get(suite, suite).split(","):
        name, colon, number = part.strip().partition(":")
        if not name or (colon and not number.isdecimal()):
            raise ConfigError(
                f"--suite {suite!r} is neither a suite nor a list of tasks",
                fix=f"give {', '.join(SUITES)}, or names: sciq,arc_challenge:25",
            )
        shots[name] = int(number) if colon else None
    try:
        importlib.import_module("lm_eval.models.huggingface")  # what `evaluate` needs
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ConfigError(f"lm-eval cannot be imported: {error}", fix="install it with scripts/venv.sh eval") from error
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if include_path is not None and not include_path.is_dir():
        raise ConfigError(f"--include-path {include_path} is not a folder", fix="give a folder of task files (YAML)")
    own = [] if include_path is None else [str(include_path)]
    manager = TaskManager(include_path=own, include_defaults=False)
    if not shots.keys() <= set(manager.all_tasks):  # to read the harness's own takes a while
        manager = TaskManager(include_path=own)
    unknown = [name for name in shots if name not in manager.all_tasks]
    if unknown:
        raise ConfigError(
            f"the harness has no task {unknown[0]!r}",
            fix="lm-eval ls tasks lists them; name a folder of your own task files with --include-path",
        )
    return Tasks(shots, manager)


def evaluate(
    folder: Path,
    tasks: Tasks,
    limit: int | None = None,
    device: str = "cpu",
    batch_size: int = 8,
    max_length: int | None = None,
) -> dict[str, Any]:
    """What the harness says of the model in `folder`: `results` by task, `n-shot`, `n-samples`, and more.

    `limit`: samples of each task at most. `max_length`: tokens that the model sees at once, by default as many as its
    config says. Raises DataError for a folder or data that cannot be loaded.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        raise DataError(
            f"{folder} has no tokenizer, which the harness needs",
            fix="give a Hugging Face folder with one; for a checkpoint or a live run name it with --tokenizer",
        )
    wanted: list[Any] = []
    for name, shots in tasks.shots.items():
        try:
            loaded = tasks.manager.load(name)
        except Exception as error:  # data sets, hubs and files of others fail in all ways
            raise DataError(
                f"the data of task {name} cannot be loaded: {type(error).__name__}: {first_line(error)}",
                fix="check the connection to the Hugging Face hub, or give local task files with --include-path",
            ) from error
        for task in loaded["tasks"].values() if shots is not None else ():
            task.set_config(key="num_fewshot", value=shots)
        wanted += [loaded["groups"][name]] if name in loaded["groups"] else list(loaded["tasks"].values())
    try:
        model = HFLM(str(folder), device=device, batch_size=batch_size, dtype="auto", max_length=max_length)
    except (OSError, ValueError) as error:
        raise DataError(
            f"the model in {folder} cannot be loaded: {first_line(error)}",
            fix="give a Hugging Face folder, as spes-p2p export makes it",
        ) from error
    try:
        found: dict[str, Any] = simple_evaluate(
            model, tasks=wanted, limit=limit, task_manager=tasks.manager, log_samples=False, bootstrap_iters=1000
        )
    except AssertionError as error:  # all that the harness says of it
        raise DataError(
            f"a sample is longer than the model's context of {model.max_length} tokens", fix="raise --max-length"
        ) from error
    return found


def table(found: Mapping[str, Any]) -> str:
    """The harness's own table, and that of its groups if there are any."""
    from lm_eval.utils import make_table

    return "\n".join(str(make_table(found, column)) for column in ("results", "groups") if column in found)

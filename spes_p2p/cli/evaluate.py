"""`spes-p2p eval`: tasks of lm-evaluation-harness. Flags and a table; the work is in `peer/evaluation.py`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spes_p2p.cli.arguments import (
    CheckpointFolder,
    Device,
    DeviceOption,
    Fingerprint,
    OptionalPeers,
    RunId,
    TokenizerOption,
    option,
)
from spes_p2p.cli.export import Dtype, DtypeOption, one_source
from spes_p2p.cli.showing import model_at, shown_bytes, told

if TYPE_CHECKING:
    from spes_p2p.peer.evaluation import Evaluation


def evaluate(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="HF_DIR|ORG/NAME|INVITE",
            help="A Hugging Face folder, a model of the hub (ORG/NAME[@REVISION]), or a live run.",
        ),
    ] = None,
    checkpoint: CheckpointFolder = None,
    initial_peers: OptionalPeers = None,
    run_id: RunId = None,
    fingerprint: Fingerprint = None,
    tokenizer: TokenizerOption = None,
    dtype: DtypeOption = Dtype.FP32,
    suite: Annotated[
        str, option("spes (the paper's suite), quick, or tasks, with their shots, such as sciq,arc_challenge:25.")
    ] = "quick",
    limit: Annotated[int | None, option("Most samples of each task.", min=1)] = None,
    include_path: Annotated[
        Path | None, option("Folder of task files of your own; nothing is downloaded for them.", metavar="DIR")
    ] = None,
    device: DeviceOption = Device.AUTO,
    batch_size: Annotated[int, option("Sequences per batch.", min=1)] = 8,
    max_length: Annotated[
        int | None, option("Context length in tokens (default: the one that it was trained with).", min=1)
    ] = None,
    as_json: Annotated[bool, option("Print one JSON object instead of a table.", "--json")] = False,
) -> None:
    """Scores a model on tasks of lm-evaluation-harness (pip extra eval): a folder, a checkpoint, or a live run.

    Example: spes-p2p eval --checkpoint peer --suite quick --limit 200
    """
    from spes_p2p.interop.evaluate import chosen_tasks, find_tasks
    from spes_p2p.peer.evaluation import EvalOptions, run_eval
    from spes_p2p.peer.export import ExportOptions
    from spes_p2p.peer.options import meeting
    from spes_p2p.swarm.invite import looks_like_invite

    invites: tuple[str, ...] = ()
    if folder is not None and looks_like_invite(str(folder)):
        invites, folder = (str(folder),), None
    run = meeting(invites, initial_peers or (), run_id, fingerprint)
    if folder is None:
        one_source(checkpoint, run.addresses)
    if folder is None or not folder.exists():  # what can be known before a model is fetched, which may take hours
        find_tasks(chosen_tasks(suite), include_path)
    if folder is not None:
        folder = model_at(folder)
    source = ExportOptions(Path(), checkpoint, run, dtype.value, tokenizer=tokenizer)
    options = EvalOptions(folder, source, suite, limit, include_path, device, batch_size, max_length)
    with shown_bytes() as report:
        found = run_eval(options, told, report)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(found)))
    else:
        _show(found)


def _show(found: Evaluation) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("task", "shots", "samples", "metric", "value", "", box=None, pad_edge=False)
    for score in found.scores:
        counts = ("" if count is None else str(count) for count in (score.shots, score.samples))
        error = "" if score.stderr is None else f"± {score.stderr:.4f}"
        table.add_row(score.task, *counts, score.metric, f"{score.value:.4f}", error)
    Console().print(table)

"""`spes-p2p eval`: tasks of lm-evaluation-harness. What is no Hugging Face folder yet
becomes one in the temporary folder first, which takes the room of the model there.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

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
    from spes_p2p.interop import evaluate as harness
    from spes_p2p.peer.devices import choose_device
    from spes_p2p.peer.export import ExportOptions, run_export
    from spes_p2p.peer.options import meeting
    from spes_p2p.peer.stopping import interrupted_by_signals
    from spes_p2p.swarm.invite import looks_like_invite

    invites: tuple[str, ...] = ()
    if folder is not None and looks_like_invite(str(folder)):
        invites, folder = (str(folder),), None
    run = meeting(invites, initial_peers or (), run_id, fingerprint)
    if folder is None:
        one_source(checkpoint, run.addresses)
    tasks = harness.find_tasks(suite, include_path)  # before a model is fetched, which may take hours
    where = str(choose_device(device))
    with interrupted_by_signals(), TemporaryDirectory(prefix="spes-p2p-eval-") as temporary:
        if folder is not None:
            model = model_at(folder)
        else:
            model = Path(temporary) / "model"
            with shown_bytes() as report:
                run_export(ExportOptions(model, checkpoint, run, dtype.value, tokenizer=tokenizer), told, report)
        found = harness.evaluate(model, tasks, limit, where, batch_size, max_length)
    if as_json:
        wanted = {name: found[name] for name in ("results", "groups", "n-shot", "n-samples") if name in found}
        typer.echo(json.dumps(wanted, default=str))
    else:
        typer.echo(harness.table(found))

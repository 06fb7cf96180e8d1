"""`spes-p2p import`: whether a run can start from a Hugging Face folder, and as which model. Only flags and text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spes_p2p.cli.arguments import option
from spes_p2p.cli.showing import model_at


def import_model(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="HF_DIR|ORG/NAME[@REVISION]",
            help="An OLMoE or Qwen3-MoE model, in a folder or on the hub, or one that upcycle made.",
        ),
    ],
    output: Annotated[Path | None, option("Also write the section to this file.", "--output", "-o")] = None,
) -> None:
    """Checks a Mixture-of-Experts checkpoint and prints the `model` section for a run that starts from it.

    Example: spes-p2p import OLMoE-1B-7B --output model.yaml
    """
    from spes_p2p.files import check_is_new, write_new
    from spes_p2p.interop.importing import ROUTER_WARNING, StartModel

    if output is not None:
        check_is_new(output)
    folder = model_at(folder)
    start = StartModel.open(folder)
    section = start.section()
    if output is not None:
        write_new(output, section.encode())
    typer.echo(section, nl=False)
    if not start.model.router_learns:
        typer.echo(f"warning: {ROUTER_WARNING}", err=True)
    typer.echo(
        f"# put this into the run's config, then: spes-p2p bootstrap --config RUN.yaml --init-from {folder}", err=True
    )

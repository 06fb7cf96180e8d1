"""`spes-p2p export`: a trained model as a Hugging Face folder, and on the hub. Only flags.

The work is in `peer/export.py` and `interop/hub.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from spes_p2p.cli.arguments import (
    CheckpointFolder,
    Fingerprint,
    Invitation,
    OptionalPeers,
    RunId,
    TokenizerOption,
    option,
)
from spes_p2p.cli.showing import show_hub_bars, shown_bytes, told


class Dtype(StrEnum):
    """What the values are written as."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


DtypeOption = Annotated[Dtype, option("Data type of the exported values; fp32 is exact.")]
MaxShardSize = Annotated[str, option("Largest size of one safetensors file.", metavar="SIZE")]


def export(
    output: Annotated[Path, option("Folder to create.", "--output", "-o")],
    invitation: Invitation = None,
    checkpoint: CheckpointFolder = None,
    initial_peers: OptionalPeers = None,
    run_id: RunId = None,
    fingerprint: Fingerprint = None,
    dtype: DtypeOption = Dtype.FP32,
    max_shard_size: MaxShardSize = "5GB",
    tokenizer: TokenizerOption = None,
    push: Annotated[
        str | None, option("Upload it to the Hugging Face hub; of an --output that exists, alone.", metavar="ORG/NAME")
    ] = None,
    public: Annotated[bool, option("Everybody may see what --push creates (default: only you).", "--public")] = False,
) -> None:
    """Writes a model that transformers can load without our code, from a checkpoint or a live run.

    Example: spes-p2p export --checkpoint peer --output my-model --dtype bf16

    Example: spes-p2p export --output my-model --push me/my-model
    """
    from spes_p2p.interop.hub import check_name, check_token, push_folder
    from spes_p2p.peer.export import ExportOptions, run_export
    from spes_p2p.peer.options import meeting
    from spes_p2p.planning.units import parse_bytes

    run = meeting((invitation,) if invitation else (), initial_peers or (), run_id, fingerprint)
    is_exported = push is not None and checkpoint is None and not run.addresses and output.is_dir()
    if not is_exported:
        one_source(checkpoint, run.addresses)
    shard_bytes = parse_bytes(max_shard_size, "--max-shard-size")
    if push is not None:
        show_hub_bars()
        check_name(push)
        check_token()
    if not is_exported:
        options = ExportOptions(output, checkpoint, run, dtype.value, shard_bytes, tokenizer)
        with shown_bytes() as report:
            facts = run_export(options, told, report)
        state = f"step {facts.step:,}, state {facts.state_root[:10]}"
        typer.echo(f"{output}: run {facts.run_id}, round {facts.round}, {state}")
    if push is not None:
        typer.echo(push_folder(output, push, public, told))


def one_source(checkpoint: Path | None, addresses: Sequence[str]) -> None:
    """Raises ConfigError unless exactly one place is given to take the model from."""
    from spes_p2p.errors import ConfigError

    if (checkpoint is None) == (not addresses):
        fix = "give the folder of a checkpoint, or the invitation to a live run (or --initial-peers)"
        if addresses:
            raise ConfigError("both --checkpoint and a live run were given", fix=fix)
        raise ConfigError("neither --checkpoint nor a live run was given", fix=fix)

"""`spes-p2p upcycle`: a dense model becomes one with experts. Only flags; the work is in `interop/upcycle.py`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from spes_p2p.cli.arguments import ADVANCED, option
from spes_p2p.cli.export import Dtype, DtypeOption, MaxShardSize
from spes_p2p.cli.showing import model_at, shown_bytes


class RouterInit(StrEnum):
    """Where the routers' weights come from."""

    ZEROS = "zeros"
    NORMAL = "normal"
    SCALED_NORMAL = "scaled_normal"
    FROM_MLP = "from_mlp"


def upcycle(
    dense: Annotated[
        Path,
        option("A Qwen3, Llama or Qwen2 model, in a folder or on the hub.", metavar="HF_DIR|ORG/NAME[@REVISION]"),
    ],
    output: Annotated[Path, option("Folder to create.", "--output", "-o")],
    experts: Annotated[int, option("Experts of each layer.", min=1)] = 8,
    top_k: Annotated[int, option("Experts per token.", min=1)] = 2,
    noise_std: Annotated[float, option("Standard deviation of the noise on expert weights.", metavar="NUMBER")] = 0.02,
    noise_fraction: Annotated[float, option("Share of the weights that get noise.", metavar="SHARE")] = 0.5,
    router_init: Annotated[
        RouterInit,
        option("normal (sigma 1), scaled_normal (0.02), from_mlp (as the down projection) or zeros.", metavar="WAY"),
    ] = RouterInit.FROM_MLP,
    norm_topk: Annotated[
        bool, option("Scale the top-k weights to add up to one.", "--norm-topk/--no-norm-topk", panel=ADVANCED)
    ] = True,
    seed: Annotated[int, option("Seed for the noise and the routers.", panel=ADVANCED)] = 0,
    dtype: DtypeOption = Dtype.FP32,
    max_shard_size: MaxShardSize = "5GB",
) -> None:
    """Turns a dense model into a Mixture of Experts; each expert is a copy of the MLP plus noise.

    Example: spes-p2p upcycle --dense Qwen3-1.7B --experts 8 --top-k 2 --output start
    """
    from spes_p2p.interop.export import filled_folder
    from spes_p2p.interop.upcycle import ZEROS_WARNING, Upcycling
    from spes_p2p.interop.upcycle import upcycle as run
    from spes_p2p.interop.weights import Format
    from spes_p2p.planning.units import parse_bytes

    how = Upcycling(experts, top_k, noise_std, noise_fraction, router_init.value, norm_topk, seed)
    how.check()
    form = Format(dtype.value, parse_bytes(max_shard_size, "--max-shard-size"))
    if how.router_init == "zeros":
        typer.echo(f"warning: {ZEROS_WARNING}", err=True)
    dense = model_at(dense)
    with shown_bytes() as report, filled_folder(output) as folder:
        run(dense, folder, how, form, lambda done, total: report("upcycle", done, total))
    typer.echo(f"{output}: copy the section in {output / 'model.yaml'} into the run's config, then start the run with")
    typer.echo(f"  spes-p2p bootstrap --config RUN.yaml --init-from {output}")

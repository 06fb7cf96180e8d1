"""`spes-p2p plan`: what a run needs of a machine and of its link, from the config alone. Flags and tables only."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spes_p2p.cli.arguments import option
from spes_p2p.observe.metrics import amount_text, bytes_text, count_text, seconds_text

if TYPE_CHECKING:
    from rich.table import Table

    from spes_p2p.config.schema import Config
    from spes_p2p.planning.report import Answer, Question

WIDTH = 80


def plan(
    config: Annotated[Path, option("Config of the run: a YAML file, or a bundled name such as small.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Config overrides, such as model.num_layers=8.")
    ] = None,
    gpu_memory: Annotated[
        str | None, option("Show what fits into a GPU with this much memory, such as 24GiB.", metavar="SIZE")
    ] = None,
    gpu: Annotated[
        str | None,
        option("Name of a GPU such as RTX4090, which sets its memory and a guess at its speed.", metavar="NAME"),
    ] = None,
    experts_per_peer: Annotated[
        int | None, option("Expert columns to train (default: swarm.experts_per_peer).", min=0)
    ] = None,
    uplink: Annotated[str | None, option("Upload speed of a peer, such as 20Mbit.", metavar="RATE")] = None,
    downlink: Annotated[str | None, option("Download speed of a peer, such as 100Mbit.", metavar="RATE")] = None,
    peers: Annotated[int | None, option("Peers of the run (default: swarm.min_peers).", min=1)] = None,
    tokens_per_second: Annotated[float | None, option("Training speed of a peer.", metavar="NUMBER", min=0.001)] = None,
    local_ranks: Annotated[int, option("GPUs per peer, each with that much memory.", min=1)] = 1,
    as_json: Annotated[bool, option("Print one JSON object instead of tables, with sizes in bytes.", "--json")] = False,
) -> None:
    """Shows what a run needs: parameters, GPU memory by part, what fits, bytes and time per sync. Needs no GPU.

    Example: spes-p2p plan --config small --gpu-memory 24GiB --uplink 20Mbit --downlink 100Mbit --peers 16
    """
    from spes_p2p.config.load import load_config
    from spes_p2p.peer.options import config_path
    from spes_p2p.planning.report import Question, answer
    from spes_p2p.planning.traffic import Link
    from spes_p2p.planning.units import parse_bytes, parse_rate

    run = load_config(config_path(config), overrides or ())
    _check_plannable(run, local_ranks)
    owned = _checked_columns(run, experts_per_peer)
    memory, speed = _of_gpu(run, gpu, owned)
    question = Question(
        run,
        owned,
        run.swarm.min_peers if peers is None else peers,
        local_ranks,
        parse_bytes(gpu_memory, "--gpu-memory") if gpu_memory else memory,
        Link(
            parse_rate(uplink, "--uplink") if uplink else None,
            parse_rate(downlink, "--downlink") if downlink else None,
        ),
        tokens_per_second or (speed and speed * local_ranks),
    )
    found = answer(question)
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2))
        return
    _show(found, is_guess=tokens_per_second is None)


def _check_plannable(config: Config, ranks: int) -> None:
    from spes_p2p.errors import ConfigError

    if config.optimizer.batch_sequences % ranks:
        raise ConfigError(
            f"--local-ranks is {ranks}, which does not divide optimizer.batch_sequences "
            f"({config.optimizer.batch_sequences})",
            fix="use a number of GPUs that divides it",
        )


def _checked_columns(config: Config, owned: int | None) -> int:
    from spes_p2p.errors import ConfigError

    if owned is None:
        return config.swarm.experts_per_peer
    if owned > config.model.num_experts:
        raise ConfigError(
            f"--experts-per-peer is {owned}, but the run has {config.model.num_experts} columns",
            fix=f"give at most {config.model.num_experts}",
        )
    return owned


def _of_gpu(config: Config, name: str | None, owned: int) -> tuple[int | None, float | None]:
    """(memory in bytes, tokens per second) of the GPU called `name`, the speed at a typical utilisation."""
    from spes_p2p.planning.gpus import gpu_named, usual_speed

    if name is None:
        return None, None
    gpu = gpu_named(name)
    return gpu.memory_bytes, usual_speed(gpu, config, owned)


def _show(found: Answer, is_guess: bool) -> None:
    from rich.console import Console

    console = Console(width=WIDTH, highlight=False, soft_wrap=False)
    console.print(_heading(found))
    console.print(_memory_table(found))
    if found.search is not None:
        console.print(_fit_table(found))
        if any(_mark(rung.adds) for rung in found.search.rungs):
            console.print("* should be the same on all peers: the organiser chooses it")
        console.print(f"\n{found.sentence()}\n")
    console.print(_sync_table(found))
    console.print(_stored(found))
    if slow := found.too_slow():
        console.print(f"\n{slow}\n", markup=False)
    if trusted := found.trusted():
        console.print(f"\n{trusted}\n", markup=False)
    for line in _hints(found.question, is_guess):
        console.print(line)


def _heading(found: Answer) -> str:
    question, sizes = found.question, found.sizes
    return (
        f"{question.config.run.run_id}: {count_text(sizes.total)} parameters, {count_text(sizes.active)} active per "
        f"token, {count_text(sizes.trained(question.owned))} trained here ({count_text(sizes.shared)} shared, "
        f"{question.owned} of {sizes.num_experts} columns with {count_text(sizes.column)} each)\n"
    )


def _memory_table(found: Answer) -> Table:
    from spes_p2p.planning.units import gib_text

    memory, config = found.memory, found.question.config
    micro = min(config.optimizer.micro_batch_sequences, config.optimizer.batch_sequences // found.question.ranks)
    title = f"memory of a GPU when it needs most, {micro} x {config.data.sequence_length:,} tokens at once"
    table = _table(title, "part", "size", "what")
    what = {
        "shared parameters": "fp32, and copies for matrix products",
        "bank": f"all {config.model.num_experts} experts of each layer, read-only",
        "masters": "fp32 beyond the bank, of owned experts",
        "gradients": "those that exist at that moment",
        "optimizer": "moments of trained parameters",
        "activations": "of the forward pass, and temporaries",
        "logits": "one chunk of the vocabulary at a time",
        "buffers": "work space of matrix products",
        "allocator and CUDA": "overhead that no tensor accounts for",
    }
    parts = {**memory.parts, "allocator and CUDA": memory.slack + memory.context}
    for name, text in what.items():
        table.add_row(name, gib_text(parts[name]), text)
    table.add_row("[bold]highest need[/]", f"[bold]{gib_text(memory.total)}[/]", f"in {memory.moment}")
    share = f"{found.state_bytes / found.full_bytes:.0%} of the {gib_text(found.full_bytes)} for training all in fp32"
    table.add_row("without activations", gib_text(found.state_bytes), share)
    return table


def _fit_table(found: Answer) -> Table:
    from spes_p2p.planning.units import gib_text

    assert found.search is not None
    wanted = found.question.owned
    title = (
        f"what fits into {gib_text(found.question.memory_bytes or 0)}, less a margin: a row adds an option to those "
        f"above\ncolumns: the most that fit; micro-batch: the largest with {wanted} of them"
    )
    table = _table(title, "option", "needs", "columns", "micro-batch")
    for rung in found.search.rungs:
        columns = "-" if rung.most_columns is None else str(rung.most_columns)
        name = rung.adds + _mark(rung.adds) if rung.adds else "as configured"
        table.add_row(name, gib_text(rung.memory.total), columns, str(rung.largest_micro_batch or "-"))
    return table


def _sync_table(found: Answer) -> Table:
    from spes_p2p.config.schema import steps_per_round_at
    from spes_p2p.planning.traffic import Spread

    question, config = found.question, found.question.config
    steps = steps_per_round_at(config, config.scheduler.total_steps)
    spread = Spread.in_run(config, question.peers, question.owned)
    owners = f"{'1 owner' if spread.replicas == 1 else f'{spread.replicas:.3g} owners'} per column"
    if spread.covered < config.model.num_experts:
        owners = f"owners for {spread.covered} of {config.model.num_experts} columns"
    peers, every = amount_text(question.peers, "peer"), amount_text(steps, "step")
    title = f"one sync, per peer: {peers}, every {every}, {owners}"
    table = _table(title, "codec", "up", "down", "time", "share of time", "per day, up + down")
    for place, cost in enumerate(found.costs):
        table.add_row(
            cost.codec if place else f"{cost.codec} (chosen)",
            bytes_text(cost.bytes_up),
            bytes_text(cost.bytes_down),
            "-" if cost.seconds is None else seconds_text(cost.seconds),
            "-" if cost.share is None else f"{cost.share:.1%}",
            "-" if cost.bytes_per_day is None else bytes_text(cost.bytes_per_day),
        )
    return table


def _stored(found: Answer) -> str:
    from spes_p2p.planning.traffic import stored_bytes

    config = found.question.config
    half = "" if config.sync.outer == "none" else ", half of it outer momentum, which no round sends"
    return f"The state takes {bytes_text(stored_bytes(config))} on disk; a newcomer fetches it once{half}."


def _hints(question: Question, is_guess: bool) -> Iterable[str]:
    from spes_p2p.planning.gpus import USUAL_MFU

    if question.memory_bytes is None:
        yield "What fits into a GPU: --gpu-memory 24GiB, or --gpu RTX4090."
    if not question.link.is_known:
        yield "Time of a sync: --uplink 20Mbit --downlink 100Mbit."
    if question.tokens_per_second is None:
        yield "Share of time and traffic per day: --tokens-per-second N, or --gpu RTX4090 for a guess."
    elif is_guess:
        speed = count_text(question.tokens_per_second)
        yield f"{speed} tokens/s is a guess ({USUAL_MFU:.0%} of the GPU's peak); set it with --tokens-per-second."


def _mark(override: str) -> str:
    from spes_p2p.planning.report import organisers_choice

    return " *" if override and organisers_choice(override) else ""


def _table(title: str, first: str, *others: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="left" if name == "what" else "right")
    return table

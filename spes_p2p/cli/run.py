"""`spes-p2p run ...`: what an organiser does beside the bootstrap node. Only flags, questions and tables."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spes_p2p.cli.arguments import Fingerprint, Invitation, OptionalPeers, RunId, met, option
from spes_p2p.files import NODE_FOLDER, check_is_new, in_folder
from spes_p2p.ids import short
from spes_p2p.observe.metrics import count_text, span_text
from spes_p2p.observe.text import to_type

if TYPE_CHECKING:
    from spes_p2p.peer.organising import HistoryLine


def init(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Config overrides, such as sync.codec=int8.")
    ] = None,
    name: Annotated[str | None, option("Name of the run.")] = None,
    template: Annotated[str | None, option("Bundled config to start from: tiny, small, home...")] = None,
    data: Annotated[str | None, option("Folder of token shards (empty: each peer brings data of its own).")] = None,
    data_url: Annotated[
        list[str] | None,
        option("URL of the shards: https://... or hf://datasets/... (repeat for mirrors); may replace --data."),
    ] = None,
    peers: Annotated[
        int | None, option("Peers that must have come before the run begins, with your own.", min=1)
    ] = None,
    experts_per_peer: Annotated[int | None, option("Expert columns that each peer trains.", min=0)] = None,
    steps_per_round: Annotated[
        int | None, option("Inner steps between syncs (default: as in the template).", min=1)
    ] = None,
    strangers: Annotated[bool, option("Anybody may train; only whom you vouch for is trusted.", "--strangers")] = False,
    gpu_memory: Annotated[
        str | None, option("Memory of the volunteers' GPUs, such as 24GiB, to check that the run fits.", metavar="SIZE")
    ] = None,
    uplink: Annotated[str | None, option("Upload speed of the volunteers, such as 20Mbit.", metavar="RATE")] = None,
    downlink: Annotated[
        str | None, option("Download speed of the volunteers, such as 100Mbit.", metavar="RATE")
    ] = None,
    gpu: Annotated[
        str | None, option("The volunteers' GPU, such as RTX4090: its memory and speed.", metavar="NAME")
    ] = None,
    tokens_per_second: Annotated[float | None, option("Training speed of a volunteer.", min=0.001)] = None,
    output: Annotated[Path, option("Folder for the organiser's key: the bootstrap node's.", "--output", "-o")] = Path(
        "bootstrap-node"
    ),
) -> None:
    """Asks a few questions (or takes flags), checks and writes a commented NAME.yaml, and creates the organiser's key.

    Example: spes-p2p run init --name mine --template small --data shards --peers 4 --experts-per-peer 2
    """
    from spes_p2p.config.load import bundled_config, load_config
    from spes_p2p.peer.run_file import NewRun, start_run
    from spes_p2p.planning.gpus import gpu_named, usual_speed
    from spes_p2p.planning.units import parse_bytes, parse_rate

    chosen = _answer(template, "template (tiny, small, home, spes-1b, spes-2b, spes-7b, spes-9b)", "small")
    known = load_config(bundled_config(chosen))
    memory = speed = None
    called = _answer(name, "name of the run", known.run.run_id)
    check_is_new(Path(f"{called}.yaml"))
    if gpu is not None:
        memory = gpu_named(gpu).memory_bytes
        speed = usual_speed(gpu_named(gpu), known, known.swarm.experts_per_peer)
    run = NewRun(
        name=called,
        template=chosen,
        data="" if data is None and data_url else _answer(
            data, "folder of token shards, as tokenize makes it (empty: each peer brings data of its own)", ""
        ),
        peers=_number(
            peers, "peers that must have come before the run begins, with your own", known.swarm.min_peers, 1
        ),
        experts_per_peer=_number(
            experts_per_peer, f"expert columns that each peer trains (of {known.model.num_experts})",
            known.swarm.experts_per_peer, 1,
        ),
        steps_per_round=steps_per_round,
        gpu_bytes=parse_bytes(gpu_memory, "--gpu-memory") if gpu_memory else memory,
        up=parse_rate(uplink, "--uplink") if uplink else None,
        down=parse_rate(downlink, "--downlink") if downlink else None,
        overrides=tuple(overrides or ()),
        data_urls=tuple(data_url or ()),
        tokens_per_second=tokens_per_second or speed,
        strangers=strangers,
    )  # fmt: skip
    made = start_run(run, Path(f"{run.name}.yaml"), output)
    typer.echo(
        f"{made.path}: run {run.name}; the organiser is {made.organiser} (key: {output}/identity.key; keep it safe)"
    )
    for words in made.words:
        typer.echo(words)
    where = f" --data {run.data}" if run.data else ""
    command = in_folder(f"spes-p2p bootstrap --config {made.path}{where} --port 31337", output, NODE_FOLDER, "--output")
    typer.echo(f"\nnext, on a host that others can reach:\n  {to_type(command)}")


def _answer(given: str | None, question: str, default: str) -> str:
    """What the flag said, else what somebody types, else the default."""
    if given is not None:
        return given
    return str(typer.prompt(question, default=default)) if is_asked() else default


def is_asked() -> bool:
    """Whether somebody is there who can answer."""
    return sys.stdin.isatty()


def _number(given: int | None, question: str, default: int, least: int) -> int:
    """The same of a number."""
    while given is None:
        text = _answer(None, question, str(default)).strip()
        if text.isdecimal() and int(text) >= least:
            given = int(text)
        else:
            typer.echo(f"Please type a whole number, {least} or more.")
    return given


def inspect(
    invitation: Invitation = None,
    initial_peers: OptionalPeers = None,
    run_id: RunId = None,
    fingerprint: Fingerprint = None,
    folder: Annotated[
        Path, option("Folder of a bootstrap node or a peer, if no invitation is given.", "--folder", "-f")
    ] = Path("bootstrap-node"),
    last: Annotated[int | None, option("Show only this many of the newest rounds.", min=1)] = None,
    as_json: Annotated[bool, option("Print one JSON object per round.", "--json")] = False,
) -> None:
    """Prints the history of a run, one round per line: from a folder, or from a live run, whose certificates it checks.

    Example: spes-p2p run inspect --folder bootstrap-node --last 20
    """
    from spes_p2p.peer.organising import kept_history, live_history

    if invitation is None and not initial_peers:
        lines = kept_history(folder)
    else:
        lines = live_history(met(invitation, initial_peers, run_id, fingerprint))
    lines = lines[-last:] if last else lines
    if as_json:
        for line in lines:
            typer.echo(json.dumps(dataclasses.asdict(line)))
    else:
        typer.echo(history_text(lines))


def history_text(lines: Sequence[HistoryLine]) -> str:
    """A table of at most 100 columns, but for lists of names."""
    is_timed = any(line.received_at for line in lines)  # of a live run that is known of the newest round alone
    heading = f"{'round':>6} {'commit':<10} {'step':>8} {'tokens':>8} {'total':>8} {'peers':>5}  {'state':<10}"
    text = [f"{heading} when" if is_timed else heading.rstrip()]
    for line in lines:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(line.received_at)) if line.received_at else "-"
        row = (
            f"{line.round:>6} {line.kind:<10} {line.step:>8,} {count_text(line.round_tokens):>8} "
            f"{count_text(line.tokens):>8} {line.members:>5}  {line.state_root[:10]}"
        )
        text.append(f"{row} {when}" if is_timed else row)
        text += _changes(line)
    return "\n".join(text)


def _changes(line: HistoryLine) -> list[str]:
    """What a round changed beside the values."""
    found = []
    if line.joined:
        found.append(f"joined: {', '.join(map(short, line.joined))}")
    if line.left:
        found.append(f"left: {', '.join(map(short, line.left))}")
    if line.without_owner:
        found.append(f"columns without owner: {span_text(line.without_owner)}")
    if line.merge_alpha:
        found.append(f"merged with alpha {line.merge_alpha:.3g}")
    if line.banned:
        found.append(f"banned: {', '.join(map(short, line.banned))}")
    if line.decay_steps:
        found.append(f"the learning rate falls over {line.decay_steps:,} steps from here on")
    if line.ends:
        found.append("the organiser ended the run with this round")
    return [f"{'':>7}{'; '.join(found)}"] if found else []

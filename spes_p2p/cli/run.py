"""`spes-p2p run ...`: what an organiser does beside the bootstrap node. Only flags, questions and tables."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spes_p2p.cli.arguments import Fingerprint, Invitation, OptionalPeers, RunId, met
from spes_p2p.ids import short
from spes_p2p.observe.metrics import count_text, span_text

if TYPE_CHECKING:
    from spes_p2p.peer.organising import HistoryLine

NodeFolder = Annotated[Path, typer.Option("--folder", "-f", help="Folder of the bootstrap node.")]


def init(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Config overrides, such as sync.codec=int8.", show_default=False),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run.", show_default=False)] = None,
    template: Annotated[
        str | None,
        typer.Option(
            help="Bundled config to start from: tiny, small, home...",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Folder of token shards (empty: peers bring their own).", show_default=False)
    ] = None,
    data_url: Annotated[
        list[str] | None,
        typer.Option(
            help="URL of the shards: https://... or hf://datasets/... (repeat for mirrors); may replace --data.",
            show_default=False,
        ),
    ] = None,
    peers: Annotated[int | None, typer.Option(help="Peers needed to start the run.", min=1, show_default=False)] = None,
    experts_per_peer: Annotated[
        int | None, typer.Option(help="Expert columns that each peer trains.", min=0, show_default=False)
    ] = None,
    steps_per_round: Annotated[
        int | None, typer.Option(help="Inner steps between syncs (default: as in the template).", min=1)
    ] = None,
    guest_rank: Annotated[
        int | None,
        typer.Option(
            help="Rank of the change that each peer trains in others' experts (0: none).", min=0, show_default=False
        ),
    ] = None,
    strangers: Annotated[
        bool, typer.Option("--strangers", help="Anybody may train: liars are left out, found and banned.")
    ] = False,
    gpu_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory of the volunteers' GPUs, such as 24GiB, to check that the run fits.",
            show_default=False,
        ),
    ] = None,
    uplink: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="Upload speed of the volunteers, such as 20Mbit.", show_default=False),
    ] = None,
    downlink: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="Download speed of the volunteers, such as 100Mbit.", show_default=False),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The volunteers' GPU, such as RTX4090: its memory and speed.", show_default=False
        ),
    ] = None,
    tokens_per_second: Annotated[
        float | None, typer.Option(help="Training speed of a volunteer.", min=0.001, show_default=False)
    ] = None,
    tune: Annotated[bool, typer.Option("--tune", help="Choose what suits these links and GPUs, and say why.")] = False,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for the organiser's key: the bootstrap node's.")
    ] = Path("bootstrap-node"),
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
    if gpu is not None:
        memory = gpu_named(gpu).memory_bytes
        speed = usual_speed(gpu_named(gpu), known, known.swarm.experts_per_peer)
    run = NewRun(
        name=_answer(name, "name of the run", known.run.run_id),
        template=chosen,
        data="" if data is None and data_url else _answer(
            data, "folder of token shards (empty: peers bring their own)", ""
        ),
        peers=_answer(peers, "peers needed to start the run", known.swarm.min_peers, int),
        experts_per_peer=_answer(
            experts_per_peer, f"expert columns that each peer trains (of {known.model.num_experts})",
            known.swarm.experts_per_peer, int,
        ),
        steps_per_round=steps_per_round,
        guest_rank=_answer(
            0 if guest_rank is None and strangers else guest_rank,
            "rank of each peer's change to others' experts (16 is good; 0: none, as in SPES)", 0, int,
        ),
        gpu_bytes=parse_bytes(gpu_memory, "--gpu-memory") if gpu_memory else memory,
        up=parse_rate(uplink, "--uplink") if uplink else None,
        down=parse_rate(downlink, "--downlink") if downlink else None,
        overrides=tuple(overrides or ()),
        data_urls=tuple(data_url or ()),
        tokens_per_second=tokens_per_second or speed,
        tune=tune,
        strangers=strangers,
    )  # fmt: skip
    made = start_run(run, Path(f"{run.name}.yaml"), output)
    typer.echo(
        f"{made.path}: run {run.name}; the organiser is {made.organiser} (key: {output}/identity.key; keep it safe)"
    )
    for words in made.words:
        typer.echo(words)
    where = f" --data {run.data}" if run.data else ""
    typer.echo(f"\nnext, on a host that others can reach:\n  spes-p2p bootstrap --config {made.path}{where} "
               f"--output {output} --port 31337")  # fmt: skip


def _answer(given: Any, question: str, default: Any, kind: Callable[[str], Any] = str) -> Any:
    """What the flag said, else what somebody types, else the default."""
    if given is not None:
        return given
    return typer.prompt(question, default=default, type=kind) if sys.stdin.isatty() else default


def inspect(
    invitation: Invitation = None,
    initial_peers: OptionalPeers = None,
    run_id: RunId = None,
    fingerprint: Fingerprint = None,
    folder: Annotated[
        Path, typer.Option("--folder", "-f", help="Folder of a bootstrap node or a peer, if no invitation is given.")
    ] = Path("bootstrap-node"),
    last: Annotated[int | None, typer.Option(help="Show only this many of the newest rounds.", min=1)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per round.")] = False,
    proof: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Check this proof of fraud instead, without the run.", show_default=False),
    ] = None,
) -> None:
    """Prints the history of a run, one round per line: from a folder, or from a live run, whose certificates it checks.

    With --proof, checks a file of run/proofs/, by which a peer shows that a reducer handed out what is no mean.

    Example: spes-p2p run inspect --folder bootstrap-node --last 20
    """
    from spes_p2p.peer.organising import kept_history, live_history

    if proof is not None:
        typer.echo(_proof_text(proof, fingerprint))
        return
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


def _proof_text(path: Path, fingerprint: str | None) -> str:
    """Raises ConfigError where it cannot be read, or is of another run; RemoteProtocolError where it proves nothing."""
    from spes_p2p.errors import ConfigError, RemoteProtocolError
    from spes_p2p.swarm.keys import RsaVerifier
    from spes_p2p.sync.fraud import check_proof

    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", fix="give the file of a proof") from error
    try:
        found = check_proof(data, RsaVerifier().verify)
    except RemoteProtocolError as error:
        fix = "believe nothing that is said by it; ask for the file as it was made"
        raise RemoteProtocolError(f"{path} proves nothing: {error}", fix=fix) from error
    info, report, piece = found.info, found.charge.report.value, found.charge.piece
    if not info.fingerprint.hex().startswith((fingerprint or "").lower()):
        own = info.fingerprint.hex()[:16]
        raise ConfigError(
            f"{path} is a proof of run {info.run_id} with fingerprint {own}, not of {fingerprint}",
            fix="ask for a proof of the right run",
        )
    return (
        f"run {info.run_id} with fingerprint {info.fingerprint.hex()}:\n  {report.reducer} has signed that it averaged "
        f"tiles {span_text(piece.tile_ids)} in round {found.charge.parent.round + 1};\n  what it handed out is not the "
        f"mean of what {', '.join(piece.contributors)} had committed to"
    )


def history_text(lines: Sequence[HistoryLine]) -> str:
    """A table of at most 100 columns, but for lists of names."""
    text = [f"{'round':>6} {'commit':<10} {'step':>8} {'tokens':>8} {'total':>8} {'peers':>5}  {'state':<10} when"]
    for line in lines:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(line.received_at)) if line.received_at else "-"
        text.append(
            f"{line.round:>6} {line.kind:<10} {line.step:>8,} {count_text(line.round_tokens):>8} "
            f"{count_text(line.tokens):>8} {line.members:>5}  {line.state_root[:10]} {when}"
        )
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
    return [f"{'':>7}{'; '.join(found)}"] if found else []


def stop(
    invitation: Invitation = None,
    initial_peers: OptionalPeers = None,
    run_id: RunId = None,
    fingerprint: Fingerprint = None,
    folder: NodeFolder = Path("bootstrap-node"),
    after_round: Annotated[
        int | None, typer.Option(help="Last round of the run (default: the current one).", min=1)
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Ends a run with the organiser's key: peers commit the last round, save and exit. This cannot be undone.

    Example: spes-p2p run stop --folder bootstrap-node
    """
    from spes_p2p.peer.kept_invite import kept_invite
    from spes_p2p.peer.organising import stop_run

    given = invitation if invitation or initial_peers else kept_invite(folder)
    meeting = met(given, initial_peers, run_id, fingerprint)
    if not yes:
        typer.confirm(f"end {meeting.run_id or 'the run'} for everybody? This cannot be undone", abort=True)
    last = stop_run(folder / "identity.key", meeting, after_round, typer.echo)
    typer.echo(f"the run ends with round {last}: its peers commit it, save and exit")


def decay(
    steps: Annotated[
        int, typer.Option(help="Inner steps over which the learning rate falls to its lowest.", min=1, max=10**9)
    ],
    invitation: Invitation = None,
    initial_peers: OptionalPeers = None,
    run_id: RunId = None,
    fingerprint: Fingerprint = None,
    folder: NodeFolder = Path("bootstrap-node"),
) -> None:
    """Lets the learning rate fall from the next round on, with the organiser's key. This cannot be undone.

    Example: spes-p2p run decay --steps 2000 --folder bootstrap-node
    """
    from spes_p2p.peer.kept_invite import kept_invite
    from spes_p2p.peer.organising import decay_run

    given = invitation if invitation or initial_peers else kept_invite(folder)
    counts = decay_run(folder / "identity.key", met(given, initial_peers, run_id, fingerprint), steps)
    typer.echo(f"the learning rate falls over {counts:,} steps from the next round on; then `spes-p2p run stop`")


Peers = Annotated[list[str], typer.Argument(metavar="PEER", help="Ids of peers, as status --json prints them.")]
Undo = Annotated[bool, typer.Option("--undo", help="Takes back what was said of these peers.")]


def vouch(
    peers: Peers,
    undo: Undo = False,
    folder: NodeFolder = Path("bootstrap-node"),
) -> None:
    """Lets peers vote in a run with swarm.electors=vouched, with the organiser's key. Strangers train, but do not vote.

    In any run it lifts what electors have decided: peers that they banned may come back. Where you had vouched for one
    before, take that back first (--undo), and let a round pass. With the folder of a peer that votes, it is one
    elector's word: two thirds of them let a peer vote, too.

    Example: spes-p2p run vouch 12D3KooWAbc... --folder bootstrap-node
    """
    from spes_p2p.peer.kept_invite import kept_invite
    from spes_p2p.peer.organising import checked_peers
    from spes_p2p.peer.vouching import change_vouches
    from spes_p2p.swarm.hivemind_backend.identity import signer_of
    from spes_p2p.swarm.invite import decode

    organiser = decode(kept_invite(folder)).organiser
    if signer_of(folder / "identity.key").peer_id != organiser:
        said = change_vouches(folder, checked_peers(peers), undo)
        typer.echo(f"this peer vouches for: {', '.join(said) or 'nobody'}")
        typer.echo("it says so while it runs; for whom two thirds of the electors vouch votes from the next round on")
        return
    _change_roll(peers, folder, "forgotten" if undo else "vouched")


def ban(
    peers: Peers,
    undo: Undo = False,
    folder: NodeFolder = Path("bootstrap-node"),
) -> None:
    """Excludes peers from a run from the next round on, with the organiser's key.

    Example: spes-p2p run ban 12D3KooWAbc... --folder bootstrap-node
    """
    _change_roll(peers, folder, "forgotten" if undo else "banned")


def _change_roll(peers: list[str], folder: Path, kind: str) -> None:
    from spes_p2p.peer.kept_invite import kept_invite
    from spes_p2p.peer.organising import change_roll, checked_peers

    meeting = met(kept_invite(folder), None, None, None)
    roll, before = change_roll(folder / "identity.key", meeting, **{kind: checked_peers(peers)})
    for words, named in (("vouched for", roll.vouched), ("banned", roll.banned)):
        typer.echo(f"{words}: {', '.join(named) or 'nobody'}")
    typer.echo("the next round takes it up")
    known = sorted({*peers}.intersection(before.vouched if before is not None and kind == "vouched" else ()))
    if known:
        typer.echo(
            f"you vouched for {', '.join(known)} before: if electors have banned it since, that goes on;"
            " to lift it, call this with --undo, let a round pass, and vouch again"
        )


def choose(
    child: Annotated[
        str | None,
        typer.Argument(
            metavar="CHILD",
            help="First digits of the history to continue, as peers print them (default: list the histories).",
            show_default=False,
        ),
    ] = None,
    invitation: Invitation = None,
    initial_peers: OptionalPeers = None,
    run_id: RunId = None,
    fingerprint: Fingerprint = None,
    folder: NodeFolder = Path("bootstrap-node"),
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Chooses, with the organiser's key, which of two histories a run continues; peers on the other switch to it.

    Example: spes-p2p run choose 4f0c2a91d3 --folder bootstrap-node
    """
    from spes_p2p.peer.kept_invite import kept_invite
    from spes_p2p.peer.organising import check_key, choose_history, look_at_histories
    from spes_p2p.swarm.invite import looks_like_invite
    from spes_p2p.sync.histories import checked_prefix, choose_child

    if child is not None and looks_like_invite(child):
        child, invitation = None, child
    digits = None if child is None else checked_prefix(child, "CHILD")
    given = invitation if invitation or initial_peers else kept_invite(folder)
    meeting = met(given, initial_peers, run_id, fingerprint)
    parted = look_at_histories(meeting)
    for line in (line for fork in parted.forks for line in fork.texts(time.time())):
        typer.echo(line)
    if digits is None:
        if not parted.forks:
            typer.echo("the run has only one history: there is nothing to choose")
        return
    fork, side = choose_child(parted.forks, digits)
    check_key(folder / "identity.key", parted.info)
    for line in fork.lost_texts(side.child):
        typer.echo(f"lost: {line}")
    if not yes:
        typer.confirm(f"continue with {side.name} for everybody?", abort=True)
    choose_history(folder / "identity.key", meeting, parted, fork, side)
    typer.echo(f"the run goes on with {side.name}: peers on other histories switch to it as soon as they hear of it")

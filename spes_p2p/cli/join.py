"""`spes-p2p join`: this machine becomes a peer of a run. Flags and what is shown; the work is in `peer/run.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spes_p2p.cli.arguments import (
    AnnounceMaddrs,
    Fingerprint,
    HostMaddrs,
    IdentityPath,
    InitialPeers,
    MaxDownload,
    MaxUpload,
    RunId,
    UseRelay,
)


def join(
    initial_peers: InitialPeers,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Own choices such as output.tensorboard=true.", show_default=False)
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Folder with a copy of the run's token shards (default: from other peers).")
    ] = None,
    max_disk: Annotated[
        str, typer.Option(metavar="SIZE", help="Most disk for data that comes from other peers.")
    ] = "20GB",
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of state and metrics.")] = Path("peer"),
    run_id: RunId = None,
    fingerprint: Fingerprint = None,
    owned_experts: Annotated[
        str | None, typer.Option(help="Expert columns to claim, such as 0,3-5 (default: what the others lack).")
    ] = None,
    max_experts: Annotated[
        int | None, typer.Option(help="Most expert columns to train (default: what fits into memory).", min=0)
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    local_ranks: Annotated[int | None, typer.Option(help="DDP ranks (default: one a visible GPU).", min=1)] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from what is in the output folder.")] = False,
    rounds: Annotated[int | None, typer.Option(help="Stop when the run has committed this round.", min=1)] = None,
    dump_rounds: Annotated[Path | None, typer.Option(help="Write what goes in and out of each round there.")] = None,
    config: Annotated[Path | None, typer.Option(help="Refuse to join a run with another config than this.")] = None,
    identity_path: IdentityPath = None,
    host_maddrs: HostMaddrs = None,
    announce_maddrs: AnnounceMaddrs = None,
    client_mode: Annotated[bool, typer.Option("--client-mode", help="Listen nowhere (behind NAT).")] = False,
    use_relay: UseRelay = True,
    max_upload: MaxUpload = None,
    max_download: MaxDownload = None,
) -> None:
    """Trains in a run until Ctrl-C; then says goodbye to the others and ends within ten seconds.

    Example: spes-p2p join --initial-peers /ip4/203.0.113.7/tcp/31337/p2p/Qm... --output peer
    """
    import sys

    from spes_p2p.peer.options import (
        DEFAULT_HOST_MADDRS,
        NetworkOptions,
        PeerOptions,
        parse_columns,
        parse_disk,
        parse_limit,
    )

    network = NetworkOptions(
        tuple(initial_peers),
        tuple(host_maddrs or DEFAULT_HOST_MADDRS),
        tuple(announce_maddrs or ()),
        identity_path,
        client_mode,
        use_relay,
        parse_limit(max_upload, "--max-upload"),
        parse_limit(max_download, "--max-download"),
    )
    options = PeerOptions(
        network=network,
        output=output,
        data=data,
        run_id=run_id,
        fingerprint=fingerprint,
        owned_experts=None if owned_experts is None else parse_columns(owned_experts),
        max_experts=max_experts,
        device=device,
        local_ranks=local_ranks,
        resume=resume,
        rounds=rounds,
        dump_rounds=dump_rounds,
        overrides=tuple(overrides or ()),
        config_path=config,
        max_disk=parse_disk(max_disk),
    )
    from spes_p2p.ids import short
    from spes_p2p.observe.events import EventBus  # now: what is wrong with the flags is known at once
    from spes_p2p.observe.progress import progress_sink
    from spes_p2p.peer.run import run_peer

    bus = EventBus()

    def say(text: str) -> None:
        sys.stdout.write(f"{text}\n")  # which is above the live display while there is one
        sys.stdout.flush()

    try:
        run_peer(
            options,
            bus,
            say,
            lambda peer, steps_per_round: bus.add(progress_sink(short(peer), steps_per_round, sys.stdout)),
        )
    finally:
        bus.close()

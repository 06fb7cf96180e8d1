"""`spes-p2p join`: this machine becomes a peer of a run. Flags and what is shown; the work is in `peer/run.py`."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from spes_p2p.cli.arguments import (
    ADVANCED,
    LIMITS,
    NETWORK,
    AnnounceMaddrs,
    Device,
    DeviceOption,
    Fingerprint,
    HostMaddrs,
    IdentityPath,
    MaxDownload,
    MaxUpload,
    MetricsHost,
    MetricsPort,
    OptionalPeers,
    Port,
    RunId,
    option,
)
from spes_p2p.data.web_url import WebAccess


class LogFormat(StrEnum):
    """The form in which a running peer reports what happens."""

    AUTO = "auto"
    TEXT = "text"
    JSON = "json"


def join(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="INVITE|KEY=VALUE",
            help="The organiser's invitation; settings of your own, such as output.tensorboard=true.",
        ),
    ] = None,
    initial_peers: OptionalPeers = None,
    data: Annotated[
        str | None, option("Folder of the run's token shards (default: fetch data from peers).", metavar="DIR")
    ] = None,
    max_data_disk: Annotated[
        str, option("Most disk space for data from other peers.", metavar="SIZE", panel=LIMITS)
    ] = "20GB",
    web_data: Annotated[
        WebAccess,
        option(
            "Which of the organiser's web servers to fetch data from: none, public https ones, or any.", panel=NETWORK
        ),
    ] = WebAccess.PUBLIC,
    output: Annotated[
        Path, option("Folder for state and metrics; a run that it holds is continued.", "--output", "-o")
    ] = Path("peer"),
    run_id: RunId = None,
    fingerprint: Fingerprint = None,
    owned_experts: Annotated[
        str | None,
        option(
            "Expert columns to claim, such as 0,3-5 (default: columns that the others lack).",
            metavar="LIST",
            panel=ADVANCED,
        ),
    ] = None,
    max_experts: Annotated[
        int | None, option("Most expert columns to train (default: as many as fit into memory).", min=0, panel=LIMITS)
    ] = None,
    device: DeviceOption = Device.AUTO,
    local_ranks: Annotated[
        int | None, option("DDP ranks (default: one per visible GPU).", min=1, panel=ADVANCED)
    ] = None,
    until_round: Annotated[
        int | None, option("Stop when the run has committed this round.", min=1, panel=ADVANCED)
    ] = None,
    dump_rounds: Annotated[
        Path | None, option("Folder to write the inputs and outputs of each round to.", panel=ADVANCED)
    ] = None,
    config: Annotated[Path | None, option("Refuse to join a run that has a different config.", panel=ADVANCED)] = None,
    identity_path: IdentityPath = None,
    port: Port = None,
    host_maddrs: HostMaddrs = None,
    announce_maddrs: AnnounceMaddrs = None,
    client_mode: Annotated[
        bool, option("Do not listen for connections (for use behind NAT).", "--client-mode", panel=NETWORK)
    ] = False,
    max_upload: MaxUpload = None,
    max_download: MaxDownload = None,
    schedule: Annotated[
        str | None, option("Train only in these hours, such as 22:00-08:00.", metavar="HOURS", panel=LIMITS)
    ] = None,
    pause_on_battery: Annotated[
        bool, option("Do not train on battery power, where that can be detected.", "--pause-on-battery", panel=LIMITS)
    ] = False,
    nice: Annotated[
        int, option("Give way to other programs: 0 (not at all) to 19 (to all of them).", min=0, max=19, panel=LIMITS)
    ] = 0,
    cores: Annotated[int | None, option("Most processor cores to use (default: all).", min=1, panel=LIMITS)] = None,
    metrics_port: MetricsPort = None,
    metrics_host: MetricsHost = "127.0.0.1",
    log_format: Annotated[
        LogFormat, option("auto (full screen on a terminal, lines elsewhere), text (lines) or json.")
    ] = LogFormat.AUTO,
) -> None:
    """Trains in a run until Ctrl-C; then tells the others and exits within ten seconds.

    The same command, given again in the same folder, continues.

    Example: spes-p2p join spes1... --output peer
    """
    from spes_p2p.config.fingerprint import check_peer_overrides
    from spes_p2p.errors import for_good
    from spes_p2p.files import make_folder
    from spes_p2p.limits import use_cores
    from spes_p2p.peer.contacts import first_addresses
    from spes_p2p.peer.options import (
        NetworkOptions,
        PeerOptions,
        config_path,
        listening,
        meeting,
        parse_columns,
        parse_data_disk,
        parse_limit,
        split_words,
    )
    from spes_p2p.peer.pausing import Schedule

    with for_good():
        invites, overrides = split_words(words or ())
        found = meeting(invites, initial_peers or (), run_id, fingerprint)
        network = NetworkOptions(
            found.addresses,
            listening(host_maddrs, port),
            tuple(announce_maddrs or ()),
            identity_path,
            client_mode,
            parse_limit(max_upload, "--max-upload"),
            parse_limit(max_download, "--max-download"),
        )
        options = PeerOptions(
            network=network,
            folder=output,
            data=data,
            run_id=found.run_id,
            fingerprint=found.fingerprint,
            owned_experts=None if owned_experts is None else parse_columns(owned_experts),
            max_experts=max_experts,
            device=device,
            local_ranks=local_ranks,
            until_round=until_round,
            dump_rounds=dump_rounds,
            overrides=overrides,
            config_path=config,
            max_data_disk=parse_data_disk(max_data_disk),
            organiser=found.organiser,
            token=found.token,
            schedule=None if schedule is None else Schedule.parse(schedule),
            pause_on_battery=pause_on_battery,
            metrics_port=metrics_port,
            metrics_host=metrics_host,
            web_data=web_data,
        )
        check_peer_overrides(overrides)
        if config is not None:
            config_path(config)
        first_addresses(options)
    # what keeps a peer from starting here, as far as it can be known before PyTorch is loaded; it is checked again
    from spes_p2p.swarm.hivemind_backend.daemon import check_ports  # loads a part of hivemind
    from spes_p2p.swarm.hivemind_backend.identity import check_free

    make_folder(output)
    check_free(identity_path or output / "identity.key")
    if not client_mode:
        check_ports(network.host_maddrs)
    used = None if cores is None else use_cores(cores)
    if nice:
        # before there are threads and children, which have it then too
        os.setpriority(os.PRIO_PROCESS, 0, max(nice, os.getpriority(os.PRIO_PROCESS, 0)))
    from spes_p2p.cli.showing import loading_torch
    from spes_p2p.cli.watching import Watching

    # before torch is loaded: threads that spin while they wait cost a CPU that others use, too, most of its speed
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with Watching(log_format) as watching:
        if cores is not None and used is not None and used < cores:
            watching.say(f"--cores {cores}: there {'is' if used == 1 else 'are'} only {used} here")
        watching.say("loading PyTorch")  # seconds; what is wrong with the flags was said before
        with loading_torch():
            from spes_p2p.peer.run import run_peer

        watching.last_words = run_peer(options, watching.bus, watching.say, watching.show, watching.pause)

"""`spes-p2p bootstrap`: the node that others meet first. Only flags; the work is in `peer/bootstrap.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spes_p2p.cli.arguments import (
    AnnounceMaddrs,
    HostMaddrs,
    IdentityPath,
    MaxDownload,
    MaxUpload,
    MetricsHost,
    MetricsPort,
    Port,
    option,
)
from spes_p2p.cli.showing import loading_torch, show_hub_bars


def bootstrap(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Config overrides, such as sync.steps_per_round=50.")
    ] = None,
    config: Annotated[
        Path | None, option("Config of the run: a file or a bundled name (default: serve the DHT only).")
    ] = None,
    mirror: Annotated[
        str | None, option("Mirror a run that somebody else started; a mirror signs nothing.", metavar="INVITE")
    ] = None,
    data: Annotated[
        str | None, option("Folder of the run's token shards (a mirror fetches them from peers by default).")
    ] = None,
    max_data_disk: Annotated[
        str, option("Most disk space for data that a mirror copies from peers.", metavar="SIZE")
    ] = "20GB",
    output: Annotated[
        Path | None,
        option(
            "Folder for identity and certificates (default: bootstrap-node; for a mirror: mirror).", "--output", "-o"
        ),
    ] = None,
    archive: Annotated[
        Path | None,
        option("Also keep the newest state, in this folder, so that the run outlives its peers.", metavar="DIR"),
    ] = None,
    serve: Annotated[
        bool, option("Also average and store values for peers; those behind NAT then need no public peer.", "--serve")
    ] = False,
    init_from: Annotated[
        Path | None,
        option(
            "Start the run from this model, a folder or one of the hub (see import and upcycle).",
            metavar="HF_DIR|ORG/NAME[@REVISION]",
        ),
    ] = None,
    initial_peers: Annotated[list[str] | None, option("Join the DHT of these nodes instead of starting one.")] = None,
    port: Port = None,
    host_maddrs: HostMaddrs = None,
    announce_maddrs: AnnounceMaddrs = None,
    identity_path: IdentityPath = None,
    max_upload: MaxUpload = None,
    max_download: MaxDownload = None,
    metrics_port: MetricsPort = None,
    metrics_host: MetricsHost = "127.0.0.1",
) -> None:
    """Starts the DHT and a run, and prints the command for volunteers; or mirrors a run. Needs no GPU.

    Example: spes-p2p bootstrap --config tiny --data shards --port 31337
    """
    from spes_p2p.cli.output import BackgroundOutput
    from spes_p2p.peer.options import NetworkOptions, listening, meeting, parse_data_disk, parse_limit

    with loading_torch():
        from spes_p2p.peer.bootstrap import BootstrapOptions, run_bootstrap

    mirrored = None if mirror is None else meeting((mirror,), initial_peers or ())
    network = NetworkOptions(
        tuple(initial_peers or ()) if mirrored is None else mirrored.addresses,
        listening(host_maddrs, port),
        tuple(announce_maddrs or ()),
        identity_path,
        False,
        parse_limit(max_upload, "--max-upload"),
        parse_limit(max_download, "--max-download"),
    )
    if init_from is not None:
        show_hub_bars()
    options = BootstrapOptions(
        network, output or Path("bootstrap-node" if mirror is None else "mirror"), config, data, tuple(overrides or ()),
        archive, init_from, serve=serve, mirror=mirrored, max_data_disk=parse_data_disk(max_data_disk),
        metrics_port=metrics_port, metrics_host=metrics_host,
    )  # fmt: skip
    with BackgroundOutput() as lines:
        run_bootstrap(options, lines.say, lambda command: lines.say(f"\nor, using the address:\n  {command}\n"))

"""`spes-p2p dashboard`: flags, and a clear error where the web packages are missing; the work is in `dashboard/`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spes_p2p.cli.arguments import Fingerprint, Invitation, OptionalPeers, RunId, option


def dashboard(
    invitation: Invitation = None,
    initial_peers: OptionalPeers = None,
    run_id: RunId = None,
    fingerprint: Fingerprint = None,
    port: Annotated[int, option("Port of the web page; 0 picks a free one.", min=0, max=65535)] = 8080,
    host: Annotated[str, option("Address to serve the page on; 0.0.0.0 opens it to other machines.")] = "127.0.0.1",
    database: Annotated[
        Path, option("File that keeps the history; without an invitation, what it holds is shown.")
    ] = Path("dashboard.sqlite"),
    replay: Annotated[
        list[Path] | None,
        option("Show a past run: metrics.jsonl of a peer, or its folder (repeat for more peers).", metavar="PATH"),
    ] = None,
) -> None:
    """Serves a web page about a run until Ctrl-C: loss, speed, experts, rounds, peers. Takes no part in the run.

    Example: spes-p2p dashboard spes1... --port 8080
    """
    from spes_p2p.errors import ConfigError
    from spes_p2p.peer.options import meeting

    found = meeting((invitation,) if invitation else (), tuple(initial_peers or ()), run_id, fingerprint)
    if replay and found.addresses:
        raise ConfigError("--replay shows a past run, but an invitation a live one", fix="give only one of the two")
    try:
        from spes_p2p.dashboard.serve import DashboardOptions, run_dashboard
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("plotly", "starlette", "uvicorn"):
            raise
        raise ConfigError(
            f"the dashboard needs the package {error.name}, which is not installed",
            fix="install it with scripts/venv.sh dashboard",
        ) from error
    live = found if found.addresses else None
    run_dashboard(DashboardOptions(live, host, port, database, tuple(replay or ())), typer.echo)

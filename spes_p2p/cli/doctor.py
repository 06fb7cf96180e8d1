"""`spes-p2p doctor`: flags, and a line for each check; the work is in `peer/doctor.py`."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spes_p2p.cli.arguments import (
    Device,
    DeviceOption,
    Fingerprint,
    HostMaddrs,
    Invitation,
    OptionalPeers,
    Port,
    RunId,
    option,
)
from spes_p2p.files import PEER_FOLDER, in_folder
from spes_p2p.observe.metrics import amount_text
from spes_p2p.observe.text import to_type

if TYPE_CHECKING:
    from spes_p2p.peer.checks import Check

PEER = Path(PEER_FOLDER)
_COLOURS = {"ok": typer.colors.GREEN, "warning": typer.colors.YELLOW, "failure": typer.colors.RED}


def doctor(
    invitation: Invitation = None,
    initial_peers: OptionalPeers = None,
    run_id: RunId = None,
    fingerprint: Fingerprint = None,
    output: Annotated[
        Path | None,
        option(
            "Folder that a peer would write to (default: peer); its key is made there, and its id shown.",
            "--output",
            "-o",
        ),
    ] = None,
    device: DeviceOption = Device.AUTO,
    max_experts: Annotated[
        int | None, option("Most expert columns to train (default: as many as fit into memory).", min=0)
    ] = None,
    port: Port = None,
    host_maddrs: HostMaddrs = None,
    as_json: Annotated[bool, option("Print one JSON object instead of lines.", "--json")] = False,
) -> None:
    """Checks in half a minute whether this machine can train in a run; downloads nothing. Exits with 1 if it cannot.

    Example: spes-p2p doctor spes1...
    """
    from spes_p2p.peer.devices import choose_device
    from spes_p2p.peer.doctor import run_checks
    from spes_p2p.peer.options import NetworkOptions, PeerOptions, listening, meeting

    found = meeting((invitation,) if invitation else (), initial_peers or (), run_id, fingerprint)
    network = NetworkOptions(found.addresses, listening(host_maddrs, port))
    options = PeerOptions(network, output or PEER, max_experts=max_experts, device=device)

    def tell(check: Check) -> None:
        if not as_json:
            typer.echo(line_of(check, sys.stdout.isatty()))

    checks = run_checks(options, found, choose_device(device), tell, makes_key=output is not None)
    failed = sum(check.level == "failure" for check in checks)
    if as_json:
        listed = [dataclasses.asdict(check) for check in checks]
        typer.echo(json.dumps({"ok": not failed, "checks": listed}, indent=2))
    else:
        typer.echo(verdict(checks, invitation, output or PEER))
    if failed:
        raise typer.Exit(1)


def line_of(check: Check, colours: bool = False) -> str:
    """One check in a line, and its fix in another one."""
    level = f"{check.level:<8}"
    shown = typer.style(level, _COLOURS[check.level], bold=True) if colours else level
    fix = f"\n{'':<17}fix: {to_type(check.fix)}" if check.fix else ""
    return f"{shown} {check.name:<8}{check.text}{fix}"


def verdict(checks: list[Check], invitation: str | None = None, output: Path = PEER) -> str:
    """The doctor's closing line: whether this machine can train, and which checks failed."""
    from spes_p2p.peer.herald import DATA_FLAG, OWN_DATA

    failed = [check.name for check in checks if check.level == "failure"]
    warned = sum(check.level == "warning" for check in checks)
    if failed:
        return f"\nthis machine cannot train in the run yet: {', '.join(failed)}"
    hints = f", with {amount_text(warned, 'warning')}" if warned else ""
    if any(check.name == "fit" for check in checks):
        command = in_folder(f"spes-p2p join {invitation or 'spes1...'}", output, PEER_FOLDER, "--output")
        if any(check.text == OWN_DATA for check in checks):
            command += DATA_FLAG
        return f"\nthis machine can train in the run{hints}: {to_type(command)}"
    return f"\nnothing was found that keeps this machine from training{hints}"

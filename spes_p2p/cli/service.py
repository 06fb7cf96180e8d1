"""`spes-p2p service install` and `uninstall`: a peer that starts with the machine. The work is in `peer/service.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spes_p2p.cli.arguments import OptionalPeers

ServiceName = Annotated[str, typer.Option(help="The unit is called spes-p2p-NAME.service.")]


def install(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[INVITE] [-- JOIN FLAGS]",
            help="The word that the organiser sent you; behind -- all that `join` takes.",
            show_default=False,
        ),
    ] = None,
    initial_peers: OptionalPeers = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of state and metrics.")] = Path("peer"),
    name: ServiceName = "peer",
    start: Annotated[bool, typer.Option("--start/--no-start", help="Start it now, and at every login.")] = True,
) -> None:
    """Makes a peer a systemd service of yours, without root: it starts with the machine, and again where it failed.

    Example: spes-p2p service install spes1... --output peer -- --nice 10 --max-upload 20Mbit
    """
    from spes_p2p.errors import ConfigError
    from spes_p2p.peer.service import Service, lingers
    from spes_p2p.peer.service import install as install_service

    folder = output.absolute()
    peers = ["--initial-peers", *initial_peers] if initial_peers else []
    arguments = (*(words or ()), *peers, "--output", str(folder), "--resume", "--log-format", "text")
    if not words and not peers:
        raise ConfigError("no invitation is given", fix="give the word that the organiser printed: spes1...")
    _check(arguments)
    path, trouble = install_service(Service(name, arguments, folder), start)
    typer.echo(f"{path}: written")
    if trouble:
        typer.echo(f"systemd could not be told: {trouble}; where it runs:", err=True)
    if trouble or not start:
        typer.echo(f"  systemctl --user daemon-reload && systemctl --user enable --now {path.name}")
    typer.echo(f"its words: journalctl --user -u {path.name} -f")
    if not lingers():
        typer.echo("it runs only while you are logged in; to let it start with the machine: loginctl enable-linger")


def uninstall(name: ServiceName = "peer") -> None:
    """Ends the service and removes its unit; the peer's folder stays.

    Example: spes-p2p service uninstall
    """
    from spes_p2p.peer.service import uninstall as uninstall_service

    path, trouble = uninstall_service(name)
    typer.echo(f"{path}: removed")
    if trouble:
        typer.echo(
            f"systemd could not be told: {trouble}; it may still run: systemctl --user stop {path.name}", err=True
        )


def _check(arguments: tuple[str, ...]) -> None:
    """What `join` would not understand is refused now: usage error, or ConfigError for a mistyped invitation."""
    from spes_p2p.cli.main import COMMANDS, build
    from spes_p2p.peer.options import meeting, split_words

    program = typer.main.get_command(build({"join": COMMANDS["join"]}, {}))
    command = getattr(program, "commands", {}).get("join", program)
    parsed = command.make_context("spes-p2p join", list(arguments)).params
    invites, _ = split_words(parsed["words"] or ())
    meeting(invites, parsed["initial_peers"] or (), parsed["run_id"], parsed["fingerprint"])

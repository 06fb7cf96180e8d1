"""`spes-p2p quickstart`: a whole swarm on this machine, from text to a trained model. Only what is shown."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spes_p2p.cli.arguments import option
from spes_p2p.observe.metrics import bytes_text
from spes_p2p.observe.text import line

if TYPE_CHECKING:
    from spes_p2p.observe.events import Event
    from spes_p2p.quickstart.first_run import Result


def quickstart(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Config overrides, such as sync.steps_per_round=5.")
    ] = None,
    peers: Annotated[int, option("Peers to start.", min=1)] = 3,
    rounds: Annotated[int, option("Rounds to train.", min=1)] = 6,
    output: Annotated[Path | None, option("Empty folder for all files (default: a new one).", "--output", "-o")] = None,
    data: Annotated[
        Path | None, option("Token shards, or text files (default: the sources of Python's standard library).")
    ] = None,
    dump_rounds: Annotated[Path | None, option("Folder to write the inputs and outputs of each round to.")] = None,
) -> None:
    """Trains a small model with several processes on this machine's CPU; needs nothing else. Takes a few minutes.

    Example: spes-p2p quickstart --peers 3 --rounds 6
    """
    import sys

    from spes_p2p.quickstart.first_run import QuickstartOptions, run

    folder = output or _new_folder()
    options = QuickstartOptions(folder, peers, rounds, data, dump_rounds, tuple(overrides or ()))
    display = _Display(sys.stdout.isatty())
    try:
        result = run(options, typer.echo, display.watch)
    finally:
        display.close()
    _show(result)
    typer.echo(f"\nAll files are in the folder {folder}/; delete it when you like. It took {result.seconds:.0f} s.")
    for problem in result.problems:
        typer.echo(f"problem: {problem}", err=True)
    if result.problems:
        raise typer.Exit(1)
    typer.echo("All peers finished, all hashes agree, and the held-out loss fell.")


def _new_folder() -> Path:
    """`quickstart`, or the first of `quickstart-2`, `quickstart-3`, ... that is not there."""
    folder, number = Path("quickstart"), 1
    while folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        number += 1
        folder = Path(f"quickstart-{number}")
    return folder


class _Display:
    """The peers while they run: a live table on a terminal, a line for each round and message without one."""

    def __init__(self, terminal: bool) -> None:
        from rich.console import Console
        from rich.live import Live

        from spes_p2p.observe.progress import render
        from spes_p2p.observe.view import PeerView

        self._make_view = PeerView
        self._views: dict[str, PeerView] = {}
        self._live = None
        if terminal:
            self._live = Live(console=Console(), get_renderable=lambda: render(self._views), refresh_per_second=4)
            self._live.start()

    def watch(self, peer: str, at: float, event: Event) -> None:
        from spes_p2p.observe.events import Step

        self._views.setdefault(peer, self._make_view()).apply(at, event)
        if self._live is None and not isinstance(event, Step):
            typer.echo(f"{peer}: {line(event)}")

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()


def _show(result: Result) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("peer", "rounds", "first loss", "last loss", "sent", "received", "state (recomputed)")
    for peer in result.peers:
        table.add_row(
            peer.name,
            str(peer.rounds),
            f"{peer.first_loss:.4f}",
            f"{peer.last_loss:.4f}",
            bytes_text(peer.bytes_sent),
            bytes_text(peer.bytes_received),
            peer.state_hash[:16],
        )
    console = Console()
    console.print(table)
    console.print(f"held-out loss: {result.held_out_before:.4f} before, {result.held_out_after:.4f} after")

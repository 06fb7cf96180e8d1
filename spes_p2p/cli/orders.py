"""The orders of `spes-p2p run`: to end a run, to let its learning rate fall, and who may take part.

Only flags and what is shown; the work is in `peer/organising.py`.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spes_p2p.cli.arguments import Fingerprint, Invitation, OptionalPeers, RunId, checked_peers, met, option
from spes_p2p.cli.showing import told
from spes_p2p.errors import ConfigError
from spes_p2p.files import NODE_FOLDER, in_folder
from spes_p2p.observe.text import to_type

if TYPE_CHECKING:
    from spes_p2p.peer.options import JoinTarget

NODE = Path(NODE_FOLDER)
EXAMPLE = "--folder bootstrap-node"
NodeFolder = Annotated[Path, option("Folder of the bootstrap node.", "--folder", "-f")]


def _meet(
    folder: Path,
    invitation: str | None = None,
    initial_peers: list[str] | None = None,
    run_id: str | None = None,
    fingerprint: str | None = None,
) -> JoinTarget:
    """The run that an order is for: the one of the folder, where no other is named. Says which it is."""
    from spes_p2p.peer.kept_invite import kept_invite

    given = invitation if invitation or initial_peers else kept_invite(folder, EXAMPLE)
    meeting = replace(met(given, initial_peers, run_id, fingerprint), folder=folder)
    told(f"run {meeting.run_id or 'at these addresses'} (folder {folder}): asking its nodes")
    return meeting


def _confirm(question: str) -> None:
    """Raises Abort where somebody says no, and ConfigError where nobody is there to say anything."""
    try:
        typer.confirm(question, abort=True)
    except typer.Abort as error:
        if sys.stdin.isatty() or not isinstance(error.__context__, EOFError):
            raise
        typer.echo()  # the question has no end of line
        raise ConfigError("nobody is there to answer: this is no terminal", fix="give --yes, if you mean it") from error


def stop(
    invitation: Invitation = None,
    initial_peers: OptionalPeers = None,
    run_id: RunId = None,
    fingerprint: Fingerprint = None,
    folder: NodeFolder = NODE,
    after_round: Annotated[
        int | None, option("Last round of the run (default: the first of which all peers hear in time).", min=1)
    ] = None,
    yes: Annotated[bool, option("Do not ask.", "--yes")] = False,
) -> None:
    """Ends a run with the organiser's key: peers commit the last round, save and exit. This cannot be undone.

    Example: spes-p2p run stop --folder bootstrap-node
    """
    meeting = _meet(folder, invitation, initial_peers, run_id, fingerprint)
    if not yes:
        name = f'run "{meeting.run_id}"' if meeting.run_id else "the run"
        _confirm(f"end {name} for everybody? This cannot be undone")
    from spes_p2p.peer.organising import stop_run

    last = stop_run(folder / "identity.key", meeting, after_round, typer.echo)
    late = "" if after_round else ", or a few later where the order comes late"
    typer.echo(f"the run ends with round {last}{late}: its peers commit it, save and exit")


def decay(
    steps: Annotated[int, option("Inner steps over which the learning rate falls to its lowest.", min=1, max=10**9)],
    invitation: Invitation = None,
    initial_peers: OptionalPeers = None,
    run_id: RunId = None,
    fingerprint: Fingerprint = None,
    folder: NodeFolder = NODE,
) -> None:
    """Lets the learning rate fall from the next round on, with the organiser's key. This cannot be undone.

    Example: spes-p2p run decay --steps 2000 --folder bootstrap-node
    """
    meeting = _meet(folder, invitation, initial_peers, run_id, fingerprint)
    from spes_p2p.peer.organising import decay_run

    counts = decay_run(folder, meeting, steps)
    command = to_type(in_folder("spes-p2p run stop", folder, NODE_FOLDER))
    typer.echo(f"the learning rate falls over {counts:,} steps from the next round on; then: {command}")


Peers = Annotated[list[str], typer.Argument(metavar="PEER", help="Ids of peers, as status --ids prints them.")]
Undo = Annotated[bool, option("Takes back what was said of these peers.", "--undo")]


def vouch(peers: Peers, undo: Undo = False, folder: NodeFolder = NODE) -> None:
    """Makes peers trusted ones in a run with strangers (swarm.trusted=vouched), with the organiser's key.

    Trusted peers vote, lead, reduce and may own columns alone; strangers only give values. It lifts a ban, too.

    Example: spes-p2p run vouch QmAbc... --folder bootstrap-node
    """
    _change_roll(peers, folder, "forgotten" if undo else "vouched")


def ban(peers: Peers, undo: Undo = False, folder: NodeFolder = NODE) -> None:
    """Excludes peers from a run from the next round on, with the organiser's key.

    Says first how many voters stay: where they are too few for a majority, the organiser's node renews the run.

    Example: spes-p2p run ban QmAbc... --folder bootstrap-node
    """
    _change_roll(peers, folder, "forgotten" if undo else "banned")


def _change_roll(peers: list[str], folder: Path, kind: str) -> None:

    named = checked_peers(peers)
    meeting = _meet(folder)
    from spes_p2p.peer.organising import change_roll

    roll, before = change_roll(folder / "identity.key", meeting, typer.echo, **{kind: named})
    for words, found in (("vouched for", roll.vouched), ("banned", roll.banned)):
        typer.echo(f"{words}: {', '.join(found) or 'nobody'}")
    typer.echo("the next round takes it up")
    if before is not None and kind == "forgotten" and {*peers} & {*before.banned}:
        typer.echo(
            "a ban that is already under way is still carried out once: such a peer may come back from the round after "
            "next on"
        )

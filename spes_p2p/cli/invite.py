"""`spes-p2p invite`: prints the invitation for volunteers. Only flags; the work is in `peer/inviting.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spes_p2p.cli.arguments import Fingerprint, Invitation, OptionalPeers, RunId


def invite(
    invitation: Invitation = None,
    initial_peers: OptionalPeers = None,
    run_id: RunId = None,
    fingerprint: Fingerprint = None,
    folder: Annotated[Path, typer.Option("--folder", "-f", help="Folder of a bootstrap node or of a peer.")] = Path(
        "bootstrap-node"
    ),
    peer: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="PEER",
            help="For this peer alone, with the organiser's key: it may vote as soon as it has joined.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Prints the newest invitation that a node on this machine kept; given an old one, makes one from the live nodes.

    Example: spes-p2p invite --folder bootstrap-node
    """
    if not initial_peers and invitation is None:
        from spes_p2p.peer.kept_invite import kept_invite

        word = kept_invite(folder)
    else:
        from spes_p2p.cli.arguments import met
        from spes_p2p.peer.inviting import fresh_invite

        word = fresh_invite(met(invitation, initial_peers, run_id, fingerprint))
    if peer is not None:
        from spes_p2p.peer.inviting import invite_for
        from spes_p2p.peer.organising import checked_peers

        word = invite_for(word, folder / "identity.key", *checked_peers([peer]))
    typer.echo(word)

"""`spes-p2p invite`: prints the invitation for volunteers. Only flags; the work is in `peer/inviting.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spes_p2p.cli.arguments import Fingerprint, Invitation, OptionalPeers, RunId, checked_peers, option
from spes_p2p.cli.showing import told


def invite(
    invitation: Invitation = None,
    initial_peers: OptionalPeers = None,
    run_id: RunId = None,
    fingerprint: Fingerprint = None,
    folder: Annotated[Path, option("Folder of a bootstrap node or of a peer.", "--folder", "-f")] = Path(
        "bootstrap-node"
    ),
    peer: Annotated[
        str | None,
        option(
            "For this peer alone, with the organiser's key: it may vote as soon as it has joined.",
            "--for",
            metavar="PEER",
        ),
    ] = None,
) -> None:
    """Prints the newest invitation that a node on this machine kept; given an old one, makes one from the live nodes.

    Example: spes-p2p invite --folder bootstrap-node
    """
    named = () if peer is None else checked_peers([peer])
    if not initial_peers and invitation is None:
        from spes_p2p.peer.kept_invite import kept_invite

        word = kept_invite(folder)
    else:
        from spes_p2p.cli.arguments import met
        from spes_p2p.peer.inviting import fresh_invite

        word = fresh_invite(met(invitation, initial_peers, run_id, fingerprint))
    if named:
        from spes_p2p.peer.folder import kept_run
        from spes_p2p.peer.inviting import full_note, invite_for, vouching_note
        from spes_p2p.swarm.invite import decode

        run = decode(word)
        word = invite_for(word, folder / "identity.key", *named)
        told(f"run {run.run_id} (folder {folder}): an invitation for {named[0]} alone")
        info = kept_run(folder, run.fingerprint.hex())
        if note := vouching_note(info) or full_note(folder, info, *named):
            told(note)
    typer.echo(word)

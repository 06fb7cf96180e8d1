"""What the commands have in common: the flags of a node, and how a run is named. Lists repeat their flag."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spes_p2p.ids import PeerId

if TYPE_CHECKING:
    from spes_p2p.peer.options import JoinTarget

MADDR = "MADDR"
_PEER_ID = re.compile(r"[1-9A-HJ-NP-Za-km-z]{40,64}")


LIMITS = "Limits"
NETWORK = "Network"
ADVANCED = "Advanced"
"""Panels of options; what everybody needs is in the first, which has no name of its own."""


def optional(text: str, metavar: str, *names: str, panel: str | None = None) -> Any:
    """A typer option that may be left out; its help `text` says what then happens."""
    return typer.Option(*names, metavar=metavar, help=text, show_default=False, rich_help_panel=panel)


Invitation = Annotated[
    str | None,
    typer.Argument(
        metavar="INVITE", help="The invitation from the organiser (spes1...), or a file with it.", show_default=False
    ),
]
OptionalPeers = Annotated[
    list[str] | None,
    typer.Option(
        "--initial-peers",
        metavar=MADDR,
        help="Address of a live node of the run, in place of an invitation; any peer will do (repeat for more).",
        show_default=False,
        rich_help_panel=NETWORK,
    ),
]
HostMaddrs = Annotated[
    list[str] | None,
    optional("Address to listen on, in place of --port (repeat for more).", MADDR, "--host-maddrs", panel=NETWORK),
]
Port = Annotated[
    int | None,
    typer.Option(
        help="TCP port to listen on, on all interfaces (default: a free one).",
        metavar="PORT",
        min=0,
        max=65535,
        show_default=False,
        rich_help_panel=NETWORK,
    ),
]
AnnounceMaddrs = Annotated[
    list[str] | None,
    optional(
        "Address that others should dial, if not one it listens on (repeat for more).",
        MADDR,
        "--announce-maddrs",
        panel=NETWORK,
    ),
]
IdentityPath = Annotated[
    Path | None, optional("Key file of this node (default: identity.key in the node's folder).", "FILE", panel=ADVANCED)
]
MaxUpload = Annotated[str | None, optional("Upload limit, such as 20Mbit (default: none).", "RATE", panel=LIMITS)]
MaxDownload = Annotated[str | None, optional("Download limit, such as 100Mbit (default: none).", "RATE", panel=LIMITS)]
MetricsPort = Annotated[
    int | None,
    typer.Option(
        help="Serve Prometheus metrics on this port (default: off).",
        metavar="PORT",
        min=1,
        max=65535,
        show_default=False,
        rich_help_panel=ADVANCED,
    ),
]
MetricsHost = Annotated[str, typer.Option(help="Local address to serve the metrics on.", rich_help_panel=ADVANCED)]
RunId = Annotated[str | None, optional("Name of the run, if several are announced.", "NAME", panel=ADVANCED)]
Fingerprint = Annotated[
    str | None, optional("Only the run with this fingerprint (its first digits will do).", "HEX", panel=ADVANCED)
]


class Device(StrEnum):
    """The device that a model is computed on."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"
    MPS = "mps"


DeviceOption = Annotated[Device, typer.Option(help="Where to compute.")]

# of what takes a model from a checkpoint or from a live run
CheckpointFolder = Annotated[Path | None, optional("A peer's folder, or one of its checkpoints.", "DIR")]
TokenizerOption = Annotated[
    str | None,
    optional(
        "byte, a file, a folder or a name on the hub, as for tokenize (default: the one the checkpoint names).", "NAME"
    ),
]


def met(
    invitation: str | None,
    initial_peers: Sequence[str] | None,
    run_id: str | None,
    fingerprint: str | None,
    folder: Path | None = None,
) -> JoinTarget:
    """The run to join and the addresses to find it at. Raises ConfigError if no invitation or address was given.

    `folder`: of a peer on this machine, whose invitation is taken then, if it has one.
    """
    from spes_p2p.errors import ConfigError
    from spes_p2p.peer.kept_invite import INVITE_FILE, kept_invite
    from spes_p2p.peer.options import meeting

    if not invitation and not initial_peers and folder is not None and (folder / INVITE_FILE).exists():
        invitation = kept_invite(folder)
    found = meeting((invitation,) if invitation else (), tuple(initial_peers or ()), run_id, fingerprint)
    if not found.addresses:
        raise ConfigError("no invitation was given", fix="give the invitation that the organiser printed: spes1...")
    return found


def checked_peers(texts: Sequence[str]) -> tuple[PeerId, ...]:
    """Ids that somebody typed. Raises ConfigError where one is not the whole id of a peer."""
    from spes_p2p.errors import ConfigError

    for text in texts:
        if not _PEER_ID.fullmatch(text):
            raise ConfigError(
                f"{text[:80]!r} is not the id of a peer",
                fix="give whole ids (Qm...), as `spes-p2p status --ids` prints them",
            )
    return tuple(map(PeerId, texts))

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


def option(text: str, *names: str, panel: str | None = None, **more: Any) -> Any:
    """A typer option with this help, in a panel."""
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


Invitation = Annotated[
    str | None,
    typer.Argument(metavar="INVITE", help="The invitation from the organiser (spes1...), or a file with it."),
]
OptionalPeers = Annotated[
    list[str] | None,
    option(
        "Address of a live node of the run, in place of an invitation; any peer will do (repeat for more).",
        "--initial-peers",
        metavar=MADDR,
        panel=NETWORK,
    ),
]
HostMaddrs = Annotated[
    list[str] | None,
    option(
        "Address to listen on, in place of --port (repeat for more).", "--host-maddrs", metavar=MADDR, panel=NETWORK
    ),
]
Port = Annotated[
    int | None,
    option(
        "TCP port to listen on, on all interfaces (default: a free one).",
        metavar="PORT",
        min=0,
        max=65535,
        panel=NETWORK,
    ),
]
AnnounceMaddrs = Annotated[
    list[str] | None,
    option(
        "Address that others should dial, if not one it listens on (repeat for more).",
        "--announce-maddrs",
        metavar=MADDR,
        panel=NETWORK,
    ),
]
IdentityPath = Annotated[
    Path | None,
    option("Key file of this node (default: identity.key in the node's folder).", metavar="FILE", panel=ADVANCED),
]
MaxUpload = Annotated[str | None, option("Upload limit, such as 20Mbit (default: none).", metavar="RATE", panel=LIMITS)]
MaxDownload = Annotated[
    str | None, option("Download limit, such as 100Mbit (default: none).", metavar="RATE", panel=LIMITS)
]
MetricsPort = Annotated[
    int | None,
    option("Serve Prometheus metrics on this port (default: off).", metavar="PORT", min=1, max=65535, panel=ADVANCED),
]
MetricsHost = Annotated[str, option("Local address to serve the metrics on.", panel=ADVANCED)]
RunId = Annotated[str | None, option("Name of the run, if several are announced.", metavar="NAME", panel=ADVANCED)]
Fingerprint = Annotated[
    str | None, option("Only the run with this fingerprint (its first digits will do).", metavar="HEX", panel=ADVANCED)
]


class Device(StrEnum):
    """The device that a model is computed on."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"
    MPS = "mps"


DeviceOption = Annotated[Device, option("Where to compute.")]

# of what takes a model from a checkpoint or from a live run
CheckpointFolder = Annotated[Path | None, option("A peer's folder, or one of its checkpoints.", metavar="DIR")]
TokenizerOption = Annotated[
    str | None,
    option(
        "byte, a file, a folder or a name on the hub, as for tokenize (default: the one the checkpoint names).",
        metavar="NAME",
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

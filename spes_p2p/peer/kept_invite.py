"""The newest invitation in a node's folder. Apart from `contacts`, so that reading it loads nothing else."""

from __future__ import annotations

from pathlib import Path

from spes_p2p.errors import ConfigError

INVITE_FILE = "invite.txt"
"""In the folder of every node."""


def kept_invite(folder: Path) -> str:
    """The newest invitation in the folder of a node. Raises ConfigError if there is none."""
    try:
        return (folder / INVITE_FILE).read_text().strip()
    except OSError as error:
        raise ConfigError(
            f"{folder} holds no invitation ({error.strerror})",
            fix="type the command where the folder is, or name the folder of a bootstrap node or of a peer, or give an "
            "invitation, however old",
        ) from error

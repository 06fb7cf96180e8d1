"""The invitation in the folder of a bootstrap node. Apart from `inviting`, so that reading it loads no network."""

from __future__ import annotations

from pathlib import Path

from spes_p2p.errors import ConfigError

INVITE_FILE = "invite.txt"
"""In the folder of a bootstrap node."""


def kept_invite(folder: Path) -> str:
    """The one that the bootstrap node of this folder printed last. Raises ConfigError where there is none."""
    try:
        return (folder / INVITE_FILE).read_text().strip()
    except OSError as error:
        raise ConfigError(
            f"{folder} holds no invitation ({error.strerror})",
            fix="give the bootstrap node's folder with --output, or an address of any live node with --initial-peers",
        ) from error

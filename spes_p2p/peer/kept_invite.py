"""The newest invitation in a node's folder. Apart from `contacts`, so that reading it loads nothing else."""

from __future__ import annotations

from pathlib import Path

from spes_p2p.errors import ConfigError
from spes_p2p.files import PEER_FOLDER

DEFAULT_FOLDER = Path(PEER_FOLDER)
"""Of a peer, where no other is named."""
INVITE_FILE = "invite.txt"
"""In the folder of every node."""


def kept_invite(folder: Path, example: str = "spes-p2p invite --folder peer") -> str:
    """The newest invitation in the folder of a node. Raises ConfigError if there is none, with an `example`."""
    try:
        return (folder / INVITE_FILE).read_text().strip()
    except OSError as error:
        raise ConfigError(
            f"{folder} holds no invitation ({error.strerror})",
            fix=f"name the folder of a peer or of a bootstrap node on this machine, as in: {example}",
        ) from error

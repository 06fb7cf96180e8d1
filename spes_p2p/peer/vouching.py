"""For whom a peer vouches as an elector: a file in its folder, which it says with its status as long as it runs."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from spes_p2p.consensus.membership import MAX_VOUCHED
from spes_p2p.errors import ConfigError
from spes_p2p.files import write_whole
from spes_p2p.ids import PeerId
from spes_p2p.peer.folder import RUN

VOUCHES = "vouches"


def vouches_in(folder: Path) -> tuple[PeerId, ...]:
    """Those in the folder of a peer, sorted."""
    try:
        named = (folder / RUN / VOUCHES).read_text().split()
    except (OSError, UnicodeDecodeError):
        return ()
    return tuple(sorted(map(PeerId, {*named})))[:MAX_VOUCHED]


def change_vouches(folder: Path, peers: Collection[PeerId], undo: bool) -> tuple[PeerId, ...]:
    """All for whom the peer of this folder vouches from now on. Raises ConfigError, StorageFull."""
    known = {*vouches_in(folder)}
    said = tuple(sorted(known - {*peers} if undo else known | {*peers}))
    if not (folder / RUN).is_dir():
        raise ConfigError(f"{folder} holds no run of a peer", fix="give the folder of a peer that votes with --folder")
    if len(said) > MAX_VOUCHED:
        raise ConfigError(f"{len(said)} peers to vouch for", fix=f"at most {MAX_VOUCHED} fit: forget some with --undo")
    write_whole(folder / RUN / VOUCHES, "\n".join(said).encode())
    return said

"""The folder of a node: one folder serves one run and one identity for ever.

identity.key        who this node is
metrics.jsonl       what happened
run/                committed state, chain of commits, votes
checkpoints/        this peer's own training state
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from spes_p2p.config.load import extends
from spes_p2p.errors import PermanentError, RemoteProtocolError
from spes_p2p.files import make_folder, write_whole
from spes_p2p.ids import Hash, PeerId
from spes_p2p.state.layout import Layout
from spes_p2p.state.store import StateStore
from spes_p2p.sync.chain import CommitFiles
from spes_p2p.sync.genesis import RunInfo
from spes_p2p.wire import pack, unpack

RUN = "run"
CHAIN = "chain"
STATE = "state"
FINGERPRINT = "fingerprint"
INFO_FILE = "info"
"""In `run/` of a node's folder: the RunInfo that the run's fingerprint is the hash of."""
OWNER = "peer_id"
CHECKPOINTS = "checkpoints"


def holds_run(output: Path) -> bool:
    """Whether a run that had begun was kept here."""
    return any((output / RUN / CHAIN).glob("*.commit")) or any((output / CHECKPOINTS).glob("*"))


def kept_run(folder: Path, fingerprint: str | None = None) -> RunInfo | None:
    """The run that the node of this folder serves, if its fingerprint begins so; None where it has served none."""
    try:
        info = unpack(RunInfo, (folder / RUN / INFO_FILE).read_bytes())
    except (OSError, RemoteProtocolError):  # none, or a damaged one: it is asked for again
        return None
    return info if info.fingerprint.hex().startswith((fingerprint or "").lower()) else None


def as_it_began(folder: Path, info: RunInfo) -> RunInfo:
    """The run of `info`, as this folder's node has begun it: an earlier version knew fewer keys of its config.

    Its peers know it by the fingerprint of that, so it stays with it.
    """
    kept = kept_run(folder)
    is_same = kept is not None and replace(kept, config=info.config) == info and extends(info.config, kept.config)
    return kept if kept is not None and is_same else info


def claim_folder(folder: Path, info: RunInfo, layout: Layout, me: PeerId) -> None:
    """Claims `folder` for the run of `info` and the node `me`.

    Raises PermanentError where another run has begun in it (it would take part in two, or begin twice), or this one as
    another node, whose votes it holds. Where nothing has begun, an initial state that was computed for another run is
    removed; StateError while another process uses it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any((folder / CHAIN).glob("*.commit")):
        _check_genesis(CommitFiles(folder / CHAIN, mends=True).parsed(0).manifest.fingerprint, folder, info)
        _check_owner(folder, me)
        write_whole(folder / INFO_FILE, pack(info))
        return
    write_whole(folder / INFO_FILE, pack(info))
    write_whole(folder / OWNER, me.encode())
    marker, name = folder / FINGERPRINT, info.fingerprint.hex()
    if marker.exists() and marker.read_text() == name:
        return
    if (folder / STATE).exists():
        StateStore(folder / STATE, layout).close()
        shutil.rmtree(folder / STATE)
    write_whole(marker, name.encode())


def open_archive(folder: Path, info: RunInfo, initial: StateStore) -> StateStore:
    """Makes a folder the archive of `info`, for ever; its states, that of round 0 too, which is in `initial`.

    Raises ConfigError where it cannot be made, and PermanentError where it is the archive of another run.
    """
    make_folder(folder, "--archive")
    marker, name = folder / FINGERPRINT, info.fingerprint.hex()
    if not marker.exists():
        write_whole(marker, name.encode())
    if (found := marker.read_text()) != name:
        raise PermanentError(
            f"{folder} is the archive of another run: its fingerprint is {found[:16]}, "
            f"that of {info.run_id} is {name[:16]}",
            fix="choose another --archive",
        )
    store = StateStore(folder / STATE, initial.layout)
    if 0 not in store.rounds():
        store.adopt(initial.version(0).folder, 0)
    return store


def _check_genesis(found: Hash, folder: Path, info: RunInfo) -> None:
    if found != info.fingerprint:
        raise PermanentError(
            f"{folder} holds another run: its fingerprint is {found.hex()[:16]}, "
            f"that of {info.run_id} is {info.fingerprint.hex()[:16]}",
            fix="use the invitation, or the config and data, that it was started with, or choose another --output",
        )


def _check_owner(folder: Path, me: PeerId) -> None:
    marker = folder / OWNER
    if not marker.exists():  # the file alone was lost: what is kept here is this run's all the same
        write_whole(marker, me.encode())
    elif (found := marker.read_text()) != me:
        raise PermanentError(
            f"{folder} belongs to peer {found}, but this peer is {me}",
            fix="use its identity.key again (--identity-path), or choose another --output",
        )

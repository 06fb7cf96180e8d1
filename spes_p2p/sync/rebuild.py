"""What can be brought back from this disk at the start, before anything is fetched: damaged versions, checkpoints.

Leaves out damaged tiles, whose bytes may come from others: see `scrub`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from spes_p2p.checkpoint.load import load_checkpoint
from spes_p2p.checkpoint.save import STATE_FOLDER, checkpoint_folders
from spes_p2p.errors import CheckpointError, StateError
from spes_p2p.state.store import StateStore, Version
from spes_p2p.sync.candidate_state import whole_state
from spes_p2p.sync.chain import Chain


def rebuild(store: StateStore, chain: Chain, checkpoints: Path, say: Callable[[str], None]) -> None:
    """Brings the newest committed state back where it cannot be read, or is gone. Raises StorageFull.

    From then on, the store also finds tiles in the checkpoints.
    """
    store.spare_folders = lambda: [folder / STATE_FOLDER for folder in reversed(checkpoint_folders(checkpoints))]
    for round in range(chain.length - 1, max(chain.length - 3, -1), -1):
        root = chain.commit(round).manifest.state_root
        if whole_state(store, round, root) is not None:
            return
        if store.salvage(round, root) is not None:
            say(f"the state of round {round} is damaged on disk; the damaged parts are fetched again")
            return
    _adopt(store, chain, checkpoints, say)


def _adopt(store: StateStore, chain: Chain, checkpoints: Path, say: Callable[[str], None]) -> None:
    """The newest checkpoint that is a committed state, if the store has none as new."""
    here = [at for at in store.rounds() if at < chain.length and _is_committed(store.version(at), chain)]
    for folder in reversed(checkpoint_folders(checkpoints)):
        saved = _opened(folder, store)
        if saved is None or saved.round >= chain.length or not _is_committed(saved, chain):
            continue
        if saved.round > max(here, default=-1):
            say(f"the committed state is not under {store.directory}: it is rebuilt from {folder.name}")
            store.adopt(saved.folder, saved.round)
        return


def _is_committed(version: Version, chain: Chain) -> bool:
    return version.root == chain.commit(version.round).manifest.state_root


def _opened(folder: Path, store: StateStore) -> Version | None:
    try:
        return load_checkpoint(folder, verify_state=False).version(store.layout)
    except (CheckpointError, StateError):  # said when training state is looked for
        return None

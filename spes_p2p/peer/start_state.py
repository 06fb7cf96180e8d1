"""A run that starts from a published checkpoint: its root goes into the config, its values into the organiser's store.

The root is part of the fingerprint (`run.initial_state`), and the state of genesis has it. So nobody can begin another
run under this name, and peers can fetch the values from anybody.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from spes_p2p.config.load import config_from_tree
from spes_p2p.config.schema import Config
from spes_p2p.data.loader import open_dataset
from spes_p2p.errors import CheckpointError, ConfigError
from spes_p2p.interop.hf import state_layout
from spes_p2p.interop.hub import model_folder
from spes_p2p.interop.importing import StartModel
from spes_p2p.interop.tokenizer import check_tokenizer
from spes_p2p.peer.folder import CHAIN, RUN
from spes_p2p.state.layout import Layout
from spes_p2p.state.store import StateStore
from spes_p2p.state.version import Version
from spes_p2p.sync.chain import Chain


def start_folder(source: Path | None, folder: Path, say: Callable[[str], None]) -> Path | None:
    """Where the model lies that the run of the organiser's `folder` starts from, downloaded if it is one of the hub.

    Once the run has begun nobody needs it. Raises what `model_folder` does.
    """
    return source if source is None or _begun(folder) is not None else model_folder(source, say)


def start_from(source: Path, config: Config, folder: Path, say: Callable[[str], None]) -> Config:
    """The config of the run that starts from the model in `source`.

    Where the run of the organiser's `folder` has begun, its genesis says what it started from, and nothing is read.
    Raises ConfigError for a model that is not the config's or data that was cut with another tokenizer, DataError for
    data that cannot be used, CheckpointError for files that are not whole.
    """
    root = _begun(folder)
    if root is None:
        start = StartModel.open(source)
        start.check_fits(config)
        if config.data.source != "local" and config.data.path:
            check_tokenizer(source, open_dataset(config), say)
        say(f"hashing the model in {source}")
        root = start.root(state_layout(config)).hex()
    tree = config.model_dump()
    tree["run"]["initial_state"] = root
    return config_from_tree(tree)


def make_start(store: StateStore, layout: Layout, config: Config, source: Path | None) -> Version:
    """Puts the values of the model into an empty store. Raises ConfigError where it is not at hand any more."""
    wanted = config.run.initial_state
    if source is None:
        raise ConfigError(
            f"the state that the run starts from is not here (run.initial_state {wanted[:16]})",
            fix="give that model with --init-from",
        )
    start = StartModel.open(source)
    start.check_fits(config)
    with start.values(layout) as values:
        version = store.create_initial(values)
    if version.root.hex() != wanted:
        store.drop(version.round)
        raise CheckpointError(
            f"the model in {source} hashes to {version.root.hex()[:16]}, but the run starts from {wanted[:16]}",
            fix="give the folder that the run was started from, unchanged",
        )
    return version


def _begun(folder: Path) -> str | None:
    chain = folder / RUN / CHAIN
    if not any(chain.glob("*.commit")):
        return None
    return Chain(chain).commit(0).manifest.state_root.hex()

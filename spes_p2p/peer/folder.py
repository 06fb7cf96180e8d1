"""The output folder of a node: one folder serves one run for ever, and nothing in it is overwritten unasked.

identity.key        who this node is
metrics.jsonl       what happened
run/                committed state, chain of commits, votes
checkpoints/        this peer's own training state
"""

from __future__ import annotations

import shutil
from pathlib import Path

from spes_p2p.errors import ConfigError, PermanentError
from spes_p2p.files import write_whole
from spes_p2p.ids import Hash
from spes_p2p.state.layout import Layout
from spes_p2p.state.store import StateStore
from spes_p2p.sync.chain import Chain
from spes_p2p.sync.genesis import RunInfo

RUN = "run"
CHAIN = "chain"
STATE = "state"
FINGERPRINT = "fingerprint"
CHECKPOINTS = "checkpoints"


def make_folder(output: Path, flag: str = "--output") -> None:
    """Raises ConfigError where it cannot be made."""
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the folder {output} of {flag} cannot be created: {error.strerror}", fix=f"choose another with {flag}"
        ) from error


def prepare_folder(output: Path, resume: bool) -> bool:
    """Creates the output folder. Returns whether it holds anything to resume.

    Raises ConfigError if it cannot be written, or if it holds a run and `resume` is False.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the output folder {output} cannot be created: {error.strerror}", fix="choose another with --output"
        ) from error
    if holds_run(output) and not resume:
        raise ConfigError(
            f"{output} already holds a run", fix="add --resume to continue it, or choose another --output"
        )
    return holds_run(output)


def holds_run(output: Path) -> bool:
    """Whether a run that had begun was kept here."""
    return any((output / RUN / CHAIN).glob("*.commit")) or any((output / CHECKPOINTS).glob("*"))


def claim_folder(folder: Path, info: RunInfo, layout: Layout) -> None:
    """Claims `folder` for the run of `info`.

    Raises PermanentError where another run has begun in it: it would take part in two, or begin twice. Where nothing
    has begun, an initial state that was computed for another run is removed; StateError while another process uses it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any((folder / CHAIN).glob("*.commit")):
        _check_genesis(Chain(folder / CHAIN).commit(0).manifest.fingerprint, folder, info)
        return
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
            fix="use the config that it was started with, or choose another --output",
        )

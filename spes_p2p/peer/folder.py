"""The output folder of a node: one folder serves one run for ever, and nothing in it is overwritten unasked.

identity.key        who this node is
metrics.jsonl       what happened
run/                committed state, chain of commits, votes
checkpoints/        this peer's own training state
"""

from __future__ import annotations

from pathlib import Path

from spes_p2p.errors import ConfigError
from spes_p2p.sync.chain import Chain
from spes_p2p.sync.genesis import RunInfo

RUN = "run"
CHAIN = "chain"
CHECKPOINTS = "checkpoints"


def prepare_folder(output: Path, resume: bool) -> bool:
    """Makes it; whether there is anything in it to go on from.

    Raises ConfigError where it cannot be written, or holds a run and is not to be resumed.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the output folder {output} cannot be made: {error.strerror}", fix="choose another"
        ) from error
    if holds_run(output) and not resume:
        raise ConfigError(
            f"{output} already holds a run", fix="add --resume to go on with it, or choose another --output"
        )
    return holds_run(output)


def holds_run(output: Path) -> bool:
    """Whether a run that had begun was kept here."""
    return any((output / RUN / CHAIN).glob("*.commit")) or any((output / CHECKPOINTS).glob("*"))


def check_folder(folder: Path, info: RunInfo) -> None:
    """Raises ConfigError where the folder of a run is another run's: it would take part in two."""
    if not (folder / CHAIN).exists():
        return
    chain = Chain(folder / CHAIN)
    if chain.length and (found := chain.commit(0).manifest.fingerprint) != info.fingerprint:
        raise ConfigError(
            f"{folder} holds another run: its fingerprint is {found.hex()[:16]}, "
            f"that of {info.run_id} {info.fingerprint.hex()[:16]}",
            fix="choose another --output, or go on with the run that is there",
        )

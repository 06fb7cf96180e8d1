"""`run_export`: a state, from one peer's checkpoint or fetched from the live run, as a Hugging Face folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spes_p2p.checkpoint.load import Checkpoint, load_checkpoint, load_latest
from spes_p2p.checkpoint.save import METADATA_FILE
from spes_p2p.config.load import published_config
from spes_p2p.config.schema import Config
from spes_p2p.config.sections import DataConfig
from spes_p2p.data.tokenizers import ByteTokenizer, NoEndOfText, load_tokenizer
from spes_p2p.errors import ConfigError, DataError
from spes_p2p.interop.card import Facts, HeldOut
from spes_p2p.interop.export import export_model, filled_folder, trimmed
from spes_p2p.interop.hf import hf_config, state_layout
from spes_p2p.interop.tokenizer import Publishable
from spes_p2p.interop.weights import Dtype, Format
from spes_p2p.observe.events import Eval, Round
from spes_p2p.observe.sinks import METRICS_FILE, EventReader
from spes_p2p.peer.fetching import Fetched, fetch_newest
from spes_p2p.peer.folder import CHECKPOINTS
from spes_p2p.peer.network import visit
from spes_p2p.peer.options import JoinTarget
from spes_p2p.state.version import Version

Say = Callable[[str], None]
Report = Callable[[str, int, int], None]
"""Is told of (what is being done, bytes done, bytes in all)."""
FETCHED = "fetched"
NOWHERE = JoinTarget()


@dataclass(frozen=True)
class ExportOptions:
    """`checkpoint`: a step's folder, or one that holds such (a peer's folder too); None: the live `run`.

    `tokenizer`: as for `spes-p2p tokenize`; None: the one that the checkpoint or the run names, if they do.
    """

    output: Path
    checkpoint: Path | None = None
    run: JoinTarget = NOWHERE
    dtype: Dtype = "fp32"
    max_shard_bytes: int = 5 * 10**9
    tokenizer: str | None = None


def run_export(options: ExportOptions, say: Say, report: Report = lambda what, done, total: None) -> Facts:
    """Writes the model to `options.output` and returns the facts about its state.

    Raises ConfigError, CheckpointError, DataError (the tokenizer), NetworkError, StorageFull.
    """
    wanted = options.tokenizer
    if wanted is not None:  # before a model is fetched or read
        with suppress(NoEndOfText):  # who has the data may know it
            load_tokenizer(wanted)

    def check(config: Config) -> None:
        hf_config(trimmed(config.model))
        if wanted is not None:
            Publishable(wanted, _document_end(config)).check_fits(config.model.vocab_size)

    with filled_folder(options.output) as folder:
        own: Mapping[str, Any] = {}
        if options.checkpoint is not None:
            checkpoint = find_checkpoint(options.checkpoint, say)
            version, facts = _of_checkpoint(checkpoint)
            own = checkpoint.run
        else:
            fetched = fetch_over_network(options.run, folder / FETCHED, say, report, check)
            version, facts = fetched.version, facts_of_run(fetched)
        data, end = facts.config.data, own.get("eos_id")
        if end is None:  # the peer gets its data from others
            end = _document_end(facts.config)
        tokenizer = (
            _named_tokenizer(own.get("tokenizer"), end, data, say) if wanted is None else Publishable(wanted, end)
        )
        if tokenizer is not None and data.tokenizer_hash not in ("", tokenizer.fingerprint):
            say(
                f"warning: tokenizer {tokenizer.name!r} differs from the one of the run's data: its hash begins "
                f"with {tokenizer.fingerprint[:16]}, that of the run's data with {data.tokenizer_hash[:16]}"
            )
        how = Format(options.dtype, options.max_shard_bytes)
        export_model(version, facts, folder, how, tokenizer, lambda done, total: report("export", done, total))
        shutil.rmtree(folder / FETCHED, ignore_errors=True)
    return facts


def _document_end(config: Config) -> int | None:
    """What the run says of it; None where that is not known."""
    return config.model.document_end if config.data.eos_id is None else config.data.eos_id


def _named_tokenizer(own: str | None, end: int | None, data: DataConfig, say: Say) -> Publishable | None:
    """The tokenizer that the peer's data names (`own`), or the run; None, and why, where none can be loaded.

    `end`: the id that ends a document, where that is known.
    """
    why = "the run names none"
    named = data.tokenizer
    if named != ByteTokenizer.name and os.path.lexists(named):  # what lies here is not what the organiser means
        why, named = f"the run names {named!r}, and a file or folder here has this name", ""
    for name in dict.fromkeys((own or "", named)):
        try:
            if name:
                return Publishable(name, end)
        except DataError as error:
            why = str(error)
    known = f" (its hash begins with {data.tokenizer_hash[:16]})" if data.tokenizer_hash else ""
    say(f"exported without a tokenizer: {why}; add the one of the run's data{known} with --tokenizer")
    return None


def find_checkpoint(folder: Path, say: Say) -> Checkpoint:
    """The checkpoint at `folder`, or the newest whole one under it (a peer's folder). Raises CheckpointError."""
    if (folder / METADATA_FILE).is_file():
        return load_checkpoint(folder)
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}", fix="give a peer's folder, or one of its checkpoints")
    checkpoint, warnings = load_latest(_root_of(folder))
    for text in warnings:
        say(text)
    return checkpoint


def metrics_of(folder: Path) -> Path:
    """The metrics.jsonl of the peer whose checkpoint, or checkpoints, are at `folder`; it may not be there."""
    folder = folder.absolute()  # a step's folder may be called from inside the peer's
    root = folder.parent if (folder / METADATA_FILE).is_file() else _root_of(folder)
    return root.parent / METRICS_FILE


def _root_of(folder: Path) -> Path:
    return folder / CHECKPOINTS if (folder / CHECKPOINTS).is_dir() else folder


def _of_checkpoint(checkpoint: Checkpoint) -> tuple[Version, Facts]:
    run = checkpoint.run
    config = published_config(run["config"], origin=f"the config in {checkpoint.folder}")
    version = checkpoint.version(state_layout(config))
    peers, held_out = _seen(metrics_of(checkpoint.folder), checkpoint.round)
    return version, Facts(
        run["run_id"], run["fingerprint"], version.root.hex(), config, checkpoint.round, checkpoint.step,
        run.get("tokens"), peers, held_out,
    )  # fmt: skip


def facts_of_run(fetched: Fetched) -> Facts:
    """What the newest certificate says of a state."""
    info, manifest = fetched.info, fetched.commit.manifest
    return Facts(
        info.run_id, info.fingerprint.hex(), manifest.state_root.hex(), fetched.config, manifest.round, manifest.step,
        manifest.tokens, peers=fetched.peers,
    )  # fmt: skip


def _seen(metrics: Path, last_round: int) -> tuple[int | None, HeldOut | None]:
    """The largest roster and the newest held-out loss up to a round, as a peer's metrics.jsonl tells them."""
    peers, held_out = None, None
    for _, event in EventReader(metrics).read():
        if isinstance(event, Round) and event.round <= last_round:
            peers = max(peers or 0, event.roster_size)
        elif isinstance(event, Eval) and event.round <= last_round:
            held_out = HeldOut(event.round, event.loss)
    return peers, held_out


def fetch_over_network(
    run: JoinTarget, folder: Path, say: Say, report: Report, check: Callable[[Config], None]
) -> Fetched:
    """The newest state of a live run, in `folder`; `check` may refuse its config. Raises Stopped on Ctrl-C."""
    folder.mkdir()
    return visit(
        run,
        lambda network: fetch_newest(
            network, folder, run.run_id, run.fingerprint, lambda done, total: report("fetch", done, total), check
        ),
        say,
    )

"""The embedded first run: text of this Python to a model that several processes trained together, checked at the end.

Everything in it is the real thing, only small: the tokenizer, the bootstrap node, the peers over loopback libp2p. What
is shown while it runs is up to the caller.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from spes_p2p.config.fingerprint import split_overrides
from spes_p2p.config.load import bundled_config, changed, load_config
from spes_p2p.config.schema import Config
from spes_p2p.data.corpus import build_stdlib_corpus
from spes_p2p.data.loader import held_out_batches, open_dataset
from spes_p2p.data.tokenize import TokenizeOptions, tokenize
from spes_p2p.errors import ConfigError
from spes_p2p.files import made_folder, on_a_sound_disk
from spes_p2p.interop.hf import state_layout
from spes_p2p.observe.events import Event, Step
from spes_p2p.observe.view import PeerView
from spes_p2p.quickstart.processes import LocalSwarm, Process
from spes_p2p.state.hashes import hash_tiles
from spes_p2p.state.initial import InitialState
from spes_p2p.state.layout import BlockSource, Layout
from spes_p2p.state.store import StateStore
from spes_p2p.train.trainer import Trainer

CORPUS_BYTES = 4 * 2**20
CONFIG = "tiny"


@dataclass(frozen=True)
class QuickstartOptions:
    """`data`: token shards (a folder with manifest.json) or text to tokenize; None: the text of this Python."""

    output: Path
    peers: int = 3
    rounds: int = 6
    data: Path | None = None
    dump_rounds: Path | None = None
    overrides: tuple[str, ...] = ()
    timeout_seconds: float = 1800.0


@dataclass(frozen=True)
class PeerResult:
    """How one peer ended: `rounds` is the last one that it has, applied one by one or caught up with.

    `state_hash` is recomputed from its store; losses are NaN where none was seen.
    """

    name: str
    exit_code: int | None
    rounds: int
    first_loss: float
    last_loss: float
    bytes_sent: int
    bytes_received: int
    state_hash: str
    committed_hash: str


@dataclass(frozen=True)
class Result:
    """The whole quickstart. `problems` is empty when every promise was kept."""

    peers: tuple[PeerResult, ...]
    held_out_before: float
    held_out_after: float
    seconds: float
    problems: tuple[str, ...]


def prepare(options: QuickstartOptions, say: Callable[[str], None]) -> tuple[Path, Config, list[str], list[str]]:
    """Data, config, and the overrides that the bootstrap node and that each peer gets. What is wrong with overrides is
    said before anything is written."""
    agreed, local = split_overrides(options.overrides)
    experts = load_config(bundled_config(CONFIG), agreed).model.num_experts
    share = min(experts, -(-experts // options.peers))
    sizes = [f"swarm.min_peers={options.peers}", f"swarm.experts_per_peer={share}"]
    agreed = [*(size for size in sizes if not any(o.startswith(size.split("=")[0]) for o in agreed)), *agreed]
    config = load_config(bundled_config(CONFIG), [*agreed, *local])
    with made_folder(options.output), on_a_sound_disk(options.output):
        if any(options.output.iterdir()):
            raise ConfigError(f"{options.output} is not empty", fix="remove it, or choose another --output")
        data = _token_shards(options, say)
    return data, changed(config, [f"data.path={data}"]), agreed, local


def _token_shards(options: QuickstartOptions, say: Callable[[str], None]) -> Path:
    if options.data is not None and (options.data / "manifest.json").exists():
        return options.data
    source = options.data
    if source is None:
        say("collecting the text of this Python's standard library")
        source = options.output / "corpus"
        build_stdlib_corpus(source, CORPUS_BYTES)
    say("tokenizing it (bytes)")
    shards = options.output / "tokens"
    manifest = tokenize([str(source)], shards, TokenizeOptions(tokenizer="byte", processes=2)).manifest
    say(f"{manifest.tokens:,} tokens of {manifest.documents:,} documents")
    return shards


def run(
    options: QuickstartOptions,
    say: Callable[[str], None],
    watch: Callable[[str, float, Event], None],
) -> Result:
    """Runs it. `watch` gets every event of every peer: (peer, time, event)."""
    started = time.monotonic()
    data, config, agreed, local = prepare(options, say)
    with LocalSwarm(options.output) as swarm:
        say(f"starting a bootstrap node and {options.peers} peers")
        swarm.bootstrap(CONFIG, data, agreed)
        names = [f"peer-{index}" for index in range(options.peers)]
        for name in names:
            swarm.peer(name, data, _arguments(options, name, local))
        swarm.wait_for_end(names, options.timeout_seconds, watch)
        processes = [swarm.processes[name] for name in names]
    layout = state_layout(config)
    peers = tuple(_result(process, layout) for process in processes)
    before, after = _held_out(options.output / names[0], config, layout)
    return Result(peers, before, after, time.monotonic() - started, find_problems(options, peers, before, after))


def _arguments(options: QuickstartOptions, name: str, local: Sequence[str]) -> list[str]:
    arguments = ["--until-round", str(options.rounds)]
    if options.dump_rounds is not None:
        arguments += ["--dump-rounds", str(options.dump_rounds / name)]
    return [*arguments, *local]


def _result(process: Process, layout: Layout) -> PeerResult:
    view = PeerView()
    for at, event in process.seen:
        view.apply(at, event)
    store = StateStore(process.folder / "run" / "state", layout, read_only=True)
    version = store.latest()
    found = layout.root_of(hash_tiles(version.tile(tile.id) for tile in layout.tiles)).hex() if version else ""
    losses = [event.loss for _, event in process.seen if isinstance(event, Step)] or [float("nan")]
    return PeerResult(
        process.name,
        process.exit_code,
        view.round,
        losses[0],
        losses[-1],
        view.bytes_sent,
        view.bytes_received,
        found,
        view.model_hash,
    )


def _held_out(folder: Path, config: Config, layout: Layout) -> tuple[float, float]:
    """Held-out loss of the initial and of the last committed state."""
    dataset = open_dataset(config)
    trainer = Trainer(config, layout, torch.device("cpu"))
    store = StateStore(folder / "run" / "state", layout, read_only=True)
    last = store.latest()

    def loss(values: BlockSource) -> float:
        trainer.adopt((), values, 0)
        return trainer.evaluate(held_out_batches(dataset, config, config.eval.sequences))

    initial = InitialState(layout, config.run.seed, config.model.init_std)
    return loss(initial), loss(last) if last is not None else float("nan")


def find_problems(
    options: QuickstartOptions, peers: Sequence[PeerResult], before: float, after: float
) -> tuple[str, ...]:
    """Promises that were not kept, in words; `before` and `after` are held-out losses."""
    problems = [f"{peer.name} ended with exit code {peer.exit_code}" for peer in peers if peer.exit_code]
    problems += [
        f"{peer.name} has round {peer.rounds} of {options.rounds}" for peer in peers if peer.rounds < options.rounds
    ]
    problems += [
        f"the state of {peer.name} does not hash to what was committed"
        for peer in peers
        if peer.state_hash != peer.committed_hash
    ]
    if len({peer.state_hash for peer in peers}) > 1:
        problems.append("the peers do not have the same state")
    if not after < before:
        problems.append(f"the held-out loss did not fall ({before:.4f} to {after:.4f})")
    return tuple(problems)

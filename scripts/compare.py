"""Trains one model under several methods for the same tokens and seeds, in one process, and writes what came out.

    python scripts/compare.py --steps 200 --seeds 0 1 --output docs/results.md
    python scripts/compare.py --config small --data shards --device cuda --steps 700

Centralized (one peer), DiLoCo with plain averaging and with its outer Nesterov step, SPES without and with merge, with
two owners a column, a rising H, and two periods. All but the named settings are those of the config; every method
starts from the same values, and a step has the tokens of all peers together. The sync is that of real peers, on the
in-memory network. Beside the table it writes two plots (SVG; pip extra plot): held-out loss against tokens and against
bytes. --json keeps the points.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from spes_p2p.config.load import load_config
from spes_p2p.config.schema import Config
from spes_p2p.data.corpus import build_stdlib_corpus
from spes_p2p.data.loader import open_dataset
from spes_p2p.data.tokenize import TokenizeOptions, tokenize
from spes_p2p.observe.metrics import bytes_text, count_text
from spes_p2p.peer.devices import choose_device
from spes_p2p.peer.options import config_path
from spes_p2p.testing.training_swarm import Point, Training, train
from spes_p2p.train.scratch import Scratch

CORPUS_BYTES = 8 * 2**20
STATE_BYTES, TRAINED_BYTES = 4, 16
"""A value in fp32; one that is trained, with its gradient and two moments."""
PERIODS = 4
"""With two periods, so many times as often are shared weights averaged as a column is handed out."""


@dataclass(frozen=True)
class Method:
    """A name, and what it changes."""

    name: str
    overrides: tuple[str, ...]


def methods_of(config: Config, peers: int, steps_per_round: int) -> list[Method]:
    """What is compared. H is `steps_per_round` for all but the rising one, and for experts alone in two periods."""
    experts, batch = config.model.num_experts, config.optimizer.batch_sequences
    each = -(-experts // peers)
    plain = (f"sync.steps_per_round={steps_per_round}", "sync.merge_alpha=0")
    rising = f"sync.steps_per_round=[[{2 * steps_per_round}, {max(1, steps_per_round // 4)}], [0, {steps_per_round}]]"
    spes = (f"swarm.min_peers={peers}", f"swarm.experts_per_peer={each}", "swarm.target_replicas=1")
    everything = f"swarm.experts_per_peer={experts}"
    alone = ("swarm.min_peers=1", f"optimizer.batch_sequences={batch * peers}")
    merge = (f"sync.merge_alpha={config.sync.merge_alpha or 0.05}", f"sync.merge_interval={steps_per_round}")
    often = often_of(steps_per_round)
    twice = (f"swarm.experts_per_peer={min(experts, 2 * each)}", "swarm.target_replicas=2")
    diloco = (*plain, f"swarm.min_peers={peers}", everything, f"swarm.target_replicas={peers}")
    return [
        Method("centralized", (*plain, everything, *alone, f"optimizer.micro_batch_sequences={batch}")),
        Method("DiLoCo, plain averaging", diloco),
        Method("DiLoCo, outer Nesterov", (*diloco, "sync.outer=nesterov")),
        Method("SPES", (*plain, *spes)),
        Method("SPES, merge", (*plain, *spes, *merge)),
        Method("SPES, 2 owners", (*plain, *spes, *twice)),
        Method("SPES, rising H", (*plain, *spes, rising)),
        Method("SPES, two periods", (*plain, *spes, f"sync.steps_per_round={often}", f"sync.expert_rounds={PERIODS}")),
    ]


def often_of(steps_per_round: int) -> int:
    """Steps between two averages of shared weights, with two periods."""
    return max(1, steps_per_round // PERIODS)


@dataclass(frozen=True)
class Outcome:
    """One method and one seed."""

    method: str
    seed: int
    peers: int
    training: Training

    @property
    def last(self) -> Point:
        return self.training.points[-1]


def run(arguments: argparse.Namespace, data: Path, seed: int, folder: Path) -> Iterator[Outcome]:
    """Every method with one seed; `folder` takes what its peers keep, for as long as it trains."""
    common = (f"data.path={data}", *arguments.overrides)
    base = load_config(config_path(arguments.config), common)
    for method in methods_of(base, arguments.peers, arguments.steps_per_round):
        config = load_config(config_path(arguments.config), (*common, *method.overrides, f"run.seed={seed}"))
        started = time.perf_counter()
        with tempfile.TemporaryDirectory(dir=folder) as own:
            training = train(config, Path(own), open_dataset(config), arguments.steps, arguments.device)
        outcome = Outcome(method.name, seed, config.swarm.min_peers, training)
        seconds = time.perf_counter() - started
        print(f"seed {seed}, {method.name}: {outcome.last.held_out_loss:.4f} ({seconds:.0f} s)", flush=True)
        yield outcome


def table(found: Sequence[Outcome], state_values: int) -> list[str]:
    """Markdown: means over the seeds, and what each seed gave."""
    rows = [
        "| method | peers | held-out loss | by seed | tokens | rounds | sent by a peer | memory of a peer |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in dict.fromkeys(outcome.method for outcome in found):
        own = [outcome for outcome in found if outcome.method == name]
        losses = [outcome.last.held_out_loss for outcome in own]
        one = own[0]
        memory = TRAINED_BYTES * one.training.trained_values
        memory += STATE_BYTES * (state_values - one.training.trained_values)
        rows.append(
            f"| {name} | {one.peers} | **{statistics.mean(losses):.4f}** | {', '.join(f'{x:.4f}' for x in losses)} "
            f"| {count_text(one.last.tokens)} | {one.last.round} "
            f"| {bytes_text(one.last.bytes_sent // one.peers)} | {bytes_text(memory)} |"
        )
    return rows


def plot(found: Sequence[Outcome], folder: Path, stem: str) -> list[str]:
    """Two plots; their file names. Says so where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plots: matplotlib is not installed (scripts/venv.sh plot)", file=sys.stderr)
        return []
    names = []
    for what, field in (("tokens", "tokens"), ("bytes sent by all peers", "bytes_sent")):
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        for name in dict.fromkeys(outcome.method for outcome in found):
            own = [outcome.training.points for outcome in found if outcome.method == name]
            points = list(zip(*own))  # rounds of the seeds side by side: they have the same steps
            xs = [getattr(some[0], field) for some in points]
            axes.plot(xs, [statistics.mean(p.held_out_loss for p in some) for some in points], label=name)
        axes.set(xlabel=what, ylabel="held-out loss (nats a token)", xscale="linear" if field == "tokens" else "symlog")
        axes.legend()
        axes.grid(alpha=0.3)
        names.append(f"{stem}-{field.replace('_', '-')}.svg")
        figure.savefig(folder / names[-1], metadata={"Date": None})
    return names


def page(
    arguments: argparse.Namespace, found: Sequence[Outcome], config: Config, images: Sequence[str], seeds: Sequence[int]
) -> str:
    """The whole result, with the command that gives it again."""
    from spes_p2p.planning.sizes import Sizes

    sizes, often = Sizes.of(config.model), often_of(arguments.steps_per_round)
    # overrides first: --seeds takes what follows it
    words = ["python scripts/compare.py", *arguments.overrides, f"--config {arguments.config}"]
    words += [f"--steps {arguments.steps}", f"--peers {arguments.peers}"]
    words += [f"--steps-per-round {arguments.steps_per_round}", f"--seeds {' '.join(map(str, seeds))}"]
    corpus = "a copy of the standard library's sources" if arguments.data is None else "a corpus of its own"
    tokens = arguments.peers * config.optimizer.batch_sequences * config.data.sequence_length
    lines = [
        "# Results",
        "",
        "<!-- Written by scripts/compare.py, which says what is compared; run it again rather than edit this. -->",
        "",
        f"{count_text(sizes.total)} parameters ({config.model.num_experts} experts, top-{config.model.top_k}), "
        f"{arguments.steps} steps of {tokens:,} tokens, {arguments.peers} peers, H = {arguments.steps_per_round}, "
        f"{len(seeds)} seed(s), on {arguments.device.type}, trained on {corpus}. Loss: cross entropy in nats a "
        f"token on {config.eval.sequences} held-out sequences, of the committed model after the last round.",
        "",
        "    " + " ".join(words),
        "",
        *table(found, sizes.total),
        "",
        "Memory is what weights, gradients and moments take in fp32, without activations: 16 bytes a trained value, 4 "
        "for the others. Bytes are counted on the in-memory network. Two periods: shared weights are averaged every "
        f"{often} steps, a column is handed out every {PERIODS * often}. Outer Nesterov: learning rate "
        f"{config.sync.outer_lr}, momentum {config.sync.outer_momentum}, as published, where a round has 500 steps and "
        "there are over a hundred of them; its momentum is on disk, and is not in the memory counted here.",
        "",
        "A small model, few steps and few seeds: differences that are no larger than those between seeds mean nothing"
        + ("." if len(seeds) > 1 else ", and one seed does not tell how large those are."),
        "",
        *(f"![held-out loss]({image})" for image in images),
    ]
    return "\n".join(lines).rstrip("\n") + "\n"


def make_data(folder: Path) -> Path:
    """Bytes of the standard library's sources."""
    files = build_stdlib_corpus(folder / "corpus", CORPUS_BYTES)
    tokenize([str(file) for file in files], folder / "tokens", TokenizeOptions(tokenizer="byte", processes=1))
    return folder / "tokens"


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("overrides", nargs="*", help="changes to the config, such as model.d_model=64")
    parser.add_argument("--config", type=Path, default=Path("tiny"))
    parser.add_argument("--data", type=Path, help="token shards (default: the standard library's sources, as bytes)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--steps-per-round", type=int, default=20)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--device", type=choose_device, default="auto")
    parser.add_argument("--output", type=Path, default=Path("docs/results.md"))
    parser.add_argument("--json", type=Path, help="write all points there")
    return parser.parse_args(words)


@contextlib.contextmanager
def working_folder() -> Iterator[Path]:
    """Removed on the way out, also after a signal; what a SIGKILL leaves is removed by the next comparison."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    heeded = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) != signal.SIG_IGN]  # nohup
    handlers = {number: signal.signal(number, leave) for number in heeded}
    scratch = Scratch("spes-p2p-compare-")
    try:
        yield scratch.path
    finally:
        scratch.remove()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def main(words: Sequence[str] | None = None) -> None:
    arguments = parse(words)
    if isinstance(arguments.device, str):
        arguments.device = choose_device(arguments.device)
    with working_folder() as folder:
        data = arguments.data or make_data(folder)
        found: list[Outcome] = []
        for at, seed in enumerate(arguments.seeds, 1):
            found += run(arguments, data, seed, folder)
            write(arguments, found, arguments.seeds[:at])  # a later seed may take too long
    print(f"{arguments.output} is written")


def write(arguments: argparse.Namespace, found: Sequence[Outcome], seeds: Sequence[int]) -> None:
    """The page, its plots, and the points, of the seeds until now."""
    config = load_config(config_path(arguments.config), arguments.overrides)
    images = plot(found, arguments.output.parent, arguments.output.stem)
    arguments.output.write_text(page(arguments, found, config, images, seeds))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([dataclasses.asdict(outcome) for outcome in found], indent=1) + "\n")


if __name__ == "__main__":
    main()

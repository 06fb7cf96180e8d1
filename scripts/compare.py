"""Trains one model under several methods ("arms") for the same tokens and seeds, and writes what came out.

    python scripts/compare.py --benchmark small-cpu --json small-cpu.json --output docs/results.md
    python scripts/compare.py --benchmark small-cpu --arms spes diloco --steps 100 --seeds 0 1 --json mine.json
    python scripts/compare.py --config small --data shards --device cuda --steps 700

An arm is a line of `ARMS`: what it changes of the config; every arm starts from the same values, and a step has the
tokens of all peers together. The sync is that of real peers, on the in-memory network. Arms run side by side on the
cores, one core each; the same seed gives the same order of the data to each, so losses are compared in pairs. With
--json every arm and seed is written there when it has ended, and what is there already is not run again. Beside the
table there are plots (SVG; pip extra plot): held-out loss against tokens, bytes and memory. What stands in the page
from its heading "What it says" on is written by people, and kept.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import hashlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from spes_p2p.config.load import config_to_yaml, load_config
from spes_p2p.config.schema import Config
from spes_p2p.data.corpus import build_stdlib_corpus
from spes_p2p.data.loader import open_dataset
from spes_p2p.data.manifest import hash_tokens
from spes_p2p.data.tokenize import TokenizeOptions, tokenize
from spes_p2p.errors import ConfigError, SpesError
from spes_p2p.files import write_whole
from spes_p2p.locks import Scratch
from spes_p2p.observe.metrics import bytes_text, count_text
from spes_p2p.peer.devices import choose_device
from spes_p2p.peer.options import config_path
from spes_p2p.planning.sizes import Sizes
from spes_p2p.testing.training_swarm import Measure, Point, train

CORPUS_BYTES = 8 * 2**20
PERIODS = 5
"""With two periods, so many times as often are shared weights averaged as a column is handed out."""
NOTES = "## What it says"
"""From here on the page is not ours."""
SHORT = ("<!-- In short, by hand: kept as it is. -->", "<!-- The end of what is by hand. -->")
"""What stands between these is not ours either: what the tables below say, for people in a hurry."""
POINTS = 16
"""Of a curve, about: where the held-out loss is measured."""

ARMS = {
    "centralized": "each={experts} swarm.min_peers=1 batch={whole_batch} micro={batch}",
    "diloco": "each={experts} swarm.target_replicas={peers}",
    "diloco-often": "diloco sync.steps_per_round={often}",
    "diloco-two-periods": "diloco two-periods",
    "nesterov": "diloco sync.outer=nesterov",
    "nesterov-often": "nesterov sync.steps_per_round={often}",
    "nesterov-corrected": "nesterov-often sync.outer_steps={H}",
    "nesterov-small": "nesterov-often sync.outer_lr=0.3 sync.outer_momentum=0.7",
    "spes": "",
    "spes-often": "sync.steps_per_round={often}",
    "merge": "sync.merge_alpha={merge} sync.merge_interval={H}",
    "merge-released": "merge sync.merge_kind=released",
    "shrink": "merge sync.merge_kind=shrink",
    "two-owners": "each={twice} swarm.target_replicas=2",
    "rising": "sync.steps_per_round=[[{twice_H},{quarter_H}],[0,{H}]]",
    "two-periods": "sync.steps_per_round={often} sync.expert_rounds={periods}",
    "two-periods-long": "sync.steps_per_round={often} sync.expert_rounds={long_periods}",
    "two-periods-two-owners": "two-periods two-owners",
    "guests-4": "two-periods model.guest_rank=4",
    "guests-8": "two-periods model.guest_rank=8",
    "guests-16": "two-periods model.guest_rank=16",
    "guests-often": "spes-often model.guest_rank=16",
    "guests-seldom": "model.guest_rank=16",
    "guests-long": "two-periods-long model.guest_rank=16",
    "int4": "two-periods sync.codec=int4",
    "topk": "two-periods sync.codec=topk",
    "topk2": "two-periods sync.codec=topk2",
    "topk2-decay": "topk2 sync.residual_decay=0.95",
    "topk2-dense": "topk2-decay sync.dense_rounds={periods}",
    "guests-int4": "guests-16 sync.guest_codec=int4",
    "wsd": "two-periods scheduler.name=wsd",
    "muon": "two-periods optimizer.name=muon",
    "guests-muon": "guests-16 optimizer.name=muon",
    "diloco-muon": "diloco optimizer.name=muon",
    "centralized-muon": "centralized optimizer.name=muon",
    "eight-peers-guests": "eight-peers model.guest_rank=16",
    "eight-peers": "two-periods each={half} swarm.min_peers={twice_peers} batch={half_batch} micro={half_batch}",
}  # fmt: skip
"""What each changes of SPES with merges off, one owner a column and H steps a round: names of other arms, and fields.

What stands in braces is told by `terms`, the short names of fields by `FIELDS`.
"""
FIELDS = {
    "each": "swarm.experts_per_peer",
    "batch": "optimizer.batch_sequences",
    "micro": "optimizer.micro_batch_sequences",
}


@dataclass(frozen=True)
class Benchmark:
    """A model and data that arms are compared on, by name."""

    config: str
    steps: int
    peers: int
    steps_per_round: int
    overrides: tuple[str, ...]


BENCHMARKS = {
    "small-cpu": Benchmark(
        "tiny", 800, 4, 50,
        (
            "model.d_model=128", "model.num_layers=4", "model.num_heads=4", "model.num_experts=8", "model.top_k=2",
            "model.expert_ffn=128", "model.norm_topk=true", "data.sequence_length=128", "data.held_out_fraction=0.05",
            "optimizer.batch_sequences=8", "optimizer.lr=0.002", "scheduler.warmup_steps=80",
            "scheduler.total_steps=800", "eval.sequences=384",
        ),
    ),
}  # fmt: skip
"""small-cpu: 2M parameters, bytes of the standard library's sources, 4 peers x 8 x 128 tokens a step."""


def terms(config: Config, peers: int, steps_per_round: int) -> dict[str, int | float]:
    """What an arm's line may say in braces. H is `steps_per_round`."""
    experts, batch, H = config.model.num_experts, config.optimizer.batch_sequences, steps_per_round
    each = -(-experts // peers)
    often = max(1, H // PERIODS)
    return {
        "experts": experts, "each": each, "half": max(1, each // 2), "twice": min(experts, 2 * each),
        "peers": peers, "twice_peers": 2 * peers,
        "batch": batch, "half_batch": max(1, batch // 2), "whole_batch": batch * peers,
        "H": H, "twice_H": 2 * H, "quarter_H": max(1, H // 4),
        "often": often, "periods": max(1, H // often), "long_periods": 4 * max(1, H // often),
        "merge": config.sync.merge_alpha or 0.05,
    }  # fmt: skip


def arm_overrides(name: str, config: Config, peers: int, steps_per_round: int) -> tuple[str, ...]:
    """The fields that an arm sets. Raises ConfigError for an unknown one."""
    if name not in ARMS:
        raise ConfigError(f"--arms has {name!r}, an unknown arm", fix=f"choose from {', '.join(ARMS)}")
    known = terms(config, peers, steps_per_round)
    plain = ["sync.steps_per_round={H}", "sync.merge_alpha=0", "swarm.min_peers={peers}", "swarm.target_replicas=1"]
    return tuple(word.format(**known) for word in (*plain, "swarm.experts_per_peer={each}", *_words(name)))


def _words(name: str) -> Iterator[str]:
    for word in ARMS[name].split():
        yield from _words(word) if word in ARMS else (_field(word),)


def _field(word: str) -> str:
    """`field=value` with the field's whole name."""
    field, equals, value = word.partition("=")
    return FIELDS.get(field, field) + equals + value


@dataclass(frozen=True)
class Outcome:
    """One arm and one seed. Bytes sent are those of all peers together, as counted on the network."""

    arm: str
    seed: int
    loss: float
    """Held-out, of the committed model after the last round: nats a token."""
    bytes_sent: int
    trained_bytes: int
    """Weights, gradients and moments of what is trained, as allocated at the peer that has most of them."""
    model_bytes: int
    """What the forward pass needs of the model, as allocated there."""
    peers: int
    tokens: int
    rounds: int
    cpu_seconds: float
    key: str
    """Names everything that decides the outcome, but for the code: config, data, steps, device."""
    points: tuple[Point, ...]

    @staticmethod
    def read(plain: dict[str, object]) -> Outcome:
        points = tuple(Point(**point) for point in plain.pop("points"))  # type: ignore[attr-defined]
        return Outcome(**plain, points=points)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Job:
    """An arm and a seed that are to be run."""

    arm: str
    seed: int
    config: Config
    steps: int
    device: torch.device

    @cached_property
    def key(self) -> str:
        data = self.config.data.model_copy(update={"path": ""})
        text = config_to_yaml(self.config.model_copy(update={"data": data}))
        tokens = [hash_tokens(file) for file in open_dataset(self.config).files]
        return hashlib.sha256(f"{text} {tokens} {self.steps} {self.device.type}".encode()).hexdigest()[:16]

    def run(self, folder: Path) -> Outcome:
        """`folder` takes what its peers keep, for as long as they train."""
        started = time.process_time()
        every = max(1, self.steps // POINTS)
        with tempfile.TemporaryDirectory(dir=folder) as own:
            data = open_dataset(self.config)
            found = train(self.config, Path(own), data, Measure(self.steps, every), self.device)
        last, seconds = found.points[-1], round(time.process_time() - started, 1)
        return Outcome(
            self.arm, self.seed, last.held_out_loss, last.bytes_sent, found.held.training, found.held.model,
            self.config.swarm.min_peers, last.tokens, last.round, seconds, self.key, found.points,
        )  # fmt: skip


def job_of(arguments: argparse.Namespace, data: Path, arm: str, seed: int) -> Job:
    """What `arguments` make of an arm and a seed."""
    common = (f"data.path={data}", *arguments.overrides)
    base = load_config(config_path(arguments.config), common)
    own = arm_overrides(arm, base, arguments.peers, arguments.steps_per_round)
    config = load_config(config_path(arguments.config), (*common, *own, f"run.seed={seed}"))
    return Job(arm, seed, config, arguments.steps, arguments.device)


class Results:
    """What was found until now, beside it in --json."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.found: list[Outcome] = []
        if path is not None and path.exists():
            self.found = [Outcome.read(plain) for plain in json.loads(path.read_text())]

    def has(self, job: Job) -> bool:
        return any(outcome.key == job.key and outcome.arm == job.arm for outcome in self.found)

    def add(self, outcome: Outcome) -> None:
        """In the place of an older one of that arm and seed."""
        kept = [one for one in self.found if (one.arm, one.seed) != (outcome.arm, outcome.seed)]
        self.found = sorted([*kept, outcome], key=lambda one: (list(ARMS).index(one.arm), one.seed))
        if self._path is not None:
            text = json.dumps([dataclasses.asdict(one) for one in self.found], indent=1)
            write_whole(self._path, text.encode() + b"\n")
        print(f"seed {outcome.seed}, {outcome.arm}: {outcome.loss:.4f} ({outcome.cpu_seconds:.0f} s)", flush=True)


class Children:
    """Runs each job in a process of its own, which is this script again, on one core."""

    def __init__(self, arguments: argparse.Namespace, data: Path, folder: Path) -> None:
        self._arguments, self._data, self._folder = arguments, data, folder
        self._running: set[subprocess.Popen[bytes]] = set()
        self._is_over = False

    def run(self, jobs: Sequence[Job], take: Callable[[Outcome], None]) -> None:
        """Raises SpesError where one fails; the others end first."""
        with ThreadPoolExecutor(self._arguments.jobs) as pool:
            try:
                for outcome in as_completed([pool.submit(self._outcome, job) for job in jobs]):
                    take(outcome.result())
            finally:
                self._is_over = True
                pool.shutdown(wait=False, cancel_futures=True)
                for process in list(self._running):
                    process.kill()

    def _outcome(self, job: Job) -> Outcome:
        path = self._folder / f"{job.arm}-{job.seed}.json"
        given = self._arguments
        words = [*given.overrides, "--config", given.config, "--data", self._data, "--device", given.device]
        words += ["--steps", given.steps, "--peers", given.peers, "--steps-per-round", given.steps_per_round]
        words += ["--arms", job.arm, "--seeds", job.seed, "--jobs", 1, "--json", path, "--output", ""]
        command = [sys.executable, __file__, *map(str, words)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(self._folder)}
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, env=environment, preexec_fn=end_with_parent
        ) as process:
            self._running.add(process)
            if self._is_over:  # just now
                process.kill()
            code = process.wait()
            self._running.remove(process)
        if code:
            raise SpesError(f"arm {job.arm} with seed {job.seed} ended with {code}", fix="see what it said above")
        return Outcome.read(json.loads(path.read_text())[0])


_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """In a child: the kernel ends it when the thread that started it ends, however that comes."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


_T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Of Student's t at 97.5%, by degrees of freedom from 1 on."""


def half_interval(values: Sequence[float]) -> float:
    """Half the width of the 95% confidence interval of a mean; NaN for one value."""
    if len(values) < 2:
        return math.nan
    quantile = _T_QUANTILES[min(len(values) - 2, len(_T_QUANTILES) - 1)]
    return quantile * statistics.stdev(values) / math.sqrt(len(values))


def with_interval(values: Sequence[float], sign: str = "") -> str:
    """Mean and half interval; the mean alone for one value."""
    half = half_interval(values)
    return f"{statistics.mean(values):{sign}.4f}" + ("" if math.isnan(half) else f" ± {half:.4f}")


def table(found: Sequence[Outcome]) -> list[str]:
    """Markdown: means over the seeds with 95% intervals, and the difference to the first arm over the same seeds."""
    arms = list(dict.fromkeys(outcome.arm for outcome in found))
    by_seed = {arm: {one.seed: one for one in found if one.arm == arm} for arm in arms}
    rows = [
        f"| arm | peers | held-out loss | against {arms[0]} | seeds | tokens | rounds | sent by a peer "
        "| trained memory of a peer |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for arm in arms:
        own, first = by_seed[arm], by_seed[arms[0]]
        differences = [own[seed].loss - first[seed].loss for seed in own if seed in first]
        one, loss = next(iter(own.values())), with_interval([each.loss for each in own.values()])
        against = with_interval(differences, "+") if differences and arm != arms[0] else ""
        rows.append(
            f"| {arm} | {one.peers} | **{loss}** | {against} | {len(own)} "
            f"| {count_text(one.tokens)} | {one.rounds} | {bytes_text(one.bytes_sent // one.peers)} "
            f"| {bytes_text(one.trained_bytes)} |"
        )
    return rows


BUDGETS = (0.5, 1, 2, 4)
"""Of what a peer of the first arm sends in all: where arms are compared at equal bytes."""


def loss_at(outcome: Outcome, bytes_a_peer: float) -> tuple[float, bool]:
    """Held-out loss when a peer had sent so much, between two points linearly; whether it ended with less."""
    sent, losses = zip(*((point.bytes_sent / outcome.peers, point.held_out_loss) for point in outcome.points))
    return float(np.interp(bytes_a_peer, sent, losses)), sent[-1] < bytes_a_peer


def bytes_table(found: Sequence[Outcome]) -> list[str]:
    """Markdown: the same losses by bytes sent instead of tokens. In brackets: the arm ended with fewer."""
    arms = list(dict.fromkeys(outcome.arm for outcome in found))
    whole = min(one.bytes_sent / one.peers for one in found if one.arm == arms[0])
    budgets = [part * whole for part in BUDGETS]
    rows = [
        "| arm | " + " | ".join(bytes_text(int(budget)) for budget in budgets) + " |",
        "| --- |" + " --- |" * len(budgets),
    ]
    for arm in arms:
        cells = []
        for budget in budgets:
            losses, ended = zip(*(loss_at(one, budget) for one in found if one.arm == arm))
            cells.append(f"({with_interval(losses)})" if any(ended) else with_interval(losses))
        rows.append(f"| {arm} | {' | '.join(cells)} |")
    return rows


def plot(found: Sequence[Outcome], folder: Path, stem: str) -> list[str]:
    """Three plots; their file names. Says so where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plots: matplotlib is not installed (scripts/venv.sh plot)", file=sys.stderr)
        return []
    names = []
    labels = {"tokens": "tokens", "bytes_sent": "bytes sent by all peers", "memory": "trained memory of a peer (bytes)"}
    for field, label in labels.items():
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        for arm in dict.fromkeys(outcome.arm for outcome in found):
            own = [outcome for outcome in found if outcome.arm == arm]
            if field == "memory":
                axes.scatter([own[0].trained_bytes], [statistics.mean(one.loss for one in own)], label=arm)
                continue
            points = list(zip(*(one.points for one in own)))  # the seeds' points side by side: they have the same steps
            losses = [statistics.mean(point.held_out_loss for point in some) for some in points]
            axes.plot([getattr(some[0], field) for some in points], losses, label=arm)
        axes.set(
            xlabel=label, ylabel="held-out loss (nats a token)", xscale="linear" if field == "tokens" else "symlog"
        )
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
        names.append(f"{stem}-{field.replace('_', '-')}.svg")
        figure.savefig(folder / names[-1], metadata={"Date": None})
    return names


def page(arguments: argparse.Namespace, found: Sequence[Outcome], images: Sequence[str]) -> str:
    """The whole result, with the command that gives it again."""
    config = load_config(config_path(arguments.config), arguments.overrides)
    sizes, seeds = Sizes.of(config.model), sorted({outcome.seed for outcome in found})
    arms = list(dict.fromkeys(outcome.arm for outcome in found))
    corpus = "a copy of the standard library's sources" if arguments.data is None else "a corpus of its own"
    tokens = arguments.peers * config.optimizer.batch_sequences * config.data.sequence_length
    known = terms(config, arguments.peers, arguments.steps_per_round)
    lines = [
        "# Results",
        "",
        "<!-- Written by scripts/compare.py, which says what is compared; run it again rather than edit this. -->",
        "",
        f"{count_text(sizes.total)} parameters ({config.model.num_experts} experts, top-{config.model.top_k}), "
        f"{arguments.steps} steps of {tokens:,} tokens, H = {arguments.steps_per_round}, "
        f"{len(seeds)} {'seed' if len(seeds) == 1 else 'seeds'}, on {arguments.device.type}, trained on {corpus}. "
        f"Loss: cross entropy in nats a token on {config.eval.sequences} held-out sequences, of the committed model "
        "after the last round.",
        "",
        "    " + _command(arguments, arms, seeds),
        "",
        *table(found),
        "",
        "±: 95% confidence intervals (Student's t) over seeds; differences are taken seed by seed. Trained memory: "
        "weights, gradients and moments of what the peer trains, as allocated. Bytes are counted on the in-memory "
        "network; evaluation sends none.",
        "",
        "The loss when each peer has sent so much. An arm that sends more in all is in the middle of its run then: its "
        "learning rate has not fallen, so a run made for that many bytes would do better. In brackets: the last loss "
        "of an arm that has ended with fewer.",
        "",
        *bytes_table(found),
        "",
        "What an arm changes of SPES (merges off, one owner a column, one period of H steps):",
        "",
        *(f"- {arm}: {_line(arm, known)}" for arm in arms),
        "",
        *(f"![held-out loss]({image})" for image in images),
    ]
    return "\n".join(lines).rstrip("\n") + "\n"


def with_what_is_kept(new: str, before: str) -> str:
    """The new page with what people have written on the old one: a few sentences below its title, notes at its end."""
    begin, end = SHORT
    if begin in before and end in before:
        title, rest = new.split("\n\n", 1)
        new = f"{title}\n\n{begin}{before.split(begin, 1)[1].split(end, 1)[0]}{end}\n\n{rest}"
    return new + (f"\n{NOTES}{before.split(NOTES, 1)[1]}" if NOTES in before else "")


def _line(arm: str, known: dict[str, int | float]) -> str:
    words = ARMS[arm].format(**known).split()
    return " ".join(word if word in ARMS else f"`{_field(word)}`" for word in words) or "nothing"


def _command(arguments: argparse.Namespace, arms: Sequence[str], seeds: Sequence[int]) -> str:
    words = ["python scripts/compare.py", *arguments.given]  # overrides first: --seeds takes what follows it
    if arguments.benchmark:
        words.append(f"--benchmark {arguments.benchmark}")
    else:
        words.append(f"--config {arguments.config}")
    words += [f"--steps {arguments.steps}", f"--peers {arguments.peers}"]
    words += [f"--steps-per-round {arguments.steps_per_round}"]
    return " ".join([*words, f"--arms {' '.join(arms)}", f"--seeds {' '.join(map(str, seeds))}"])


def make_data(folder: Path) -> Path:
    """Bytes of the standard library's sources."""
    files = build_stdlib_corpus(folder / "corpus", CORPUS_BYTES)
    tokenize([str(file) for file in files], folder / "tokens", TokenizeOptions(tokenizer="byte", processes=1))
    return folder / "tokens"


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("overrides", nargs="*", help="changes to the config, such as model.d_model=64")
    parser.add_argument("--benchmark", choices=BENCHMARKS, help="a config, steps, peers and H by name")
    parser.add_argument("--arms", nargs="+", metavar="NAME", default=list(ARMS), help=", ".join(ARMS))
    parser.add_argument("--config", type=Path, help="(default: tiny)")
    parser.add_argument("--data", type=Path, help="token shards (default: the standard library's sources, as bytes)")
    parser.add_argument("--steps", type=int, help="(default: 200)")
    parser.add_argument("--peers", type=int, help="(default: 4)")
    parser.add_argument("--steps-per-round", type=int, metavar="H", help="(default: 20)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--device", type=choose_device, default="auto")
    parser.add_argument("--jobs", type=int, help="arms at a time, on a core each (default: one a core; 1 on a GPU)")
    parser.add_argument("--output", default="docs/results.md", help="the page (nothing: none)")
    parser.add_argument("--json", type=Path, help="all outcomes; those that are there are not run again")
    arguments = parser.parse_args(words)
    named = BENCHMARKS.get(arguments.benchmark or "", Benchmark("tiny", 200, 4, 20, ()))
    for field in ("steps", "peers", "steps_per_round", "config"):
        if getattr(arguments, field) is None:
            setattr(arguments, field, getattr(named, field))
    arguments.given, arguments.overrides = arguments.overrides, [*named.overrides, *arguments.overrides]
    arguments.config = Path(arguments.config)
    if isinstance(arguments.device, str):
        arguments.device = choose_device(arguments.device)
    cores = len(os.sched_getaffinity(0)) if arguments.device.type == "cpu" else 1
    arguments.jobs = arguments.jobs or cores
    return arguments


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
    results = Results(arguments.json)
    with working_folder() as folder:
        data = arguments.data or make_data(folder)
        jobs = [job_of(arguments, data, arm, seed) for seed in arguments.seeds for arm in arguments.arms]
        left = [job for job in jobs if not results.has(job)]

        def take(outcome: Outcome) -> None:
            results.add(outcome)
            write(arguments, results, jobs)  # a later one may take too long

        if arguments.jobs > 1 and len(left) > 1:
            Children(arguments, data, folder).run(left, take)
        else:
            for job in left:
                take(job.run(folder))
    write(arguments, results, jobs)


def write(arguments: argparse.Namespace, results: Results, jobs: Sequence[Job]) -> None:
    """The page and its plots, of those of `jobs` that have ended."""
    keys = {(job.arm, job.key) for job in jobs}
    found = [outcome for outcome in results.found if (outcome.arm, outcome.key) in keys]
    if not arguments.output or not found:
        return
    output = Path(arguments.output)
    before = output.read_text() if output.exists() else ""
    output.write_text(with_what_is_kept(page(arguments, found, plot(found, output.parent, output.stem)), before))


if __name__ == "__main__":
    try:
        main()
    except SpesError as error:
        sys.exit(f"{error}\n  fix: {error.fix}")

"""Trains one model under several methods ("arms") for the same tokens and seeds, and writes what came out.

    python scripts/compare.py --arms spes diloco merge --seeds 0 1 --json mine.json --output mine.md
    python scripts/compare.py --benchmark small-cpu --arms spes diloco --seeds 0 1 2 --json mine.json
    python scripts/compare.py --config small --data shards --device cuda --steps 700 optimizer.lr=0.001

An arm is a line of `ARMS` in scripts/comparison/arms.py: what it changes of the config; every arm starts from
the same values, and a step has the tokens of all peers together. The sync is that of real peers, on the in-memory
network. Arms run side by side on the cores, one core each; the same seed gives the same order of the data to each, so
losses are compared in pairs, with those of --against. With --json every arm and seed is written there when it has
ended, and what the same code has made of the same settings is not run again. The learning rate falls until --steps,
unless scheduler.total_steps is set. Next to the table there are plots (pip extra plot): held-out loss against tokens,
bytes and memory. What stands in the page from its heading "What it says" on is written by people, and kept.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import lru_cache, partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts.comparison.arms import ARMS, BENCHMARKS, REFERENCE, Benchmark, Setting, check_arms
from scripts.comparison.outcomes import Job, Outcome, Results
from scripts.comparison.page import Comparison, in_a_line, page, plot, with_what_is_kept
from spes_p2p.data.corpus import build_stdlib_corpus
from spes_p2p.data.tokenize import TokenizeOptions, tokenize
from spes_p2p.errors import ConfigError, SpesError
from spes_p2p.locks import Scratch
from spes_p2p.parent import end_with
from spes_p2p.peer.devices import choose_device
from tests.simulation.training_swarm import Point

CORPUS_BYTES = 8 * 2**20
REPEAT_SECONDS = 1.0
"""What ends us is raised again after so long: Python drops what is raised while it clears an object away."""
OVERRIDE = re.compile(r"[a-z_0-9]+\.[a-z_0-9]+=.*", re.DOTALL)
"""KEY=VALUE, which may stand anywhere between the options."""


def say(text: str) -> None:
    """At once, also into a file."""
    print(text, flush=True)


@lru_cache
def say_once(text: str) -> None:
    say(text)


def say_point(job: Job, point: Point) -> None:
    """Of a long training, what is lost should it be broken off."""
    sent = f"all peers have sent {point.bytes_sent / 1e6:.1f} MB"
    say(f"seed {job.seed}, {job.arm}: {point.held_out_loss:.4f} after {point.step} of {job.steps} steps, {sent}")


class Children:
    """Runs each job in a process of its own, which is this script again, on one core."""

    def __init__(self, arguments: argparse.Namespace, data: Path, folder: Path) -> None:
        self._arguments, self._data, self._folder = arguments, data, folder
        self._running: set[subprocess.Popen[bytes]] = set()
        self._is_over = False

    def run(self, jobs: Sequence[Job], begin: Callable[[Job], None], take: Callable[[Outcome], None]) -> None:
        """Raises SpesError where one fails; the others end first."""
        with ThreadPoolExecutor(self._arguments.jobs) as pool:
            try:
                for outcome in as_completed([pool.submit(self._outcome, job, begin) for job in jobs]):
                    take(outcome.result())
            finally:
                self._is_over = True
                pool.shutdown(wait=False, cancel_futures=True)
                for process in list(self._running):
                    process.kill()

    def _outcome(self, job: Job, begin: Callable[[Job], None]) -> Outcome:
        begin(job)
        path = self._folder / f"{job.arm}-{job.seed}.json"
        given = self._arguments
        words = [*given.given, *(["--benchmark", given.benchmark] if given.benchmark else ["--config", given.config])]
        words += ["--data", self._data, "--device", given.device, "--peers", given.peers]
        words += ["--steps", given.steps, "--steps-per-round", given.steps_per_round]
        words += ["--arms", job.arm, "--seeds", job.seed, "--jobs", 1, "--json", path, "--output", ""]
        command = [sys.executable, __file__, *map(str, words)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(self._folder)}
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, env=environment, preexec_fn=partial(as_child_of, os.getpid())
        ) as process:
            self._running.add(process)
            if self._is_over:  # just now
                process.kill()
            code = process.wait()
            self._running.remove(process)
        if code:
            raise SpesError(f"arm {job.arm} with seed {job.seed} ended with {code}", fix="see what it said above")
        outcome = Results(path).of(job)
        if outcome is None:
            raise SpesError("the code has changed since this comparison began", fix="run the same command again")
        return outcome


def as_child_of(parent: int) -> None:
    """In a child: it ends when the thread that started it does, however that comes; Ctrl-C is not for it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with(parent, signal.SIGKILL)


def make_data(folder: Path) -> Path:
    """Bytes of the standard library's sources."""
    files = build_stdlib_corpus(folder / "corpus", CORPUS_BYTES)
    tokenize([str(file) for file in files], folder / "tokens", TokenizeOptions(tokenizer="byte", processes=1))
    return folder / "tokens"


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 1 or more")
    return int(text)


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("other", nargs="*", metavar="KEY=VALUE", help="changes to the config, such as model.d_model=64")
    parser.add_argument("--benchmark", choices=BENCHMARKS, help="a config, steps, peers and H by name")
    parser.add_argument("--arms", nargs="+", metavar="NAME", help=f"(default: all that fit) {', '.join(ARMS)}")
    parser.add_argument(
        "--against", metavar="ARM", help=f"the reference (default: {REFERENCE}, or the first of --arms)"
    )
    parser.add_argument("--config", type=Path, help="(default: tiny)")
    parser.add_argument("--data", type=Path, help="token shards (default: the standard library's sources, as bytes)")
    parser.add_argument("--steps", type=positive, help="(default: 200)")
    parser.add_argument("--peers", type=positive, help="(default: 4)")
    parser.add_argument("--steps-per-round", type=positive, metavar="H", help="(default: 20)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--device", type=choose_device, default="auto")
    parser.add_argument(
        "--jobs", type=positive, help="arms at a time, on a core each (default: one a core; 1 on a GPU)"
    )
    parser.add_argument("--output", default="compare.md", help="the page (default: compare.md; an empty word: none)")
    parser.add_argument("--plots", nargs="+", choices=("svg", "png"), default=["svg"], help="(default: svg)")
    parser.add_argument("--json", type=Path, help="all outcomes; those that are there are not run again")
    takes_one = {option for action in parser._actions if action.nargs is None for option in action.option_strings}
    pairs = list(zip(["", *words], words))
    given = [word for before, word in pairs if OVERRIDE.fullmatch(word) and before not in takes_one]
    arguments = parser.parse_args([word for word in words if word not in given])
    arguments.given = [*arguments.other, *given]
    named = BENCHMARKS.get(arguments.benchmark or "", Benchmark("tiny", 200, 4, 20, ()))
    for field in ("steps", "peers", "steps_per_round", "config"):
        if getattr(arguments, field) is None:
            setattr(arguments, field, getattr(named, field))
    arguments.named, arguments.config = named.overrides, Path(arguments.config)
    arguments.all_arms = arguments.arms is None
    arguments.arms, arguments.seeds = list(dict.fromkeys(arguments.arms or ARMS)), list(dict.fromkeys(arguments.seeds))
    arguments.against = arguments.against or (REFERENCE if REFERENCE in arguments.arms else arguments.arms[0])
    if isinstance(arguments.device, str):
        arguments.device = choose_device(arguments.device)
    cores = len(os.sched_getaffinity(0)) if arguments.device.type == "cpu" else 1
    arguments.jobs = arguments.jobs or cores
    return arguments


def check(arguments: argparse.Namespace, setting: Setting) -> None:
    """Raises ConfigError for what would otherwise be noticed when an arm has trained."""
    setting.check(arguments.arms)
    check_arms([arguments.against])
    if arguments.against not in arguments.arms:
        raise ConfigError(f"--against {arguments.against} is none of --arms", fix=f"add {arguments.against} to --arms")
    for option, path in (("--json", arguments.json), ("--output", arguments.output and Path(arguments.output))):
        if path and not path.parent.is_dir():
            raise ConfigError(
                f"{option} {path}: the folder {path.parent} does not exist",
                fix=f"mkdir -p {shlex.quote(str(path.parent))}",
            )
        if path and path.is_dir():
            raise ConfigError(f"{option} {path} is a folder", fix="give a file")


def fits(setting: Setting, arm: str, data: Path) -> bool:
    """Whether a model of this shape can have what an arm changes; says why not."""
    try:
        setting.config_of(arm, 0, data)
    except ConfigError as error:
        say(f"{arm} is left out: {error}")
        return False
    return True


def command(arguments: argparse.Namespace) -> str:
    """That makes the page again, with what a benchmark and defaults stand for where that could change."""
    words = ["python", "scripts/compare.py", *arguments.given]
    words += ["--benchmark", arguments.benchmark] if arguments.benchmark else ["--config", arguments.config]
    words += ["--data", arguments.data] if arguments.data else []
    words += ["--steps", arguments.steps, "--peers", arguments.peers, "--steps-per-round", arguments.steps_per_round]
    words += ["--arms", *arguments.arms, "--against", arguments.against, "--seeds", *arguments.seeds]
    words += ["--device", arguments.device, "--output", arguments.output]
    words += ["--plots", *arguments.plots] if arguments.plots != ["svg"] else []
    return shlex.join(map(str, words + (["--json", arguments.json] if arguments.json else [])))


@contextlib.contextmanager
def working_folder() -> Iterator[Path]:
    """Removed on the way out, also after a signal; what a SIGKILL leaves is removed by the next comparison."""

    def leave(number: int, frame: object) -> None:
        if number != signal.SIGALRM:
            code.append(128 + number)
        signal.setitimer(signal.ITIMER_REAL, REPEAT_SECONDS)
        raise SystemExit(code[-1])

    code = list[int]()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    heeded = [one for one in numbers if signal.getsignal(one) != signal.SIG_IGN]  # nohup
    handlers = {number: signal.signal(number, leave) for number in (*heeded, signal.SIGALRM)}
    scratch = Scratch("spes-p2p-compare-")
    try:
        yield scratch.path
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        scratch.remove()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def main(words: Sequence[str] | None = None) -> None:
    arguments = parse(sys.argv[1:] if words is None else list(words))
    setting = Setting(
        arguments.config, arguments.steps, arguments.peers, arguments.steps_per_round, tuple(arguments.named),
        tuple(arguments.given),
    )  # fmt: skip
    check(arguments, setting)
    results = Results(arguments.json)
    with working_folder() as folder:
        data = arguments.data or make_data(folder)
        if arguments.all_arms:
            arguments.arms = [arm for arm in arguments.arms if fits(setting, arm, data) or arm == arguments.against]
        jobs = [
            Job(arm, seed, setting.config_of(arm, seed, data), arguments.steps, arguments.device)
            for seed in arguments.seeds
            for arm in arguments.arms
        ]
        corpus = "token shards of its own" if arguments.data else "a copy of the standard library's sources"
        comparison = Comparison(
            setting, tuple(arguments.arms), tuple(arguments.seeds), arguments.against, data, corpus,
            arguments.device.type,
        )  # fmt: skip
        try:
            run(arguments, comparison, results, jobs, folder)
        except SystemExit:  # a signal
            logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # a step that was broken off is no news
            sys.unraisablehook = lambda broken: None  # nor a start
            done = sum(results.of(job) is not None for job in jobs)
            kept = (
                f"in {arguments.json}, the same command goes on from there" if arguments.json else "lost without --json"
            )
            say(f"stopped; {done} of {len(jobs)} are {kept}")
            raise


def run(
    arguments: argparse.Namespace, comparison: Comparison, results: Results, jobs: Sequence[Job], folder: Path
) -> None:
    """What is not there yet, with a new page after each."""
    left = results.reused(jobs, say)

    def begin(job: Job) -> None:
        number = len(jobs) - len(left) + left.index(job) + 1
        say(f"{number} of {len(jobs)}: seed {job.seed}, {job.arm} begins")

    def take(outcome: Outcome) -> None:
        results.add(outcome)
        say(outcome.line(f"{outcome.cpu_seconds:.0f} s of processor time"))
        write(arguments, comparison, results, jobs)  # a later one may take too long

    if arguments.jobs > 1 and len(left) > 1:
        Children(arguments, comparison.data, folder).run(left, begin, take)
    else:
        for job in left:
            begin(job)
            take(job.run(folder, partial(say_point, job)))
    write(arguments, comparison, results, jobs)
    if arguments.output:
        say(f"the table is in {arguments.output}")


def write(arguments: argparse.Namespace, comparison: Comparison, results: Results, jobs: Sequence[Job]) -> None:
    """The page and its plots, of those of `jobs` that have ended."""
    found = [outcome for job in jobs if (outcome := results.of(job)) is not None]
    if not arguments.output or not found:
        return
    output, images = Path(arguments.output), []
    before = output.read_text() if output.exists() else ""
    title = in_a_line(comparison.setting)
    try:
        images = plot(found, comparison.arms, title, output.parent, output.stem, arguments.plots)
    except ImportError:
        say_once("no plots: matplotlib is not installed (scripts/venv.sh plot)")
    output.write_text(with_what_is_kept(page(comparison, found, images, command(arguments)), before))


if __name__ == "__main__":
    try:
        main()
    except SpesError as error:
        sys.exit(f"{error}\n  fix: {error.fix}")

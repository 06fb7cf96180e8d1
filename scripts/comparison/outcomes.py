"""One arm and one seed: how it is run, what came out, and when a result that is on disk may be used again."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch

import spes_p2p
from scripts.comparison.arms import ARMS
from spes_p2p.config.load import config_to_yaml
from spes_p2p.config.schema import Config
from spes_p2p.data.loader import open_dataset
from spes_p2p.data.manifest import hash_tokens
from spes_p2p.errors import ConfigError
from spes_p2p.files import write_whole
from tests.simulation.training_swarm import Measure, Point, train

PACKAGE = Path(spes_p2p.__file__).parent
OWN = Path(__file__).parent
"""Whose effect on an outcome is the config, which is in its key."""
POINTS = 16
"""Of a curve, about: where the held-out loss is measured."""


@lru_cache
def code_hash() -> str:
    """Of all sources that may decide an outcome, and of the version of PyTorch; as they were at the first call."""
    digest = hashlib.sha256(torch.__version__.encode())
    for path in sorted(PACKAGE.rglob("*.py")):
        if OWN not in path.parents:
            digest.update(f"\n{path.relative_to(PACKAGE)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


@lru_cache
def commit() -> str:
    """The commit of this clone, and whether something in it has changed since; `no commit` where there is none."""
    root = PACKAGE.parent
    try:
        if Path(_git(root, "rev-parse", "--show-toplevel")).resolve() != root.resolve():
            return "no commit"
        changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", "spes_p2p", "scripts", "configs")
        return f"commit {_git(root, 'rev-parse', '--short', 'HEAD')}{' with uncommitted changes' if changed else ''}"
    except (OSError, subprocess.CalledProcessError):
        return "no commit"


def _git(folder: Path, *words: str) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), *words], check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ).stdout.strip()


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
    """Names what decides the outcome: config, data, steps, device."""
    points: tuple[Point, ...]
    code: str = ""
    """Names the code that decides it, see `code_hash`; empty in files of older versions."""

    @staticmethod
    def read(plain: Mapping[str, Any]) -> Outcome:
        """From what `json` made of one."""
        return Outcome(**{**plain, "points": tuple(Point(**point) for point in plain["points"])})

    def line(self, after: str) -> str:
        """The outcome as it is said while others still train."""
        return f"seed {self.seed}, {self.arm}: {self.loss:.4f} ({after})"


@lru_cache
def dataset_hash(path: Path, config: Config) -> str:
    """Of the tokens in `path`, whatever they are called and wherever they lie."""
    files = open_dataset(config.model_copy(update={"data": config.data.model_copy(update={"path": str(path)})})).files
    return hashlib.sha256(" ".join(hash_tokens(file) for file in files).encode()).hexdigest()[:16]


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
        tokens = dataset_hash(Path(self.config.data.path), self.config)
        return hashlib.sha256(f"{text} {tokens} {self.steps} {POINTS} {self.device.type}".encode()).hexdigest()[:16]

    @property
    def code(self) -> str:
        return code_hash()

    def gave(self, outcome: Outcome) -> bool:
        """Whether running it would give this outcome again."""
        return self.is_like(outcome) and outcome.code == self.code

    def is_like(self, outcome: Outcome) -> bool:
        """The same, unless the code matters."""
        return (outcome.arm, outcome.seed, outcome.key) == (self.arm, self.seed, self.key)

    def run(self, folder: Path, report: Callable[[Point], None] = lambda point: None) -> Outcome:
        """`folder` takes what its peers keep, for as long as they train. `report` hears of each point of the curve."""
        started, code = time.process_time(), self.code
        every = max(1, self.steps // POINTS)
        with tempfile.TemporaryDirectory(dir=folder) as own:
            data = open_dataset(self.config)
            found = train(self.config, Path(own), data, Measure(self.steps, every, report), self.device)
        last, seconds = found.points[-1], round(time.process_time() - started, 1)
        return Outcome(
            self.arm, self.seed, last.held_out_loss, last.bytes_sent, found.held.training, found.held.model,
            self.config.swarm.min_peers, last.tokens, last.round, seconds, self.key, found.points, code,
        )  # fmt: skip


class Results:
    """What was found until now, beside it in a file of --json."""

    def __init__(self, path: Path | None) -> None:
        """Raises ConfigError where the file is none of results."""
        self._path = path
        self.found: list[Outcome] = []
        if path is None or not path.exists():
            return
        try:
            self.found = [Outcome.read(plain) for plain in json.loads(path.read_text())]
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"--json {path} is no file of results: {error}", fix="remove it, or give another one"
            ) from error

    def of(self, job: Job) -> Outcome | None:
        """What the job has given before."""
        return next((outcome for outcome in self.found if job.gave(outcome)), None)

    def reused(self, jobs: Sequence[Job], say: Callable[[str], None]) -> list[Job]:
        """Says which of `jobs` need not be run again, and why others must be; gives those that are left."""
        left = []
        for job in jobs:
            outcome = self.of(job)
            if outcome is None:
                left.append(job)
            else:
                say(outcome.line(f"from {self._path}"))
        asked = {(job.arm, job.seed): job for job in left}
        same = [(one, asked.get((one.arm, one.seed))) for one in self.found]
        old = [one for one, job in same if job is not None and (job.is_like(one) or not one.code)]
        if old:
            say(f"{self._path}: made by other code, and run again: {', '.join(dict.fromkeys(one.arm for one in old))}")
        return left

    def add(self, outcome: Outcome) -> None:
        """In the place of one that other code has given."""
        same, older = (outcome.arm, outcome.seed), ("", outcome.key)
        kept = [one for one in self.found if (one.arm, one.seed) != same or (one.code and one.key) not in older]
        places = {arm: number for number, arm in enumerate(ARMS)}
        self.found = sorted([*kept, outcome], key=lambda one: (places.get(one.arm, len(places)), one.seed))
        if self._path is not None:
            text = json.dumps([dataclasses.asdict(one) for one in self.found], indent=1)
            write_whole(self._path, text.encode() + b"\n")

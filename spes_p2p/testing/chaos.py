"""A long run of real peers of which every few rounds some die, freeze or lose their disk; and what came of it.

`Chaos` breaks, as drawn by a seed, and measures while the swarm runs; `judge` compares what it found with the promises.
The first peer is never hurt: it is the witness whose memory is watched. Told to people by scripts/chaos.py.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

from spes_p2p.config.load import bundled_config, load_config
from spes_p2p.data.corpus import build_stdlib_corpus
from spes_p2p.data.tokenize import TokenizeOptions, tokenize
from spes_p2p.interop.hf import state_layout
from spes_p2p.observe.events import Round, Step
from spes_p2p.state.hashes import hash_tiles
from spes_p2p.state.store import StateStore
from spes_p2p.steps import INNER_STEP
from spes_p2p.sync.chain import Chain
from spes_p2p.sync.core.messages import DEGRADED, Commit
from spes_p2p.testing.faults import LEADER_STEPS, MEMBER_STEPS, SLOW, Fault
from spes_p2p.testing.processes import LocalSwarm, Process, children

MODEL = (
    "model.d_model=32", "model.num_layers=2", "model.num_heads=2", "model.expert_ffn=32", "data.sequence_length=32",
    "data.block_sequences=16", "data.held_out_fraction=0.05", "optimizer.batch_sequences=2", "optimizer.lr=0.003",
    "scheduler.warmup_steps=50", "scheduler.total_steps=100000", "sync.tile_values=1024", "sync.slice_tiles=4",
)  # fmt: skip
"""On top of `tiny`: 75 thousand parameters, so that many peers share two cores."""
LOCAL = ("output.log_every_steps=1", "eval.every_rounds=0", "output.keep_checkpoints=2")
FAULTS = tuple(Fault(step) for step in (*LEADER_STEPS, *MEMBER_STEPS))
"""Every peer but the witness carries all of them; whoever comes first to one that is armed dies of it."""
CORPUS_BYTES = 8 * 2**20
COMMITTED_SHARE = 0.95
COUNTED_SHARE = 0.90
MEMORY_GROWTH = 0.05
HANDLES_GROWTH, SPARE_HANDLES = 0.1, 10
"""Open files and threads stay flat within a tenth and a few: connections come and go."""
ROUND_SECONDS = 300.0
"""A round that takes longer is one that hangs."""


@dataclass(frozen=True)
class ChaosOptions:
    """`minutes`: where it ends, if `rounds` did not come before. `kill_rate`: share of rounds that lose a peer.

    `step_seconds`: what each inner step sleeps on top of its computing, so that many peers share few cores.
    """

    folder: Path
    peers: int = 8
    rounds: int = 200
    kill_rate: float = 0.3
    seed: int = 0
    minutes: float = 60.0
    steps_per_round: int = 60
    heartbeat_seconds: float = 0.5
    step_seconds: float = 0.0


@dataclass
class Life:
    """One process of a peer: from its start to its end, in seconds of the wall clock."""

    name: str
    began: float
    ended: float | None = None
    killed: bool = False


@dataclass(frozen=True)
class Sample:
    """The witness at one commit."""

    round: int
    resident_bytes: int
    files: int
    threads: int


@dataclass
class Findings:
    """What a run of chaos showed. Times in seconds, shares from 0 to 1."""

    options: ChaosOptions
    seconds: float = 0.0
    commits: list[Commit] = field(default_factory=list)
    blows: list[tuple[float, str]] = field(default_factory=list)
    healthy: list[float] = field(default_factory=list)
    faulty: list[float] = field(default_factory=list)
    tokens_trained: int = 0
    tokens_counted: int = 0
    samples: list[Sample] = field(default_factory=list)
    exit_codes: dict[str, int] = field(default_factory=dict)
    disagreements: list[str] = field(default_factory=list)
    left_over: list[int] = field(default_factory=list)
    """Processes that still ran after all had ended."""
    problems: list[str] = field(default_factory=list)

    @property
    def rounds(self) -> int:
        return max(0, len(self.commits) - 1)

    @property
    def degraded(self) -> int:
        return sum(commit.certificate.kind == DEGRADED for commit in self.commits)

    @property
    def aborted(self) -> int:
        """Ballots that came to nothing before the one that committed."""
        return sum(max(0, commit.certificate.ballot) for commit in self.commits)

    @property
    def counted_share(self) -> float:
        return self.tokens_counted / self.tokens_trained if self.tokens_trained else 1.0

    def spread_of_samples(self) -> tuple[list[Sample], list[Sample]]:
        """The tenth of them after the warm-up, and the last tenth."""
        tenth = max(1, len(self.samples) // 10)
        nothing = [Sample(0, 1, 0, 0)]
        return self.samples[2 * tenth : 3 * tenth] or nothing, self.samples[-tenth:] or nothing

    @property
    def memory_growth(self) -> float:
        """Resident memory of the witness in the last tenth of the run, against the tenth after its warm-up."""
        early, late = self.spread_of_samples()
        return median(s.resident_bytes for s in late) / median(s.resident_bytes for s in early) - 1


class Chaos:
    """Runs it: `Chaos(options, say).run()`."""

    def __init__(self, options: ChaosOptions, say: Callable[[str], None]) -> None:
        self._options = options
        self._say = say
        self._rng = random.Random(options.seed)
        self._names = [f"p{index}" for index in range(options.peers)]
        self._lives: list[Life] = []
        self._back_at: dict[str, tuple[int, bool]] = {}
        self._thaw_at: dict[str, float] = {}
        self._armed: list[Fault] = []
        self._findings = Findings(options)
        self._overrides = (
            *MODEL,
            f"sync.steps_per_round={options.steps_per_round}",
            f"swarm.heartbeat_seconds={options.heartbeat_seconds}",
            f"swarm.min_peers={options.peers}",
            f"swarm.experts_per_peer={max(1, -(-16 // options.peers))}",
            "swarm.target_replicas=2",
        )

    def run(self) -> Findings:
        """From the first process to the last, and the stores looked through."""
        began, found = time.monotonic(), self._findings
        data = self._tokens()
        here = set(children(os.getpid()))
        with LocalSwarm(self._options.folder, forked=True) as swarm:
            self._swarm = swarm
            swarm.bootstrap("tiny", data, self._overrides)
            for name in self._names:
                self._start(name, data)
            swarm.wait_for_round(1, self._names, 300.0)
            self._say(f"{len(self._names)} peers train, after {time.monotonic() - began:.0f} s")
            self._break_and_watch(data)
            self._end()
        found.left_over = sorted(set(children(os.getpid())) - here)
        found.seconds = time.monotonic() - began
        self._look_through_stores()
        self._count_times()
        self._count_tokens()
        found.problems += judge(found)
        return found

    # ---------------------------------------------------------------- while it runs

    def _break_and_watch(self, data: Path) -> None:
        until = time.monotonic() + 60 * self._options.minutes
        newest, moved = 1, time.monotonic()
        while newest < self._options.rounds and time.monotonic() < until:
            time.sleep(0.1)
            self._tend(newest, data)
            round = self._newest()
            if round > newest:
                newest, moved = round, time.monotonic()
                self._sample(round)
                self._strike(round)
            if time.monotonic() - moved > ROUND_SECONDS:
                self._findings.problems.append(f"round {newest + 1} did not come in {ROUND_SECONDS:g} s")
                return

    def _newest(self) -> int:
        return max((event.round for name in self._up() for event in self._swarm.processes[name].rounds()), default=0)

    def _up(self) -> list[str]:
        return [name for name in self._names if self._swarm.processes[name].exit_code is None]

    def _start(self, name: str, data: Path, resume: bool = False) -> None:
        faults = list(FAULTS) if name != self._names[0] else []
        if self._options.step_seconds:
            faults.append(Fault(INNER_STEP, SLOW, times=0, seconds=self._options.step_seconds))
        self._swarm.peer(name, data, [*(["--resume"] if resume else []), *LOCAL], faults=faults)
        self._lives.append(Life(name, time.time()))

    def _tend(self, round: int, data: Path) -> None:
        """Who is dead is noted, and comes back some rounds later; who is frozen long enough is thawed."""
        for name, at in list(self._thaw_at.items()):
            if time.monotonic() > at:
                del self._thaw_at[name]
                if self._swarm.processes[name].exit_code is None:
                    self._swarm.processes[name].thaw()
        for life in self._lives:
            process = self._swarm.processes[life.name]
            if life.ended is None and process.exit_code is not None:
                life.ended, life.killed = time.time(), process.exit_code == -signal.SIGKILL
                if not life.killed:
                    words = f"{life.name} ended by itself with {process.exit_code}; {process.last_words()}"
                    self._findings.problems.append(words)
                self._back_at.setdefault(life.name, (round + self._rng.choice((0, 1, 1, 2, 4)), False))
        for name, (back, wiped) in list(self._back_at.items()):
            if round >= back and self._swarm.processes[name].exit_code is not None:
                del self._back_at[name]
                if wiped:
                    shutil.rmtree(self._options.folder / name / "run")
                    shutil.rmtree(self._options.folder / name / "checkpoints", ignore_errors=True)
                self._start(name, data, resume=not wiped)

    def _strike(self, round: int) -> None:
        """What this round's draw says; the same draws for the same seed."""
        lot, kind, share = self._rng.random(), self._rng.random(), self._rng.random()
        fault, order = self._rng.choice(FAULTS), self._rng.sample(self._names[1:], len(self._names) - 1)
        able = [name for name in order if name in self._up() and name not in self._thaw_at]
        spare = len(able) - self._options.peers // 2  # the witness and these must stay a majority
        if lot >= self._options.kill_rate or spare < 1:
            return
        if kind < 0.5:
            self._swarm.armoury.arm(fault)
            self._note(f"round {round + 1}: whoever comes to {fault.step!r} dies")
        elif kind < 0.75:
            self._kill(able[:1], share)
        elif kind < 0.83 and spare > 1:
            self._kill(able[:2], share)
        elif kind < 0.9:
            self._kill(able[:1], share)
            self._back_at.update(dict.fromkeys(able[:1], (round + 1, True)))
            self._note("its disk is lost with it")
        elif able:
            self._swarm.processes[able[0]].freeze()
            self._thaw_at[able[0]] = time.monotonic() + 5 + 20 * share
            self._note(f"{able[0]} freezes for {5 + 20 * share:.0f} s")

    def _kill(self, names: Sequence[str], share: float) -> None:
        """At some moment of the round, by the length that rounds had lately."""
        times = [event_at for event_at, event in self._swarm.processes[self._names[0]].seen if isinstance(event, Round)]
        usual = median(b - a for a, b in pairwise(times[-10:])) if len(times) > 2 else 1.0
        time.sleep(min(share * usual, 10.0))
        for name in names:
            self._swarm.processes[name].send(signal.SIGKILL)
        self._note(f"{' and '.join(names)} killed at {share:.0%} of the round")

    def _note(self, text: str) -> None:
        self._findings.blows.append((time.time(), text))
        self._say(text)

    def _sample(self, round: int) -> None:
        witness = self._swarm.processes[self._names[0]]
        if witness.exit_code is None:
            self._findings.samples.append(sample(witness, round))

    def _end(self) -> None:
        """A clean end of all who run."""
        self._swarm.armoury.disarm()
        for name in list(self._thaw_at):
            self._swarm.processes[name].thaw()
        for name in self._up():
            self._swarm.processes[name].send(signal.SIGTERM)
        for name in self._up():
            self._findings.exit_codes[name] = self._swarm.processes[name].wait(60.0)

    # ---------------------------------------------------------------- afterwards

    def _tokens(self) -> Path:
        corpus, shards = self._options.folder / "corpus", self._options.folder / "tokens"
        build_stdlib_corpus(corpus, CORPUS_BYTES)
        tokenize([str(corpus)], shards, TokenizeOptions(tokenizer="byte", processes=1))
        return shards

    def _look_through_stores(self) -> None:
        """All chains are one, and every state hashes, read afresh, to what its commit says."""
        config = load_config(bundled_config("tiny"), self._overrides)
        layout = state_layout(config)
        found = self._findings
        chains = {name: Chain(self._options.folder / name / "run" / "chain") for name in self._names}
        longest = max(chains.values(), key=lambda chain: chain.length)
        found.commits = [longest.commit(round) for round in range(longest.length)]
        for name, chain in chains.items():
            for round in range(chain.length):
                if chain.commit(round).certificate.manifest != found.commits[round].certificate.manifest:
                    found.disagreements.append(f"{name} has another round {round}")
                    break
            store = StateStore(self._options.folder / name / "run" / "state", layout, read_only=True)
            version = store.latest()
            if version is None or version.round >= chain.length:
                found.disagreements.append(f"{name} has no committed state")
                continue
            root = layout.root_of(hash_tiles(version.tile(tile.id) for tile in layout.tiles))
            if root != chain.commit(version.round).manifest.state_root:
                found.disagreements.append(f"the state of {name} does not hash to round {version.round}")

    def _count_times(self) -> None:
        """From one commit to the next; faulty where something was broken since the commit before."""
        first: dict[int, float] = {}
        for process in (self._swarm.processes[name] for name in self._names):
            for at, event in process.seen:
                if isinstance(event, Round):
                    first[event.round] = min(at, first.get(event.round, at))
        times = [first[round] for round in sorted(first)]
        for before, after in pairwise(times):
            broken = any(before <= at <= after for at, _ in self._findings.blows)
            (self._findings.faulty if broken else self._findings.healthy).append(after - before)

    def _count_tokens(self) -> None:
        """What lives trained between two commits that they lived to see, and how much of it rosters list.

        What was trained since its last commit died with a killed peer; a round that counted it nevertheless does not
        count here.
        """
        for name in self._names:
            process = self._swarm.processes[name]
            ids = peer_ids(process)
            rosters = {
                commit.manifest.round: sum(entry.tokens for entry in commit.manifest.roster if entry.peer in ids)
                for commit in self._findings.commits
            }
            for life in (life for life in self._lives if life.name == name):
                end = life.ended or float("inf")
                seen = [(at, event) for at, event in process.seen if life.began <= at <= end]
                commits = [(at, event.round) for at, event in seen if isinstance(event, Round)]
                for (start, _), (stop, round) in pairwise(commits):
                    trained = sum(e.tokens for at, e in seen if isinstance(e, Step) and start < at <= stop)
                    self._findings.tokens_trained += trained
                    self._findings.tokens_counted += rosters.get(round, 0) if trained else 0


def peer_ids(process: Process) -> set[str]:
    """All identities under which it was in the run."""
    lines = [line.split() for line in process.output().splitlines() if " is in, round " in line]
    return {words[words.index("peer") + 1] for words in lines if "peer" in words}


def sample(process: Process, round: int) -> Sample:
    """Memory, open files and threads of a process and of those that it started (Linux)."""
    pids = [process.pid, *children(process.pid)]
    resident = files = threads = 0
    for pid in pids:
        place = Path(f"/proc/{pid}")
        try:
            status = dict(line.split(":", 1) for line in (place / "status").read_text().splitlines())
            resident += int(status.get("VmRSS", "0 kB").split()[0]) * 1024
            threads += int(status["Threads"])
            files += sum(1 for _ in (place / "fd").iterdir())
        except OSError:  # it has just ended
            continue
    return Sample(round, resident, files, threads)


def judge(found: Findings) -> list[str]:
    """Promises that were not kept, in words."""
    problems = [f"{name} ended with exit code {code}" for name, code in found.exit_codes.items() if code]
    problems += found.disagreements
    committed = found.rounds - found.degraded
    if committed < COMMITTED_SHARE * found.rounds:
        problems.append(f"only {committed} of {found.rounds} rounds were committed by a majority")
    if found.counted_share < COUNTED_SHARE:
        problems.append(f"only {found.counted_share:.1%} of the survivors' tokens were counted")
    if found.memory_growth > MEMORY_GROWTH and len(found.samples) >= 50:
        problems.append(f"the witness's memory grew by {found.memory_growth:.1%}")
    early, late = found.spread_of_samples()
    for what in ("files", "threads"):
        before, after = (median(getattr(sample, what) for sample in part) for part in (early, late))
        if after > before * (1 + HANDLES_GROWTH) + SPARE_HANDLES and len(found.samples) >= 50:
            problems.append(f"the witness had {before:.0f} open {what} early and {after:.0f} late")
    if found.left_over:
        problems.append(f"processes {found.left_over} were left over")
    return problems


def report(found: Findings) -> str:
    """The figures, one a line, each beside what was promised."""
    options, samples = found.options, found.samples
    first, last = (samples[len(samples) // 5], samples[-1]) if samples else (None, None)

    def spread(times: Sequence[float]) -> str:
        return f"median {median(times):.2f} s, worst {max(times):.2f} s ({len(times)} rounds)" if times else "none"

    lines = [
        f"{options.peers} peers, seed {options.seed}, kill rate {options.kill_rate:g}, {found.seconds / 60:.1f} min, "
        f"{options.steps_per_round} steps a round, each sleeps {options.step_seconds:g} s",
        f"blows                {len(found.blows)}",
        f"rounds committed     {found.rounds - found.degraded} of {found.rounds} (promised: {COMMITTED_SHARE:.0%})",
        f"rounds degraded      {found.degraded}",
        f"ballots aborted      {found.aborted}",
        f"healthy rounds       {spread(found.healthy)}",
        f"faulty rounds        {spread(found.faulty)}",
        f"tokens counted       {found.counted_share:.2%} of {found.tokens_trained:,} (promised: {COUNTED_SHARE:.0%})",
        f"memory growth        {found.memory_growth:+.2%} (promised: below {MEMORY_GROWTH:.0%})",
    ]
    if first is not None and last is not None:
        lines.append(f"files, threads       {first.files}, {first.threads} early; {last.files}, {last.threads} late")
    lines.append("hash agreement       " + ("broken" if found.disagreements else "yes"))
    return "\n".join([*lines, *(f"BROKEN: {problem}" for problem in found.problems)])

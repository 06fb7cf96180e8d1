"""A long run of real peers of which every few rounds some die, freeze, leave or lose their disk; and what came of it.

`Chaos` breaks, as drawn by a seed, and measures while the swarm runs; `chaos_report` compares that with the promises.
The first peer is never hurt: it is the witness whose memory is watched. Nobody else is spared, the bootstrap node
neither. Told to people by scripts/chaos.py.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from spes_p2p.config.load import bundled_config, load_config
from spes_p2p.data.corpus import build_stdlib_corpus
from spes_p2p.data.tokenize import TokenizeOptions, tokenize
from spes_p2p.errors import SpesError
from spes_p2p.failpoints import INNER_STEP
from spes_p2p.interop.hf import state_layout
from spes_p2p.observe.events import Round, Step
from spes_p2p.quickstart.processes import BOOTSTRAP, Process, children
from spes_p2p.state.hashes import hash_tiles
from spes_p2p.state.store import StateStore
from spes_p2p.sync.chain import Chain
from tests.fork_server import ForkedSwarm
from tests.simulation.faults import LEADER_STEPS, MEMBER_STEPS, SLOW, Fault
from tests.swarm.chaos_report import ChaosOptions, Findings, Sample, judge

MODEL = (
    "model.d_model=32", "model.num_layers=2", "model.num_heads=2", "model.expert_ffn=32", "data.sequence_length=32",
    "data.block_sequences=16", "data.held_out_fraction=0.05", "optimizer.batch_sequences=2", "optimizer.lr=0.003",
    "scheduler.warmup_steps=50", "scheduler.total_steps=100000", "sync.tile_values=1024", "sync.slice_tiles=4",
)  # fmt: skip
"""On top of `tiny`: 75 thousand parameters, so that many peers share two cores."""
LOCAL = ("output.log_every_steps=1", "eval.every_rounds=0", "output.keep_checkpoints=2")
FAULTS = tuple(Fault(step) for step in (*LEADER_STEPS, *MEMBER_STEPS))
"""Faults planted in every peer but the witness; the first peer that reaches an armed one is killed by it."""
CORPUS_BYTES = 8 * 2**20
ROUND_SECONDS = 300.0
"""A round that takes longer is one that hangs."""
ROUNDS_TO_VOTE = 3
"""Since it came: caught up, named as a member, and by the next manifest one who votes."""
LEAVE_SECONDS = 10.0
"""The kernel ends at once what a killed process had started, but not in no time."""
SETTLE_SECONDS = 60.0
"""By then everybody who runs has the rounds that were committed without it."""
ROUNDS_WITHOUT = (0, 1, 2, 5, 10, None)
"""So many pass before the bootstrap node is started again; None: it is gone for good."""


@dataclass
class Life:
    """One process of a peer: from its start to its end, in seconds of the wall clock."""

    name: str
    began: float
    ended: float | None = None
    killed: bool = False


class Chaos:
    """Runs it: `Chaos(options, say).run()`."""

    def __init__(self, options: ChaosOptions, say: Callable[[str], None]) -> None:
        self._options = options
        self._say = say
        self._rng = random.Random(options.seed)
        self._bootstrap_rng = random.Random(f"{options.seed} {BOOTSTRAP}")
        self._bootstrap_back: int | None = None
        self._names = [f"p{index}" for index in range(options.peers)]
        self._lives: list[Life] = []
        self._back_at: dict[str, tuple[int, bool]] = {}
        self._thaw_at: dict[str, float] = {}
        self._leaving: set[str] = set()
        self._meeting: list[str] = []
        """What peers that come back are told besides the bootstrap node: where the witness is."""
        self._findings = Findings(options)
        self._overrides = (
            *MODEL,
            f"sync.steps_per_round={options.steps_per_round}",
            f"swarm.heartbeat_seconds={options.heartbeat_seconds}",
            f"swarm.min_peers={options.peers}",
            f"swarm.experts_per_peer={max(1, -(-16 // options.peers))}",
            "swarm.target_replicas=2",
            *options.overrides,
        )

    def run(self) -> Findings:
        """From the first process to the last, and the stores looked through."""
        began, found = time.monotonic(), self._findings
        data = _tokens(self._options.folder)
        with ForkedSwarm(self._options.folder) as swarm:
            self._swarm = swarm
            swarm.bootstrap("tiny", data, self._overrides)
            for name in self._names:
                self._start(name, data)
            swarm.wait_for_round(1, self._names, 300.0)
            self._find_witness()
            self._say(f"{len(self._names)} peers train, after {time.monotonic() - began:.0f} s")
            self._break_and_watch(data)
            self._settle()
            self._end()
            swarm.close()
            found.left_over = [f"{pid} {command_of(pid)}" for pid in swarm.left_behind(LEAVE_SECONDS)]
        found.seconds = time.monotonic() - began
        self._look_through_stores()
        _count_times([self._swarm.processes[name] for name in self._names], found)
        self._count_tokens()
        found.problems += judge(found)
        return found

    # ---------------------------------------------------------------- while it runs

    def _break_and_watch(self, data: Path) -> None:
        until = time.monotonic() + 60 * self._options.minutes
        newest, moved = self._newest(), time.monotonic()  # looking for the witness took a few rounds of a small model
        last = newest + self._options.rounds
        while newest < last and time.monotonic() < until:
            time.sleep(0.1)
            self._tend(newest, data)
            self._tend_bootstrap(newest, data)
            round = self._newest()
            if round > newest:
                newest, moved = round, time.monotonic()
                self._sample(round)
                self._strike(round)
                self._strike_bootstrap(round)
            if time.monotonic() - moved > ROUND_SECONDS:
                self._findings.problems.append(f"round {newest + 1} did not come in {ROUND_SECONDS:g} s")
                return

    def _newest(self) -> int:
        return max((event.round for name in self._up() for event in self._swarm.processes[name].rounds()), default=0)

    def _up(self) -> list[str]:
        return [name for name in self._names if self._swarm.processes[name].exit_code is None]

    def _start(self, name: str, data: Path) -> None:
        faults = list(FAULTS) if name != self._names[0] else []
        if self._options.step_seconds:
            faults.append(Fault(INNER_STEP, SLOW, times=0, seconds=self._options.step_seconds))
        arguments = [*self._meeting, *LOCAL]
        self._swarm.peer(name, data, arguments, faults=faults)
        self._leaving.discard(name)
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
                has_left = life.name in self._leaving and process.exit_code == 0
                if not (life.killed or has_left):
                    words = f"{life.name} ended by itself with {process.exit_code}; {process.last_words()}"
                    self._findings.problems.append(words)
                self._back_at.setdefault(life.name, (round + self._rng.choice((0, 1, 1, 2, 4)), False))
        for name, (back, wiped) in list(self._back_at.items()):
            if round >= back and self._swarm.processes[name].exit_code is not None:
                del self._back_at[name]
                if wiped:
                    shutil.rmtree(self._options.folder / name / "run")
                    shutil.rmtree(self._options.folder / name / "checkpoints", ignore_errors=True)
                self._start(name, data)

    def _strike(self, round: int) -> None:
        """Breaks what the seed draws for this round; the same seed draws the same faults."""
        lot, kind, share = self._rng.random(), self._rng.random(), self._rng.random()
        fault, order = self._rng.choice(FAULTS), self._rng.sample(self._names[1:], len(self._names) - 1)
        able = [name for name in order if self._votes(name)]
        spare = len(able) - self._options.peers // 2  # the witness and these must stay a majority
        if lot >= self._options.kill_rate or spare < 1:
            return
        self._swarm.armed_faults.disarm()  # one at a time: nobody came to the last one
        if kind < 0.5:
            self._swarm.armed_faults.arm(fault)
            self._note(f"round {round + 1}: whoever comes to {fault.step!r} dies")
        elif kind < 0.75:
            self._kill(able[:1], share)
        elif kind < 0.83 and spare > 1:
            self._kill(able[:2], share)
        elif kind < 0.9:
            self._kill(able[:1], share)
            self._back_at.update(dict.fromkeys(able[:1], (round + 1, True)))
            self._note("its disk is lost with it")
        elif able and kind < 0.95:
            self._swarm.processes[able[0]].freeze()
            self._thaw_at[able[0]] = time.monotonic() + 5 + 20 * share
            self._note(f"{able[0]} freezes for {5 + 20 * share:.0f} s")
        elif able:
            self._swarm.processes[able[0]].send(signal.SIGTERM)
            self._leaving.add(able[0])
            self._note(f"{able[0]} is asked to leave")

    def _votes(self, name: str) -> bool:
        """Whether it is awake and stays, and has been in for long enough to be an elector again."""
        if name not in self._up() or name in self._thaw_at or name in self._leaving:
            return False
        began = next(life.began for life in reversed(self._lives) if life.name == name)
        rounds = sum(at >= began and isinstance(event, Round) for at, event in self._swarm.processes[name].seen)
        return rounds >= ROUNDS_TO_VOTE

    def _kill(self, names: Sequence[str], share: float) -> None:
        """At some moment of the round, by the length that rounds had lately."""
        times = [event_at for event_at, event in self._swarm.processes[self._names[0]].seen if isinstance(event, Round)]
        usual = median(b - a for a, b in pairwise(times[-10:])) if len(times) > 2 else 1.0
        time.sleep(min(share * usual, 10.0))
        for name in names:
            self._swarm.processes[name].send(signal.SIGKILL)
        self._note(f"{' and '.join(names)} killed at {share:.0%} of the round")

    # ---------------------------------------------------------------- the bootstrap node

    def _find_witness(self) -> None:
        """Its address, as `status` shows it: who comes back, or anew, may find no bootstrap node."""
        (witness,) = peer_ids(self._swarm.processes[self._names[0]])
        found: list[str] = []

        def is_known() -> bool:
            said = json.loads(self._swarm.ask("status", "--initial-peers", self._swarm.address, "--json"))
            found.extend(one["addresses"][0] for one in said["peers"] if one["peer"] == witness and one["addresses"])
            return bool(found)

        self._swarm.wait_until(is_known, "the witness in the status", self._names[:1])
        self._meeting = ["--initial-peers", found[0]]

    def _strike_bootstrap(self, round: int) -> None:
        """A draw of its own, so that a seed hurts the peers as it did before."""
        lot, share = self._bootstrap_rng.random(), self._bootstrap_rng.random()
        without = self._bootstrap_rng.choice(ROUNDS_WITHOUT)
        if lot < self._options.kill_rate / 4 and self._swarm.processes[BOOTSTRAP].exit_code is None:
            self._kill([BOOTSTRAP], share)
            self._bootstrap_back = None if without is None else round + 1 + without
            self._say("for good" if without is None else f"it comes back after {1 + without} rounds")

    def _tend_bootstrap(self, round: int, data: Path) -> None:
        if self._bootstrap_back is not None and round >= self._bootstrap_back:
            self._bootstrap_back = None
            try:
                self._swarm.bootstrap("tiny", data, self._overrides)
            except SpesError as error:
                self._findings.problems.append(str(error))

    def _note(self, text: str) -> None:
        self._findings.blows.append((time.time(), text))
        self._say(text)

    def _sample(self, round: int) -> None:
        witness = self._swarm.processes[self._names[0]]
        if witness.exit_code is None:
            self._findings.samples.append(sample(witness, round))

    def _settle(self) -> None:
        """Undisturbed, all who run come to the newest round: who left while it is cut off would commit alone."""
        self._swarm.armed_faults.disarm()
        for name in list(self._thaw_at):
            self._swarm.processes[name].thaw()
        newest, until = self._newest(), time.monotonic() + SETTLE_SECONDS
        while behind := [name for name in (*self._names, BOOTSTRAP) if self._is_behind(name, newest)]:
            if time.monotonic() > until:
                late = f"{', '.join(behind)} did not come to round {newest} in {SETTLE_SECONDS:g} s"
                self._findings.problems.append(late)
                return
            time.sleep(0.1)

    def _is_behind(self, name: str, round: int) -> bool:
        commits = self._options.folder / name / "run" / "chain"
        return self._swarm.processes[name].exit_code is None and len(list(commits.glob("*.commit"))) <= round

    def _end(self) -> None:
        """A clean end of all who run."""
        running = [name for name in (*self._names, BOOTSTRAP) if self._swarm.processes[name].exit_code is None]
        for name in running:
            self._swarm.processes[name].send(signal.SIGTERM)
        for name in running:
            code = self._swarm.processes[name].wait(60.0)
            if code != -signal.SIGKILL:  # that was the last blow
                self._findings.exit_codes[name] = code

    # ---------------------------------------------------------------- afterwards

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


def _tokens(folder: Path) -> Path:
    corpus, shards = folder / "corpus", folder / "tokens"
    build_stdlib_corpus(corpus, CORPUS_BYTES)
    tokenize([str(corpus)], shards, TokenizeOptions(tokenizer="byte", processes=1))
    return shards


def _count_times(processes: Sequence[Process], found: Findings) -> None:
    """From one commit to the next; faulty where something was broken since the commit before."""
    first: dict[int, float] = {}
    for at, event in (seen for process in processes for seen in process.seen):
        if isinstance(event, Round):
            first[event.round] = min(at, first.get(event.round, at))
    for before, after in pairwise(first[round] for round in sorted(first)):
        broken = any(before <= at <= after for at, _ in found.blows)
        (found.faulty if broken else found.healthy).append(after - before)


def peer_ids(process: Process) -> set[str]:
    """All identities under which it was in the run."""
    lines = [line.split() for line in process.output().splitlines() if "this is peer " in line]
    return {words[words.index("peer") + 1].rstrip(",") for words in lines}


def command_of(pid: int) -> str:
    """Its command line and state, as far as it can still be read (Linux)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "(has ended meanwhile)"
    return f"{command.strip()} ({stat[0]}, child of {stat[1]})"


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

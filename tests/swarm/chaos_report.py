"""What a run of chaos showed, whether that is what was promised, and the table that people read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from spes_p2p.consensus.messages import RENEWAL, Commit

COMMITTED_SHARE = 0.95
COUNTED_SHARE = 0.90
MEMORY_GROWTH = 0.05
HANDLES_GROWTH, SPARE_HANDLES = 0.1, 10
"""Open files and threads stay flat within a tenth and a few: connections come and go."""


@dataclass(frozen=True)
class ChaosOptions:
    """`rounds`: so many from where all peers train. `minutes`: where it ends, if these did not come before.

    `kill_rate`: share of rounds that lose a peer.

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
    overrides: tuple[str, ...] = ()
    """Of the run's config."""


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
    left_over: list[str] = field(default_factory=list)
    """Processes that still ran after all had ended: pid and command."""
    problems: list[str] = field(default_factory=list)

    @property
    def rounds(self) -> int:
        return max(0, len(self.commits) - 1)

    @property
    def renewals(self) -> int:
        return sum(commit.certificate.kind == RENEWAL for commit in self.commits)

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


def judge(found: Findings) -> list[str]:
    """Promises that were not kept, in words."""
    problems = [f"{name} ended with exit code {code}" for name, code in found.exit_codes.items() if code]
    problems += found.disagreements
    committed = found.rounds - found.renewals
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
        problems.append("processes were left over: " + ", ".join(found.left_over))
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
        f"rounds committed     {found.rounds - found.renewals} of {found.rounds} (promised: {COMMITTED_SHARE:.0%})",
        f"renewals             {found.renewals}",
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

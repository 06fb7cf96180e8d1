"""Explores seeded schedules of the protocol and reports the first that breaks a rule, with the command to replay it.

python -m tests.simulation.explorer --first 0 --count 5000 --processes 2
python -m tests.simulation.explorer --first 1234 --count 1 --verbose
"""

from __future__ import annotations

import argparse
import random
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from spes_p2p.consensus.machine import Consensus
from spes_p2p.consensus.messages import QUORUM, RENEWAL
from spes_p2p.consensus.table import RULE_NAMES
from tests.simulation.judge import Violation
from tests.simulation.schedules import end_faults, plan_run
from tests.simulation.sim import Result, World

ROUNDS_AFTER_FAULTS = 1
CHECK_SECONDS = 2.0
MAX_EVENTS = 400_000


@dataclass
class Finding:
    """A schedule that broke a rule."""

    seed: int
    kind: str
    text: str
    only: str | None = None

    def __str__(self) -> str:
        kind = "" if self.only is None else f" --only '{self.only}'"
        replay = f"python -m tests.simulation.explorer --first {self.seed} --count 1 --verbose{kind}"
        return f"seed {self.seed} ({self.kind}): {self.text}\n  replay: {replay}"


@dataclass
class Summary:
    """What came of many runs."""

    runs: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    fired: Counter[str] = field(default_factory=Counter)
    totals: Counter[str] = field(default_factory=Counter)
    longest_stall: float = 0.0
    tightest_bound: float = 0.0
    findings: list[Finding] = field(default_factory=list)

    @classmethod
    def of(cls, kind: str, result: Result) -> Summary:
        """Of one run."""
        names = "rounds", "commits", "renewals", "forks", "switches", "restarts", "handovers", "messages", "extinct"
        totals = Counter({name: int(getattr(result, name)) for name in names})
        return cls(1, Counter([kind]), Counter(result.fired), totals, result.longest_stall, result.tightest_bound)

    def merge(self, other: Summary) -> None:
        self.runs += other.runs
        self.kinds.update(other.kinds)
        self.fired.update(other.fired)
        self.totals.update(other.totals)
        self.longest_stall = max(self.longest_stall, other.longest_stall)
        self.tightest_bound = max(self.tightest_bound, other.tightest_bound)
        self.findings += other.findings


def run_schedule(
    seed: int,
    core_class: type[Consensus] = Consensus,
    only: str | None = None,
    say: Callable[[str], None] | None = None,
) -> tuple[str, Result]:
    """One run to its end; (kind of schedule, result). `say` is told the story. Raises Violation."""
    world, kind = plan_run(seed, core_class, only)
    world.say = say
    world.at(kind.mended_seconds, end_faults, world, random.Random(seed ^ 0xE4D))
    run_until(world, until=lambda: world.now > kind.mended_seconds)
    if not world.result.extinct:
        goal = world.newest().round + ROUNDS_AFTER_FAULTS
        run_until(world, until=lambda: has_arrived(world, goal))
    return kind.name, _conclude(world)


def run_until(world: World, until: Callable[[], bool]) -> None:
    events, check_at = 0, world.now + CHECK_SECONDS
    while not until() and not world.result.extinct:
        if not world.step():
            raise Violation("stall", "nothing can happen any more")
        events += 1
        if world.now >= check_at:
            world.check_stall()
            check_at = world.now + CHECK_SECONDS
        if events > MAX_EVENTS:
            raise Violation("stall", f"{events} events without an end")


def has_arrived(world: World, goal: int) -> bool:
    """Everybody who runs stands on a late enough manifest of one chain, on which a quorum has committed."""
    staying = [peer for peer in world.up() if not peer.intent.leaving]
    by_quorum = any(
        commit.certificate.kind == QUORUM and commit.manifest.round >= goal
        for peer in staying
        for commit in peer.disk.chain
    )
    return (by_quorum or not staying) and all(p.disk.tip.round >= goal for p in staying) and world.is_one_history()


def _conclude(world: World) -> Result:
    result = world.result
    for peer in world.up():
        assert peer.core is not None
        result.fired.update(peer.core.fired)
    result.seconds = world.now
    result.forks = len(world.judge.forks)
    for known in world.judge.known.values():
        result.commits += bool(known.certificates)
        result.renewals += any(c.kind == RENEWAL for c in known.certificates)
        before = world.judge.known.get(known.manifest.parent)
        result.handovers += before is not None and before.manifest.ownership != known.manifest.ownership
    return result


def explore(
    seeds: Iterable[int], core_class: type[Consensus] = Consensus, only: str | None = None, stop_at: int = 1
) -> Summary:
    """Runs schedules one after the other, until `stop_at` of them have broken a rule."""
    summary = Summary()
    for seed in seeds:
        try:
            kind, result = run_schedule(seed, core_class, only)
            summary.merge(Summary.of(kind, result))
        except Exception as error:  # noqa: BLE001 - whatever a schedule brings to light is a finding
            kind = error.kind if isinstance(error, Violation) else "error"
            text = str(error) if isinstance(error, Violation) else traceback.format_exc()
            summary.findings.append(Finding(seed, kind, text, only))
            if len(summary.findings) >= stop_at:
                break
    return summary


def explore_in_parallel(first: int, count: int, processes: int, stop_at: int = 1, only: str | None = None) -> Summary:
    """The same over a pool of processes, in chunks of neighbouring seeds."""
    summary = Summary()
    chunks = _chunks(first, count, max(20, count // (16 * processes)))
    with ProcessPoolExecutor(processes) as pool:
        for part in pool.map(partial(explore, only=only), chunks):
            summary.merge(part)
            if len(summary.findings) >= stop_at:
                pool.shutdown(cancel_futures=True)
                break
    return summary


def _chunks(first: int, count: int, size: int) -> Iterator[range]:
    for start in range(first, first + count, size):
        yield range(start, min(start + size, first + count))


def report(summary: Summary) -> str:
    """A few lines for a person."""
    never = [name for name in RULE_NAMES if not summary.fired[name]]
    lines = [
        f"{summary.runs} schedules: {dict(summary.totals)}",
        f"kinds: {dict(summary.kinds)}",
        f"longest stall {summary.longest_stall:.1f} s, at most {summary.tightest_bound:.0%} of what is allowed",
        f"rules fired: {dict(summary.fired)}" + (f"; never: {never}" if never else ""),
        *(str(finding) for finding in summary.findings),
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Explore schedules of the protocol.")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--stop-at", type=int, default=1)
    parser.add_argument("--only", help="this kind of schedule")
    parser.add_argument("--verbose", action="store_true", help="tell what happens (one schedule only)")
    options = parser.parse_args()
    if options.verbose:
        run_schedule(options.first, only=options.only, say=lambda line: print(line))  # noqa: T201
    if options.processes > 1:
        summary = explore_in_parallel(options.first, options.count, options.processes, options.stop_at, options.only)
    else:
        summary = explore(
            range(options.first, options.first + options.count), only=options.only, stop_at=options.stop_at
        )
    sys.stdout.write(report(summary) + "\n")
    return 1 if summary.findings else 0


if __name__ == "__main__":
    sys.exit(main())

"""Goes through every order of deliveries, losses and crashes of a few peers in one round, up to a number of faults.

python -m tests.simulation.exhaustive --faults 2
python -m tests.simulation.exhaustive --faults 2 --any-order

A loss, a crash and a peer's return from its disk count as one fault each. Depth-first over the states of `small_world`,
each taken once. Each step is judged where it is made; here it is seen that a commit comes in the end, whatever
happened. Leaves out what longer runs need: for those there is `explorer`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

from spes_p2p.consensus.machine import Consensus
from tests.simulation.judge import Violation
from tests.simulation.small_world import CRASH, FAULTS, LOSE, Event, SmallWorld, State

MOST_BEATS = 48
"""Heartbeats without a commit since the last fault that are too many."""

LONG_BEATS = 10
"""After so many, who is down may come back to a swarm that has taken every other step."""


@dataclass
class Report:
    """What a search saw."""

    states: int = 0
    ends: int = 0
    splits: int = 0
    lost: int = 0
    """Ends in which those who are down are needed, for what they have or for what they would train."""
    longest_beats: int = 0
    seconds: float = 0.0
    peer_states: int = 0
    peer_steps: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    fired: Counter[str] = field(default_factory=Counter)
    whole: bool = True

    def __str__(self) -> str:
        return "\n".join(
            [
                f"{self.states} states{'' if self.whole else ' (not all)'} in {self.seconds:.0f} s of CPU time: "
                f"{self.ends} ends, {self.splits} of them with two commits as the rules allow",
                f"{self.lost} ends in which the newest state, or all who train, went down",
                f"longest wait for a commit: {self.longest_beats} heartbeats after the last fault",
                f"one peer: {self.peer_states} states, {self.peer_steps} steps",
                f"steps taken: {dict(self.kinds)}",
                f"rules fired: {dict(self.fired)}",
            ]
        )


class Found(Violation):
    """A violation with the steps that lead to it."""

    def __init__(self, violation: Violation, path: list[Event]) -> None:
        super().__init__(violation.kind, f"{violation.args[0]}\n  after " + "; ".join(map(_told, path)))
        self.kind = violation.kind
        self.path = path


class Search:
    """One search through a `SmallWorld`, with `faults` of `kinds`."""

    def __init__(self, world: SmallWorld, faults: int, kinds: tuple[str, ...] = (LOSE, CRASH)) -> None:
        self._world = world
        self._faults = faults
        self._kinds = kinds
        self._seen: set[int] = set()
        self._ended: set[int] = set()
        self._path: list[Event] = []
        self.report = Report()

    def run(self, most_states: int = sys.maxsize) -> Report:
        """Goes through all states, or until `most_states` were seen. Raises Found."""
        began = time.process_time()
        try:
            self._search(most_states)
        except Violation as violation:
            raise Found(violation, self._path) from violation
        self.report.seconds = time.process_time() - began
        self.report.peer_states, self.report.peer_steps = self._world.table.size
        self.report.fired = self._world.table.fired
        return self.report

    def _search(self, most_states: int) -> None:
        self._path = [("start",)]
        start = self._world.start(self._faults)
        stack: list[tuple[State, int, Event]] = [(start, 0, ("start",))]
        self._seen.add(hash(start))
        while stack:
            state, depth, event = stack.pop()
            self._path[depth:] = [event]
            self.report.states += 1
            if self.report.states >= most_states:
                self.report.whole = not stack
                return
            if self._is_hopeless(state):
                self.report.lost += 1
                continue
            if self._world.is_over(state) or (self._world.is_known(state) and not self._world.is_lost(state)):
                self._end(state)
                continue
            self._check_progress(state)
            for following, after in reversed(self._world.successors(state, self._kinds)):
                self.report.kinds[following[0]] += 1
                name = hash(after)
                if name not in self._seen:
                    self._seen.add(name)
                    stack.append((after, depth + 1, following))

    def _end(self, state: State) -> None:
        """Everybody knows of the commit: what is left is done in one order, to see that all come to stand on it."""
        self.report.ends += 1
        self.report.splits += self._world.is_split(state)
        state = state._replace(faults=0)
        while not self._world.is_over(state) and hash(state.locals) not in self._ended:
            self._ended.add(hash(state.locals))
            self._check_progress(state)
            event, state = self._world.successors(state, ())[0]
            self._path.append(event)

    def _is_hopeless(self, state: State) -> bool:
        """Whether nobody is up for whose training a round would be made, and none of them comes in a long time.

        Or whether only those who are down have the committed state: the others wait for them for longer than we do.
        """
        if state.beats > LONG_BEATS and not self._world.is_training(state):
            return True
        return (state.faults == 0 or state.beats > LONG_BEATS) and self._world.is_lost(state)

    def _check_progress(self, state: State) -> None:
        self.report.longest_beats = max(self.report.longest_beats, state.beats)
        if state.beats > MOST_BEATS:
            raise Violation("stall", f"no commit for {state.beats} heartbeats after the last fault")


def explore_all(
    faults: int,
    kinds: tuple[str, ...] = (LOSE, CRASH),
    core_class: type[Consensus] = Consensus,
    ordered: bool = True,
    most_states: int = sys.maxsize,
    servers: int = 0,
    leader: int = 1,
) -> Report:
    """The search of three peers in one round, of which `servers` train nothing, led by `leader`. Raises Found."""
    return Search(SmallWorld(3, core_class, ordered, servers, leader=leader), faults, kinds).run(most_states)


def _told(event: Event) -> str:
    return " ".join(str(part) for part in event)


def main() -> int:
    parser = argparse.ArgumentParser(description="Every order of deliveries, losses and crashes in one round.")
    parser.add_argument("--faults", type=int, default=2, help="losses, crashes and returns of a peer, together")
    parser.add_argument("--kinds", nargs="+", choices=FAULTS, default=[LOSE, CRASH])
    parser.add_argument("--any-order", action="store_true", help="messages of one link may overtake each other")
    parser.add_argument("--servers", type=int, choices=range(3), default=0, help="so many of the three train nothing")
    parser.add_argument("--most-states", type=int, default=sys.maxsize)
    options = parser.parse_args()
    try:
        report = explore_all(
            options.faults,
            tuple(options.kinds),
            ordered=not options.any_order,
            most_states=options.most_states,
            servers=options.servers,
        )
    except Found as found:
        sys.stdout.write(f"{found}\n")
        return 1
    sys.stdout.write(f"{report}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

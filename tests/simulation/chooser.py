"""Goes through every run of a small swarm that has up to so many faults, each at every place where it can come.

    python -m tests.simulation.chooser --electors 3 --faults 2 --kinds crash
    python -m tests.simulation.chooser --electors 4 --faults 1 --liar 0

The world is the explorer's, in fair weather, and always the same but for what the `Chooser` picks until all stand on
the first commit: before an action, whether the peer dies; for a message that tells something, whether it is lost or
late; with a liar, what it says to a peer before a message comes there. Depth first: each run begins anew, follows the
last one up to its last choice that can be made otherwise, and goes another way there.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

from spes_p2p.consensus import actions as do
from spes_p2p.consensus.content import Envelope
from spes_p2p.consensus.electorate import Electorate, Faults
from spes_p2p.consensus.machine import Consensus
from spes_p2p.consensus.manifest import manifest_hash
from spes_p2p.consensus.membership import leader_order
from spes_p2p.consensus.table import RULE_NAMES
from spes_p2p.ids import PeerId
from tests.simulation.attackers.lies import Lies
from tests.simulation.explorer import has_arrived, run_until
from tests.simulation.judge import Violation
from tests.simulation.sim import Network, Weather, World
from tests.simulation.sim_peer import SimPeer

CRASH, GONE, LOSE, LATE = "crash", "gone", "lose", "late"
KINDS = (CRASH, GONE, LOSE, LATE)
DEATHS = {CRASH: 0.5, GONE: None}
"""After how many seconds who dies is back with its disk; None: never."""
DELAY_SECONDS, LATE_SECONDS = 0.05, 6.0
STEP_SECONDS = 0.2
ROUNDS = 2
"""Each run ends when all who are up stand on so late a manifest of one chain."""


class Chooser:
    """Which of several ways a run goes; way 0 is what happens where nothing goes wrong, all others are faults."""

    def __init__(self, faults: int, depth: int = sys.maxsize, every: int = 1, offset: int = 0) -> None:
        """At most `faults` in a run, within its first `depth` choices.

        Of all that may be the first one every `every`th is taken, from `offset` on: a part of the search.
        """
        self._faults, self._depth, self._every, self._offset = faults, depth, every, offset
        self._picks: list[int] = []
        self._others: list[list[int]] = []
        """Of each choice the ways that were not taken yet."""
        self._first = 0
        """How many faults could have been the first one so far."""
        self._at = 0

    @property
    def picks(self) -> list[int]:
        """Those of this run, up to its last fault: they lead to it again."""
        last = max((at for at, pick in enumerate(self._picks) if pick), default=-1)
        return self._picks[: last + 1]

    @property
    def choices(self) -> int:
        return len(self._picks)

    def follow(self, picks: list[int]) -> None:
        """One run alone, that of these picks."""
        self._picks, self._others, self._faults, self._at = list(picks), [[] for _ in picks], 0, 0

    def pick(self, ways: int) -> int:
        if self._at == len(self._picks):
            self._picks.append(0)
            self._others.append(self._faults_among(ways))
        self._at += 1
        return self._picks[self._at - 1]

    def _faults_among(self, ways: int) -> list[int]:
        before = sum(map(bool, self._picks))
        if len(self._picks) > self._depth or before >= self._faults:
            return []
        faults = list(range(1, ways))
        if before:
            return faults
        self._first += len(faults)
        return [way for way in faults if (self._first + way) % self._every == self._offset]

    def advance(self) -> bool:
        """Turns to the next run; False where there is none."""
        self._at = 0
        while self._picks:
            if self._others[-1]:
                self._picks[-1] = self._others[-1].pop(0)
                return True
            self._picks.pop()
            self._others.pop()
        return False


class ChosenNetwork(Network):
    """Loses or delays a message where that is chosen, and brings a lie before it."""

    _world: ChosenWorld

    def send(self, sender: PeerId, to: PeerId, envelope: Envelope) -> None:
        fault = self._world.fault_of((LOSE, LATE)) if envelope.has_news and sender not in self._world.liars else ""
        if fault != LOSE:
            self._world.after(DELAY_SECONDS + LATE_SECONDS * (fault == LATE), self._deliver, sender, to, envelope)

    def _deliver(self, sender: PeerId, to: PeerId, envelope: Envelope) -> None:
        if envelope.has_news:
            self._world.lie_to(to)
        super()._deliver(sender, to, envelope)


class ChosenWorld(World):
    """`electors` equals; with `liar` the one that leads this ballot of the first round lies."""

    network_class = ChosenNetwork
    poisoned = 0.0

    def __init__(
        self,
        chooser: Chooser,
        electors: int,
        kinds: tuple[str, ...],
        core_class: type[Consensus] = Consensus,
        liar: int | None = None,
    ) -> None:
        self._chooser, self._kinds = chooser, kinds
        self.is_chosen = False
        """Whether faults may come: not before all have heard each other, nor after the first commit."""
        self.told: Counter[str] = Counter()
        self._offered: set[tuple[object, ...]] = set()
        """Lies that the chooser was asked about, each once for all that its receiver has bound itself to."""
        self.faults = Faults.CRASH if liar is None else Faults.BYZANTINE  # type: ignore[misc]
        super().__init__(0, electors, 2, 1, Weather(reply=0.0), core_class, STEP_SECONDS)
        for peer in self.peers.values():
            peer.step_seconds, peer.work_seconds = STEP_SECONDS, DELAY_SECONDS
        self._lies: Lies | None = None
        if liar is not None:
            order = leader_order(manifest_hash(self.genesis), self.genesis.members)
            name = Electorate(order, self.faults).leader(liar)
            self.liars = {name: core_class}
            self.judge.liars = {name}
            self._lies = Lies(name, self.rules)
        else:
            self.add_organiser(keeps_states=False)

    def fault_of(self, kinds: tuple[str, ...]) -> str:
        """Which of these kinds of fault comes now; "" for none."""
        ways = [kind for kind in kinds if kind in self._kinds]
        if not ways or not self.is_chosen:
            return ""
        return ["", *ways][self._chooser.pick(1 + len(ways))]

    def dies_before(self, peer: SimPeer, action: do.Action) -> bool:
        if peer.has_key or (isinstance(action, do.Send) and not action.envelope.has_news):
            return False
        fault = self.fault_of((CRASH, GONE))
        if not fault:
            return False
        seconds = DEATHS[fault]
        peer.is_gone_for_good = seconds is None
        if seconds is not None:
            self.after(seconds, peer.start)
        return True

    def lie_to(self, to: PeerId) -> None:
        """What the liar says to `to`, or to all, before a message comes there."""
        receiver = self.peers[to].core
        if self._lies is None or not self.is_chosen or to in self.liars or receiver is None or receiver.tip.round:
            return
        cores = [peer.core for peer in self.up() if peer.core is not None and not peer.core.tip.round]
        moment = (to, bool(receiver.state.round.plan), receiver.state.round.vote.ballot, *_bound_to(receiver))
        lies = [one for one in self._lies.for_peer(receiver, cores) if (moment, one[0]) not in self._offered]
        self._offered |= {(moment, told) for told, _ in lies}
        if not lies:
            return
        pick = self._chooser.pick(1 + 2 * len(lies))
        if not pick:
            return
        told, envelope = lies[(pick - 1) // 2]
        [liar] = self.liars
        self.tell(f"{liar} lies to {'all' if pick % 2 else to}: {told}")
        self.told[told.split()[0]] += 1
        for name in [peer for peer in self.peers if peer not in self.liars] if pick % 2 else [to]:
            self.peers[name].receive(liar, envelope)

    def play(self) -> None:
        """Raises Violation."""
        run_until(self, until=lambda: all(len(peer.core.state.others.contacts) for peer in self.up() if peer.core))
        self.is_chosen = True
        run_until(self, until=self._knows_a_commit)
        self.is_chosen = False
        run_until(self, until=lambda: has_arrived(self, ROUNDS))
        for name, peer in self.peers.items():
            if (
                self.liars
                and name not in self.liars
                and (peer.core is None or peer.disk.incarnation != self._first(name))
            ):
                raise Violation("gave up", f"{name} was made to give up its vote")

    def _first(self, name: PeerId) -> int:
        return next(member.incarnation for member in self.genesis.members if member.peer == name)

    def _knows_a_commit(self) -> bool:
        staying = [peer for peer in self.up() if not peer.has_key and peer.name not in self.liars]
        return all(peer.disk.tip.round > 0 for peer in staying) and bool(staying)


def _bound_to(core: Consensus) -> tuple[bool, ...]:
    """Which votes it has cast in its ballot."""
    record = core.state.round.vote.record
    words = record.proposal, record.prevote, record.precommit
    return tuple(word is not None and word.value.ballot == core.state.round.vote.ballot for word in words)


class Found(Violation):
    """A violation with the picks that lead to it."""

    def __init__(self, violation: Violation, picks: list[int]) -> None:
        super().__init__(violation.kind, f"{violation.args[0]}\n  with --picks {' '.join(map(str, picks))}")
        self.kind, self.picks = violation.kind, picks


@dataclass
class Report:
    """What a search saw. `choices`: of the longest run."""

    runs: int = 0
    choices: int = 0
    seconds: float = 0.0
    whole: bool = True
    told: Counter[str] = field(default_factory=Counter)
    fired: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        never = [name for name in RULE_NAMES if not self.fired[name]]
        return (
            f"{self.runs} runs{'' if self.whole else ' (not all)'} of up to {self.choices} choices in "
            f"{self.seconds:.0f} s of CPU time; rules that never fired: {never}"
            + (f"; lies: {dict(self.told)}" if self.told else "")
        )


def search(
    electors: int,
    faults: int,
    kinds: tuple[str, ...] = (CRASH,),
    core_class: type[Consensus] = Consensus,
    liar: int | None = None,
    depth: int = sys.maxsize,
    part: tuple[int, int] = (0, 1),
    most_seconds: float = float("inf"),
) -> Report:
    """All runs, or as many as `most_seconds` of CPU time allow; `part` (i, n): the ith of n parts. Raises Found."""
    chooser, report, began = Chooser(faults, depth, part[1], part[0]), Report(), time.process_time()
    while True:
        world = ChosenWorld(chooser, electors, kinds, core_class, liar)
        try:
            world.play()
        except Violation as violation:
            raise Found(violation, chooser.picks) from violation
        report.runs += 1
        report.choices = max(report.choices, chooser.choices)
        report.told += world.told
        for peer in world.up():
            assert peer.core is not None
            report.fired.update(peer.core.fired)
        report.fired.update(world.result.fired)
        report.seconds = time.process_time() - began
        if not chooser.advance():
            return report
        if report.seconds > most_seconds:
            report.whole = False
            return report


def main() -> int:
    parser = argparse.ArgumentParser(description="Every run of a small swarm with up to so many faults.")
    parser.add_argument("--electors", type=int, default=3)
    parser.add_argument("--faults", type=int, default=2)
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=[CRASH])
    parser.add_argument("--liar", type=int, help="who leads this ballot lies, a lie counts as a fault")
    parser.add_argument("--depth", type=int, default=sys.maxsize, help="faults come within so many first choices")
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), help="the first of two parts: 0 2")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of CPU time, at most")
    parser.add_argument("--picks", type=int, nargs="+", help="tell one run, as a finding names it")
    options = parser.parse_args()
    kinds = tuple(options.kinds)
    if options.picks is not None:
        chooser = Chooser(0)
        chooser.follow(options.picks)
        world = ChosenWorld(chooser, options.electors, kinds, liar=options.liar)
        world.say = lambda line: print(line)  # noqa: T201
        world.play()
        return 0
    try:
        report = search(
            options.electors, options.faults, kinds, liar=options.liar, depth=options.depth,
            part=tuple(options.part), most_seconds=options.seconds,
        )  # fmt: skip
    except Found as found:
        sys.stdout.write(f"{found}\n")
        return 1
    sys.stdout.write(f"{report}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Electors that tell each other their votes, in every order and at random; and whether they decide once all goes well.

python -m tests.consensus.vote_gossip --electors 3 --ballots 2
python -m tests.consensus.vote_gossip --walks 2000

Beside `vote_search`, which looks at everything that can be said: here the shipped `Tendermint` remembers what it heard.
Somebody hears what another tells at that moment, a deadline that was asked for passes, or somebody comes back from its
disk; who is not named any more is down. From every state that is reached a fair schedule (all who are up hear each
other, then deadlines pass) must decide within as many ballots as there are electors, and two.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from spes_p2p.consensus.electorate import NIL, Electorate, Faults
from spes_p2p.consensus.messages import Polka, Precommit, Prevote, Proposal, Signed, Votes
from spes_p2p.consensus.tendermint import Tendermint
from spes_p2p.consensus.vote_events import (
    Allowed,
    Built,
    DeadlinePassed,
    Event,
    Heard,
    Judged,
    NotPersisted,
    Persist,
    Stage,
    StartDeadline,
    Step,
    Verdict,
)
from spes_p2p.consensus.vote_record import VoteRecord
from spes_p2p.ids import Hash, PeerId
from tests.consensus.vote_search import FINGERPRINT, NAMES, PARENT, precommit_of, prevote_of, proposal_of, value_of
from tests.simulation.judge import Violation
from tests.simulation.sim_state import FakeSealer


class Elector:
    """One elector with its disk: what it asks for is done at once."""

    def __init__(self, name: PeerId, electorate: Electorate, elector_class: type[Tendermint]) -> None:
        self.name, self._electorate, self._class = name, electorate, elector_class
        self.record = VoteRecord(PARENT)
        self.restart()

    def restart(self) -> None:
        """Only the record is left of what it knew. It has built a value of its own, and asks for tiles again."""
        sealer = FakeSealer(self.name)
        self.machine = self._class.begin(self.name, self._electorate, FINGERPRINT, self.record, sealer)
        self.deadlines: set[StartDeadline] = set()
        self.wanted: set[Hash] = set()
        self.take(Allowed(True))
        self.take(Built(value_of(self._electorate.order.index(self.name))))

    def take(self, event: Event, verdict: Verdict | None = Verdict.FIT, has_room: bool = True) -> None:
        """One event and all that follows from it here; what is to be staged gets this verdict. Or the disk is full."""
        events = [event]
        while events:
            for action in self.machine.handle(events.pop(0)):
                match action:
                    case Persist(record):
                        if not has_room:
                            self.machine.handle(NotPersisted(self.record))
                            return
                        self.record = record
                    case StartDeadline():
                        self.deadlines.add(action)
                    case Stage(value):
                        self.wanted.add(value)
                        if verdict is not None:
                            events.append(Judged(value, verdict))

    @property
    def due(self) -> list[DeadlinePassed]:
        """Deadlines that would do something."""
        own = self.machine.vote
        here = (own.step, Step.PRECOMMIT) if own.step is not Step.PRECOMMIT else (own.step,)
        return [DeadlinePassed(own.ballot, at) for at in here if StartDeadline(own.ballot, at) in self.deadlines]

    @property
    def decided(self) -> Hash | None:
        return self.machine.vote.decided.value if self.machine.vote.decided else None

    def copy(self) -> Elector:
        """One that goes its own way."""
        other = copy.copy(self)
        other.machine, other.deadlines, other.wanted = (
            _copy(self.machine, FakeSealer(self.name)),
            set(self.deadlines),
            set(self.wanted),
        )
        return other

    def key(self) -> tuple[object, ...]:
        """Equal where the same follows."""
        heard, own = self.machine.vote.heard, self.machine.vote
        votes = [
            _said(kept.get(name)) for name in NAMES for kept in (heard.prevotes, heard.precommits, heard.proposals)
        ]
        polkas = [_shown(polka) for polka in (heard.polka, own.record.valid)]
        lock = own.record.locked_ballot, own.record.locked_value
        due, verdicts = tuple(self.due), frozenset(self.machine.vote.verdicts.items())
        return own.ballot, own.step, tuple(votes), tuple(polkas), lock, due, verdicts, self.decided


def _copy(machine: Tendermint, sealer: FakeSealer) -> Tendermint:
    return type(machine)(machine.me, machine.vote.copy(), sealer)


def _shown(polka: Polka | None) -> tuple[int, Hash, tuple[PeerId, ...]]:
    return (polka.ballot, polka.value, tuple(signed.author for signed in polka.prevotes)) if polka else (-1, NIL, ())


def _said(signed: Signed[Prevote] | Signed[Precommit] | Signed[Proposal] | None) -> tuple[object, ...]:
    if signed is None:
        return ()
    polka = signed.value.polka if isinstance(signed.value, Proposal) else None
    return signed.value.ballot, signed.value.value, _shown(polka)


World = tuple[int, ...]
"""The number of the state of each elector."""


@dataclass
class Report:
    """What a search saw."""

    states: int = 0
    local_states: int = 0
    longest_ballots: int = 0
    """From the newest ballot of a state to the one in which a fair schedule decides."""
    seconds: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.states} states, {self.local_states} of one elector; a fair schedule decided after "
            f"{self.longest_ballots} ballots at most; {self.seconds:.1f} s of CPU time"
        )


class GossipSearch:
    """Every order of hearing, deadlines and restarts in the first ballots; `down` electors at the end never start."""

    def __init__(
        self, electors: int, faults: Faults, down: int = 0, elector_class: type[Tendermint] = Tendermint
    ) -> None:
        electorate = Electorate(NAMES[:electors], faults)
        self._quorum = electorate.quorum
        self._states: list[Elector] = []
        self._numbers: dict[object, int] = {}
        self._known: dict[object, int] = {}
        self._start = tuple(
            self._number(Elector(n, electorate, elector_class)) for n in electorate.order[: electors - down]
        )
        self._good: set[tuple[World, tuple[int, ...]]] = set()
        self.report = Report()

    def run(self, ballots: int, most_states: int = sys.maxsize) -> Report:
        """Goes through all that can be reached in so many ballots. Raises Violation."""
        began = time.process_time()
        seen, stack = {self._start}, [self._start]
        while stack and len(seen) < most_states:
            world = stack.pop()
            self._check(world)
            for after in self._successors(world, ballots):
                if after not in seen:
                    seen.add(after)
                    stack.append(after)
        self.report.states, self.report.local_states = len(seen), len(self._states)
        self.report.seconds = time.process_time() - began
        return self.report

    def _number(self, elector: Elector) -> int:
        key = (elector.name, elector.key())
        if key not in self._numbers:
            self._numbers[key] = len(self._states)
            self._states.append(elector)
        return self._numbers[key]

    def _after(self, number: int, what: int | DeadlinePassed | None) -> int:
        """The state after hearing what one in state `what` tells, a deadline, or (None) a restart."""
        name = (number, what)
        if name not in self._known:
            elector = self._states[number].copy()
            if what is None:
                elector.restart()
            elif isinstance(what, int):
                elector.take(Heard(self._states[what].machine.vote.to_tell))
            else:
                elector.take(what)
            self._known[name] = self._number(elector)
        return self._known[name]

    def _successors(self, world: World, ballots: int) -> Iterator[World]:
        for place, number in enumerate(world):
            others = [other for other in world if other != number]
            for what in (*others, *self._states[number].due, None):
                after = self._after(number, what)
                if self._states[after].machine.vote.ballot < ballots:
                    yield (*world[:place], after, *world[place + 1 :])

    def _check(self, world: World) -> None:
        if any(self._states[number].machine.vote.is_mute for number in world):
            raise Violation("mute", "an elector with its record takes it for an old one")
        decided = {self._states[number].decided for number in world} - {None}
        if len(decided) > 1:
            raise Violation("agreement", f"{len(decided)} values are decided")
        if not decided:
            for up in itertools.combinations(range(len(world)), self._quorum):
                self._check_progress(world, up)

    def _check_progress(self, world: World, up: tuple[int, ...]) -> None:
        """Those of a quorum who are `up` hear all of each other; then the deadlines pass that they wait for."""
        first = max(self._states[number].machine.vote.ballot for number in world)
        path: list[tuple[World, tuple[int, ...]]] = []
        while (world, up) not in self._good and not any(self._states[world[at]].decided for at in up):
            path.append((world, up))
            after = self._all_hear(world, up)
            if after == world:
                after = self._all_wait(world, up)
            newest = max(self._states[number].machine.vote.ballot for number in after)
            if after == world or newest - first > len(world) + 2:
                where = [(self._states[n].name, self._states[n].machine.vote.ballot) for n in world]
                raise Violation("stall", f"{[where[at] for at in up]} hear each other, and decide nothing")
            self.report.longest_ballots = max(self.report.longest_ballots, newest - first)
            world = after
        self._good.update(path)

    def _all_hear(self, world: World, up: tuple[int, ...]) -> World:
        after = list(world)
        for listener, speaker in itertools.permutations(up, 2):
            after[listener] = self._after(after[listener], after[speaker])
        return tuple(after)

    def _all_wait(self, world: World, up: tuple[int, ...]) -> World:
        after = list(world)
        for place in up:
            for event in self._states[world[place]].due[:1]:
                after[place] = self._after(after[place], event)
        return tuple(after)


class Walk:
    """One run at random: words come late, twice or never, disks are full, some may not vote for a while, liars lie."""

    def __init__(self, seed: int, elector_class: type[Tendermint] = Tendermint) -> None:
        self._random = random.Random(seed)
        faults = self._random.choice(tuple(Faults))
        size = self._random.choice((1, 2, 3, 4, 5, 7))
        self._electorate = Electorate(NAMES[:size], faults)
        spare = size - self._electorate.quorum
        liars = self._random.randint(0, spare) if faults is Faults.BYZANTINE else 0
        names = list(self._electorate.order)
        self._random.shuffle(names)
        self._liars = names[:liars]
        self._electors = [Elector(name, self._electorate, elector_class) for name in names[liars:]]
        self._down = names[liars : liars + self._random.randint(0, spare - liars)]
        self._words: list[Votes] = [elector.machine.vote.to_tell for elector in self._electors]
        self._values = [value_of(ballot, twin) for ballot in range(size) for twin in (0, 1)]

    def run(self, steps: int = 120) -> int:
        """So many steps at random, then fair ones; how many ballots it took to decide then. Raises Violation."""
        for _ in range(self._random.randint(0, steps)):
            self._step()
            self._check()
        return self._end()

    def _step(self) -> None:
        elector, chance = self._random.choice(self._electors), self._random.random()
        verdict = self._random.choice((Verdict.FIT, Verdict.FIT, Verdict.FIT, None))
        has_room = self._random.random() < 0.9
        if chance < 0.6:
            elector.take(Heard(self._random.choice(self._words[-40:])), verdict, has_room)
        elif chance < 0.75 and self._liars:
            elector.take(Heard(self._lie()), verdict, has_room)
        elif chance < 0.9:
            for event in elector.due[:1]:
                elector.take(event, verdict, has_room)
        elif chance < 0.95:
            elector.take(Allowed(self._random.random() < 0.5), verdict, has_room)
        else:
            elector.restart()
        self._words.append(elector.machine.vote.to_tell)

    def _lie(self) -> Votes:
        """Anything that a liar can sign, with polkas that there are, or a false one."""
        liar = self._random.choice(self._liars)
        newest = max(elector.machine.vote.ballot for elector in self._electors)
        ballot, value = self._random.randint(0, newest + 2), self._random.choice([NIL, *self._values])
        polkas: list[Polka | None] = [words.polka for words in self._words[-40:]]
        polka = self._random.choice(polkas)
        if polka is not None and self._random.random() < 0.3:
            polka = Polka(ballot, self._random.choice([value, polka.value]), polka.prevotes)
        said = value if polka is None else polka.value
        proposal = proposal_of(liar, ballot, said, polka) if said != NIL else None
        return Votes(prevote_of(liar, ballot, value), precommit_of(liar, ballot, value), proposal, polka)

    def _check(self) -> None:
        decided = {elector.decided for elector in self._electors} - {None}
        if len(decided) > 1:
            raise Violation("agreement", f"{len(decided)} values are decided")
        if any(elector.machine.vote.is_mute for elector in self._electors):
            raise Violation("mute", "an elector with its record takes it for an old one")
        for elector in self._electors:
            accused = elector.machine.vote.heard.liars - set(self._liars)
            if accused:
                raise Violation("evidence", f"{accused} are accused and do not lie")

    def _end(self) -> int:
        """Who is up hears all others, liars too, then deadlines pass; until somebody has decided."""
        up = [elector for elector in self._electors if elector.name not in self._down]
        first = max(elector.machine.vote.ballot for elector in self._electors)
        for elector in up:
            elector.take(Allowed(True))
        while not any(elector.decided for elector in up):
            for _ in range(3):
                for listener, speaker in itertools.permutations(up, 2):
                    if self._liars and self._random.random() < 0.3:
                        listener.take(Heard(self._lie()))
                    listener.take(Heard(speaker.machine.vote.to_tell))
            self._check()
            for elector in up if not any(elector.decided for elector in up) else []:
                for value in elector.wanted:
                    elector.take(Judged(value, Verdict.FIT))
                for event in elector.due[:1]:
                    elector.take(event)
            newest = max(elector.machine.vote.ballot for elector in up)
            if newest - first > 2 * len(self._electorate.order) + 2:
                raise Violation("stall", f"nothing is decided from ballot {first} to {newest}")
        self._check()
        return max(elector.machine.vote.ballot for elector in up) - first


def main() -> int:
    parser = argparse.ArgumentParser(description="Electors that tell each other their votes.")
    parser.add_argument("--electors", type=int, default=3)
    parser.add_argument("--faults", choices=[faults.value for faults in Faults], default="crash")
    parser.add_argument("--down", type=int, default=0, help="so many never start")
    parser.add_argument("--ballots", type=int, default=2)
    parser.add_argument("--walks", type=int, default=0, help="so many random runs in place of the search")
    options = parser.parse_args()
    if options.walks:
        longest = max(Walk(seed).run() for seed in range(options.walks))
        sys.stdout.write(f"{options.walks} walks; {longest} ballots at most to decide at the end\n")
        return 0
    report = GossipSearch(options.electors, Faults(options.faults), options.down).run(options.ballots)
    sys.stdout.write(f"{report}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

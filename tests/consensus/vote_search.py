"""Goes through everything that electors, one of them perhaps a liar, can do in the first ballots of one vote.

python -m tests.consensus.vote_search --electors 4 --faults byzantine --ballots 4

The search runs the shipped `Tendermint`, each step of it after a restart from the record, with any of the messages
that were ever sent: what is never heard was lost, and who says nil may as well be down. What an elector says in a
ballot depends on its record and on what was said in that ballot and earlier ones alone, and nothing is ever unsaid. So
every run can be put in this order, with the same words said: ballot after ballot, first the proposal, then all
prevotes, then all precommits. Only such runs are gone through. Deadlines pass at any moment, and anybody may be in any
ballot: that is more than can happen. A liar signs whatever it likes at any time, and shows it to whom it likes. Leaves
out messages that are remembered over steps, and progress (`vote_gossip`).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial

from spes_p2p.consensus.electorate import NIL, Electorate, Faults
from spes_p2p.consensus.messages import Polka, Precommit, Prevote, Proposal, Signed, Votes
from spes_p2p.consensus.tendermint import Tendermint
from spes_p2p.consensus.vote_events import (
    Allowed,
    Built,
    DeadlinePassed,
    Decide,
    Event,
    Heard,
    Judged,
    Persist,
    Step,
    Verdict,
)
from spes_p2p.consensus.vote_record import VoteRecord, ballot_of
from spes_p2p.ids import Hash, PeerId, sha256, short
from tests.simulation.judge import Violation
from tests.simulation.sim_state import FakeSealer

FINGERPRINT = sha256(b"a run")
PARENT = sha256(b"a parent")
NAMES = tuple(PeerId(name) for name in "abcdefg")


@cache
def value_of(ballot: int, twin: int = 0) -> Hash:
    """What the leader of a ballot makes of its own; a liar makes twins."""
    return sha256(b"value", bytes([ballot, twin]))


@cache
def prevote_of(author: PeerId, ballot: int, value: Hash) -> Signed[Prevote]:
    return FakeSealer(author).seal(Prevote(FINGERPRINT, PARENT, ballot, value))


@cache
def precommit_of(author: PeerId, ballot: int, value: Hash) -> Signed[Precommit]:
    return FakeSealer(author).seal(Precommit(FINGERPRINT, PARENT, ballot, value))


def proposal_of(author: PeerId, ballot: int, value: Hash, polka: Polka | None) -> Signed[Proposal]:
    return FakeSealer(author).seal(Proposal(FINGERPRINT, PARENT, ballot, value, polka))


Path = tuple["Path", str] | None
"""The steps before, and the last one."""


@dataclass(frozen=True)
class World:
    """The records on the disks of all who do not lie, and what was ever said that still matters."""

    records: tuple[VoteRecord, ...]
    polkas: tuple[Polka, ...] = ()
    decided: frozenset[Hash] = frozenset()
    proposals: tuple[Signed[Proposal], ...] = ()
    """Of the present ballot."""
    path: Path = None

    def key(self, ballot: int) -> tuple[object, ...]:
        """Equal where the same can follow. A vote for nil and none are the same: neither lets anything come about."""
        return (
            tuple(_key(record, ballot) for record in self.records),
            tuple(sorted((polka.ballot, polka.value) for polka in self.polkas)),
            self.decided,
            tuple(sorted((signed.value.value, signed.value.polka_ballot) for signed in self.proposals)),
        )

    def with_record(self, place: int, record: VoteRecord, told: str) -> World:
        records = (*self.records[:place], record, *self.records[place + 1 :])
        return replace(self, records=records, path=(self.path, told))


def _key(record: VoteRecord, ballot: int) -> tuple[object, ...]:
    valid = (record.valid_ballot, record.valid.value) if record.valid else ()
    return (
        record.locked_ballot,
        record.locked_value,
        valid,
        said(record.prevote, ballot),
        said(record.precommit, ballot),
    )


def _whole(record: VoteRecord) -> tuple[object, ...]:
    """All of a record that an elector can act by."""
    proposal = record.proposal.value if record.proposal else None
    proposed = (proposal.ballot, proposal.value, _shown(proposal.polka)) if proposal else ()
    votes = [(vote.value.ballot, vote.value.value) for vote in (record.prevote, record.precommit) if vote is not None]
    valid = _shown(record.valid)
    return ballot_of(record.prevote), *votes, proposed, record.locked_ballot, record.locked_value, valid


def _shown(polka: Polka | None) -> tuple[object, ...]:
    return (polka.ballot, polka.value, tuple(signed.author for signed in polka.prevotes)) if polka else ()


def said(vote: Signed[Prevote] | Signed[Precommit] | None, ballot: int) -> Hash:
    """What this newest vote says in the ballot; NIL without."""
    return vote.value.value if vote is not None and vote.value.ballot == ballot else NIL


class Found(Violation):
    """A violation with the steps that lead to it."""

    def __init__(self, kind: str, text: str, path: Path) -> None:
        steps: list[str] = []
        while path is not None:
            path, step = path
            steps.append(step)
        super().__init__(kind, f"{text}\n  after " + "; ".join(reversed(steps)))
        self.steps = steps[::-1]


@dataclass
class Report:
    """What a search saw."""

    states: int = 0
    steps: int = 0
    decisions: int = 0
    """States in which something is decided."""
    seconds: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.states} states, something is decided in {self.decisions} of them; "
            f"{self.steps} steps of one elector; {self.seconds:.1f} s of CPU time"
        )


class VoteSearch:
    """One search over `electors`, of whom those at the places `liars` in the order of leaders do anything."""

    def __init__(
        self,
        electors: int,
        faults: Faults,
        liars: tuple[int, ...] = (),
        elector_class: type[Tendermint] = Tendermint,
        electorate_class: type[Electorate] = Electorate,
        record_class: type[VoteRecord] = VoteRecord,
    ) -> None:
        self.electorate = electorate_class(NAMES[:electors], faults)
        self._liars = tuple(NAMES[place] for place in liars)
        self._honest = tuple(name for name in self.electorate.order if name not in self._liars)
        self._elector_class, self._record = elector_class, record_class(PARENT)
        self._known: dict[object, list[VoteRecord]] = {}
        self.report = Report()

    def run(self, ballots: int) -> Report:
        """Goes through all that can happen in ballots 0 to `ballots` - 1. Raises Found."""
        began = time.process_time()
        worlds = [World((self._record,) * len(self._honest))]
        for ballot in range(ballots):
            worlds = self._stage(worlds, ballot, self._propose)
            for place in range(len(self._honest)):
                worlds = self._stage(worlds, ballot, partial(self._prevote, place))
            worlds = self._stage(worlds, ballot, self._see_polkas)
            for place in range(len(self._honest)):
                worlds = self._stage(worlds, ballot, partial(self._precommit, place))
            worlds = self._stage(worlds, ballot + 1, lambda w, b: self._decide(w, b - 1))
        self.report.seconds = time.process_time() - began
        return self.report

    def _stage(
        self, worlds: Iterable[World], ballot: int, follow: Callable[[World, int], Iterator[World]]
    ) -> list[World]:
        """All that can follow, each once."""
        found: dict[object, World] = {}
        for world in worlds:
            for after in follow(world, ballot):
                found.setdefault(after.key(ballot), after)
        self.report.states += len(found)
        return list(found.values())

    # ---------------------------------------------------------------- proposals

    def _propose(self, world: World, ballot: int) -> Iterator[World]:
        """The leader proposes nothing, its own value, or that of any polka it may have heard of. A liar: anything."""
        leader = self.electorate.leader(ballot)
        yield world
        if leader in self._liars:
            told = f"{leader} proposes anything in ballot {ballot}"
            yield replace(world, proposals=tuple(self._lies(world, leader, ballot)), path=(world.path, told))
            return
        place = self._honest.index(leader)
        for polka in (None, *world.polkas):
            heard: list[Event] = []
            if polka is not None:
                heard = [Heard(Votes(polka=polka)), Judged(polka.value, Verdict.FIT)]
            events = [*self._enter(leader, ballot), *heard, Built(value_of(ballot))]
            record = self._step(world, place, ballot, events)
            if ballot_of(record.proposal) != ballot or record.proposal is None:
                raise Found("stall", f"{leader} does not propose in ballot {ballot}", world.path)
            proposal = record.proposal.value
            told = f"{leader} proposes {short(proposal.value)} with polka {proposal.polka_ballot} in ballot {ballot}"
            yield replace(world.with_record(place, record, told), proposals=(record.proposal,))

    def _lies(self, world: World, leader: PeerId, ballot: int) -> Iterator[Signed[Proposal]]:
        """Every value so far, two new ones, every polka that there is, and some that are none."""
        values = {value_of(at, twin) for at in range(ballot + 1) for twin in (0, 1)}
        for value in sorted(values):
            yield proposal_of(leader, ballot, value, None)
            shown = [polka for polka in world.polkas if polka.value == value]
            if not shown:
                lies = tuple(prevote_of(liar, 0, value) for liar in self._liars)
                yield proposal_of(leader, ballot, value, Polka(0, value, lies * len(self.electorate.order)))
        for polka in world.polkas:
            yield proposal_of(leader, ballot, polka.value, polka)
            yield proposal_of(leader, ballot, value_of(ballot), polka)
            yield proposal_of(leader, ballot, polka.value, replace(polka, prevotes=polka.prevotes[:-1]))
            for other in range(-1, ballot + 1):
                if other != polka.ballot:
                    yield proposal_of(leader, ballot, polka.value, replace(polka, ballot=other))

    # ---------------------------------------------------------------- votes

    def _prevote(self, place: int, world: World, ballot: int) -> Iterator[World]:
        """An elector prevotes what was proposed, or nil."""
        me, record = self._honest[place], world.records[place]
        heard = tuple((signed.value.value, _shown(signed.value.polka)) for signed in world.proposals)
        for after in self._once((place, ballot, _whole(record), heard), lambda: self._prevotes(world, ballot, place)):
            told = _told(said(after.prevote, ballot))
            yield world.with_record(place, after, f"{me} prevotes {told} in ballot {ballot}")

    def _prevotes(self, world: World, ballot: int, place: int) -> Iterator[VoteRecord]:
        """What one elector can have on disk then; it never prevotes twice, whatever it hears next."""
        record = world.records[place]
        ways = list(self._before_prevote(world, self._honest[place], ballot))
        with_proposal = ballot_of(record.prevote) == ballot
        all_after = [record] if with_proposal else [self._step(world, place, ballot, events) for events in ways]
        for after in _different(all_after):
            others = ways if ballot_of(after.prevote) == ballot else []
            if any(self._step(world, place, ballot, events, after).prevote != after.prevote for events in others):
                raise Found("equivocation", f"{self._honest[place]} prevotes twice in ballot {ballot}", world.path)
            yield after

    def _once(self, name: object, work: Callable[[], Iterator[VoteRecord]]) -> list[VoteRecord]:
        """The different records that an elector can come to: the same wherever it has the same before it."""
        if name not in self._known:
            self._known[name] = _different(work())
        return self._known[name]

    def _before_prevote(self, world: World, me: PeerId, ballot: int) -> Iterator[list[Event]]:
        enter = self._enter(me, ballot)
        yield [*enter, DeadlinePassed(ballot, Step.PROPOSE)]
        for proposal in world.proposals:
            heard = [*enter, Heard(Votes(proposal=proposal))]
            yield [*heard, DeadlinePassed(ballot, Step.PROPOSE)]
            for verdict in Verdict:
                yield [*heard, Judged(proposal.value.value, verdict)]

    def _see_polkas(self, world: World, ballot: int) -> Iterator[World]:
        """Every polka that the prevotes of this ballot, and all that liars may sign, amount to."""
        polkas = list(world.polkas)
        for value in self._values(world.records, ballot, "prevote"):
            voters = [n for n, r in zip(self._honest, world.records) if said(r.prevote, ballot) == value]
            chosen = sorted([*voters, *self._liars][: self.electorate.quorum])
            if voters and len(chosen) >= self.electorate.quorum:
                polkas.append(Polka(ballot, value, tuple(prevote_of(name, ballot, value) for name in chosen)))
        yield replace(world, polkas=tuple(polkas))

    def _precommit(self, place: int, world: World, ballot: int) -> Iterator[World]:
        """An elector precommits what has a polka, or nil."""
        me, record = self._honest[place], world.records[place]
        heard = tuple(said(other.prevote, ballot) for other in world.records)
        for after in self._once((place, ballot, _whole(record), heard), lambda: self._precommits(world, ballot, place)):
            told = _told(said(after.precommit, ballot))
            yield world.with_record(place, after, f"{me} precommits {told} in ballot {ballot}")

    def _precommits(self, world: World, ballot: int, place: int) -> Iterator[VoteRecord]:
        """What one elector can have on disk then; it never precommits twice, whatever it hears next."""
        me, record, ways = self._honest[place], world.records[place], list(self._before_precommit(world, ballot))
        found: list[VoteRecord] = []
        for events in ways:
            after = record if ballot_of(record.precommit) == ballot else self._step(world, place, ballot, events)
            value = said(after.precommit, ballot)
            if value != NIL and not any((polka.ballot, polka.value) == (ballot, value) for polka in world.polkas):
                raise Found("polka", f"{me} precommits {short(value)} in ballot {ballot} without a polka", world.path)
            if value != NIL and after is not record and not any(isinstance(event, Judged) for event in events):
                raise Found("tiles", f"{me} precommits {short(value)}, which is not on its disk", world.path)
            found.append(after)
        for after in _different(found):
            others = ways if ballot_of(after.precommit) == ballot else []
            if any(self._step(world, place, ballot, other, after).precommit != after.precommit for other in others):
                raise Found("equivocation", f"{me} precommits twice in ballot {ballot}", world.path)
            yield after

    def _before_precommit(self, world: World, ballot: int) -> Iterator[list[Event]]:
        """Prevotes of the whole ballot, liars voting for each value in turn; or only those for that value."""
        votes = list(zip(self._honest, (said(record.prevote, ballot) for record in world.records)))
        yield [DeadlinePassed(ballot, Step.PREVOTE)]
        for value in (NIL, *self._values(world.records, ballot, "prevote")):
            lies = [prevote_of(liar, ballot, value) for liar in self._liars]
            every = [*(prevote_of(name, ballot, choice) for name, choice in votes), *lies]
            same = [vote for vote in every if vote.value.value == value]
            for heard in (every, same):
                events: list[Event] = [Heard(Votes(prevote=vote)) for vote in heard]
                yield [*events, DeadlinePassed(ballot, Step.PREVOTE)]
                yield [Judged(value, Verdict.FIT), *events]

    def _decide(self, world: World, ballot: int) -> Iterator[World]:
        """Somebody may hear every precommit of this ballot."""
        decided = set(world.decided)
        for value in self._values(world.records, ballot, "precommit"):
            watcher = self._elector(0, self._record)
            voters = [n for n, r in zip(self._honest, world.records) if said(r.precommit, ballot) == value]
            votes = [precommit_of(name, ballot, value) for name in (*voters, *self._liars)]
            actions = [action for vote in votes for action in watcher.handle(Heard(Votes(precommit=vote)))]
            decided |= {action.value for action in actions if isinstance(action, Decide)}
        if len(decided) > 1:
            raise Found("agreement", f"{len(decided)} values are decided", world.path)
        self.report.decisions += bool(decided)
        yield replace(world, decided=frozenset(decided), proposals=())

    # ---------------------------------------------------------------- one elector

    def _values(self, records: Iterable[VoteRecord], ballot: int, kind: str) -> list[Hash]:
        """What somebody who does not lie has voted for in this ballot."""
        votes = (record.prevote if kind == "prevote" else record.precommit for record in records)
        return sorted({said(vote, ballot) for vote in votes} - {NIL})

    def _enter(self, me: PeerId, ballot: int) -> list[Event]:
        """As if it heard somebody of every later ballot: anybody may come to any ballot. Adds to no quorum."""
        others = [name for name in self.electorate.order if name != me][: self.electorate.believed]
        return [Heard(Votes(precommit=precommit_of(name, ballot, NIL))) for name in others] if ballot else []

    def _elector(self, place: int, record: VoteRecord) -> Tendermint:
        me = self._honest[place]
        elector = self._elector_class.begin(me, self.electorate, FINGERPRINT, record, FakeSealer(me))
        elector.handle(Allowed(True))
        return elector

    def _step(
        self, world: World, place: int, ballot: int, events: list[Event], before: VoteRecord | None = None
    ) -> VoteRecord:
        """What is on disk after an elector came back with its record, or `before`, and took in these events."""
        self.report.steps += 1
        before = record = before or world.records[place]
        elector = self._elector(place, record)
        for event in events:
            for action in elector.handle(event):
                if isinstance(action, Persist):
                    record = action.record
        if elector.vote.is_mute:
            raise Found("mute", f"{self._honest[place]} takes its record for an old one", world.path)
        if elector.vote.to_tell.prevote != record.prevote or elector.vote.to_tell.precommit != record.precommit:
            raise Found("durability", f"{self._honest[place]} tells what is not on its disk", world.path)
        if record.locked_ballot < before.locked_ballot or record.valid_ballot < before.valid_ballot:
            raise Found("lock", f"{self._honest[place]} goes back to an earlier lock in ballot {ballot}", world.path)
        return record


def _different(records: Iterable[VoteRecord]) -> list[VoteRecord]:
    return list({_whole(record): record for record in records}.values())


def _told(value: Hash) -> str:
    return "nil" if value == NIL else short(value)


def main() -> int:
    parser = argparse.ArgumentParser(description="Everything that electors can do in the first ballots of a vote.")
    parser.add_argument("--electors", type=int, default=4)
    parser.add_argument("--faults", choices=[faults.value for faults in Faults], default="byzantine")
    parser.add_argument("--liars", type=int, nargs="*", default=[], help="their places in the order of leaders")
    parser.add_argument("--ballots", type=int, default=3)
    options = parser.parse_args()
    try:
        report = VoteSearch(options.electors, Faults(options.faults), tuple(options.liars)).run(options.ballots)
    except Found as found:
        sys.stdout.write(f"{found}\n")
        return 1
    sys.stdout.write(f"{report}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

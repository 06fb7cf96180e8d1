"""The vote inside the state machine: words of an earlier life, of ballots far ahead, and of an elector that lies."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from spes_p2p.consensus import events as on
from spes_p2p.consensus.actions import Action, CatchUp, Forget
from spes_p2p.consensus.content import Envelope, Statements
from spes_p2p.consensus.electorate import Electorate, Faults, make_polka
from spes_p2p.consensus.heard_votes import HeardVotes
from spes_p2p.consensus.machine import Consensus, Start
from spes_p2p.consensus.manifest import Contribution, manifest_hash
from spes_p2p.consensus.membership import Member, leader_order
from spes_p2p.consensus.messages import (
    QUORUM,
    Ballots,
    Certificate,
    Commit,
    Intent,
    Plan,
    Polka,
    Precommit,
    Prevote,
    Proposal,
    Status,
    Votes,
    Work,
    declared,
)
from spes_p2p.consensus.parts import PartClasses, Parts
from spes_p2p.consensus.rules import genesis_manifest
from spes_p2p.consensus.state import MAX_NEWCOMERS, MOST_TURNS, Identity
from spes_p2p.consensus.statements import content_of
from spes_p2p.consensus.tendermint import Tendermint
from spes_p2p.consensus.timing import Pace
from spes_p2p.consensus.vote_events import Action as VoteAction
from spes_p2p.consensus.vote_events import Event as VoteEvent
from spes_p2p.consensus.vote_events import Heard
from spes_p2p.ids import NO_HASH, Hash, PeerId, sha256
from spes_p2p.ownership.assign import OwnershipRequest
from tests.simulation.sim_state import FakeSealer, initial_state, root_of, run_rules


class Elector:
    """The first leader of a round of `count` electors, and what it does of what it hears."""

    def __init__(self, count: int, faults: Faults = Faults.CRASH, incarnation: int = 1, life: int = 0) -> None:
        self.rules = replace(run_rules(columns=0), faults=faults)
        names = [PeerId(f"p{index}") for index in range(count)]
        members = [Member(name, 1, True, 0) for name in names]
        requests = {name: OwnershipRequest(0) for name in names}
        self.tip = genesis_manifest(self.rules, root_of(initial_state(self.rules)), members, requests)
        self.order = leader_order(manifest_hash(self.tip), members)
        me = self.order[0]
        identity = Identity(me, self.rules, FakeSealer(me), lambda *signed: True)
        start = Start(incarnation, self.tip, intent=Intent(True), first_sequence=life)
        self.core = Consensus.begin(identity, start, Pace(1.0), 0.0)

    def hears(self, envelope: Envelope, now: float) -> list[Action]:
        return self.core.handle(on.MessageReceived(envelope), now)

    def prevote(self, author: PeerId, ballot: int, value: Hash) -> Votes:
        vote = Prevote(self.rules.fingerprint, self.core.tip_hash, ballot, value)
        return Votes(prevote=FakeSealer(author).seal(vote))


def test_words_of_an_earlier_incarnation_are_no_reason_for_another_one() -> None:
    """It hears at each heartbeat a polka in which the life before, of whose record nothing is left, has voted."""
    elector = Elector(3, incarnation=5)
    signed = [elector.prevote(peer, 0, sha256(b"value")).prevote for peer in elector.order[:2]]
    polka = make_polka([vote for vote in signed if vote is not None], Electorate(elector.order, Faults.CRASH))
    envelope = Envelope(elector.order[1], votes=(Votes(polka=polka),))
    for beat in range(20):
        assert not any(isinstance(action, Forget) for action in elector.hears(envelope, float(beat)))


def test_a_leader_that_hears_its_last_answer_and_the_decision_at_once_proposes_no_more() -> None:
    """It has just come back: the others have decided without it, and it has their state."""
    elector = Elector(3)
    core, others = elector.core, elector.order[1:]
    said = tuple(declared(FakeSealer(peer).seal(replace(core.status(), peer=peer))) for peer in elector.order)
    content = content_of(elector.rules, elector.tip, Statements((), (), said), elector.tip.state_root, None)
    name, run = manifest_hash(content.manifest), (elector.rules.fingerprint, core.tip_hash, 1)
    proposal = FakeSealer(others[0]).seal(Proposal(*run, name))
    precommits = [FakeSealer(peer).seal(Precommit(*run, name)) for peer in others]
    proposed = Votes(precommit=precommits[0], proposal=proposal)
    elector.hears(Envelope(others[0], votes=(proposed,)), 0.0)
    elector.hears(Envelope(others[0], contents=(content,)), 0.0)
    core.handle(on.StateVerified(name), 0.0)
    for beat in range(7):
        core.handle(on.ClockTicked(), float(beat))
    assert core.state.liveness.asking_since is not None
    elector.hears(Envelope(others[1], votes=(Votes(precommit=precommits[1]),)), 6.5)
    assert core.state.liveness.asking_since is None
    assert core.state.round.decided is not None
    assert core.state.round.vote.record.proposal is None


def test_a_word_of_a_ballot_that_turns_do_not_lead_to_moves_nobody() -> None:
    elector = Elector(3)
    for beat in range(11):  # it asks first what became of the run
        elector.core.handle(on.ClockTicked(), float(beat))
    most = MOST_TURNS * 3
    for ballot, reached in ((2**31 - 1, 0), (most + 1, 0), (most, most)):
        elector.hears(Envelope(elector.order[2], votes=(elector.prevote(elector.order[2], ballot, NO_HASH),)), 10.0)
        elector.core.handle(on.ClockTicked(), 10.0)
        assert elector.core.state.round.vote.ballot == reached


def test_a_liar_does_not_hold_up_deadlines() -> None:
    elector = Elector(4, Faults.BYZANTINE)
    liar, core, moved = elector.order[3], elector.core, 0
    seal, head = FakeSealer(liar).seal, core.tip_hash
    for beat in range(200):
        proposal = Proposal(elector.rules.fingerprint, head, 3 + 4 * beat, sha256(b"%d" % beat))
        envelope = Envelope(liar, votes=(Votes(proposal=seal(proposal)),))
        elector.hears(envelope, float(beat))
        moved += core.state.round.progress_at == float(beat)
    assert moved < 5


def test_a_thousand_words_that_say_nothing_new_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody may send them, without a signature of its own."""
    elector, looks = Elector(4, Faults.BYZANTINE), list[VoteEvent]()
    run, other = (elector.rules.fingerprint, elector.core.tip_hash), elector.order[2]
    out_of_turn = FakeSealer(other).seal(Proposal(*run, 1, sha256(b"x")))
    handle = Tendermint.handle

    def counting(machine: Tendermint, event: VoteEvent) -> list[VoteAction]:
        looks.append(event)
        return handle(machine, event)

    monkeypatch.setattr(Tendermint, "handle", counting)
    known = elector.prevote(elector.order[1], 0, NO_HASH)
    for votes in (known, Votes(), Votes(proposal=out_of_turn), Votes(polka=Polka(7, sha256(b"x"), ()))):
        elector.hears(Envelope(PeerId("stranger"), votes=(votes,) * 1000), 0.5)
    assert sum(isinstance(event, Heard) for event in looks) == 1


def test_what_is_news_is_what_changes_something() -> None:
    elector, chance = Elector(4, Faults.BYZANTINE), random.Random(5)
    run, order = (elector.rules.fingerprint, elector.core.tip_hash), elector.order
    values = [sha256(b"x"), sha256(b"y"), NO_HASH]
    seen = Counter[bool]()
    for _ in range(300):
        heard = HeardVotes(Electorate(order, Faults.BYZANTINE), *run)
        for _ in range(30):
            author, ballot, value = FakeSealer(chance.choice(order)), chance.randrange(4), chance.choice(values)
            cast = Prevote(
                *run, ballot, chance.choice(values[:2])
            )  # by a quorum, which may be another one than we know
            others = Polka(ballot, cast.value, tuple(FakeSealer(one).seal(cast) for one in chance.sample(order, 3)))
            polka = chance.choice((None, None, heard.polka, others))
            proposal = Proposal(*run, ballot, polka.value if polka else value, polka)
            votes = chance.choice((
                Votes(prevote=author.seal(Prevote(*run, ballot, value))),
                Votes(precommit=author.seal(Precommit(*run, ballot, value))),
                Votes(proposal=author.seal(proposal)),
                Votes(polka=polka),
            ))  # fmt: skip
            before, is_news = heard.copy(), heard.is_news(votes)
            heard.take(votes)
            assert is_news == (heard != before)
            seen[is_news] += 1
    assert min(seen[True], seen[False]) > 1000


def test_one_elector_that_lies_closes_no_round_that_it_does_not_lead() -> None:
    """Nor does it shorten it: in each round a part of it, until nobody trains."""
    elector = Elector(4, Faults.BYZANTINE)
    core, first, liar = elector.core, elector.order[1], elector.order[3]
    proposal = Proposal(elector.rules.fingerprint, core.tip_hash, 3, sha256(b"x"))
    seal, leadership = FakeSealer(liar).seal, Parts(core.state, PartClasses()).leadership
    elector.hears(Envelope(liar, votes=(Votes(proposal=seal(proposal)),)), 0.5)
    assert not leadership.is_closing()
    elector.hears(Envelope(first, votes=(elector.prevote(first, 3, NO_HASH),)), 0.5)  # not the liar alone is there
    assert leadership.is_closing()


def test_of_strangers_that_came_and_went_nothing_is_kept() -> None:
    """Keys cost nothing: a run that lasts for months hears of millions."""
    elector, now = Elector(4, Faults.BYZANTINE), 0.0
    core, others = elector.core, elector.core.state.others
    for number in range(MAX_NEWCOMERS + 8):
        for _ in range(int(core.state.pace.suspect_seconds) + 1):
            now += 1.0
            core.handle(on.ClockTicked(), now)
        peer = PeerId(f"stranger {number}")
        status = replace(core.status(), peer=peer, sequence=1, round=7, head=sha256(b"%d" % number))
        elector.hears(Envelope(peer, (FakeSealer(peer).seal(status),), answers=core.state.own.life), now)
        assert others.asked_last == peer
        core.handle(on.CatchUpFailed(), now)
        core.handle(on.HostRefusedDial(peer), now)
    kept = (others.contacts, others.refused_dial, others.asked, others.asked_in_vain)
    assert max(len(known) for known in kept) <= MAX_NEWCOMERS


class Leaver:
    """A run of four electors that trains for a hundred seconds in a round, and a fifth member that says it leaves."""

    def __init__(self, trains: bool, votes: bool) -> None:
        elector = Elector(4, Faults.BYZANTINE)
        self.core, self.others = elector.core, elector.order[1:]
        self.peer = PeerId("leaver")
        self.members = (Member(self.peer, 1, votes, 0, trains), *elector.tip.members)
        for _ in range(5):
            self.core.state.pace.observe_round(100.0)
        self.roster: tuple[Contribution, ...] = ()
        self._sequence, self.now = 1, 0.0
        self._goes_on()

    def _goes_on(self) -> None:
        """The next round begins."""
        tip = self.core.tip
        members = tuple(sorted(self.members))
        child = replace(tip, parent=manifest_hash(tip), round=tip.round + 1, members=members, roster=self.roster)
        commit = Commit(Certificate(child.parent, QUORUM, 0, manifest_hash(child), ()), child)
        self.core.handle(on.CommitApplied(commit), self.now)

    def leaves(self) -> None:
        """A round begins, and this peer is READY at once, and says that it leaves."""
        self._goes_on()
        running = Work(tokens=8, steps=1, sequences=1, seconds=1.0, expected_tokens=800)
        for peer in self.others:
            self._says(peer, running, Intent(True))
        self._says(self.peer, replace(running, ready=True), Intent(True, leaving=True))

    def _says(self, peer: PeerId, work: Work, intent: Intent) -> None:
        self._sequence += 1
        status = replace(
            self.core.status(), peer=peer, incarnation=1, sequence=self._sequence, work=work, intent=intent, life=5
        )
        said = FakeSealer(peer).seal(status)
        self.core.handle(on.MessageReceived(Envelope(peer, (said,), answers=self.core.state.own.life)), self.now)


def test_what_a_round_took_is_learnt_from_its_first_close() -> None:
    """Later leaders close it again, after deadlines that are none of it."""
    leaver = Leaver(True, True)
    for _ in range(4):
        current = leaver.core.state.round
        current.first_closed_at, current.closed_at = leaver.now + 10.0, leaver.now + 90.0
        leaver._goes_on()
    assert leaver.core.state.pace.round_seconds == 10.0


def test_who_was_waited_for_in_vain_is_waited_for_again_once_a_round_has_counted_its_work() -> None:
    """Where it may lie, not already where it says that it is READY."""
    leaver = Leaver(True, True)
    others = leaver.core.state.others
    others.kept_waiting.add(leaver.peer)
    leaver.leaves()
    assert others.contacts[leaver.peer].status.work.ready
    leaver._goes_on()
    assert others.kept_waiting == {leaver.peer}
    leaver.roster = (Contribution(leaver.peer, 8, 1, 1),)
    leaver._goes_on()
    assert not others.kept_waiting


def test_whoever_takes_the_plan_of_another_notes_whom_the_round_waited_for_in_vain() -> None:
    """It may lead the next round, and would wait again."""
    leaver = Leaver(True, True)
    core, seconds = leaver.core, leaver.core.state.pace.last_step_seconds(1.0)
    leaver._goes_on()
    leader = core.state.round.order[0]
    running = Work(tokens=8, steps=1, sequences=1, seconds=1.0, ready_in_seconds=80_000.0)
    core.state.round.first_closed_at = leaver.now + 1.0
    for later, late in ((seconds / 2, set[PeerId]()), (seconds / 2 + 4.0, {leaver.peer})):
        for _ in range(int(later)):
            leaver.now += 1.0
            core.handle(on.ClockTicked(), leaver.now)
        leaver._says(leaver.peer, running, Intent(True))
        plan = Plan(core.state.rules.fingerprint, core.tip_hash, 0, leader, (), ())
        Parts(core.state, PartClasses()).round_plan.take(FakeSealer(leader).seal(plan), leaver.now)
        assert core.state.others.kept_waiting == late


def test_what_is_known_of_the_vote_before_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    leaver = Leaver(True, True)
    run = (leaver.core.state.rules.fingerprint, leaver.core.tip_hash)
    leaver._goes_on()
    before, taken = leaver.core.state.others.votes_before, list[Votes]()
    assert before is not None
    take = HeardVotes.take

    def counting(heard: HeardVotes, votes: Votes) -> None:
        taken.append(votes)
        take(heard, votes)

    monkeypatch.setattr(HeardVotes, "take", counting)
    one, other = (Votes(prevote=FakeSealer(leaver.peer).seal(Prevote(*run, 0, sha256(what)))) for what in (b"x", b"y"))
    envelope = Envelope(PeerId("stranger"), votes=(one, other) * 500)
    leaver.core.handle(on.MessageReceived(envelope), leaver.now)
    assert taken == [one, other]
    assert leaver.peer in leaver.core.state.others.voted_twice


def test_who_has_just_started_follows_others_that_do_not_answer_it() -> None:
    """A bootstrap node hides its status, so nobody answers it; nothing can have waited for a process that is new."""
    elector = Elector(3, life=7)
    core, other = elector.core, elector.order[1]
    status = Status(elector.rules.fingerprint, other, 1, 1, 2, sha256(b"a later head"), Work(), Intent(True), Ballots())
    assert core.state.liveness.asking_since is not None
    actions = elector.hears(Envelope(other, (FakeSealer(other).seal(status),)), 0.1)
    assert CatchUp(other, 2, status.head) in actions

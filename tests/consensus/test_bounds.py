"""What one peer can make the others keep, or do, by what it says: bounded, whatever it signs."""

from __future__ import annotations

import itertools
import random
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from spes_p2p.consensus import events as on
from spes_p2p.consensus import gossip, membership
from spes_p2p.consensus.actions import Notice, Send
from spes_p2p.consensus.contacts import Contacts
from spes_p2p.consensus.content import Envelope
from spes_p2p.consensus.electorate import MAX_BALLOT, Faults
from spes_p2p.consensus.machine import Consensus, Start
from spes_p2p.consensus.manifest import (
    Contribution,
    Manifest,
    Slice,
    manifest_hash,
)
from spes_p2p.consensus.membership import LEAST_NEW, MAX_ELECTORS, Member, Roll, leader_order, rank
from spes_p2p.consensus.messages import (
    LOST,
    Ballots,
    Commit,
    Intent,
    Plan,
    Precommit,
    Prevote,
    Proposal,
    Report,
    Signed,
    Status,
    Votes,
    Work,
    plan_hash,
)
from spes_p2p.consensus.parts import PartClasses, Parts
from spes_p2p.consensus.proposals import MOST_CONTENTS
from spes_p2p.consensus.rules import genesis_manifest
from spes_p2p.consensus.state import MAX_NEWCOMERS, MOST_FORMER, MOST_PLANS, Identity
from spes_p2p.consensus.statements import content_of
from spes_p2p.consensus.statuses import MAX_WAIT_EXTENSIONS
from spes_p2p.consensus.timing import Pace
from spes_p2p.consensus.vote_record import ballot_of
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.exchange.requests import ChainPart, PackedRequest, PiecesRequest, TilesRequest, kind_of
from spes_p2p.ids import NO_HASH, Hash, PeerId, sha256
from spes_p2p.ownership.assign import OwnershipRequest
from spes_p2p.swarm.memory_backend import FakeKeys
from spes_p2p.sync.genesis import RunInfo
from spes_p2p.sync.sealing import MAX_PARTS, EnvelopeChecker
from spes_p2p.wire import pack, unpack
from tests.simulation.explorer import run_schedule
from tests.simulation.sim import Network, Weather, World
from tests.simulation.sim_state import FakeSealer, initial_state, root_of, run_rules

LIAR = PeerId("p2")


def walk_until(wanted: Callable[[Consensus], object], seed: int = 0) -> Consensus:
    """One of the first two of three peers, in a round with losses, as soon as it is as `wanted`."""
    for number in itertools.count(8 * seed):
        world = World(number, 3, 0, 1, Weather(loss=0.2))
        while world.newest().round == 0:
            world.step()
            for peer in world.up()[:2]:
                if peer.core is not None and wanted(peer.core):
                    return peer.core
    raise AssertionError


def has_reported(core: Consensus) -> bool:
    return any(signed.author == core.me for signed in core.state.round.reports.values())


@pytest.fixture(scope="module")
def said() -> list[Envelope]:
    """All messages of runs in which losses and crashes made everybody say all there is to say."""
    messages: list[Envelope] = []

    class Heard(Network):
        def send(self, sender: PeerId, to: PeerId, envelope: Envelope) -> None:
            messages.append(envelope)
            super().send(sender, to, envelope)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(World, "network_class", Heard)
        for seed in range(3):
            run_schedule(seed, only="votes")
    return messages


@pytest.fixture
def core() -> Consensus:
    """Has a plan; nobody has voted yet."""
    return walk_until(lambda core: core.state.round.plan is not None)


def seal(value: Any) -> Signed[Any]:
    return FakeSealer(LIAR).seal(value)


def parts_of(core: Consensus) -> Parts:
    """All that is known is in the state: parts over it answer as those of `core` do."""
    return Parts(core.state, PartClasses())


def size_of(core: Consensus, act: Callable[[], None]) -> int:
    """Bytes that are still held after `act`."""
    tracemalloc.start()
    try:
        act()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def hears_votes(core: Consensus, author: PeerId, *votes: Votes, now: float = 0.0) -> None:
    core.handle(on.MessageReceived(Envelope(author, votes=votes)), now)


def prevote(core: Consensus, author: PeerId, ballot: int, value: Hash) -> Votes:
    vote = Prevote(core.state.rules.fingerprint, core.tip_hash, ballot, value)
    return Votes(prevote=FakeSealer(author).seal(vote))


def proposal(core: Consensus, author: PeerId, ballot: int, value: Hash) -> Votes:
    asked = Proposal(core.state.rules.fingerprint, core.tip_hash, ballot, value)
    return Votes(proposal=FakeSealer(author).seal(asked))


def test_votes_of_thousands_of_ballots(core: Consensus) -> None:
    def flood() -> None:
        for ballot in range(2000):
            hears_votes(core, LIAR, prevote(core, LIAR, ballot, sha256(b"%d" % ballot)))

    core.state.round.progress_at = -1.0
    assert size_of(core, flood) < 100_000
    assert core.state.round.vote.heard.prevotes[LIAR].value.ballot == 1999  # the newest, and no other


def voted_for(core: Consensus) -> bool:
    """Whether it is bound to a value that is not decided."""
    return core.state.record.locked_ballot >= 0 and core.state.round.decided is None and core.me != "p0"


def test_contents_of_thousands_of_proposals_but_never_what_somebody_is_bound_to() -> None:
    """Only what is proposed, nearly decided or voted for is kept, however much is sent."""
    core = walk_until(voted_for)
    name = core.state.record.locked_value
    kept = core.state.round.contents[name]
    for number in range(500):
        manifest = replace(kept.manifest, state_root=sha256(b"%d" % number))
        envelope = Envelope(LIAR, contents=(replace(kept, manifest=manifest),))
        core.handle(on.MessageReceived(envelope), 0.0)
    assert set(core.state.round.contents) == {name}


@pytest.mark.parametrize("new", [LEAST_NEW, LEAST_NEW + 1])
def test_no_elector_takes_a_proposal_that_names_a_crowd(new: int, monkeypatch: pytest.MonkeyPatch) -> None:
    core = walk_until(voted_for)
    kept = core.state.round.contents[core.state.record.locked_value]
    made = kept.manifest
    said = kept.statements.declarations
    crowd = tuple(
        FakeSealer(name).seal(replace(said[0].value, peer=name, incarnation=1, intent=Intent(True)))
        for name in (PeerId(f"new {number}") for number in range(new))
    )
    monkeypatch.setattr(membership, "LEAST_NEW", new)  # whoever makes it names them all
    statements = replace(kept.statements, declarations=(*said, *crowd))
    content = content_of(core.state.rules, core.tip, statements, made.state_root, made.merge)
    monkeypatch.undo()
    assert len(content.manifest.members) == len(made.members) + new
    name, now = manifest_hash(content.manifest), core.state.last_event
    vote = core.state.round.vote
    polka = vote.heard.polka
    assert polka is not None
    newer = [prevote(core, peer, polka.ballot + 1, name) for peer in core.state.electors if peer != core.me]
    hears_votes(core, LIAR, *newer, now=now)  # a quorum wants it
    core.handle(on.MessageReceived(Envelope(LIAR, contents=(content,))), now)
    assert (name in core.state.round.contents) == (new == LEAST_NEW)
    assert (name in core.state.round.refused) == (new > LEAST_NEW)


def test_ever_new_plans_do_not_hold_up_a_round(core: Consensus) -> None:
    before = core.state.round.plans_of.get(LIAR, 0)
    reach(core, 150)
    for ballot in ballots_of(core, LIAR):
        say_plan(core, ballot)
    assert core.state.round.plan is not None
    assert core.state.round.plan.value.ballot == ballots_of(core, LIAR)[MOST_PLANS - before - 1]


def test_who_leads_no_ballot_that_somebody_has_reached_plans_nothing() -> None:
    core = walk_until(lambda core: core.state.round.plan is not None and core.state.round.decided is None)
    plan, progress = core.state.round.plan, core.state.round.progress_at
    ballot = next(ballot for ballot in ballots_of(core, LIAR) if ballot > 1)
    say_plan(core, ballot)
    assert core.state.round.plan == plan
    assert core.state.round.progress_at == progress
    reach(core, ballot)
    say_plan(core, ballot)
    assert core.state.round.plan is not None
    assert core.state.round.plan.author == LIAR


def test_only_who_leads_a_ballot_proposes_in_it(core: Consensus) -> None:
    leads = ballots_of(core, LIAR)[0]
    hears_votes(core, LIAR, proposal(core, LIAR, leads + 1, sha256(b"mine")))
    assert LIAR not in core.state.round.vote.heard.proposals
    hears_votes(core, LIAR, proposal(core, LIAR, leads, sha256(b"mine")))
    assert core.state.round.vote.heard.proposals[LIAR].value.ballot == leads


def ballots_of(core: Consensus, leader: PeerId) -> list[int]:
    order = leader_order(core.tip_hash, core.tip.members)
    return [ballot for ballot in range(1, 500) if order[ballot % len(order)] == leader]


def say_plan(core: Consensus, ballot: int) -> None:
    assert core.state.round.plan is not None
    mine = core.state.round.plan.value
    plan = Plan(core.state.rules.fingerprint, core.tip_hash, ballot, LIAR, mine.roster, mine.slices)
    core.handle(on.MessageReceived(Envelope(LIAR, plan=seal(plan))), 0.0)


def reach(core: Consensus, ballot: int) -> None:
    """All others have voted in it."""
    for peer in core.state.electors:
        if peer != core.me:
            hears_votes(core, peer, prevote(core, peer, ballot, NO_HASH))


def test_a_report_heard_again_is_no_progress_while_the_tiles_of_a_proposal_cannot_be_had() -> None:
    """Else nobody would give up the leader that is gone with them."""

    def of_others(core: Consensus) -> list[tuple[int, Signed[Report]]]:
        return [(at, said) for at, said in core.state.round.reports.items() if said.author != core.me]

    core = walk_until(of_others)
    core.state.round.vote.heard.proposals.clear()
    index, report = of_others(core)[0]
    assert core.state.round.plan is not None
    key, now = core.state.round.plan.value.slices[index].key, core.state.round.progress_at + 0.1
    core.state.round.fetching[key] = sha256(b"a tile of the proposal")
    core.handle(on.FetchFailed(key), now)
    core.handle(on.MessageReceived(Envelope(report.author, reports=(report,))), now)
    assert core.state.round.progress_at < now


@pytest.mark.parametrize("is_unfit", [False, True])
def test_tiles_that_no_mean_gives_are_not_taken_for_a_failing_disk(is_unfit: bool) -> None:
    core = walk_until(lambda core: bool(core.state.round.fetching))
    key = next(iter(core.state.round.fetching))
    core.state.others.ahead_since = 0.0  # else it is not for long: nobody waits for this disk
    core.handle(on.FetchFailed(key, is_unfit), core.state.round.progress_at + 0.1)
    assert (core.state.liveness.failing_since is None) == is_unfit


def test_a_state_of_slices_that_were_done_again_since_is_not_proposed() -> None:
    core = walk_until(lambda core: core.state.round.building is not None and core.state.round.outcome is None)
    assert core.state.round.building is not None
    first, *others = core.state.round.building.reports
    again = replace(first, value=replace(first.value, wire_hashes=(sha256(b"done again since"),)))
    build = replace(core.state.round.building, reports=(again, *others))
    core.handle(on.StateBuilt(build, NO_HASH, NO_HASH, None), 0.0)
    assert core.state.round.outcome is None


def test_strangers_are_few_and_silent_ones_make_room(core: Consensus) -> None:
    template = core.state.others.contacts[LIAR].status

    def hear(name: str, now: float) -> None:
        status = replace(template, peer=PeerId(name), incarnation=9, sequence=1, intent=Intent(joining=True))
        core.handle(on.MessageReceived(Envelope(PeerId(name), (FakeSealer(PeerId(name)).seal(status),))), now)

    for number in range(500):
        hear(f"stranger {number}", 0.0)
    strangers = [peer for peer in core.state.others.contacts if peer.startswith("stranger")]
    assert len(strangers) == MAX_NEWCOMERS
    hear("late", 1.0)
    assert "late" not in core.state.others.contacts
    hear("later", core.state.pace.suspect_seconds + 1)  # the others fell silent
    assert "later" in core.state.others.contacts
    assert len(core.state.others.contacts) <= MAX_NEWCOMERS + 2


def test_who_was_a_member_lately_or_is_trusted_finds_room_beside_strangers(core: Consensus) -> None:
    """For how long somebody was one counts more than who left last: keys that come and go push nobody out."""
    template, friend = core.state.others.contacts[LIAR].status, PeerId("friend")
    roll = Roll(core.state.rules.fingerprint, 1, (friend,))
    core.state.others.roll = FakeSealer(core.state.rules.organiser).seal(roll)
    contacts, members, tip = parts_of(core).contacts, core.tip.members, core.state.round.tip
    old, passing = PeerId("elector"), [PeerId(f"passing {number}") for number in range(3 * MOST_FORMER)]
    for here in ([old], [old], *([key] for key in passing)):
        core.state.round.tip = replace(tip, members=(*members, *(Member(peer, 1, False, 0) for peer in here)))
        contacts.note_members()
    core.state.round.tip = tip
    contacts.note_members()
    assert len(core.state.others.named) == len(members) + MOST_FORMER

    def hear(name: PeerId) -> None:
        status = replace(template, peer=name, incarnation=9, sequence=1, intent=Intent(joining=True))
        core.handle(on.MessageReceived(Envelope(name, (FakeSealer(name).seal(status),))), 0.0)

    for name in (*(PeerId(f"stranger {number}") for number in range(500)), old, friend, passing[0]):
        hear(name)
    assert {old, friend} <= core.state.others.contacts.keys()
    assert passing[0] not in core.state.others.contacts


def test_a_round_is_told_to_as_many_newcomers_as_the_next_one_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them may say with each heartbeat that it knows nothing yet."""
    core = walk_until(has_reported)
    plan, now = core.state.round.plan, core.state.last_event
    assert plan is not None
    known = replace(core.status(), incarnation=1, sequence=1, life=1, plan=plan_hash(plan.value), reports=b"")
    for number in range(MAX_NEWCOMERS):
        peer = PeerId(f"stranger {number}")
        said = FakeSealer(peer).seal(replace(known, peer=peer, intent=Intent(joining=True)))
        core.handle(on.MessageReceived(Envelope(peer, (said,))), now)
    ranking = Mock(wraps=rank)
    monkeypatch.setattr(gossip, "rank", ranking)
    for beat in range(1, 3):
        acts = core.handle(on.ClockTicked(), now + beat * core.state.pace.heartbeat_seconds)
        sent = [act for act in acts if isinstance(act, Send) and act.to.startswith("stranger")]
        assert len(sent) == MAX_NEWCOMERS
        assert sum(bool(act.envelope.reports) for act in sent) == LEAST_NEW
        assert ranking.call_count == beat * MAX_NEWCOMERS, "the loop would be busy for all of them times all of them"


def test_whoever_the_organiser_vouches_for_hears_of_the_round_and_nobody_who_is_banned_or_leaves() -> None:
    """As the next manifest names them, however many they are, and strangers beside them."""
    core = walk_until(has_reported)
    plan, now, state = core.state.round.plan, core.state.last_event, core.state
    assert plan is not None
    state.identity = replace(state.identity, rules=replace(state.rules, has_strangers=True))
    vouched = tuple(sorted(PeerId(f"friend {number}") for number in range(3 * LEAST_NEW)))
    strangers = sorted(
        (PeerId(f"stranger {number}") for number in range(5 * LEAST_NEW)), key=lambda peer: rank(core.tip_hash, peer)
    )
    banned, elsewhere = tuple(sorted(strangers[:LEAST_NEW])), strangers[LEAST_NEW : 2 * LEAST_NEW]
    leaving = strangers[2 * LEAST_NEW : 3 * LEAST_NEW]
    state.others.roll = FakeSealer(state.rules.organiser).seal(Roll(state.rules.fingerprint, 1, vouched, banned))
    known = replace(core.status(), incarnation=1, sequence=1, life=1, plan=plan_hash(plan.value), reports=b"")
    for peer in (*strangers, *vouched):
        head = sha256(b"another history") if peer in elsewhere else known.head
        intent = Intent(joining=True, leaving=peer in leaving)
        said = FakeSealer(peer).seal(replace(known, peer=peer, head=head, intent=intent))
        core.handle(on.MessageReceived(Envelope(peer, (said,))), now)
    acts = core.handle(on.ClockTicked(), now + state.pace.heartbeat_seconds)
    told = {act.to for act in acts if isinstance(act, Send) and act.envelope.reports}
    assert told - {member.peer for member in core.tip.members} == {
        *vouched,
        *strangers[3 * LEAST_NEW : 4 * LEAST_NEW],
    }


@pytest.mark.parametrize(
    "change",
    [
        {"reports": bytes(100_000)},
        {"staged": bytes(100_000)},
        {"unheard": tuple(PeerId(str(at)) for at in range(5000))},
        {"unheard": (PeerId("somebody who has no vote"),)},
        {"unheard": (LIAR, LIAR)},
        {"unheard": tuple(PeerId(str(at)) for at in range(MAX_ELECTORS + 1)), "head": sha256(b"elsewhere")},
        {"silent": tuple(PeerId(str(at)) for at in range(5000))},
        {"silent": (PeerId("somebody who is no member"),)},
        {"silent": (LIAR, LIAR)},
        {"silent": tuple(PeerId(str(at)) for at in range(MAX_ELECTORS + 1)), "head": sha256(b"elsewhere")},
        {"counted": -1},
        {"roll": -1},
        {"intent": Intent(claims=(1, 1))},
        {"intent": Intent(claims=(0,), releases=(0,))},
        {"intent": Intent(claims=(2**40,))},
        {"head": Hash(bytes(100_000))},
        {"plan": Hash(b"short")},
        {"intent": Intent(claims=tuple(range(5000)))},
        {"intent": Intent(releases=tuple(range(5000)))},
        {"round": -2},
        {"work": Work(True, tokens=2**62)},
        {"work": Work(True, steps=-1)},
        {"work": Work(True, sequences=2**53)},
        {"work": Work(expected_tokens=2**62)},
        {"work": Work(seconds=1e300)},
        {"work": Work(seconds=-1.0)},
        {"work": Work(ready_in_seconds=1e300)},
        {"work": Work(ready_in_seconds=float("nan"))},
        {"intent": Intent(uplink_bytes_per_second=2**41)},
        {"intent": Intent(uplink_bytes_per_second=-1)},
        {"intent": Intent(link_class=-1)},
        {"intent": Intent(link_class=2)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_status_of_impossible_size_is_not_kept(core: Consensus, change: dict[str, Any]) -> None:
    before = core.state.others.contacts[LIAR].status
    core.handle(
        on.MessageReceived(Envelope(LIAR, (seal(replace(before, sequence=before.sequence + 1, **change)),))), 0.0
    )
    assert core.state.others.contacts[LIAR].status == before


class Beginning:
    """The leader of a round that has just begun, and what the other two, an honest peer and a liar, tell it."""

    def __init__(self, faults: Faults = Faults.CRASH) -> None:
        self.rules = replace(run_rules(columns=0), faults=faults)
        names = [PeerId(name) for name in ("p0", "p1", "p2")]
        state = initial_state(self.rules)
        members = [Member(name, 1, True, 0) for name in names]
        tip = genesis_manifest(self.rules, root_of(state), members, {name: OwnershipRequest(0) for name in names})
        me, self.honest, self.liar = leader_order(manifest_hash(tip), tip.members)
        identity = Identity(me, self.rules, FakeSealer(me), lambda *_: True)
        self.core = Consensus.begin(identity, Start(1, tip, intent=Intent(True)), Pace(1.0), 0.0)
        self.sequence = 0

    def says(self, peer: PeerId, now: float, **what: Any) -> list[Any]:
        self.sequence += 1
        status = Status(
            self.rules.fingerprint, peer, 1, self.sequence, 0, self.core.tip_hash, Work(), Intent(True), Ballots()
        )
        said = FakeSealer(peer).seal(replace(status, **what))
        envelope = Envelope(peer, (said,), answers=self.core.state.own.life)
        return self.core.handle(on.MessageReceived(envelope), now)


READY = Work(True, 64, 4, 8, seconds=10.0)


def seconds_until_planned(work: Work, was_late: bool = False) -> tuple[float, list[Notice]]:
    """From the close of a round on, while one of three tells of `work` and never ends it."""
    story, told, now = Beginning(), [], 10.0
    core = story.core
    core.state.others.kept_waiting |= {story.liar} if was_late else set()
    core.handle(on.ClockTicked(), now)
    story.says(story.liar, now, work=work)
    story.says(story.honest, now, work=READY)
    core.handle(on.TrainingProgressed(READY), now)
    while core.state.round.plan is None:
        now += 0.5
        assert now < 1000
        core.handle(on.BytesMoved(), now)  # else the lead would pass on meanwhile
        story.says(story.liar, now, work=work)
        story.says(story.honest, now, work=READY)
        told += [action for action in core.handle(on.ClockTicked(), now) if isinstance(action, Notice)]
    assert core.state.round.closed_at is not None
    assert core.state.others.kept_waiting == {story.liar}
    story.says(story.liar, now, work=READY)
    assert not core.state.others.kept_waiting
    return now - core.state.round.closed_at, told


def test_a_running_step_that_is_said_to_take_a_day_delays_a_round_for_a_while_and_is_named() -> None:
    running = Work(tokens=16, steps=1, sequences=2, seconds=10.0, ready_in_seconds=80_000.0)
    waited, told = seconds_until_planned(running)
    assert 24 <= waited <= 28  # the deadline is six heartbeats here
    assert [(notice.kind, notice.peer) for notice in told] == [("late", Beginning().liar)]
    waited, told = seconds_until_planned(running, was_late=True)
    assert waited <= 3
    assert not told


def test_a_step_of_a_slow_peer_is_waited_for() -> None:
    waited, _ = seconds_until_planned(Work(tokens=16, steps=1, sequences=2, seconds=10.0, ready_in_seconds=8.0))
    assert 18 <= waited <= 19


def test_a_stranger_costs_a_round_a_fifth_of_its_time_at_most_whatever_it_says() -> None:
    """In each round anew, since it may be counted in every other one; one that was not counted costs it nothing."""
    running = Work(tokens=16, steps=1, sequences=2, seconds=10.0, ready_in_seconds=80_000.0)
    for is_counted, longest in ((True, 2.0 + 0.2 * 30.0), (False, 0.5)):
        story, now = Beginning(), 100.0
        core, state = story.core, story.core.state
        state.identity = replace(state.identity, rules=replace(state.rules, has_strangers=True))
        trusted = tuple(sorted((core.me, story.honest)))
        roster = (Contribution(story.liar, 16, 1, 2),) if is_counted else ()
        state.round.tip = replace(core.tip, roll=Roll(state.rules.fingerprint, 1, trusted), roster=roster)
        state.round.tip_hash = manifest_hash(core.tip)
        state.pace.observe_round(30.0)
        core.handle(on.ClockTicked(), now)
        story.says(story.liar, now, work=running)
        story.says(story.honest, now, work=READY)
        core.handle(on.TrainingProgressed(READY), now)
        closed_at = now
        while core.state.round.plan is None:
            now += 0.5
            assert now < closed_at + 60.0
            core.handle(on.BytesMoved(), now)
            story.says(story.liar, now, work=running)
            story.says(story.honest, now, work=READY)
            core.handle(on.ClockTicked(), now)
        assert now - closed_at <= longest + 1.0
        assert {entry.peer for entry in core.state.round.plan.value.roster} == {*trusted}


def test_a_stranger_whose_values_do_not_come_is_planned_without_for_longer_each_time() -> None:
    """Else each key would cost each round the wait for it."""
    story = Beginning()
    core, state = story.core, story.core.state
    state.identity = replace(state.identity, rules=replace(state.rules, has_strangers=True))
    trusted = tuple(sorted((core.me, story.honest)))
    lifecycle, tip = parts_of(core).lifecycle, replace(core.tip, roll=Roll(state.rules.fingerprint, 1, trusted))

    def commits(*lost: PeerId, counts: tuple[PeerId, ...] = trusted) -> int:
        """A round whose reducer does without some; the round from which on plans count the stranger again."""
        nonlocal tip
        piece = Slice(0, 0, 1, core.me, trusted)
        reasons = tuple((peer, LOST) for peer in lost)
        state.round.reports[0] = FakeSealer(core.me).seal(Report(core.tip_hash, NO_HASH, 0, piece, (), reasons))
        roster = tuple(Contribution(peer, 1, 1, 1) for peer in counts)
        tip = replace(tip, round=core.tip.round + 1, parent=core.tip_hash, roster=roster)
        lifecycle.enter(tip, 1.0)
        return state.others.silences.get(story.liar, (0, 0))[1] - tip.round

    state.round.tip, state.round.tip_hash = tip, manifest_hash(tip)
    assert commits(story.honest) == -1, "who is trusted is waited for"
    assert commits(story.liar) == 3
    status = story.says(story.liar, 2.0, round=tip.round, head=core.tip_hash, work=READY)
    assert status is not None
    plan = parts_of(core).round_plan
    core.handle(on.TrainingProgressed(READY), 2.0)
    assert {entry.peer for entry in plan._roster(2.0)} == {core.me}
    assert [commits(story.liar) for _ in range(3)] == [5, 9, 17]
    assert commits(counts=(*trusted, story.liar)) == -tip.round
    assert commits(story.liar) == 3, "as if it had never been silent"


def test_a_leader_that_slept_after_it_closed_a_round_waits_for_running_steps_as_if_it_had_not() -> None:
    """The other machines may have been suspended with it."""
    story, now, planned = Beginning(), 10.0, []
    core, running = story.core, Work(tokens=16, steps=1, sequences=2, seconds=10.0, ready_in_seconds=8.0)
    for asleep in (0.0, 3600.0):
        now += asleep
        for work in [running] * 10 + [READY] * 3:
            now += 0.5
            core.handle(on.BytesMoved(), now)
            story.says(story.liar, now, work=work if asleep else running)
            story.says(story.honest, now, work=READY)
            core.handle(on.TrainingProgressed(READY), now)
            planned.append(core.state.round.plan is not None)
        assert core.state.round.closed_at is not None
    assert planned == [False] * 23 + [True] * 3
    assert not core.state.others.kept_waiting


@pytest.mark.parametrize(("name", "counts"), [("p1", True), ("p2", True), ("stranger", False)])
def test_bytes_that_move_at_a_stranger_keep_no_leader(name: str, counts: bool) -> None:
    story = Beginning()
    peer = story.liar if name == story.core.me else PeerId(name)
    for moved in range(1, 6):
        story.says(peer, 0.5 * moved, moved=moved)
    assert (story.core.state.round.progress_at == 2.5) == counts


def test_who_asks_a_thousand_times_for_one_status_gets_it_once() -> None:
    story, stranger = Beginning(), PeerId("stranger")
    story.says(story.honest, 1.0)
    named = (story.honest, *[story.honest] * 20, PeerId("nobody"))
    story.says(stranger, 1.0, unheard=named, head=sha256(b"elsewhere"))
    sent = [act for act in story.core.handle(on.ClockTicked(), 2.0) if isinstance(act, Send) and act.to == stranger]
    assert [[one.author for one in act.envelope.statuses] for act in sent] == [[story.core.me, story.honest]]


def test_only_who_leads_closes_a_round() -> None:
    """Ballot k is led by elector k, once somebody is there."""

    def is_closed(rank: int, closing: int, reached: int = 0) -> bool:
        story = Beginning()
        peer = story.core.state.round.order[rank]
        if reached:
            hears_votes(story.core, story.liar, prevote(story.core, story.liar, reached, NO_HASH), now=1.0)
        story.says(peer, 1.0, ballots=Ballots(closing=closing))
        return parts_of(story.core).leadership.is_closing()

    assert not any(is_closed(2, closing) for closing in (0, 1, 2, 3, 5, 2**62))
    assert not is_closed(1, closing=2, reached=2)
    assert is_closed(2, closing=2, reached=2)
    assert not is_closed(2, closing=5, reached=2)
    assert is_closed(1, closing=1, reached=2)  # it led before


def test_a_plan_of_a_ballot_far_ahead_is_not_kept(core: Consensus) -> None:
    mine = core.state.round.plan
    assert mine is not None
    core.handle(on.MessageReceived(Envelope(LIAR, plan=seal(replace(mine.value, ballot=2**61, leader=LIAR)))), 0.0)
    assert core.state.round.plan == mine


def test_words_of_a_ballot_beyond_all_turns_are_not_taken(core: Consensus) -> None:
    hears_votes(core, LIAR, prevote(core, LIAR, MAX_BALLOT, sha256(b"far")))
    assert ballot_of(core.state.round.vote.heard.prevotes.get(LIAR)) < MAX_BALLOT


def test_reports_that_cannot_be_are_not_kept(core: Consensus) -> None:
    plan = core.state.round.plan
    assert plan is not None
    core.state.round.reports.clear()
    name, tile, piece = plan_hash(plan.value), sha256(b"tile"), plan.value.slices[0]

    def report_of(index: int, contributors: tuple[PeerId, ...], hashes: tuple[Hash, ...], left_out: Any = ()) -> Report:
        made = replace(piece, reducer=LIAR, contributors=contributors)
        return Report(core.tip_hash, name, index, made, hashes, left_out)

    honest = report_of(0, (LIAR,), (tile,))
    for report in (
        report_of(0, (LIAR,), (Hash(b"no hash"),)),
        report_of(0, (LIAR,), (tile,), ((LIAR, "x" * 10_000),)),
        report_of(0, (LIAR,), (tile,), ((LIAR, "lost"),) * 100),
        report_of(0, (LIAR,), (tile,), ((LIAR, "lost"), (LIAR, "lost"))),
        report_of(0, (LIAR,), (tile,), ((PeerId("\033[2Jsomebody"), "lost"),)),
        report_of(0, (LIAR,), (tile,), ((PeerId("p0"), "\033[2Jlost"),)),
        report_of(0, (), (tile,)),
        report_of(0, (PeerId("nobody"),), (tile,)),
        report_of(7, (LIAR,), (tile,)),
        replace(honest, plan=sha256(b"another plan")),
        replace(honest, parent=sha256(b"another parent")),
        replace(honest, piece=replace(honest.piece, block=1)),
    ):
        core.handle(on.MessageReceived(Envelope(LIAR, reports=(seal(report),))), 0.0)
    assert not core.state.round.reports
    assert not core.state.round.empty_reports


def test_what_is_of_another_parent_or_run_is_dropped(core: Consensus) -> None:
    other = sha256(b"another")
    name = sha256(b"manifest")
    for vote in (Precommit(core.state.rules.fingerprint, other, 0, name), Precommit(other, core.tip_hash, 0, name)):
        hears_votes(core, LIAR, Votes(precommit=seal(vote)))
    assert LIAR not in core.state.round.vote.heard.precommits


def test_a_claim_beyond_the_lease_is_named(core: Consensus) -> None:
    """A plan that counts more than the lease can give is refused with the name of who claims it."""
    mine = core.state.round.plan
    assert mine is not None
    entry = Contribution(LIAR, 10**9, 1, 10**6)
    roster = (*(e for e in mine.value.roster if e.peer != LIAR), entry)
    ballot = 9 + core.state.round.order.index(LIAR)
    reach(core, ballot)
    plan = replace(mine.value, ballot=ballot, leader=LIAR, roster=roster)
    actions = core.handle(on.MessageReceived(Envelope(LIAR, plan=seal(plan))), 0.0)
    told = [action for action in actions if isinstance(action, Notice)]
    assert [(notice.kind, notice.peer) for notice in told] == [("refused", LIAR)]
    assert "p2 claims more than its lease" in told[0].text


def test_words_of_others_reach_a_terminal_cleaned_and_cut() -> None:
    core = walk_until(lambda core: core.state.round.decided is not None)
    commit = core.state.round.decided
    assert commit is not None
    rude = "\033]0;title\a\n" * 100_000
    for kind in (rude, "genesis"):
        core.state.round.decided = None
        wrong = Commit(replace(commit.certificate, kind=kind), commit.manifest)
        told = [
            each
            for each in core.handle(on.MessageReceived(Envelope(LIAR, commit=wrong)), 0.0)
            if isinstance(each, Notice)
        ]
        assert [(each.kind, each.peer, each.text) for each in told] == [
            ("refused", LIAR, "certificate of round 1 has an unknown kind")
        ]
    core.state.notify("refused", rude, LIAR)
    notice = core.state.out[-1]
    assert isinstance(notice, Notice)
    assert len(notice.text) <= 300
    assert notice.text.isprintable()


# ---- bytes ----


def spoilt(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(changed))
        match chance.randrange(4):
            case 0:
                changed[at] = chance.randrange(256)
            case 1:
                del changed[at : at + chance.randint(1, 30)]
            case 2:
                changed[at:at] = changed[at : at + chance.randint(1, 200)]
            case 3:
                changed[at] = chance.choice((0x90, 0xDC, 0xDD, 0xC6, 0xCF, 0xC0, 0xDF, 0xFF))
        if not changed:
            return b""
    return bytes(changed)


def examples(said: list[Envelope]) -> list[Any]:
    """At least one of everything that is read from the network."""
    found: dict[type, Any] = {}
    for envelope in said:
        found.setdefault(Envelope, envelope)
        if envelope.commit is not None:
            found.setdefault(Commit, envelope.commit)
            found.setdefault(Manifest, envelope.commit.manifest)
            found[ChainPart] = ChainPart((pack(envelope.commit),))
    for request in (TilesRequest((NO_HASH, NO_HASH)), PiecesRequest(NO_HASH, (1, 2))):
        found[type(request)] = request
        found[PackedRequest] = PackedRequest(kind_of(request), pack(request))
    found[RunInfo] = RunInfo(1, "tiny", "model:\n", NO_HASH, NO_HASH, PeerId("organiser"))
    return list(found.values())


def test_every_kind_of_message_is_read_or_refused(said: list[Envelope]) -> None:
    chance = random.Random(1)
    for example in examples(said):
        for _ in range(400):
            try:
                unpack(type(example), spoilt(pack(example), chance))
            except RemoteProtocolError:
                continue


def test_spoilt_words_neither_break_the_state_machine_nor_grow_it(said: list[Envelope], core: Consensus) -> None:
    """Any well-formed message, whatever it says, of any author: no exception, and no more than there is room for."""
    chance, taken = random.Random(2), 0
    told = [e for e in said if e.sender != core.me and (e.votes or e.contents or e.plan or e.reports or e.commit)]
    for _ in range(4000):
        data = pack(chance.choice(told))
        try:
            envelope = unpack(Envelope, spoilt(data, chance))
        except RemoteProtocolError:
            continue
        taken += 1
        core.handle(on.MessageReceived(envelope), 0.001 * taken)
    assert taken > 500
    current = core.state.round
    heard = current.vote.heard
    assert max(len(heard.prevotes), len(heard.precommits), len(heard.proposals)) <= len(core.state.electors)
    assert len(current.contents) <= MOST_CONTENTS
    assert len(core.state.others.contacts) <= 3 + MAX_NEWCOMERS


class Verifier(FakeKeys):
    """Counts what it is asked."""

    asked = 0

    def verify(self, peer: PeerId, public_key: bytes, data: bytes, signature: bytes) -> bool:
        self.asked += 1
        return super().verify(peer, public_key, data, signature)


def test_an_envelope_of_too_many_parts_is_refused_before_its_signatures_are_checked() -> None:
    vote, keys = Votes(prevote=seal(Prevote(NO_HASH, NO_HASH, 0, NO_HASH))), Verifier()
    data = pack(Envelope(LIAR, votes=(vote,) * (MAX_PARTS["votes"] + 1)))
    with pytest.raises(RemoteProtocolError, match="1025 votes at once"):
        EnvelopeChecker(keys).open(LIAR, data)
    assert not keys.asked


def test_a_key_or_signature_of_impossible_size_is_not_looked_at() -> None:
    keys = Verifier()
    signer, checker = keys.signer(LIAR), EnvelopeChecker(keys)
    assert not checker.check(LIAR, signer.public_key + bytes(10_000), b"x", signer.sign(b"x"))
    assert not checker.check(LIAR, signer.public_key, b"x", signer.sign(b"x") + bytes(10_000))
    assert not keys.asked
    assert checker.check(LIAR, signer.public_key, b"x", signer.sign(b"x"))


def test_bytes_that_are_said_to_move_for_ever_keep_a_round_for_a_while() -> None:
    """They are believed again when something has come of it."""
    story = Beginning()
    told: list[Any] = []
    for now in range(1, 1000):
        told += story.says(story.liar, float(now), moved=now)
    waited = story.core.state.round.progress_at
    assert waited == pytest.approx(MAX_WAIT_EXTENSIONS * story.core.state.pace.deadline_seconds(0), abs=2)
    assert [(notice.kind, notice.peer) for notice in told if isinstance(notice, Notice)] == [("late", story.liar)]
    story.says(story.honest, 1000.0, moved=1)
    assert story.core.state.round.progress_at == waited
    story.core.handle(on.BytesMoved(), 1001.0)
    story.says(story.honest, 1002.0, moved=2)
    assert story.core.state.round.progress_at == 1002.0


def test_one_reducer_alone_does_not_take_a_slice_out_of_a_round() -> None:
    """It may say that nobody's values are fit; who contributed is blamed when a second one says so."""
    story, now = Beginning(), 10.0
    core = story.core
    core.handle(on.ClockTicked(), now)
    story.says(story.liar, now, work=READY)
    story.says(story.honest, now, work=READY)
    core.handle(on.TrainingProgressed(READY), now)
    plan = core.state.round.plan
    assert plan is not None
    index, piece = next((at, p) for at, p in enumerate(plan.value.slices) if p.reducer != core.me)
    liar, honest = piece.reducer, next(peer for peer in (story.liar, story.honest) if peer != piece.reducer)

    def says_void(peer: PeerId) -> None:
        left_out = tuple((one, "not finite") for one in piece.contributors)
        nothing = replace(piece, reducer=peer, contributors=())
        report = Report(core.tip_hash, plan_hash(plan.value), index, nothing, (), left_out)
        core.handle(on.MessageReceived(Envelope(peer, reports=(FakeSealer(peer).seal(report),))), now)

    says_void(liar)
    assert parts_of(core).reducing.acting_reducer(index, piece, now) in (core.me, honest)
    says_void(honest)
    assert parts_of(core).reducing.acting_reducer(index, piece, now) is None


def test_whom_to_catch_up_with_takes_time_in_proportion_to_those_who_claim_something(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All members stand on the tip or claim more: with a thousand of them each event would else take a second."""
    story, now, alive = Beginning(), 10.0, Contacts.alive
    claimers = [PeerId(f"q{at}") for at in range(200)]
    members = (*story.core.tip.members, *(Member(name, 1, False, 0) for name in claimers))
    story.core.state.round.tip = replace(story.core.tip, members=members)
    for name in claimers:
        story.says(name, now, round=5, head=sha256(b"nobody has it"), counted=2**40)
    story.core.state.round.following = False
    asked = list[PeerId]()

    def counted(self: Contacts, peer: PeerId, at: float) -> bool:
        asked.append(peer)
        return alive(self, peer, at)

    monkeypatch.setattr(Contacts, "alive", counted)
    assert parts_of(story.core).following.follow(now)
    assert len(asked) <= 3 * len(members)


@pytest.mark.parametrize("where", ["members", "roster", "slices", "ownership"])
def test_a_manifest_names_nobody_at_length(where: str) -> None:
    """Whoever leads could else have every peer keep megabytes of names for each round, for ever."""
    for characters, is_taken in ((128, True), (129, False), (10**6, False)):
        name = PeerId("x" * characters)
        named: dict[str, Any] = {
            "members": (Member(name, 1, True, 0),),
            "roster": (Contribution(name, 1, 1, 1),),
            "slices": (Slice(0, 0, 1, LIAR, (name,)),),
            "ownership": ((name,),),
        }
        rules = run_rules(columns=1)
        root = root_of(initial_state(rules))
        manifest = genesis_manifest(rules, root, [Member(LIAR, 1, True, 0)], {LIAR: OwnershipRequest(1)})
        data = pack(replace(manifest, **{where: named[where]}))
        if is_taken:
            assert pack(unpack(Manifest, data)) == data
        else:
            with pytest.raises(RemoteProtocolError, match="a peer id of at most 128 characters"):
                unpack(Manifest, data)

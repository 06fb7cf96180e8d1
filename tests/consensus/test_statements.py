"""Leaders that make up what others never said: electors make the manifest again, and take nothing else."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from spes_p2p.consensus import events as on
from spes_p2p.consensus.actions import Notice, Send
from spes_p2p.consensus.child_checks import check_child
from spes_p2p.consensus.content import Content, Envelope, Statements
from spes_p2p.consensus.electorate import Faults
from spes_p2p.consensus.machine import Consensus
from spes_p2p.consensus.manifest import SHARE, Contribution, Credit, Decay, Manifest, Slice, manifest_hash
from spes_p2p.consensus.membership import LINK_PRIVATE, Member, Roll, electors
from spes_p2p.consensus.messages import (
    Ballots,
    DecayOrder,
    Declaration,
    Intent,
    Report,
    Signed,
    Status,
    Work,
    declared,
)
from spes_p2p.consensus.rules import Outcome, RunRules, child_manifest, genesis_manifest
from spes_p2p.consensus.statements import check_content, content_of, credited, members_after
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import NO_HASH, PeerId, sha256
from spes_p2p.ownership.assign import OwnershipRequest
from tests.consensus.test_bounds import LIAR, walk_until
from tests.simulation.sim_state import FakeSealer, run_rules

Change = Callable[[Consensus, Content], Content]


@pytest.fixture(scope="module")
def voter() -> Consensus:
    """An elector that knows what is proposed, work of several, and has not voted yet."""

    def knows(core: Consensus) -> bool:
        contents = core.state.round.contents.values()
        return core.state.round.decided is None and any(len(content.manifest.roster) > 1 for content in contents)

    return walk_until(knows)


@pytest.fixture(scope="module", params=["ready", "at work again"])
def honest(voter: Consensus, request: pytest.FixtureRequest) -> Content:
    """Those who trained say so, or have said so and are in another life by now."""
    content = next(one for one in voter.state.round.contents.values() if len(one.manifest.roster) > 1)
    return content if request.param == "ready" else apart(content)


def apart(content: Content) -> Content:
    """What was trained was declared before what everybody declares now."""
    said, counted = content.statements.declarations, {entry.peer for entry in content.manifest.roster}
    known = {one.author for one in content.statements.ready}
    ready = (*content.statements.ready, *(one for one in said if one.author in counted - known))
    now = tuple(said_by(one, work=Work(), sequence=one.value.sequence + 1) for one in said)
    return with_statements(content, ready=ready, declarations=now)


def made_again(core: Consensus, content: Content, **outcome: Any) -> Content:
    """The same with another outcome, consistent with its parent in all that is derived."""
    made = content.manifest
    members, wishes = members_after(core.tip, (signed.value for signed in content.statements.declarations))
    other = replace(Outcome(made.roster, made.slices, made.wire_root, made.state_root, made.merge), **outcome)
    return replace(content, manifest=child_manifest(core.state.rules, core.tip, other, members, wishes))


def with_statements(content: Content, **said: Any) -> Content:
    return replace(content, statements=replace(content.statements, **said))


def said_by(signed: Signed[Any], **changes: Any) -> Signed[Any]:
    """Signed again by its author: what a liar can have a friend of his say, or what it once did say."""
    return FakeSealer(signed.author).seal(replace(signed.value, **changes))


def changed_member(content: Content, **changes: Any) -> Content:
    first, *others = content.manifest.members
    return replace(content, manifest=replace(content.manifest, members=(replace(first, **changes), *others)))


def counts_more(core: Consensus, content: Content) -> Content:
    first, *others = content.manifest.roster
    return made_again(core, content, roster=(replace(first, tokens=first.tokens - 1), *others))


def drops_a_member(core: Consensus, content: Content) -> Content:
    return replace(content, manifest=replace(content.manifest, members=content.manifest.members[1:]))


def alters_a_link(core: Consensus, content: Content) -> Content:
    return changed_member(content, link_class=LINK_PRIVATE)


def invents_a_reducer(core: Consensus, content: Content) -> Content:
    first, *others = content.manifest.slices
    other = next(member.peer for member in core.tip.members if member.peer != first.reducer)
    return made_again(core, content, slices=(replace(first, reducer=other), *others))


def leaves_a_contributor_out(core: Consensus, content: Content) -> Content:
    first, *others = content.manifest.slices
    return made_again(core, content, slices=(replace(first, contributors=first.contributors[1:]), *others))


def alters_a_wire_root(core: Consensus, content: Content) -> Content:
    return made_again(core, content, wire_root=sha256(b"other tiles"))


def counts_what_nobody_said(core: Consensus, content: Content) -> Content:
    said = apart(content).statements
    return with_statements(content, ready=said.ready[1:], declarations=said.declarations)


def signs_for_another(core: Consensus, content: Content) -> Content:
    content = apart(content)
    first, *others = sorted(content.statements.ready, key=lambda signed: signed.author == LIAR)
    return with_statements(content, ready=(FakeSealer(LIAR).seal(first.value), *others))


def counts_one_twice(core: Consensus, content: Content) -> Content:
    content = apart(content)
    ready = content.statements.ready
    again = said_by(ready[0], work=replace(ready[0].value.work, tokens=ready[0].value.work.tokens - 1))
    return with_statements(content, ready=(again, *ready))


def counts_work_on_another_parent(core: Consensus, content: Content) -> Content:
    content = apart(content)
    first, *others = content.statements.ready
    return with_statements(content, ready=(said_by(first, head=sha256(b"another")), *others))


def counts_another_incarnation(core: Consensus, content: Content) -> Content:
    content = apart(content)
    first, *others = content.statements.ready
    return with_statements(content, ready=(said_by(first, incarnation=7), *others))


def reports_for_another(core: Consensus, content: Content) -> Content:
    first, *others = content.statements.reports
    stranger = FakeSealer(PeerId("somebody")).seal(first.value)
    return with_statements(content, reports=(stranger, *others))


def brings_an_old_report(core: Consensus, content: Content) -> Content:
    first, *others = content.statements.reports
    return with_statements(content, reports=(said_by(first, parent=sha256(b"another")), *others))


def brings_half_a_report(core: Consensus, content: Content) -> Content:
    first, *others = content.statements.reports
    return with_statements(content, reports=(said_by(first, wire_hashes=()), *others))


def claims_more_than_there_is(core: Consensus, content: Content) -> Content:
    first, *others = content.statements.declarations
    greedy = said_by(first, intent=Intent(True, claims=tuple(range(5000))))
    return with_statements(content, declarations=(greedy, *others))


def brings_a_crowd_of_words(core: Consensus, content: Content) -> Content:
    """So that everybody keeps and sends megabytes."""
    first = content.statements.declarations[0].value
    names = (PeerId(f"stranger {number}") for number in range(100))
    crowd = tuple(FakeSealer(name).seal(replace(first, peer=name, intent=Intent())) for name in names)
    return with_statements(content, declarations=(*content.statements.declarations, *crowd))


LIES: tuple[Change, ...] = (
    counts_more,
    drops_a_member,
    alters_a_link,
    invents_a_reducer,
    leaves_a_contributor_out,
    alters_a_wire_root,
    counts_what_nobody_said,
    signs_for_another,
    counts_one_twice,
    counts_work_on_another_parent,
    counts_another_incarnation,
    reports_for_another,
    brings_an_old_report,
    brings_half_a_report,
    claims_more_than_there_is,
    brings_a_crowd_of_words,
)


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
def test_a_manifest_that_does_not_follow_from_what_was_said_is_refused(
    voter: Consensus, honest: Content, lie: Change
) -> None:
    rules, tip = voter.state.rules, voter.tip
    check_content(rules, tip, honest)
    with pytest.raises(RemoteProtocolError, match="manifest of round 1"):
        check_content(rules, tip, lie(voter, honest))


@pytest.mark.parametrize("lie", [alters_a_link, counts_more], ids=lambda lie: lie.__name__)
def test_the_manifest_alone_does_not_show_it(voter: Consensus, honest: Content, lie: Change) -> None:
    """What its parent says leaves these open; that is why statements come with it."""
    check_child(voter.state.rules, voter.tip, lie(voter, honest).manifest)


def test_nobody_gets_a_column_that_it_did_not_ask_for() -> None:
    rules, names = run_rules(columns=2), [PeerId(name) for name in ("p0", "p1")]
    members = [Member(name, 1, True, 0) for name in names]
    tip = genesis_manifest(rules, NO_HASH, members, {names[0]: OwnershipRequest(2)})
    head, nothing = manifest_hash(tip), (Work(), Intent(max_columns=2), Ballots())
    statuses = (Status(rules.fingerprint, name, 1, 1, 0, head, *nothing) for name in names)
    said = tuple(declared(FakeSealer(status.peer).seal(status)) for status in statuses)
    content = content_of(rules, tip, Statements((), (), said), NO_HASH, None)
    assert content.manifest.ownership == (("p0",), ("p1",))
    check_content(rules, tip, content)
    taken = replace(content, manifest=replace(content.manifest, ownership=((names[1],), (names[1],))))
    check_child(rules, tip, taken.manifest)
    with pytest.raises(RemoteProtocolError, match="ownership does not follow"):
        check_content(rules, tip, taken)


def order(rules: RunRules, steps: int = 30, author: PeerId | None = None, **changes: Any) -> Signed[DecayOrder]:
    """The organiser's word on the learning rate, or a forged one: electors check signatures before."""
    said = replace(DecayOrder(rules.fingerprint, steps), **changes)
    return FakeSealer(rules.organiser if author is None else author).seal(said)


def test_the_next_manifest_takes_up_the_organisers_decay_and_later_ones_keep_it(
    voter: Consensus, honest: Content
) -> None:
    core, rules = copy.deepcopy(voter), voter.state.rules
    core.handle(on.DecayOrdered(order(rules)), 0.0)
    assert core.state.others.decay == order(rules)
    said, state_root = replace(honest.statements, decay=order(rules)), core.tip.state_root
    taken = content_of(rules, core.tip, said, state_root, None)
    assert taken.manifest.decay == Decay(taken.manifest.step, 30)
    check_content(rules, core.tip, taken)
    check_child(rules, core.tip, taken.manifest)
    with pytest.raises(RemoteProtocolError, match="decay does not follow"):
        check_content(rules, core.tip, with_statements(taken, decay=None))
    again = Statements((), (), said.declarations, order(rules, 10))
    later = content_of(rules, taken.manifest, again, state_root, None)
    check_child(rules, taken.manifest, later.manifest)
    assert (later.manifest.decay, later.statements.decay) == (taken.manifest.decay, None)
    for other in (None, Decay(taken.manifest.step, 10)):
        with pytest.raises(RemoteProtocolError, match="decay does not follow"):
            check_child(rules, taken.manifest, replace(later.manifest, decay=other))


@pytest.mark.parametrize(
    "forged", [{"author": LIAR}, {"fingerprint": sha256(b"another run")}, {"steps": 0}, {"steps": 2**53}], ids=str
)
def test_no_other_word_lets_the_learning_rate_fall(voter: Consensus, forged: dict[str, Any]) -> None:
    rules, tip = voter.state.rules, voter.tip
    word = order(rules, **forged)
    content = content_of(rules, tip, Statements((), (), (), word), tip.state_root, None)
    assert (content.manifest.decay, content.statements.decay) == (None, None)
    with pytest.raises(RemoteProtocolError, match="nothing in it follows from"):
        check_content(rules, tip, with_statements(content, decay=word))


MALLORY = PeerId("mallory")


def signed_roll(rules: RunRules, author: PeerId | None = None, **changes: Any) -> Signed[Roll]:
    """The organiser's roll, which bans the liar, or a forged one."""
    said = replace(Roll(rules.fingerprint, 3, (PeerId("p0"),), (LIAR,)), **changes)
    return FakeSealer(rules.organiser if author is None else author).seal(said)


def test_the_next_manifest_takes_up_the_organisers_roll_and_later_ones_keep_it(
    voter: Consensus, honest: Content
) -> None:
    core, rules = copy.deepcopy(voter), replace(voter.state.rules, has_strangers=True)
    word = signed_roll(rules)
    for other in (word, signed_roll(rules, number=2), signed_roll(rules, author=LIAR, number=9)):
        core.handle(on.RollSigned(other), 0.0)
    assert core.state.others.roll == word
    state_root = core.tip.state_root
    said = replace(honest.statements, roll=word, reports=())  # as nobody was trusted, nothing was reduced
    taken = content_of(rules, core.tip, said, state_root, None)
    check_content(rules, core.tip, taken)
    check_child(rules, core.tip, taken.manifest)
    assert taken.manifest.roll == word.value
    assert LIAR not in {member.peer for member in taken.manifest.members}
    assert [member.peer for member in electors(taken.manifest.members)] == ["p0"]
    with pytest.raises(RemoteProtocolError, match="does not follow"):
        check_content(rules, core.tip, with_statements(taken, roll=None))
    older = Statements((), (), honest.statements.declarations, roll=signed_roll(rules, number=2))
    later = content_of(rules, taken.manifest, older, state_root, None)
    check_child(rules, taken.manifest, later.manifest)
    assert (later.manifest.roll, later.statements.roll) == (word.value, None)


@pytest.mark.parametrize(
    "lie",
    [
        lambda rules, child: replace(child, roll=None),
        lambda rules, child: replace(child, roll=replace(child.roll, number=2)),
        lambda rules, child: replace(child, roll=replace(child.roll, vouched=(PeerId("p0"), PeerId("p1")))),
        lambda rules, child: replace(child, roll=replace(child.roll, number=4, vouched=(LIAR,))),
        lambda rules, child: replace(
            child, members=tuple(replace(one, elector=not one.elector) for one in child.members)
        ),
        lambda rules, child: replace(child, members=(Member(MALLORY, 1, False, 0), *child.members)),
    ],
)
def test_whoever_leads_neither_forgets_a_roll_nor_gives_votes(
    voter: Consensus, honest: Content, lie: Callable[[RunRules, Manifest], Manifest]
) -> None:
    rules, state_root = replace(voter.state.rules, has_strangers=True), voter.tip.state_root
    said = replace(honest.statements, roll=signed_roll(rules, banned=(MALLORY,)))
    parent = content_of(rules, voter.tip, said, state_root, None).manifest
    child = content_of(rules, parent, Statements((), (), honest.statements.declarations), state_root, None)
    check_content(rules, parent, child)
    with pytest.raises(RemoteProtocolError):
        check_content(rules, parent, replace(child, manifest=lie(rules, child.manifest)))


@pytest.mark.parametrize(
    "forged",
    [{"author": LIAR}, {"fingerprint": sha256(b"another run")}, {"number": 0}, {"vouched": (LIAR,)}],
    ids=str,
)
def test_no_other_word_gives_a_vote_or_bans(voter: Consensus, forged: dict[str, Any]) -> None:
    rules, tip = voter.state.rules, voter.tip
    word = signed_roll(rules, **forged)
    content = content_of(rules, tip, Statements((), (), (), roll=word), tip.state_root, None)
    assert (content.manifest.roll, content.statements.roll) == (None, None)
    with pytest.raises(RemoteProtocolError, match="nothing in it follows from"):
        check_content(rules, tip, with_statements(content, roll=word))


def test_the_last_who_may_vote_stays_named_when_it_leaves(voter: Consensus, honest: Content) -> None:
    """Else strangers would be among themselves, or nobody could go on."""
    rules = replace(voter.state.rules, has_strangers=True)
    leaving = tuple(
        said_by(signed, intent=replace(signed.value.intent, leaving=True)) if signed.author == "p0" else signed
        for signed in honest.statements.declarations
    )
    word = signed_roll(rules, banned=())
    made = content_of(rules, voter.tip, replace(honest.statements, declarations=leaving, roll=word), NO_HASH, None)
    assert [member.peer for member in electors(made.manifest.members)] == ["p0"]


def test_another_leader_makes_the_same_of_the_same_words(voter: Consensus, honest: Content) -> None:
    said = honest.statements
    mixed = Statements(said.ready[::-1], said.reports, said.declarations[::-1])
    again = content_of(voter.state.rules, voter.tip, mixed, honest.manifest.state_root, honest.manifest.merge)
    assert again.manifest == honest.manifest


def test_who_passes_a_manifest_on_with_the_wrong_words_does_not_spoil_it() -> None:
    """The hash of a manifest does not say which words it follows from: somebody else brings them."""

    def lacks_content(core: Consensus) -> bool:
        return bool(core.state.round.contents) and core.state.round.decided is None

    core = walk_until(lacks_content)
    (name, content), *_ = core.state.round.contents.items()
    core.state.round.contents.clear()
    core.state.round.verified.clear()
    now = core.state.last_event
    actions = core.handle(on.MessageReceived(Envelope(LIAR, contents=(counts_what_nobody_said(core, content),))), now)
    assert [(a.kind, a.peer) for a in actions if isinstance(a, Notice)] == [("refused", LIAR)]
    assert name not in core.state.round.contents
    assert name not in core.state.round.refused
    core.handle(on.MessageReceived(Envelope(PeerId("p1"), contents=(content,))), now)
    assert core.state.round.contents[name] == content
    assert manifest_hash(content.manifest) == name


def test_a_plan_that_counts_what_nobody_said_is_not_taken() -> None:
    """Else nobody could make a manifest of it; an honest one comes with what its roster follows from."""
    core = walk_until(lambda core: core.state.round.plan is not None and core.state.round.plan.author != core.me)
    signed = core.state.round.plan
    assert signed is not None
    entry = signed.value.roster[0]
    known = core.state.round.ready[entry]
    for is_told in (False, True):
        core.state.round.plan = None
        core.state.round.ready.clear()
        ready = (known,) if is_told else ()
        others = tuple(core.state.round.ready.values())
        plan = replace(signed, value=replace(signed.value, roster=(entry,), slices=_only(signed, entry)))
        core.handle(on.MessageReceived(Envelope(signed.author, plan=plan, ready=(*others, *ready))), 0.0)
        assert (core.state.round.plan is not None) == is_told


def _only(signed: Signed[Any], entry: Contribution) -> tuple[Any, ...]:
    return tuple(replace(piece, contributors=(entry.peer,)) for piece in signed.value.slices)


def test_a_plan_brings_what_its_roster_follows_from() -> None:
    core = walk_until(lambda core: core.state.round.plan is not None and core.state.round.decided is None)
    plan = core.state.round.plan
    assert plan is not None
    other = next(peer for peer in core.state.others.contacts if peer != core.me)
    contact = core.state.others.contacts[other]
    contact.signed = said_by(contact.signed, plan=NO_HASH, sequence=contact.status.sequence + 1)
    actions = core.handle(on.ClockTicked(), core.state.last_event + 1.5)
    told = [a.envelope for a in actions if isinstance(a, Send) and a.to == other and a.envelope.plan]
    assert told
    assert {signed.author for signed in told[0].ready} == {entry.peer for entry in plan.value.roster}


class TrustedRun:
    """Electors a to d by the organiser's roll, two strangers beside them, and a round in which all trained."""

    ELECTORS = tuple(PeerId(name) for name in "abcd")
    STRANGERS = (PeerId("x"), PeerId("y"))

    def __init__(self, faults: Faults = Faults.BYZANTINE) -> None:
        rules = run_rules(columns=0)
        tiles = rules.block_tiles[0]
        self.rules = replace(rules, has_strangers=True, faults=faults, slice_tiles=tiles)
        members = [Member(name, 1, True, 0) for name in (*self.ELECTORS, *self.STRANGERS)]
        self.tip = genesis_manifest(self.rules, NO_HASH, members, {}, Roll(self.rules.fingerprint, 1, self.ELECTORS))

    def says(self, author: PeerId, **changes: Any) -> Signed[Declaration]:
        work = Work(True, 64, 4, 8, seconds=10.0)
        status = Status(
            self.rules.fingerprint, author, 1, 1, 0, manifest_hash(self.tip), work, Intent(True), Ballots()
        )  # fmt: skip
        return declared(FakeSealer(author).seal(replace(status, **changes)))

    def report(self, contributors: Iterable[PeerId], *left_out: PeerId, **shares: int) -> Signed[Report]:
        """Of the one slice that there is."""
        reducer, names = self.ELECTORS[0], tuple(sorted(contributors))
        piece = Slice(0, 0, self.rules.block_tiles[0], reducer, names)
        hashes, lost = (NO_HASH,) * piece.tiles, tuple((peer, "lost") for peer in left_out)
        counted = tuple(shares.get(peer, SHARE) for peer in names) if shares else ()
        return FakeSealer(reducer).seal(Report(manifest_hash(self.tip), NO_HASH, 0, piece, hashes, lost, counted))

    def child(self, said: Iterable[Signed[Declaration]], *reports: Signed[Report]) -> Content:
        """As others check it."""
        statements = Statements((), reports, tuple(said))
        content = content_of(self.rules, self.tip, statements, NO_HASH, None)
        check_content(self.rules, self.tip, content)
        check_child(self.rules, self.tip, content.manifest)
        return content


def test_where_electors_may_lie_a_manifest_needs_the_ready_of_a_quorum_and_names_one() -> None:
    run = TrustedRun()
    a, b, c, d = run.ELECTORS
    everybody = [run.says(name) for name in (*run.ELECTORS, *run.STRANGERS)]
    assert len(run.child(everybody, run.report((a, b, c, d, *run.STRANGERS), x=0, y=0)).manifest.roster) == 6
    assert run.child(everybody, run.report((a, b), c)), "what was lost was planned"
    with pytest.raises(RemoteProtocolError, match="2 electors are READY in it and 4 stay, but a quorum is 3"):
        run.child(everybody, run.report((a, b, *run.STRANGERS), x=0))
    with pytest.raises(RemoteProtocolError, match="2 electors are READY in it and 2 stay"):
        run.child([run.says(name) for name in (a, b, *run.STRANGERS)], run.report((a, b)))
    training = [run.says(a), run.says(b), run.says(c, work=Work()), run.says(d, work=Work())]
    with pytest.raises(RemoteProtocolError, match="2 electors are READY in it and 4 stay"):
        run.child(training, run.report((a, b)))
    idle = [run.says(a), run.says(b), run.says(c, work=Work(ready=True)), run.says(d, work=Work())]
    assert run.child(idle, run.report((a, b))), "who has trained nothing is left out by nobody"
    leaving = [run.says(name, intent=Intent(True, leaving=name in (c, d))) for name in run.ELECTORS]
    assert [m.peer for m in run.child(leaving, run.report(run.ELECTORS)).manifest.members] == [a, b]
    assert TrustedRun(Faults.CRASH).child([run.says(a), run.says(b)], run.report((a, b)))


def test_what_strangers_gave_counts_by_the_reports_of_a_round_and_on_average() -> None:
    run = TrustedRun(Faults.CRASH)
    said = [run.says(name) for name in (*run.ELECTORS, *run.STRANGERS)]
    first = run.child(said, run.report((*run.ELECTORS, *run.STRANGERS), x=400, y=0)).manifest
    assert first.strangers == (Credit(PeerId("x"), 400, 400), Credit(PeerId("y"), 0, 0))
    run.tip = first
    said = [run.says(name) for name in (*run.ELECTORS, *run.STRANGERS)]
    second = run.child(said, run.report((*run.ELECTORS, PeerId("x")), x=1000)).manifest
    assert second.strangers == (Credit(PeerId("x"), 1000, 475), Credit(PeerId("y"), 0, 0)), "of y there was nothing"
    assert credited(second, [], {PeerId("x")}) == second.strangers[:1], "who is no stranger any more, or gone"


@pytest.mark.parametrize("shares", [(0,), (SHARE + 1,) * 6, (-1,) * 6])
def test_shares_that_cannot_be_are_refused(shares: tuple[int, ...]) -> None:
    run = TrustedRun(Faults.CRASH)
    report = run.report((*run.ELECTORS, *run.STRANGERS))
    forged = FakeSealer(report.author).seal(replace(report.value, shares=shares))
    with pytest.raises(RemoteProtocolError, match="does not say what counted of whom"):
        run.child([run.says(name) for name in (*run.ELECTORS, *run.STRANGERS)], forged)


def test_of_values_of_strangers_alone_no_state_is_made() -> None:
    run = TrustedRun(Faults.CRASH)
    with pytest.raises(RemoteProtocolError, match="values of strangers only"):
        run.child([run.says(name) for name in (*run.ELECTORS, *run.STRANGERS)], run.report(run.STRANGERS, x=0, y=0))

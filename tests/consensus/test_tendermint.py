"""One vote, step by step: the lines of Algorithm 1 and our departures from them. Orders of all kinds: the searches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spes_p2p.consensus.electorate import NIL, Electorate, Faults, is_polka
from spes_p2p.consensus.messages import Polka, Votes
from spes_p2p.consensus.tendermint import Tendermint
from spes_p2p.consensus.vote_events import (
    Accuse,
    Action,
    Allowed,
    Built,
    DeadlinePassed,
    Decide,
    Heard,
    Judged,
    NotPersisted,
    Persist,
    RecordIsOld,
    Stage,
    StartDeadline,
    Step,
    Tell,
    Verdict,
)
from spes_p2p.consensus.vote_record import VoteRecord
from spes_p2p.ids import Hash, PeerId, sha256
from tests.consensus.planted_votes import CountsOnlyThisBallot
from tests.consensus.vote_search import (
    FINGERPRINT,
    NAMES,
    PARENT,
    precommit_of,
    prevote_of,
    proposal_of,
)
from tests.simulation.sim_state import FakeSealer

A, B, C, D = NAMES[:4]
V, W = sha256(b"v"), sha256(b"w")
FOUR = Electorate((A, B, C, D), Faults.BYZANTINE)
THREE = Electorate((A, B, C), Faults.CRASH)


class Scene:
    """One elector, what it wrote and what it asks for."""

    def __init__(self, me: PeerId, electorate: Electorate = FOUR, elector_class: type[Tendermint] = Tendermint) -> None:
        self.me, self.electorate, self.elector_class = me, electorate, elector_class
        self.record, self.asked = VoteRecord(PARENT), list[Action]()
        self.restart()

    def restart(self) -> None:
        sealer = FakeSealer(self.me)
        self.elector = self.elector_class.begin(self.me, self.electorate, FINGERPRINT, self.record, sealer)
        self.asked.clear()
        self.take(self.elector.handle(Allowed(True)))

    def take(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Persist):
                self.record = action.record
        self.asked += actions

    def hears(self, *said: Votes) -> None:
        for votes in said:
            self.take(self.elector.handle(Heard(votes)))

    def prevoted(self, ballot: int, value: Hash, *names: PeerId) -> None:
        self.hears(*(Votes(prevote=prevote_of(name, ballot, value)) for name in names))

    def precommitted(self, ballot: int, value: Hash, *names: PeerId) -> None:
        self.hears(*(Votes(precommit=precommit_of(name, ballot, value)) for name in names))

    def proposed(self, ballot: int, value: Hash, polka: Polka | None = None) -> None:
        self.hears(Votes(proposal=proposal_of(self.electorate.leader(ballot), ballot, value, polka)))

    def judges(self, value: Hash, verdict: Verdict | None = Verdict.FIT) -> None:
        self.take(self.elector.handle(Judged(value, verdict)))

    def waits(self, ballot: int, step: Step) -> None:
        self.take(self.elector.handle(DeadlinePassed(ballot, step)))

    @property
    def prevote(self) -> tuple[int, Hash] | None:
        vote = self.record.prevote
        return (vote.value.ballot, vote.value.value) if vote else None

    @property
    def precommit(self) -> tuple[int, Hash] | None:
        vote = self.record.precommit
        return (vote.value.ballot, vote.value.value) if vote else None


def polka(ballot: int, value: Hash, *names: PeerId) -> Polka:
    return Polka(ballot, value, tuple(prevote_of(name, ballot, value) for name in names))


def locked_on(value: Hash, ballot: int = 0) -> Scene:
    """D, which has precommitted `value`."""
    scene = Scene(D)
    if ballot:
        scene.precommitted(ballot, NIL, A, B)
    scene.proposed(ballot, value)
    scene.judges(value)
    scene.prevoted(ballot, value, A, B)
    assert scene.precommit == (ballot, value)
    return scene


@pytest.mark.parametrize(
    ("size", "crash", "byzantine", "believed"), [(1, 1, 1, 1), (2, 2, 2, 1), (3, 2, 3, 1), (4, 3, 3, 2), (7, 4, 5, 3)]
)
def test_quorums(size: int, crash: int, byzantine: int, believed: int) -> None:
    order = NAMES[:size]
    assert (Electorate(order, Faults.CRASH).quorum, Electorate(order, Faults.CRASH).believed) == (crash, 1)
    liars = Electorate(order, Faults.BYZANTINE)
    assert (liars.quorum, liars.believed) == (byzantine, believed)
    assert 2 * liars.quorum - size >= liars.believed  # two quorums share one that does not lie


def test_a_ballot_in_which_all_goes_well() -> None:
    scene = Scene(A)
    scene.take(scene.elector.handle(Built(V)))
    assert scene.elector.vote.to_tell.proposal == proposal_of(A, 0, V, None)
    assert scene.prevote is None
    scene.judges(V)
    assert scene.prevote == (0, V)
    scene.prevoted(0, V, B, C)
    assert scene.precommit == (0, V)
    assert (scene.record.locked_ballot, scene.record.locked_value) == (0, V)
    scene.precommitted(0, V, C, D)
    decided = scene.asked[-1]
    assert isinstance(decided, Decide)
    assert (decided.ballot, decided.value) == (0, V)
    assert [signed.author for signed in decided.precommits] == [A, C, D]


def test_a_record_is_written_before_what_it_says_is_told() -> None:
    elector = Scene(A).elector
    assert [type(action) for action in elector.handle(Built(V))] == [Persist, Tell, Stage]
    assert elector.handle(Built(V)) == []


def test_a_prevote_waits_for_the_tiles_until_the_deadline() -> None:
    scene = Scene(B)
    scene.proposed(0, V)
    assert Stage(V) in scene.asked
    assert scene.prevote is None
    scene.waits(0, Step.PROPOSE)
    assert scene.prevote == (0, NIL)


def test_who_gets_the_tiles_late_precommits_what_has_a_polka() -> None:
    """Lines 36 to 41: whatever it prevoted itself."""
    scene = Scene(B)
    scene.waits(0, Step.PROPOSE)
    scene.prevoted(0, V, A, C, D)
    assert scene.precommit is None
    assert scene.record.valid is None
    scene.judges(V)
    assert scene.precommit == (0, V)
    assert scene.record.valid == polka(0, V, A, C, D)


def test_what_is_not_fit_gets_a_nil_vote_at_once() -> None:
    scene = Scene(B)
    scene.proposed(0, V)
    scene.judges(V, Verdict.REFUSED)
    assert scene.prevote == (0, NIL)


def test_what_is_not_fit_gets_a_nil_vote_whatever_polka_comes_with_it() -> None:
    refused = Scene(B, THREE)
    refused.hears(Votes(proposal=proposal_of(C, 2, V, polka(0, V, A, C))))
    refused.judges(V, Verdict.REFUSED)
    assert refused.prevote == (2, NIL)


def test_a_lock_holds_against_another_first_proposal() -> None:
    scene = locked_on(V)
    scene.precommitted(1, NIL, A, B)
    scene.proposed(1, W)
    assert scene.prevote == (1, NIL)


def test_a_lock_gives_way_to_a_later_polka() -> None:
    """Lines 28 to 33: two that prevoted W in ballot 1, and a liar."""
    scene = locked_on(V)
    scene.precommitted(2, NIL, A, B)
    scene.judges(W)
    scene.proposed(2, W, polka(1, W, A, B, C))
    assert scene.prevote == (2, W)
    assert (scene.record.locked_value, scene.record.valid_ballot) == (V, 1)
    scene.prevoted(2, W, B, C)
    assert (scene.record.locked_ballot, scene.record.locked_value) == (2, W)


def test_a_lock_holds_against_an_older_polka() -> None:
    scene = locked_on(V, 1)
    scene.precommitted(2, NIL, A, B)
    scene.judges(W)
    scene.proposed(2, W, polka(0, W, A, B, C))
    assert scene.prevote == (2, NIL)


@pytest.mark.parametrize(
    "shown",
    [
        replace(polka(0, W, A, B, C), ballot=1),
        polka(0, W, A, B),
        polka(0, W, A, B, B),
        replace(polka(0, V, A, B, C), value=W),
        polka(0, W, A, B, PeerId("stranger")),
        polka(2, W, A, B, C),
    ],
    ids=["of another ballot", "too few", "one twice", "for another value", "a stranger", "of its own ballot"],
)
def test_a_proposal_with_a_false_polka_is_none(shown: Polka) -> None:
    scene = Scene(D)
    scene.hears(Votes(proposal=proposal_of(C, 2, W, shown)))
    assert not scene.elector.vote.heard.proposals


def test_nil_is_no_value() -> None:
    assert not is_polka(polka(0, NIL, A, B, C), FOUR, FINGERPRINT, PARENT)
    scene = Scene(D)
    scene.waits(0, Step.PROPOSE)
    scene.prevoted(0, NIL, A, B)
    assert scene.precommit == (0, NIL)
    scene.precommitted(0, NIL, A, B)
    assert scene.elector.vote.decided is None
    assert scene.elector.vote.ballot == 1


def test_where_votes_differ_the_next_ballot_begins_after_a_deadline() -> None:
    """Lines 47, 48 and 65 to 67: somebody may still hear of a quorum."""
    scene = locked_on(V)
    scene.precommitted(0, NIL, A)
    assert StartDeadline(0, Step.PRECOMMIT) not in scene.asked
    scene.precommitted(0, V, B)
    assert StartDeadline(0, Step.PRECOMMIT) in scene.asked
    scene.waits(0, Step.PRECOMMIT)
    assert scene.elector.vote.ballot == 1


def test_who_leads_later_proposes_the_valid_value_with_its_polka() -> None:
    scene = locked_on(V)
    scene.precommitted(3, NIL, A, B)
    assert scene.elector.vote.to_tell.proposal == proposal_of(D, 3, V, scene.record.valid)


def test_a_leader_without_the_tiles_of_the_valid_value_proposes_its_own() -> None:
    """Else nobody would ever propose anything, where those who had the tiles are gone."""
    scene = Scene(D)
    scene.hears(Votes(polka=polka(0, V, A, B, C)))
    scene.take(scene.elector.handle(Built(W)))
    scene.precommitted(3, NIL, A, B)
    assert scene.elector.vote.to_tell.proposal == proposal_of(D, 3, W, None)


def test_after_a_restart_the_lock_and_the_votes_hold() -> None:
    scene = locked_on(V)
    scene.restart()
    assert (scene.elector.vote.ballot, scene.elector.vote.step) == (0, Step.PRECOMMIT)
    assert Stage(V) in scene.asked
    scene.proposed(0, W)
    scene.waits(0, Step.PREVOTE)
    assert (scene.prevote, scene.precommit) == ((0, V), (0, V))
    scene.precommitted(1, NIL, A, B)
    scene.proposed(1, W)
    assert scene.prevote == (1, NIL)


def test_a_leader_that_comes_back_tells_its_old_proposal() -> None:
    scene = Scene(A)
    scene.take(scene.elector.handle(Built(V)))
    scene.restart()
    scene.take(scene.elector.handle(Built(W)))
    assert scene.elector.vote.to_tell.proposal == proposal_of(A, 0, V, None)


def test_what_could_not_be_written_was_not_said_and_is_tried_again() -> None:
    scene = Scene(B)
    scene.judges(V)
    before = scene.record
    said = scene.elector.handle(Heard(Votes(proposal=proposal_of(A, 0, V, None))))
    assert isinstance(said[0], Persist)
    assert scene.elector.handle(NotPersisted(before)) == []
    assert scene.elector.vote.to_tell.prevote is None
    again = scene.elector.handle(Judged(V, Verdict.FIT))
    assert isinstance(again[0], Persist)
    assert again[0].record.prevote == prevote_of(B, 0, V)


def test_a_polka_that_our_unwritten_prevote_completed_is_not_told() -> None:
    scene = Scene(B)
    scene.judges(V)
    scene.prevoted(0, V, C, D)
    scene.elector.handle(Heard(Votes(proposal=proposal_of(A, 0, V, None))))
    assert scene.elector.vote.to_tell.polka is not None
    scene.elector.handle(NotPersisted(scene.record))
    assert scene.elector.vote.to_tell.polka is None


def test_own_words_that_the_record_does_not_know_make_it_mute() -> None:
    """The disk was brought back from a copy."""
    scene = Scene(B)
    scene.prevoted(0, W, B)
    assert RecordIsOld() in scene.asked
    scene.proposed(0, V)
    scene.judges(V)
    scene.waits(0, Step.PROPOSE)
    assert scene.record == VoteRecord(PARENT)


def test_who_still_asks_what_became_of_the_run_votes_only_then() -> None:
    scene = Scene(B)
    scene.take(scene.elector.handle(Allowed(False)))
    scene.asked.clear()
    scene.proposed(0, V)
    scene.judges(V)
    scene.waits(0, Step.PROPOSE)
    assert scene.record == VoteRecord(PARENT)
    scene.take(scene.elector.handle(Allowed(True)))
    assert scene.prevote == (0, V)
    assert StartDeadline(0, Step.PROPOSE) in scene.asked


def test_who_is_no_elector_looks_on() -> None:
    scene = Scene(PeerId("stranger"))
    scene.take(scene.elector.handle(Allowed(True)))
    scene.proposed(0, V)
    scene.judges(V)
    scene.waits(0, Step.PROPOSE)
    assert scene.record == VoteRecord(PARENT)
    scene.precommitted(0, V, A, B, C)
    assert scene.elector.vote.decided is not None


def test_who_votes_twice_is_accused_and_counted_once() -> None:
    scene = Scene(B)
    scene.prevoted(0, V, C)
    scene.prevoted(0, W, C)
    assert Accuse(C) in scene.asked
    scene.proposed(0, V)
    scene.proposed(0, W)
    assert Accuse(A) in scene.asked


def test_a_late_elector_goes_where_enough_others_are() -> None:
    """Lines 55 and 56: one liar moves nobody."""
    scene = Scene(D)
    scene.prevoted(5, NIL, A)
    assert scene.elector.vote.ballot == 0
    scene.prevoted(4, NIL, B)
    assert scene.elector.vote.ballot == 4
    crash = Scene(C, THREE)
    crash.prevoted(5, NIL, A)
    assert crash.elector.vote.ballot == 5


def test_a_late_elector_learns_of_a_polka_from_anybody() -> None:
    scene = Scene(D)
    scene.judges(V)
    scene.hears(Votes(prevote=prevote_of(A, 3, NIL), polka=polka(2, V, A, B, C)))
    assert scene.elector.vote.ballot == 2
    assert scene.record.valid_ballot == 2


@pytest.mark.parametrize(("elector_class", "moves"), [(Tendermint, True), (CountsOnlyThisBallot, False)])
def test_who_has_gone_on_counts_in_earlier_steps(elector_class: type[Tendermint], moves: bool) -> None:
    """A helped C to ballot 1 and fell silent; B has precommitted in ballot 0, where D has only prevoted."""
    scene = Scene(D, elector_class=elector_class)
    scene.waits(0, Step.PROPOSE)
    scene.prevoted(0, NIL, B)
    scene.prevoted(1, NIL, C)
    assert (StartDeadline(0, Step.PREVOTE) in scene.asked) is moves


def test_words_of_another_run_parent_or_of_strangers_are_not_taken() -> None:
    scene = Scene(B)
    good = prevote_of(A, 0, V)
    for bad in (
        replace(good, value=replace(good.value, parent=sha256(b"other"))),
        replace(good, value=replace(good.value, fingerprint=sha256(b"other"))),
        replace(good, value=replace(good.value, ballot=-1)),
        replace(good, author=PeerId("stranger")),
    ):
        scene.hears(Votes(prevote=bad))
    scene.hears(Votes(proposal=proposal_of(C, 0, V, None)))
    assert not scene.elector.vote.heard.prevotes
    assert not scene.elector.vote.heard.proposals

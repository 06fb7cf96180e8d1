"""An elector that lies when it leads gets nothing committed that is not fair: it only costs its ballot.

`python -m tests.simulation.sim_liars` prints the same for several seeds, with times.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest

from spes_p2p.consensus.content import Content, Envelope, Equivocation
from spes_p2p.consensus.electorate import NIL
from spes_p2p.consensus.events import MessageReceived
from spes_p2p.consensus.fairness import Fairness
from spes_p2p.consensus.members import Members
from spes_p2p.consensus.membership import Member
from spes_p2p.consensus.messages import Prevote, Signed, Status
from spes_p2p.ids import PeerId
from tests.simulation.attackers.leaders import LEADERS
from tests.simulation.sim_liars import LIAR, CalmWorld, play

SEED, SECONDS = 7, 30.0
"""Of a run in which the liar leads and somebody joins at the right times."""
DEATH_SEED = 11
"""Here somebody dies just before the liar leads."""
CALM_SEED = 23
"""Here no ballot is over before its leader is done."""
UNNOTICED = {"drops-members", "keeps-the-dead"}
"""Mostly these have nothing to do: then the liar's proposal is as good as any."""
SHORT_ROUNDS = "closes-at-once"
"""It ends no round: nobody stops training for it."""
TWO_VOTES = "two-votes"
"""It may harm nothing before it is banned."""
MOST_ROUNDS_WITH_THE_DEAD = 4
LEFT_OUT = {
    "leaves-one-out": {"work", "columns"},
    "counts-itself-alone": {"work", "columns"},
    "closes-at-once": {"work", "columns"},
    "loses-columns": {"columns"},
    "loses-all": {"work", "columns"},
    "drops-elector": {"members"},
    "keeps-the-dead": {"dead"},
}
"""What others would vote for if they did not compare."""


@pytest.mark.parametrize("attack", sorted(set(LEADERS) - UNNOTICED - {SHORT_ROUNDS, TWO_VOTES}))
def test_what_an_unfair_leader_makes_up_or_leaves_out_costs_its_ballot_and_nothing_else(attack: str) -> None:
    world = play(attack, SEED, SECONDS)
    assert not any(one.by_liar and one.unfair for one in world.committed)  # it may bring what others have built
    assert sum(one.ballot > 0 for one in world.committed) > 0
    assert {part for one in world.committed for part in one.unfair} <= {"dead"}  # who has died a moment ago
    assert world.is_one_history()
    assert banned(world) <= set(world.liars)


class NeverDone(Members):
    """Says until a plan is there that its running step takes all day, and then that it is READY."""

    def own_status(self) -> Status:
        said, current = super().own_status(), self._state.round
        if current.plan is not None or said.head != current.tip_hash:
            return said
        work = replace(said.work, ready=False, tokens=16, steps=1, sequences=2, ready_in_seconds=80_000.0)
        return replace(said, work=work)


def test_a_step_that_never_ends_is_waited_for_by_all_leaders_of_a_round_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of them used to begin anew, and gave the lead up before it was done, for minutes and in every round."""
    monkeypatch.setitem(cast("dict[str, type]", LEADERS), "never-done", NeverDone)
    seconds = sorted(one.seconds for one in play("never-done", SEED, 4 * SECONDS).committed)
    assert seconds[-1] < 2 * SECONDS
    assert seconds[len(seconds) // 2] < SECONDS / 2


def banned(world: CalmWorld) -> set[PeerId]:
    """By the newest manifests of those who do not lie."""
    return {peer for honest in world.up() if honest.name not in world.liars for peer in honest.disk.tip.banned}


def test_who_proposes_two_manifests_in_one_ballot_is_banned_by_its_signatures() -> None:
    world = play("two-faces", SEED, 2 * SECONDS)
    assert banned(world) == set(world.liars)


@pytest.mark.parametrize("attack", sorted(UNNOTICED))
def test_members_without_a_vote_are_not_dropped_nor_the_dead_kept_for_long(attack: str) -> None:
    committed = play(attack, SEED, SECONDS).committed
    assert any(one.by_liar for one in committed)
    assert {part for one in committed for part in one.unfair} <= {"dead"}
    assert sum("dead" in one.unfair for one in committed) <= MOST_ROUNDS_WITH_THE_DEAD


def test_nobody_stops_for_a_leader_that_closes_a_round_as_it_begins() -> None:
    """Rounds count nearly as much as where nobody lies, the first one too."""
    world, honest = play(SHORT_ROUNDS, SEED, SECONDS), play(None, SEED, SECONDS)
    assert world.is_one_history()
    assert not any(one.by_liar and one.unfair for one in world.committed)
    assert min(one.tokens for one in world.committed) >= 0.75 * min(one.tokens for one in honest.committed)


def test_in_the_first_round_nobody_stops_before_half_of_the_electors_are_ready() -> None:
    """Nobody has learnt yet how long a round takes."""
    world, kept_on, stopped = CalmWorld(None, SEED), 0, 0
    while world.now < SECONDS and world.step() and not world.committed:
        core = world.peers[PeerId("p1")].core
        if core is None or core.state.round.work.ready:
            continue
        here = core._parts.members.members_here(world.now)
        if 2 * sum(status.work.ready for status in here) < len(here):
            kept_on += not core._parts.fairness.may_stop(world.now)
            stopped += core.state.round.close_asked
    assert kept_on > 0
    assert stopped == 0


def test_votes_of_two_kinds_ban_their_author() -> None:
    world = play(TWO_VOTES, SEED, SECONDS)
    assert banned(world) == set(world.liars)
    assert world.is_one_history()


def test_two_votes_that_nobody_has_heard_both_of_meet_in_the_next_round() -> None:
    """One elector alone has heard another one than all others: it tells one of them, and any proof bans."""
    world, told = CalmWorld(None, SEED), False
    while world.now < SECONDS and world.step() and not banned(world):
        core = world.peers[PeerId("p1")].core
        before = None if core is None else core.state.others.votes_before
        if told or core is None or before is None or core.state.round.has_told_votes or LIAR not in before.prevotes:
            continue
        liar = world.peers[LIAR].core
        assert liar is not None
        said = replace(before.prevotes[LIAR].value, value=NIL)
        before.prevotes[LIAR] = liar.state.identity.sealer.seal(said)
        told = True
    assert told
    assert banned(world) == {LIAR}


def test_proofs_against_who_has_no_vote_are_not_taken() -> None:
    """Anybody has as many keys as it likes: their proofs would fill messages and the list of who is banned."""
    world = play(None, SEED, SECONDS / 3)
    core = world.peers[PeerId("p1")].core
    assert core is not None
    state = core.state
    for author, is_taken in ((PeerId("stranger"), False), (LIAR, True)):
        vote = Prevote(state.rules.fingerprint, state.tip_hash, 0, NIL)
        pair = tuple(Signed(replace(vote, value=value), author, b"", b"") for value in (NIL, state.tip_hash))
        named = [*state.tip.members, *([Member(author, 1, False, 0)] if author != LIAR else [])]
        state.round.tip = replace(state.tip, members=tuple(sorted(named)))
        core.handle(MessageReceived(Envelope(PeerId("p2"), equivocations=(Equivocation(prevotes=pair),))), world.now)
        assert (author in state.others.equivocations) == is_taken


@pytest.mark.parametrize("attack", LEFT_OUT)
def test_others_would_vote_for_all_of_it(attack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def takes_anything(self: Fairness, content: Content, now: float) -> bool:
        return True

    monkeypatch.setattr(Fairness, "is_complete", takes_anything)
    committed = play(attack, DEATH_SEED if attack == "keeps-the-dead" else SEED, SECONDS).committed
    assert {part for one in committed if one.by_liar for part in one.unfair} >= LEFT_OUT[attack]


def test_where_nobody_lies_all_is_there_in_every_round() -> None:
    committed = play(None, CALM_SEED, SECONDS).committed
    assert len(committed) > 10
    assert {part for one in committed for part in one.unfair} <= {"dead"}
    assert not any(one.ballot for one in committed)

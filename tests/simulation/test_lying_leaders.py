"""An elector that lies when it leads leaves out less than a quorum, and cannot make two histories.

`python -m tests.simulation.sim_liars` prints the same for several seeds, with times.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest

from spes_p2p.consensus.electorate import NIL
from spes_p2p.consensus.members import Members
from spes_p2p.consensus.messages import Status
from spes_p2p.consensus.round_plan import RoundPlan
from spes_p2p.ids import PeerId
from tests.simulation.attackers.leaders import LEADERS
from tests.simulation.sim_liars import LIAR, CalmWorld, play

SEED, SECONDS = 7, 30.0
"""Of a run in which the liar leads and somebody joins at the right times."""
CALM_SEED = 23
"""Here no ballot is over before its leader is done."""


@pytest.mark.parametrize("attack", sorted(LEADERS))
def test_whatever_a_leader_leaves_out_a_round_counts_a_quorum_and_names_one(attack: str) -> None:
    """But for who has trained nothing when a leader closes a round as it begins."""
    world = play(attack, SEED, SECONDS)
    assert len(world.committed) > 2
    counting = [one for one in world.committed if one.tokens and attack != "closes-at-once"]
    assert all(one.counted >= one.quorum for one in counting)
    assert all(one.named >= one.quorum for one in world.committed)
    assert world.is_one_history()
    assert noticed(world) <= set(world.liars)


def test_without_that_rule_fewer_would_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("statements", "voting"):
        monkeypatch.setattr(f"spes_p2p.consensus.{module}.missing_quorum", lambda *_: "")
    monkeypatch.setattr(RoundPlan, "has_quorum", lambda *_: True)
    assert any(one.by_liar and one.counted < one.quorum for one in play("counts-itself-alone", SEED, SECONDS).committed)


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
    seconds = sorted(one.seconds for one in play("never-done", 5, 4 * SECONDS).committed)
    assert seconds[-1] < 2 * SECONDS
    assert seconds[len(seconds) // 2] < SECONDS / 2


def noticed(world: CalmWorld) -> set[PeerId]:
    """Of whom somebody who does not lie says that it votes twice."""
    honest = (peer for peer in world.up() if peer.name not in world.liars)
    return {said.peer for peer in honest for said in peer.notices if said.kind == "lies" and said.peer is not None}


def test_who_proposes_two_manifests_in_one_ballot_is_named_to_people() -> None:
    world = play("two-faces", SEED, 2 * SECONDS)
    assert noticed(world) == set(world.liars)


def test_who_votes_in_two_ways_is_named_to_people() -> None:
    world = play("two-votes", SEED, SECONDS)
    assert noticed(world) == set(world.liars)
    assert world.is_one_history()


def test_two_votes_that_nobody_has_heard_both_of_meet_in_the_next_round() -> None:
    """One elector alone has heard another one than all others: it tells one of them."""
    world, told = CalmWorld(None, SEED), False
    while world.now < SECONDS and world.step() and not noticed(world):
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
    assert noticed(world) == {LIAR}


def test_where_nobody_lies_all_is_there_in_every_round() -> None:
    committed = play(None, CALM_SEED, SECONDS).committed
    assert len(committed) > 10
    assert not any(one.ballot for one in committed)

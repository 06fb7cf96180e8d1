"""What an elector that lies when it leads gets committed, and what only costs its ballot.

`python -m spes_p2p.testing.sim_liars` prints the same for several seeds, with times.
"""

from __future__ import annotations

import pytest

from spes_p2p.testing.attackers.leaders import LEADERS
from spes_p2p.testing.sim_liars import play

SEED, SECONDS = 1, 30.0
"""Of a run in which the liar leads, somebody joins and somebody dies at the right times."""
ACCEPTED = {
    "leaves-one-out": {"work", "columns"},
    "counts-itself-alone": {"work", "columns"},
    "loses-columns": {"columns"},
    "loses-all": {"work", "columns"},
    "drops-members": {"members"},
    "keeps-the-dead": {"dead"},
}
"""What others vote for all the same."""
REFUSED = sorted(set(LEADERS) - set(ACCEPTED))


@pytest.mark.parametrize("attack", ACCEPTED)
def test_others_vote_for_what_an_unfair_leader_leaves_out(attack: str) -> None:
    committed = play(attack, SEED, SECONDS).committed
    assert {part for one in committed if one.by_liar for part in one.unfair} == ACCEPTED[attack]


@pytest.mark.parametrize("attack", REFUSED)
def test_what_an_unfair_leader_makes_up_costs_its_ballot_and_nothing_else(attack: str) -> None:
    world = play(attack, SEED, SECONDS)
    assert not any(one.by_liar for one in world.committed)
    assert sum(one.ballot > 0 for one in world.committed) > 0
    assert {part for one in world.committed for part in one.unfair} <= {"dead"}  # who has died a moment ago
    assert world.is_one_history()


def test_where_nobody_lies_all_is_there_in_every_round() -> None:
    committed = play(None, SEED, SECONDS).committed
    assert len(committed) > 10
    assert {part for one in committed for part in one.unfair} <= {"dead"}
    assert not any(one.ballot for one in committed)

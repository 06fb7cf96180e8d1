"""When the leader of a ballot is waited for no longer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spes_p2p.consensus.machine import Consensus
from spes_p2p.consensus.manifest import manifest_hash
from spes_p2p.ids import Hash
from tests.consensus.test_bounds import parts_of, walk_until
from tests.simulation.sim_state import FakeSealer

LOWEST, HIGHEST = Hash(bytes(32)), Hash(b"\xff" * 32)


def follows(core: Consensus) -> bool:
    leader = core.state.others.contacts.get(core.state.electorate.leader(0))
    may_lead = leader is not None and leader.status.intent.can_vote
    return may_lead and core.state.round.vote.ballot == 0 and core.state.round.ready_at is None


@pytest.mark.parametrize(
    ("ahead", "head", "is_higher"),
    [(-1, LOWEST, False), (0, HIGHEST, False), (0, LOWEST, True), (1, HIGHEST, True), (100, HIGHEST, True)],
)
@pytest.mark.parametrize("is_followed", [False, True])
def test_a_leader_on_another_history_is_waited_for_no_longer_than_a_deadline(
    ahead: int, head: Hash, is_higher: bool, is_followed: bool
) -> None:
    """However far it is there; but while we catch up with who is further, it may well be our own history."""
    core = walk_until(follows)
    round, leader = core.state.round, core.state.electorate.leader(0)
    contact, leadership = core.state.others.contacts[leader], parts_of(core).leadership
    assert contact.status.head == manifest_hash(core.tip)
    status = replace(contact.status, round=core.tip.round + ahead, head=head)
    contact.signed = FakeSealer(leader).seal(status)
    round.following = is_followed
    for waited, has_failed in ((0.5, False), (1.5, not is_higher or not is_followed)):
        now = round.started_at + waited * core.state.pace.deadline_seconds(0)
        contact.at = contact.direct_at = now
        assert leadership.has_failed(now) is has_failed

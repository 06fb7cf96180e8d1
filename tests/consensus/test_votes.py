"""The voting record: what an elector has bound itself to, and what it may still do."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from spes_p2p.consensus import votes
from spes_p2p.consensus.messages import Manifest, Proposal, Signed, manifest_hash
from spes_p2p.consensus.votes import VoteRecord
from spes_p2p.errors import LocalProtocolError
from spes_p2p.ids import sha256
from spes_p2p.wire import pack, unpack
from tests.sync.chains import A, MadeRun

PARENT = sha256(b"parent")
CONTENTS: tuple[Manifest, ...] = tuple(commit.manifest for commit in MadeRun().chain(3))


def proposal(ballot: int, content: int = 0) -> Signed[Proposal]:
    return Signed(Proposal(PARENT, ballot, A, CONTENTS[content], ()), A, b"key", b"signature")


def test_a_promise_is_only_for_a_later_ballot() -> None:
    record = votes.promise(VoteRecord(PARENT), 3)
    assert not votes.can_promise(record, 3)
    with pytest.raises(LocalProtocolError, match="ballot 2 is not above the promised 3"):
        votes.promise(record, 2)


def test_below_a_promise_nothing_is_accepted() -> None:
    record = votes.promise(VoteRecord(PARENT), 3)
    assert not votes.can_accept(record, proposal(2).value)
    assert votes.can_accept(record, proposal(3).value)


def test_an_acceptance_is_a_promise_too() -> None:
    record = votes.accept(VoteRecord(PARENT), proposal(4))
    assert (record.promised, record.accepted_ballot) == (4, 4)
    assert record.accepted_hash == manifest_hash(CONTENTS[0])


def test_one_content_a_ballot() -> None:
    record = votes.accept(VoteRecord(PARENT), proposal(1, 0))
    assert votes.can_accept(record, proposal(1, 0).value)
    assert not votes.can_accept(record, proposal(1, 1).value)
    assert votes.can_accept(record, proposal(2, 1).value)


def test_a_proposal_for_another_parent_is_none_of_this_record() -> None:
    assert not votes.can_accept(VoteRecord(sha256(b"another")), proposal(9).value)


def test_own_proposals_are_never_two_at_one_ballot() -> None:
    record = votes.propose(VoteRecord(PARENT), 0, sha256(b"this"))
    assert votes.can_propose(record, 0, sha256(b"this"))
    assert votes.can_propose(record, 1, sha256(b"that"))
    with pytest.raises(LocalProtocolError, match="ballot 0"):
        votes.propose(record, 0, sha256(b"that"))


def test_a_record_survives_the_way_to_disk_and_back() -> None:
    record = votes.propose(votes.accept(votes.promise(VoteRecord(PARENT), 2), proposal(2)), 2, sha256(b"own"))
    assert unpack(VoteRecord, pack(record)) == record


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6), st.integers(0, 2)), max_size=20))
def test_whatever_is_asked_promises_and_acceptances_only_rise(asked: list[tuple[bool, int, int]]) -> None:
    record = VoteRecord(PARENT)
    accepted: dict[int, int] = {}
    for is_promise, ballot, content in asked:
        before = record
        if is_promise and votes.can_promise(record, ballot):
            record = votes.promise(record, ballot)
        elif not is_promise and votes.can_accept(record, proposal(ballot, content).value):
            record = votes.accept(record, proposal(ballot, content))
            assert ballot >= before.promised
            assert accepted.setdefault(ballot, content) == content
        assert record.promised >= before.promised
        assert record.accepted_ballot >= before.accepted_ballot

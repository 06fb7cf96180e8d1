"""The voting record: what an elector has bound itself to, and what it may still say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from spes_p2p.consensus import vote_record
from spes_p2p.consensus.electorate import NIL
from spes_p2p.consensus.messages import Polka, Precommit, Prevote, Proposal
from spes_p2p.consensus.vote_record import VoteRecord, ballot_of
from spes_p2p.errors import LocalProtocolError
from spes_p2p.ids import PeerId, sha256
from spes_p2p.wire import pack, unpack
from tests.consensus.vote_search import FINGERPRINT, PARENT, precommit_of, prevote_of, proposal_of

A = PeerId("a")
VALUES = (sha256(b"v"), sha256(b"w"))


def polka(ballot: int, value: int = 0) -> Polka:
    return Polka(ballot, VALUES[value], (prevote_of(A, ballot, VALUES[value]),))


def test_one_prevote_a_ballot() -> None:
    record = vote_record.prevote(VoteRecord(PARENT), prevote_of(A, 3, VALUES[0]))
    for ballot in (2, 3):
        with pytest.raises(LocalProtocolError, match=f"ballot {ballot} is too late for a prevote"):
            vote_record.prevote(record, prevote_of(A, ballot, VALUES[1]))
    assert vote_record.prevote(record, prevote_of(A, 4, VALUES[1])).ballot == 4


def test_one_precommit_a_ballot_and_of_what_is_locked_there() -> None:
    record = VoteRecord(PARENT)
    with pytest.raises(LocalProtocolError, match="not locked"):
        vote_record.precommit(record, precommit_of(A, 1, VALUES[0]))
    record = vote_record.precommit(vote_record.lock(record, polka(1)), precommit_of(A, 1, VALUES[0]))
    with pytest.raises(LocalProtocolError, match="ballot 1 is too late for a precommit"):
        vote_record.precommit(record, precommit_of(A, 1, NIL))
    with pytest.raises(LocalProtocolError, match="not locked"):
        vote_record.precommit(record, precommit_of(A, 2, VALUES[0]))


def test_one_proposal_a_ballot_and_before_the_vote() -> None:
    record = vote_record.propose(VoteRecord(PARENT), proposal_of(A, 2, VALUES[0], None))
    with pytest.raises(LocalProtocolError, match="ballot 2 is too late for a proposal"):
        vote_record.propose(record, proposal_of(A, 2, VALUES[1], None))
    record = vote_record.prevote(record, prevote_of(A, 3, NIL))
    with pytest.raises(LocalProtocolError, match="ballot 3 is too late for a proposal"):
        vote_record.propose(record, proposal_of(A, 3, VALUES[1], None))


def test_a_lock_goes_forward_only_and_is_a_valid_value() -> None:
    record = vote_record.lock(VoteRecord(PARENT), polka(1))
    assert (record.locked_ballot, record.locked_value, record.valid) == (1, VALUES[0], polka(1))
    with pytest.raises(LocalProtocolError, match="cannot go back to ballot 0"):
        vote_record.lock(record, polka(0, 1))
    with pytest.raises(LocalProtocolError, match="is newer than 1"):
        vote_record.take_valid(record, polka(1, 1))
    assert vote_record.take_valid(record, polka(2, 1)).locked_value == VALUES[0]


@pytest.mark.parametrize(
    ("value", "polka_ballot", "allowed"),
    [(0, None, True), (1, None, False), (1, 0, False), (1, 1, True), (1, 2, True), (0, 0, True)],
)
def test_a_lock_gives_way_to_its_own_value_and_to_a_polka_that_is_not_older(
    value: int, polka_ballot: int | None, allowed: bool
) -> None:
    record = vote_record.lock(VoteRecord(PARENT), polka(1))
    shown = None if polka_ballot is None else polka(polka_ballot, value)
    assert record.allows(proposal_of(A, 3, VALUES[value], shown).value) is allowed
    assert VoteRecord(PARENT).allows(proposal_of(A, 3, VALUES[value], shown).value)


def test_a_vote_for_the_child_of_another_parent_is_none_of_this_record() -> None:
    vote = prevote_of(A, 0, VALUES[0])
    other = replace(vote, value=replace(vote.value, parent=sha256(b"another")))
    with pytest.raises(LocalProtocolError, match="another parent"):
        vote_record.prevote(VoteRecord(PARENT), other)


def test_what_was_voted_for_stays_on_disk() -> None:
    record = vote_record.prevote(VoteRecord(PARENT), prevote_of(A, 0, VALUES[0]))
    record = vote_record.prevote(record, prevote_of(A, 1, NIL))
    assert record.pinned == {VALUES[0]}
    assert vote_record.take_valid(record, polka(1, 1)).pinned == set(VALUES)


Move = tuple[str, int, int]
_TRANSITIONS: dict[str, Callable[[VoteRecord, int, int], VoteRecord]] = {
    "propose": lambda record, k, v: vote_record.propose(record, proposal_of(A, k, (*VALUES, NIL)[v], None)),
    "prevote": lambda record, k, v: vote_record.prevote(record, prevote_of(A, k, (*VALUES, NIL)[v])),
    "precommit": lambda record, k, v: vote_record.precommit(record, precommit_of(A, k, (*VALUES, NIL)[v])),
    "lock": lambda record, k, v: vote_record.lock(record, polka(k, v % 2)),
    "take_valid": lambda record, k, v: vote_record.take_valid(record, polka(k, v % 2)),
}
moves = st.lists(st.tuples(st.sampled_from(sorted(_TRANSITIONS)), st.integers(0, 4), st.integers(0, 2)), max_size=40)


@given(moves)
def test_whatever_is_tried_nothing_is_said_twice_and_nothing_goes_back(tried: list[Move]) -> None:
    record, kept = VoteRecord(PARENT), dict[tuple[type, int], object]()
    for name, ballot, value in tried:
        before = record
        try:
            record = _TRANSITIONS[name](record, ballot, value)
        except LocalProtocolError:
            continue
        for signed in (record.prevote, record.precommit, record.proposal):
            if signed is not None:
                name_of = type(signed.value), signed.value.ballot
                assert kept.setdefault(name_of, signed.value) == signed.value
        assert record.ballot >= before.ballot
        assert record.locked_ballot >= before.locked_ballot
        assert record.valid_ballot >= max(before.valid_ballot, record.locked_ballot)
        assert ballot_of(record.prevote) >= ballot_of(before.prevote)
        assert ballot_of(record.precommit) >= ballot_of(before.precommit)
        if record.precommit is not None and record.precommit.value.value != NIL:
            assert record.locked_ballot >= record.precommit.value.ballot
    assert unpack(VoteRecord, pack(record)) == record


def test_messages_are_read_as_what_they_are() -> None:
    messages = Prevote(FINGERPRINT, PARENT, 1, NIL), Precommit(FINGERPRINT, PARENT, 1, NIL)
    assert [unpack(type(message), pack(message)) for message in messages] == list(messages)
    proposal = Proposal(FINGERPRINT, PARENT, 2, VALUES[0], polka(1))
    assert unpack(Proposal, pack(proposal)) == proposal

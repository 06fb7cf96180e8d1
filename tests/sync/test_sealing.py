"""Signatures at the border between bytes and the state machine."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from spes_p2p.consensus.content import Envelope
from spes_p2p.consensus.messages import (
    Ballots,
    Intent,
    Polka,
    Prevote,
    Proposal,
    Signed,
    Status,
    Votes,
    Work,
    signing_bytes,
)
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import NO_HASH, PeerId
from spes_p2p.swarm.memory_backend import FakeKeys
from spes_p2p.sync.sealing import EnvelopeChecker, KeySealer
from spes_p2p.wire import pack

KEYS = FakeKeys()
A, B = PeerId("a"), PeerId("b")
SEALER = KeySealer(KEYS.signer(A))
VOTE = SEALER.seal(Prevote(NO_HASH, NO_HASH, 0, NO_HASH))


class CountingKeys:
    """A verifier that counts what it really verifies."""

    def __init__(self) -> None:
        self.verified = 0

    def verify(self, peer: PeerId, public_key: bytes, data: bytes, signature: bytes) -> bool:
        self.verified += 1
        return KEYS.verify(peer, public_key, data, signature)


def status(sequence: int) -> Signed[Status]:
    return SEALER.seal(Status(NO_HASH, A, 1, sequence, 0, NO_HASH, Work(), Intent(), Ballots()))


def test_an_envelope_with_good_signatures_comes_out_as_it_was() -> None:
    envelope = Envelope(A, (status(1), status(2)), votes=(Votes(VOTE),))
    assert EnvelopeChecker(KEYS).open(A, pack(envelope)) == envelope


def test_what_came_before_to_the_byte_is_not_read_again_and_only_from_the_same_peer() -> None:
    keys, small, large = CountingKeys(), Envelope(A, (status(1),)), Envelope(A, tuple(map(status, range(99))))
    checker = EnvelopeChecker(keys)
    assert checker.open(A, pack(small)) is checker.open(A, pack(small))
    with pytest.raises(RemoteProtocolError, match="sent an envelope of"):
        checker.open(B, pack(small))
    assert checker.open(A, pack(large)) is not checker.open(A, pack(large))
    first = checker.open(A, pack(small))
    for sequence in range(2, 400):
        checker.open(A, pack(Envelope(A, (status(sequence),))))
    again = checker.open(A, pack(small))
    assert again == first
    assert again is not first
    assert keys.verified == 400


@pytest.mark.parametrize(
    "wrong",
    [
        replace(VOTE, signature=b""),
        replace(VOTE, author=B),
        replace(VOTE, public_key=KEYS.signer(B).public_key),
        replace(VOTE, value=replace(VOTE.value, ballot=1)),
    ],
)
def test_one_bad_signature_refuses_the_whole_envelope(wrong: Signed[Prevote]) -> None:
    shown = SEALER.seal(Proposal(NO_HASH, NO_HASH, 1, NO_HASH, Polka(0, NO_HASH, (VOTE, wrong))))
    for votes in (Votes(prevote=wrong), Votes(polka=Polka(0, NO_HASH, (VOTE, wrong))), Votes(proposal=shown)):
        with pytest.raises(RemoteProtocolError, match="a Prevote without a valid signature"):
            EnvelopeChecker(KEYS).open(A, pack(Envelope(A, (status(1),), votes=(votes,))))


def test_an_envelope_of_another_sender_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="an envelope of a"):
        EnvelopeChecker(KEYS).open(B, pack(Envelope(A)))


def test_a_signature_for_one_kind_of_message_is_none_for_another() -> None:
    """The fields alone may look alike; the name of the type is signed with them."""
    assert not KEYS.verify(A, VOTE.public_key, pack(VOTE.value), VOTE.signature)
    assert KEYS.verify(A, VOTE.public_key, pack(("Prevote", VOTE.value)), VOTE.signature)


def test_a_good_signature_is_verified_once_a_bad_one_each_time() -> None:
    keys = CountingKeys()
    checker = EnvelopeChecker(keys)
    data = pack(Envelope(A, (status(1),)))
    checker.open(A, data)
    checker.open(A, data)
    assert keys.verified == 1
    for _ in range(2):
        assert not checker.check(A, VOTE.public_key, b"something", VOTE.signature)
    assert keys.verified == 3


def test_what_is_remembered_is_exactly_what_was_verified() -> None:
    """The same bytes split elsewhere are another claim."""
    checker = EnvelopeChecker(KEYS)
    key, data, signature = VOTE.public_key, signing_bytes(VOTE.value), VOTE.signature
    assert checker.check(A, key, data, signature)
    assert not checker.check(A, key, data[3:], signature + data[:3])
    assert not checker.check(A, key + signature[:1], data, signature[1:])
    assert checker.check(A, key, data, signature)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spes_p2p.sync.sealing._REMEMBERED", 10)
    monkeypatch.setattr("spes_p2p.sync.sealing._REMEMBERED_ENVELOPES", 5)
    keys = CountingKeys()
    checker = EnvelopeChecker(keys)
    for sequence in range(25):
        checker.open(A, pack(Envelope(A, (status(sequence),))))
    assert (len(checker._good), len(checker._opened)) == (10, 5)
    checker.open(A, pack(Envelope(A, (status(0),))))
    assert keys.verified == 26


def test_checks_from_several_threads_do_not_disturb_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spes_p2p.sync.sealing._REMEMBERED", 3)
    checker = EnvelopeChecker(KEYS)
    votes = [SEALER.seal(Prevote(NO_HASH, NO_HASH, ballot, NO_HASH)) for ballot in range(8)]

    def check(at: int) -> bool:
        vote = votes[at % 8]
        return checker.check(A, vote.public_key, signing_bytes(vote.value), vote.signature)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(check, range(2000)))

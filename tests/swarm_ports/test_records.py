"""Records of the directory: round trips, bounds, grouping, and bytes from anybody."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_p2p import wire
from spes_p2p.errors import LocalProtocolError, RemoteProtocolError
from spes_p2p.ids import Hash, PeerId, sha256
from spes_p2p.swarm import envelope, records
from spes_p2p.swarm.memory_backend import FakeKeys
from spes_p2p.swarm.records import HeadRecord, PeerRecord, RunRecord
from spes_p2p.swarm.vitals import MAX_ROUND, PeerWarning, Vitals

ANNA, BEN = PeerId("anna"), PeerId("ben")
KEY = records.peers_key("tiny")
RUN = RunRecord("tiny", sha256(b"config"), ANNA, 1, 3, b"head", ("/ip4/10.0.0.1/tcp/4000/p2p/anna",))
PEER = PeerRecord("tiny", ANNA, RUN.addresses, "0.1", 3, 300, 10**6, 1234.5, (0, 3, 4), "peer", False, 1_700_000_000)
VITALS = Vitals("training", "cpu", 2.5, 3, 1.7e9, (1.0, 0.5, 2.0, 0.25, 0.125), 2.6, 10, 20, 2, 2.4)
HEAD = HeadRecord(3, sha256(b"manifest"), b"certificate", b"manifest")


@pytest.mark.parametrize("record", [RUN, PEER, HEAD])
def test_records_survive_the_wire(record: Any) -> None:
    assert records.parse(type(record), ANNA, wire.pack(record)) == record


@pytest.mark.parametrize(
    ("record", "change"),
    [
        (RUN, {"run_id": "../etc"}),
        (RUN, {"fingerprint": Hash(b"short")}),
        (RUN, {"round": -1}),
        (RUN, {"round": 2**63 - 1}),
        (RUN, {"addresses": ("/ip4/1.2.3.4",) * 17}),
        (RUN, {"addresses": ("/ip4/1.2.3.4\x1b[2J",)}),
        (PEER, {"tokens": 2**62}),
        (PEER, {"tokens_per_second": -1.0}),
        (PEER, {"owned": (3, 3)}),
        (PEER, {"owned": (-1, 3)}),
        (PEER, {"role": "king"}),
        (VITALS, {"phase": "\x1b[2J"}),
        (VITALS, {"device": "x" * 65}),
        (VITALS, {"loss": -1.0}),
        (VITALS, {"held_out_loss": 1e300}),
        (VITALS, {"phase_seconds": (1.0,) * 6}),
        (VITALS, {"phase_seconds": (1.0, 1.0, 1e30, 1.0, 1.0)}),
        (VITALS, {"bytes_sent": 2**62}),
        (HEAD, {"manifest": b"x" * (records.MAX_MANIFEST_BYTES + 1)}),
        (HEAD, {"manifest_hash": Hash(b"")}),
    ],
)
def test_nonsense_is_refused_when_made_and_when_read(record: Any, change: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        dataclasses.replace(record, **change)
    forged = object.__new__(type(record))
    for field in dataclasses.fields(record):
        object.__setattr__(forged, field.name, change.get(field.name, getattr(record, field.name)))
    with pytest.raises(RemoteProtocolError):
        wire.unpack(type(record), wire.pack(forged))


def test_a_peer_describes_only_itself() -> None:
    with pytest.raises(RemoteProtocolError, match="ben published a record in the name of anna"):
        records.parse(PeerRecord, BEN, wire.pack(PEER))


KINDS: list[Any] = [RunRecord, PeerRecord, HeadRecord]


@given(data=st.binary(max_size=300), index=st.integers(0, 2))
def test_any_bytes_parse_or_are_refused(data: bytes, index: int) -> None:
    _parses_or_refuses(index, data)


@given(place=st.integers(0, 400), new=st.binary(min_size=1, max_size=9), index=st.integers(0, 2))
def test_damaged_records_parse_or_are_refused(place: int, new: bytes, index: int) -> None:
    data = wire.pack((RUN, PEER, HEAD)[index])
    place %= len(data)
    _parses_or_refuses(index, data[:place] + new + data[place + len(new) :])


def _parses_or_refuses(index: int, data: bytes) -> None:
    try:
        records.parse(KINDS[index], ANNA, data)
    except RemoteProtocolError:
        return


@given(data=st.binary(max_size=400))
def test_any_bytes_are_no_envelope(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        envelope.open_envelope(FakeKeys(), data, KEY, ANNA, now=0.0)


@given(place=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_one_flipped_bit_spoils_an_envelope(place: int, bit: int) -> None:
    data = bytearray(envelope.seal(FakeKeys().signer(ANNA), KEY, b"value", 100.0))
    data[place % len(data)] ^= 1 << bit
    with pytest.raises(RemoteProtocolError):
        envelope.open_envelope(FakeKeys(), bytes(data), KEY, ANNA, now=0.0)


@pytest.mark.parametrize(
    ("key", "most"),
    [
        (records.RUNS_KEY, 6 * 2**10),
        (records.peers_key("tiny"), 20 * 2**10),
        (records.heads_key("tiny"), 481 * 2**10),
        (records.words_key("tiny"), 20 * 2**10),
        ("spes-p2p/tiny/songs", -1),
        ("spes-p2p/tiny", -1),
        ("spes-p2p/no id!/peers", -1),
        ("spes-p2p/tiny/peers/more", -1),
        ("anything", -1),
    ],
)
def test_only_our_own_keys_hold_anything_and_each_so_much(key: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = FakeKeys()
    sealed = {}
    with monkeypatch.context() as patch:
        patch.setattr(envelope, "_unfit", lambda key, value: "")  # as strangers do
        for size in (most, most + 1):
            if size >= 0:
                sealed[size] = envelope.seal(keys.signer(ANNA), key, bytes(size), 100.0)
    for size, data in sealed.items():
        if size <= most:
            assert envelope.open_envelope(keys, data, key, ANNA, now=0.0).value == bytes(size)
            assert envelope.seal(keys.signer(ANNA), key, bytes(size), 100.0) == data
        else:
            with pytest.raises(RemoteProtocolError):
                envelope.open_envelope(keys, data, None, ANNA, now=0.0)
            with pytest.raises(LocalProtocolError):
                envelope.seal(keys.signer(ANNA), key, bytes(size), 100.0)


def test_what_peers_write_fits_under_its_key() -> None:
    addresses = ("/" + "x" * (records.MAX_ADDRESS_CHARACTERS - 1),) * records.MAX_ADDRESSES
    run = dataclasses.replace(RUN, run_id="r" * 64, organiser=PeerId("o" * 128), head=bytes(32), addresses=addresses)
    head = HeadRecord(
        MAX_ROUND, sha256(b""), bytes(records.MAX_CERTIFICATE_BYTES), bytes(records.MAX_MANIFEST_BYTES), 2**40
    )
    for key, record in ((records.RUNS_KEY, run), (records.heads_key("tiny"), head)):
        envelope.seal(FakeKeys().signer(ANNA), key, wire.pack(record), 100.0)
    for columns in (512, 1024, records.MAX_COLUMNS):
        loads = ((100 * columns,) * columns,) * 3
        words = tuple(PeerWarning(1.7e9, "warning", "\u00fc" * 160) for _ in range(3))
        vitals = dataclasses.replace(
            VITALS, device="x" * 64, load_percent=loads[0], highest_load_percent=loads[1],
            lowest_load_percent=loads[2], warnings=words,
        )  # fmt: skip
        peer = dataclasses.replace(PEER, addresses=addresses, owned=tuple(range(columns)), vitals=vitals)
        fitting = records.fitting(peer)
        envelope.seal(FakeKeys().signer(ANNA), KEY, wire.pack(fitting), 100.0)
        assert (fitting == peer) == (columns <= 512)


def test_runs_are_grouped_by_id_and_fingerprint() -> None:
    other = dataclasses.replace(RUN, fingerprint=sha256(b"other"), round=9)
    later = dataclasses.replace(RUN, round=5, addresses=("/ip4/10.0.0.2/tcp/1",))
    groups = records.group_runs({ANNA: RUN, BEN: later, PeerId("carl"): other})
    assert [(group.round, sorted(group.records)) for group in groups] == [(5, [ANNA, BEN]), (9, ["carl"])]
    assert list(groups[0].addresses()) == [BEN, ANNA]
    assert groups[0].organisers == (ANNA,)


def test_heads_come_newest_first_with_all_their_publishers() -> None:
    bare = dataclasses.replace(HEAD, manifest=b"")
    old = dataclasses.replace(HEAD, round=2)
    heads = records.newest_heads({ANNA: bare, BEN: HEAD, PeerId("carl"): old})
    assert heads == [(HEAD, (ANNA, BEN)), (old, (PeerId("carl"),))]


def test_malformed_records_are_left_out_not_fatal() -> None:
    assert records.parse_all(RunRecord, {ANNA: wire.pack(RUN), BEN: b"junk"}) == {ANNA: RUN}

"""The signed envelope of one record in the DHT: bound to its key, its publisher and its end, bounded in size and time.

Pure: what a node stores and what a reader believes is decided here, with a Signer and a Verifier passed in. Leaves out
where envelopes are kept.
"""

from __future__ import annotations

from dataclasses import dataclass

from spes_p2p import wire
from spes_p2p.errors import LocalProtocolError, RemoteProtocolError
from spes_p2p.ids import PeerId
from spes_p2p.swarm.ports import Signer, Verifier
from spes_p2p.swarm.records import MAX_VALUE_BYTES, bounds_of

MAX_TTL_SECONDS = 3600.0
"""Longest life of a record; its publisher republishes it. With a later end, not even its publisher could replace it."""
CLOCK_SLACK_SECONDS = 10.0
"""Two clocks in one DHT are at most 3 s apart; more than this beyond the longest life is nonsense."""
MAX_ENVELOPE_BYTES = MAX_VALUE_BYTES + 4096
_STEP_SECONDS = 0.001
_PURPOSE = "spes-p2p record 1"


@dataclass(frozen=True)
class Statement:
    """What the publisher signs: a value that `peer` published under `key`, until `expiration` (wall clock seconds).

    `purpose` keeps the signature from being taken for one of something else.
    """

    purpose: str
    key: str
    peer: str
    expiration: float
    value: bytes


@dataclass(frozen=True)
class Envelope:
    statement: Statement
    public_key: bytes
    signature: bytes


def seal(signer: Signer, key: str, value: bytes, expiration: float) -> bytes:
    """The envelope of `value` under `key`. Raises LocalProtocolError for what readers would drop (`bounds_of`)."""
    if unfit := _unfit(key, value):
        raise LocalProtocolError(unfit)
    statement = Statement(_PURPOSE, key, signer.peer_id, expiration, value)
    return wire.pack(Envelope(statement, signer.public_key, signer.sign(wire.pack(statement))))


def open_envelope(verifier: Verifier, data: bytes, key: str | None, peer: PeerId, now: float) -> Statement:
    """The record in `data`, found under (`key`, `peer`); None: under a key that is not known.

    Raises RemoteProtocolError where it is malformed, too large, expired, valid for too long, made for another key or
    peer, or not signed by `peer`.
    """
    envelope = wire.unpack(Envelope, data, max_bytes=MAX_ENVELOPE_BYTES)
    statement = envelope.statement
    if statement.purpose != _PURPOSE:
        raise RemoteProtocolError("this is not a record of the directory")
    if unfit := _unfit(statement.key, statement.value):
        raise RemoteProtocolError(unfit)
    if not now < statement.expiration <= _latest_end(now):
        raise RemoteProtocolError(f"a record expires in {statement.expiration - now:.0f} s, which is out of bounds")
    if statement.peer != peer or key not in (None, statement.key):
        raise RemoteProtocolError(f"a record of {statement.peer!r} for {statement.key!r} was found in another's place")
    if not verifier.verify(peer, envelope.public_key, wire.pack(statement), envelope.signature):
        raise RemoteProtocolError(f"a record names {statement.peer!r}, which did not sign it")
    return statement


def _unfit(key: str, value: bytes) -> str:
    """Why no node keeps `value` under `key`; "" where they do."""
    bounds = bounds_of(key)
    if bounds is None:
        return f"a record is for key {key[:80]!r}, under which nothing is stored"
    if len(value) > bounds.record_bytes:
        return f"a record under {key!r} has {len(value)} bytes, but at most {bounds.record_bytes} are allowed"
    return ""


def key_of(data: bytes) -> str:
    """The key that an envelope is for; unchecked. Raises RemoteProtocolError."""
    return wire.unpack(Envelope, data, max_bytes=MAX_ENVELOPE_BYTES).statement.key


class Expirations:
    """Expiry times of one publisher's records, by key. Of two records the one that expires later wins, so each new
    one must expire a bit later than the one before it.

    Ends that no node would accept are forgotten: they were made by a clock that was ahead and has been set back, and
    any successor would be refused, too, until that time had come.
    """

    def __init__(self) -> None:
        self._ends: dict[str, float] = {}

    def next(self, key: str, ttl_seconds: float, now: float) -> float:
        """The end of a new record for `ttl_seconds`."""
        end = max(now + ttl_seconds, self._ends.get(key, 0.0) + _STEP_SECONDS)
        self._ends[key] = end = end if end <= _latest_end(now) else now + ttl_seconds
        return end

    def found(self, key: str, end: float, now: float) -> None:
        """There is a record of an earlier life of this publisher."""
        if end <= _latest_end(now):
            self._ends[key] = max(self._ends.get(key, 0.0), end)


def _latest_end(now: float) -> float:
    """Of a record that a node believes."""
    return now + MAX_TTL_SECONDS + CLOCK_SLACK_SECONDS


def check_ttl(ttl_seconds: float) -> None:
    """Raises LocalProtocolError for a life that readers would not accept."""
    if not 0 < ttl_seconds <= MAX_TTL_SECONDS:
        raise LocalProtocolError(
            f"a record cannot live for {ttl_seconds:g} s: more than 0 and at most {MAX_TTL_SECONDS:g} s are allowed"
        )

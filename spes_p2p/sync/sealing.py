"""Signing what we say and checking what others say, at the border between bytes and the round's state machine."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, TypeVar

from spes_p2p.consensus.content import Envelope
from spes_p2p.consensus.messages import Signed, signing_bytes
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import Hash, PeerId, sha256, short
from spes_p2p.swarm.calls import MAX_CALL_BYTES
from spes_p2p.swarm.door import Door, DoorLimits, Rate
from spes_p2p.swarm.keys import MAX_KEY_BYTES, MAX_SIGNATURE_BYTES
from spes_p2p.swarm.ports import Signer, Verifier
from spes_p2p.wire import unpack

T = TypeVar("T")
MAX_PARTS = {
    "statuses": 2048,
    "ready": 2048,
    "reports": 2**16,
    "votes": 1024,
    "contents": 16,
}
"""What one envelope may hold of each kind: many times what an honest peer says at once."""
_REMEMBERED = 8192
_REMEMBERED_ENVELOPES = 128
_SMALL_BYTES = 4096
"""A heartbeat has some hundreds."""
SIGNATURES = DoorLimits(Rate(1000.0, 16_384.0), Rate(50.0, 4096.0), Rate(200.0, 8192.0))
"""New signatures: a burst has room for any call. Each takes 26 us, the largest call 0.1 s. They are
checked on the event loop, since other threads check no faster: OpenSSL's binding keeps Python's lock meanwhile.
"""


class KeySealer:
    """Signs messages with this peer's libp2p key."""

    def __init__(self, signer: Signer) -> None:
        self._signer = signer

    def seal(self, value: T) -> Signed[T]:
        signature = self._signer.sign(signing_bytes(value))
        return Signed(value, self._signer.peer_id, self._signer.public_key, signature)


class EnvelopeChecker:
    """Opens envelopes of others: strictly typed, every signature good.

    Good signatures are remembered, since the same signed message comes again with each heartbeat, and so are the newest
    small envelopes: half of all that come are to the byte what came before. `check` may be called from any thread.
    """

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier
        self._good: OrderedDict[Hash, None] = OrderedDict()
        self._lock = threading.Lock()
        self._opened: OrderedDict[tuple[PeerId, bytes], Envelope] = OrderedDict()

    def open(self, sender: PeerId, data: bytes, door: Door | None = None) -> Envelope:
        """Raises RemoteProtocolError for anything but a well-formed envelope of `sender` with good signatures.

        `door`: refuses senders with too many signatures that are new.
        """
        if (known := self._opened.get((sender, data))) is not None:
            self._opened.move_to_end((sender, data))
            return known
        envelope = self._checked(sender, data, door)
        if len(data) <= _SMALL_BYTES:
            self._opened[sender, data] = envelope
            if len(self._opened) > _REMEMBERED_ENVELOPES:
                self._opened.popitem(last=False)
        return envelope

    def _checked(self, sender: PeerId, data: bytes, door: Door | None) -> Envelope:
        envelope = unpack(Envelope, data, max_bytes=MAX_CALL_BYTES)
        if envelope.sender != sender:
            raise RemoteProtocolError(f"{short(sender)} sent an envelope of {short(envelope.sender)}")
        for name, limit in MAX_PARTS.items():
            if len(getattr(envelope, name)) > limit:
                raise RemoteProtocolError(f"{short(sender)} sent {len(getattr(envelope, name))} {name} at once")
        parts = [(signed, signing_bytes(signed.value)) for signed in _signed_parts(envelope)]
        if door is not None:
            new = sum(not self._is_known(_name(s.author, s.public_key, data, s.signature)) for s, data in parts)
            if not door.admits(sender, new):
                raise RemoteProtocolError(f"{short(sender)} sent too many signatures in too short a time")
        for signed, said in parts:
            if not self.check(signed.author, signed.public_key, said, signed.signature):
                kind = type(signed.value).__name__
                raise RemoteProtocolError(f"{short(sender)} sent a {kind} without a valid signature of its author")
        return envelope

    def _is_known(self, name: Hash) -> bool:
        with self._lock:
            return name in self._good

    def check(self, peer: PeerId, public_key: bytes, data: bytes, signature: bytes) -> bool:
        """Whether `signature` over `data` was made with `public_key`, and that key is the peer's."""
        if len(public_key) > MAX_KEY_BYTES or len(signature) > MAX_SIGNATURE_BYTES:
            return False
        name = _name(peer, public_key, data, signature)
        with self._lock:
            if name in self._good:
                self._good.move_to_end(name)
                return True
        if not self._verifier.verify(peer, public_key, data, signature):
            return False
        with self._lock:
            self._good[name] = None
            if len(self._good) > _REMEMBERED:
                self._good.popitem(last=False)
        return True


def _name(peer: PeerId, public_key: bytes, data: bytes, signature: bytes) -> Hash:
    lengths = f"{len(public_key)} {len(signature)} {peer}\0"  # or another split of the same bytes would pass
    return sha256(lengths.encode(), public_key, signature, data)


def _signed_parts(envelope: Envelope) -> Iterator[Signed[Any]]:
    yield from envelope.statuses
    if envelope.plan is not None:
        yield envelope.plan
    yield from envelope.ready
    yield from envelope.reports
    for content in envelope.contents:
        yield from content.statements.declarations
        yield from content.statements.ready
        yield from content.statements.reports
        if content.statements.decay is not None:
            yield content.statements.decay
        if content.statements.roll is not None:
            yield content.statements.roll
    for votes in envelope.votes:
        yield from (signed for signed in (votes.prevote, votes.precommit, votes.proposal) if signed is not None)
        earlier = votes.proposal.value.polka if votes.proposal is not None else None
        for polka in (votes.polka, earlier):
            yield from polka.prevotes if polka is not None else ()

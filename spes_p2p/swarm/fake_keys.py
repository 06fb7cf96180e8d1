"""Signatures for swarms inside one process: as strict as real ones against forgery, a thousand times cheaper.

Leaves out any security against code in the same process, which can look up every key.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field

from spes_p2p.ids import PeerId, sha256


@dataclass(frozen=True)
class FakeSigner:
    """Signs for one peer with a key that others cannot compute without the secret."""

    peer_id: PeerId
    _key: bytes = field(repr=False)

    @property
    def public_key(self) -> bytes:
        return sha256(b"public", self._key)

    def sign(self, data: bytes) -> bytes:
        return hmac.digest(self._key, data, hashlib.sha256)


class FakeKeys:
    """All keys of one swarm: gives each peer its signer, and is the Verifier of everybody."""

    def __init__(self, secret: bytes = b"one swarm") -> None:
        self._secret = secret

    def signer(self, peer: PeerId) -> FakeSigner:
        return FakeSigner(peer, sha256(self._secret, peer.encode()))

    def verify(self, peer: PeerId, public_key: bytes, data: bytes, signature: bytes) -> bool:
        signer = self.signer(peer)
        return public_key == signer.public_key and hmac.compare_digest(signer.sign(data), signature)

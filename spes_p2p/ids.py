"""Names of things: peer ids and hashes. No behaviour beyond printing them short."""

from __future__ import annotations

import hashlib
from typing import NewType

PeerId = NewType("PeerId", str)
"""A libp2p peer id in base58, as everybody writes it (tests use short names)."""

MAX_PEER_ID = 128
"""Characters; libp2p's of RSA keys have 46."""

Hash = NewType("Hash", bytes)
"""A SHA-256 digest, or the BLAKE3 digest of a tile (`state/hashes.py`); 32 bytes."""

NO_HASH = Hash(b"\0" * 32)


def sha256(*parts: bytes | memoryview) -> Hash:
    """SHA-256 over the concatenation of `parts`."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return Hash(digest.digest())


def short(identifier: str | bytes) -> str:
    """An id shortened for messages: the last 6 characters of a peer id (where ids differ), 10 hex digits of bytes."""
    return identifier.hex()[:10] if isinstance(identifier, bytes) else identifier[-6:]

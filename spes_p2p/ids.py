"""Names of things: peer ids, hashes and runs. No behaviour beyond printing them short."""

from __future__ import annotations

import hashlib
from typing import NewType

PeerId = NewType("PeerId", str)
"""A libp2p peer id in base58, as everybody writes it (tests use short names)."""

NOBODY = PeerId("")

MAX_PEER_ID = 128
"""Characters; libp2p's of RSA keys have 46."""

Hash = NewType("Hash", bytes)
"""A SHA-256 digest, or the BLAKE3 digest of a tile (`state/hashes.py`); HASH_BYTES long."""

HASH_BYTES = 32
NO_HASH = Hash(bytes(HASH_BYTES))

RUN_ID = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
"""What the name of a run looks like."""


def sha256(*parts: bytes | memoryview) -> Hash:
    """SHA-256 over the concatenation of `parts`."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return Hash(digest.digest())


def short(identifier: str | bytes) -> str:
    """An id shortened for messages: the last 6 characters of a peer id (where ids differ), 10 hex digits of bytes."""
    return identifier.hex()[:10] if isinstance(identifier, bytes) else identifier[-6:]

"""Peer ids and signatures: libp2p's RSA keys, without libp2p.

A peer id is the multihash of the public key, so a signature proves who signed without any list of keys. Leaves out
private keys, and loads nothing large.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import base58
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import Prehashed

from spes_p2p.ids import PeerId

PADDING = padding.PSS(mgf=padding.MGF1(hashes.SHA256()), salt_length=padding.PSS.DIGEST_LENGTH)
_SHA256_MULTIHASH = b"\x12\x20"
_RSA_FIELD = b"\x08\x00\x12"
"""How libp2p's protobuf record of an RSA key begins: its type, and that bytes follow, with their number as a varint."""
RSA_BITS = 2048
"""Of every peer's key, as nodes make them: larger ones cost all others, in what travels beside a manifest."""
MAX_KEY_BYTES, MAX_SIGNATURE_BYTES = 299, RSA_BITS // 8
_RSA_EXPONENT = 65537


def packed_key(der: bytes) -> bytes:
    """The public key (SubjectPublicKeyInfo, 128 to 16,383 bytes) as libp2p writes it."""
    return _RSA_FIELD + bytes([len(der) & 0x7F | 0x80, len(der) >> 7]) + der


def peer_id_of(public_key: bytes) -> PeerId:
    """The libp2p id of a public key as `packed_key` gives it (longer than 42 bytes, as RSA keys are)."""
    return PeerId(base58.b58encode(_SHA256_MULTIHASH + hashlib.sha256(public_key).digest()).decode())


class RsaVerifier:
    """Checks RSA-PSS signatures over SHA-256, made with the peer's own libp2p key."""

    def verify(self, peer: PeerId, public_key: bytes, data: bytes, signature: bytes) -> bool:
        if len(public_key) > MAX_KEY_BYTES or len(signature) > MAX_SIGNATURE_BYTES or peer_id_of(public_key) != peer:
            return False
        return _verified(public_key, hashlib.sha256(data).digest(), signature)


@lru_cache(maxsize=4096)
def _verified(public_key: bytes, digest: bytes, signature: bytes) -> bool:
    """Remembered, since a record of the directory comes back with every read and from every node."""
    key = _public_key(public_key)
    try:
        if key is not None:
            key.verify(signature, digest, PADDING, Prehashed(hashes.SHA256()))
    except InvalidSignature:
        return False
    return key is not None


@lru_cache(maxsize=1024)
def _public_key(public_key: bytes) -> rsa.RSAPublicKey | None:
    """None for what is no RSA key of the size that nodes make: odd ones could make verifying slow."""
    der = public_key[len(_RSA_FIELD) + 2 :]
    if public_key != packed_key(der):
        return None
    try:
        key = serialization.load_der_public_key(der)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return None
    if not isinstance(key, rsa.RSAPublicKey) or key.key_size != RSA_BITS:
        return None
    return key if key.public_numbers().e == _RSA_EXPONENT else None

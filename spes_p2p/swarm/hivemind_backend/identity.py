"""The libp2p identity of a peer: its key file, the lock that keeps it to one process, signing and verifying.

A peer id is the multihash of the public key, so a signature proves who signed without any list of keys. Leaves out
every other use of keys: encryption is libp2p's.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import Prehashed
from google.protobuf.message import DecodeError
from hivemind.p2p import PeerID
from hivemind.proto import crypto_pb2
from hivemind.utils.crypto import RSAPrivateKey

from spes_p2p.errors import ConfigError, IdentityInUse, StorageFull
from spes_p2p.files import write_whole
from spes_p2p.ids import PeerId
from spes_p2p.swarm.hivemind_backend.locks import FileLock

_SHA256_MULTIHASH = b"\x12\x20"
_PADDING = padding.PSS(mgf=padding.MGF1(hashes.SHA256()), salt_length=padding.PSS.DIGEST_LENGTH)
_MAX_KEY_BYTES = 1024
_RSA_BITS = range(2048, 4097)
_RSA_EXPONENT = 65537


class IdentityFile:
    """A key file that this process holds alone until `release`.

    Raises IdentityInUse when another process holds it, ConfigError when it cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = _lock(path)
        try:
            self.existed = path.exists()
            if not self.existed:
                _create(path)
            self.signer = RsaSigner(_load(path))
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        self._lock.release()


def _lock(path: Path) -> FileLock:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return FileLock(path.with_name(path.name + ".lock"))
    except BlockingIOError as error:
        raise in_use(path, "on this machine") from error
    except OSError as error:
        raise ConfigError(f"identity {path} cannot be locked: {error}", fix="give a path you may write to") from error


def in_use(path: Path, where: str) -> IdentityInUse:
    return IdentityInUse(
        f"another process {where} is using the identity {path}",
        fix="stop that process, or give this one its own key file with --identity-path",
    )


def _create(path: Path) -> None:
    """Writes a new key that only its owner can read; whole or not at all."""
    private = crypto_pb2.PrivateKey(key_type=crypto_pb2.KeyType.RSA, data=RSAPrivateKey().to_bytes())
    try:
        write_whole(path, private.SerializeToString(), mode=0o600)
    except (OSError, StorageFull) as error:
        raise ConfigError(f"identity {path} cannot be written: {error}", fix="give a path you may write to") from error


def _load(path: Path) -> rsa.RSAPrivateKey:
    fix = "restore the file, or remove it to get a new identity"
    try:
        if path.stat().st_mode & 0o077:
            path.chmod(0o600)
        message = crypto_pb2.PrivateKey.FromString(path.read_bytes())
        key = serialization.load_der_private_key(message.data, password=None)
    except OSError as error:
        raise ConfigError(f"identity {path} cannot be read: {error}", fix=fix) from error
    except (DecodeError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"identity {path} is not a libp2p private key", fix=fix) from error
    if not isinstance(key, rsa.RSAPrivateKey):
        raise ConfigError(f"identity {path} is not an RSA key", fix=fix)
    return key


def signer_of(path: Path) -> RsaSigner:
    """Signs with the key of a node that may be running; makes none. Raises ConfigError where it cannot be read."""
    return RsaSigner(_load(path))


def peer_id_of(public_key: bytes) -> PeerId:
    """The libp2p id of a public key in its protobuf form (longer than 42 bytes, as RSA keys are)."""
    return PeerId(PeerID(_SHA256_MULTIHASH + hashlib.sha256(public_key).digest()).to_base58())


class RsaSigner:
    """Signer with the peer's own libp2p key: RSA-PSS over SHA-256."""

    def __init__(self, key: rsa.RSAPrivateKey) -> None:
        self._key = key
        encoded = key.public_key().public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        self.public_key: bytes = crypto_pb2.PublicKey(key_type=crypto_pb2.RSA, data=encoded).SerializeToString()
        self.peer_id = peer_id_of(self.public_key)

    def sign(self, data: bytes) -> bytes:
        return self._key.sign(data, _PADDING, hashes.SHA256())


class RsaVerifier:
    """Verifier of RsaSigner's signatures."""

    def verify(self, peer: PeerId, public_key: bytes, data: bytes, signature: bytes) -> bool:
        if len(public_key) > _MAX_KEY_BYTES or len(signature) > _MAX_KEY_BYTES or peer_id_of(public_key) != peer:
            return False
        return _verified(public_key, hashlib.sha256(data).digest(), signature)


@lru_cache(maxsize=4096)
def _verified(public_key: bytes, digest: bytes, signature: bytes) -> bool:
    """Remembered, since a record of the directory comes back with every read and from every node."""
    key = _public_key(public_key)
    try:
        if key is not None:
            key.verify(signature, digest, _PADDING, Prehashed(hashes.SHA256()))
    except InvalidSignature:
        return False
    return key is not None


@lru_cache(maxsize=1024)
def _public_key(public_key: bytes) -> rsa.RSAPublicKey | None:
    """None for what is no RSA key of a usual size: odd ones could make verifying slow."""
    try:
        message = crypto_pb2.PublicKey.FromString(public_key)
        if message.key_type != crypto_pb2.KeyType.RSA:
            return None
        key = serialization.load_der_public_key(message.data)
    except (DecodeError, ValueError, TypeError, UnsupportedAlgorithm):
        return None
    if not isinstance(key, rsa.RSAPublicKey) or key.key_size not in _RSA_BITS:
        return None
    return key if key.public_numbers().e == _RSA_EXPONENT else None

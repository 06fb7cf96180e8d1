"""The libp2p identity of a peer: its key file, the lock that keeps it to one process, signing.

Leaves out checking of signatures (`swarm/keys.py`), and encryption, which is libp2p's.
"""

from __future__ import annotations

from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from google.protobuf.message import DecodeError
from hivemind.proto import crypto_pb2

from spes_p2p.errors import ConfigError, IdentityInUse
from spes_p2p.files import write_whole
from spes_p2p.locks import FileLock, holder_of
from spes_p2p.swarm.keys import PADDING, RSA_BITS, packed_key, peer_id_of


class IdentityFile:
    """A key file that this process holds alone until `release`.

    Raises IdentityInUse when another process holds it, ConfigError when it cannot be used, StorageFull.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = _lock(path)
        try:
            self.existed = path.exists()
            self.signer = RsaSigner(_load(path) if self.existed else _create(path))
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        self._lock.release()


def check_free(path: Path) -> None:
    """Raises IdentityInUse when another process holds this key file, ConfigError when it cannot be locked."""
    _lock(path).release()


def _lock_of(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def _lock(path: Path) -> FileLock:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return FileLock(_lock_of(path))
    except BlockingIOError as error:
        process = holder_of(_lock_of(path))
        raise in_use(path, f"on this machine (process {process})" if process else "on this machine") from error
    except OSError as error:
        raise ConfigError(f"identity {path} cannot be locked: {error}", fix="give a path you may write to") from error


def in_use(path: Path, where: str) -> IdentityInUse:
    return IdentityInUse(
        f"another process {where} is using the identity {path}",
        fix="stop that process; a second peer or node needs a folder of its own, --output DIR",
    )


def _create(path: Path) -> rsa.RSAPrivateKey:
    """Writes a new key that only its owner can read; whole or not at all. Raises ConfigError, StorageFull."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=RSA_BITS)
    encoded = key.private_bytes(
        serialization.Encoding.DER, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    private = crypto_pb2.PrivateKey(key_type=crypto_pb2.KeyType.RSA, data=encoded)
    try:
        _hide_from_git(path)
        write_whole(path, private.SerializeToString(), mode=0o600)
    except OSError as error:
        raise ConfigError(f"identity {path} cannot be written: {error}", fix="give a path you may write to") from error
    return key


def _hide_from_git(path: Path) -> None:
    """Before there is a key: whoever publishes the folder around it, as with `git add .`, would give it away."""
    ignored, line = path.with_name(".gitignore"), f"/{path.name}*".encode()
    text = ignored.read_bytes() if ignored.exists() else b"# Whoever has this key speaks for its owner."
    if line not in text.splitlines():
        write_whole(ignored, b"%b\n%b\n" % (text.rstrip(), line))


def _load(path: Path) -> rsa.RSAPrivateKey:
    fix = "restore the file from a copy; where it is no organiser's, removing it gives a new identity"
    try:
        if path.stat().st_mode & 0o077:
            path.chmod(0o600)
        message = crypto_pb2.PrivateKey.FromString(path.read_bytes())
        key = serialization.load_der_private_key(message.data, password=None)
    except OSError as error:
        # never told to remove it: it may be whole, and a run without its organiser's key cannot be steered any more
        raise ConfigError(
            f"identity {path} cannot be read: {error}",
            fix="start as the user whom the file belongs to, or restore it from a copy",
        ) from error
    except (DecodeError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"identity {path} is not a libp2p private key", fix=fix) from error
    if not isinstance(key, rsa.RSAPrivateKey):
        raise ConfigError(f"identity {path} is not an RSA key", fix=fix)
    if key.key_size != RSA_BITS:
        raise ConfigError(f"identity {path} is an RSA key of {key.key_size} bits, not of {RSA_BITS}", fix=fix)
    return key


def signer_of(path: Path) -> RsaSigner:
    """Signs with the key of a node that may be running; makes none. Raises ConfigError where it cannot be read."""
    return RsaSigner(_load(path))


class RsaSigner:
    """Signer with the peer's own libp2p key: RSA-PSS over SHA-256."""

    def __init__(self, key: rsa.RSAPrivateKey) -> None:
        self._key = key
        encoded = key.public_key().public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        self.public_key = packed_key(encoded)
        self.peer_id = peer_id_of(self.public_key)

    def sign(self, data: bytes) -> bytes:
        return self._key.sign(data, PADDING, hashes.SHA256())

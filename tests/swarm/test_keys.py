"""Keys, signatures and greetings of strangers: whatever their bytes, they are good or refused, never an exception."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_p2p import wire
from spes_p2p.errors import ConfigError, StorageFull
from spes_p2p.ids import PeerId
from spes_p2p.swarm.hivemind_backend import identity
from spes_p2p.swarm.hivemind_backend.hello import NOT_SERVING, HelloHandler, HelloReply, HelloRequest
from spes_p2p.swarm.hivemind_backend.identity import IdentityFile, RsaSigner
from spes_p2p.swarm.hivemind_backend.reach import DialBackHandler, DialBackReply, DialBackRequest
from spes_p2p.swarm.keys import RsaVerifier, peer_id_of

DATA = b"what was said"


@pytest.fixture(scope="module")
def signer(tmp_path_factory: pytest.TempPathFactory) -> RsaSigner:
    with_key = IdentityFile(tmp_path_factory.mktemp("keys") / "identity.key")
    with_key.release()
    return with_key.signer


def test_a_full_disk_is_not_taken_for_a_wrong_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*file: Any, **how: Any) -> None:
        raise StorageFull("no room for 1197 bytes", fix="free disk space")

    monkeypatch.setattr(identity, "write_whole", write)
    with pytest.raises(StorageFull, match="no room") as caught:
        IdentityFile(tmp_path / "identity.key")
    assert caught.value.fix == "free disk space"


def test_who_may_not_read_a_key_is_not_told_to_remove_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the organiser's, nobody can steer or end a run any more."""
    path = tmp_path / "identity.key"
    IdentityFile(path).release()

    def read(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", read)
    with pytest.raises(ConfigError, match=r"cannot be read: .*Permission denied") as caught:
        identity.signer_of(path)
    assert "start as the user whom the file belongs to" in caught.value.fix
    assert "remove" not in caught.value.fix


def test_git_takes_no_key_along(tmp_path: Path) -> None:
    """A folder within a repository, with a file of its own or without: `git add .` leaves out what is secret."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "node" / "kept").mkdir(parents=True)
    (tmp_path / "node" / "kept" / ".gitignore").write_bytes(b"*.log\xff")
    for folder in (tmp_path / "node", tmp_path / "node" / "kept", tmp_path / "new" / "folder"):
        for _ in range(2):
            IdentityFile(folder / "identity.key").release()
        IdentityFile(folder / "other.key").release()
        lines = (folder / ".gitignore").read_bytes().splitlines()
        assert lines[1:] == [b"/identity.key*", b"/other.key*"]
    git = ["git", "-C", str(tmp_path)]
    subprocess.run([*git, "add", "."], check=True)
    found = subprocess.run([*git, "ls-files"], check=True, capture_output=True, text=True).stdout.split()
    assert found == ["new/folder/.gitignore", "node/.gitignore", "node/kept/.gitignore"]


def test_its_own_signature_is_good(signer: RsaSigner) -> None:
    assert RsaVerifier().verify(signer.peer_id, signer.public_key, DATA, signer.sign(DATA))
    assert not RsaVerifier().verify(signer.peer_id, signer.public_key, DATA + b"!", signer.sign(DATA))


@given(key=st.binary(max_size=600), signature=st.binary(max_size=300))
def test_any_bytes_are_no_key(key: bytes, signature: bytes) -> None:
    assert not RsaVerifier().verify(peer_id_of(key), key, DATA, signature)


@given(place=st.integers(0, 10_000), new=st.binary(min_size=1, max_size=9))
def test_a_damaged_key_is_another_key_or_none(signer: RsaSigner, place: int, new: bytes) -> None:
    key = signer.public_key
    place %= len(key)
    spoilt = key[:place] + new + key[place + len(new) :]
    assert RsaVerifier().verify(peer_id_of(spoilt), spoilt, DATA, signer.sign(DATA)) in (True, False)
    assert RsaVerifier().verify(signer.peer_id, spoilt, DATA, signer.sign(DATA)) == (spoilt == key)


@given(signature=st.binary(max_size=600))
def test_any_bytes_are_no_signature(signer: RsaSigner, signature: bytes) -> None:
    assert not RsaVerifier().verify(signer.peer_id, signer.public_key, DATA, signature)


@given(place=st.integers(0, 100), new=st.binary(max_size=40))
def test_any_greeting_is_answered(place: int, new: bytes) -> None:
    """Nobody is dialled for it."""

    async def nobody() -> list[Any]:
        return []

    desk = HelloHandler(cast(Any, SimpleNamespace(list_peers=nobody)), lambda: 7.0)
    asked = wire.pack(HelloRequest("somebody"))
    answer = asyncio.run(desk.answer(asked[: place % len(asked)] + new))
    assert answer == NOT_SERVING or wire.unpack(HelloReply, answer) == HelloReply(7.0, False)


@given(place=st.integers(0, 100), new=st.binary(max_size=40))
def test_any_request_to_be_dialled_is_answered(place: int, new: bytes) -> None:
    """Who is not connected is not dialled, whatever it sends."""

    async def nobody() -> list[Any]:
        return []

    async def no_daemon() -> Any:
        raise AssertionError("a daemon was started")

    desk = DialBackHandler(cast(Any, SimpleNamespace(list_peers=nobody)), no_daemon)
    asked = wire.pack(DialBackRequest((4001, 4002)))
    answer = asyncio.run(desk.answer(PeerId("caller"), asked[: place % len(asked)] + new))
    assert answer == NOT_SERVING or wire.unpack(DialBackReply, answer) == DialBackReply(False)


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_a_port_that_is_none_is_not_dialled(port: int) -> None:
    with pytest.raises(ValueError, match=f"one of ports is {port}, not between 1 and 65535"):
        DialBackRequest((4001, port))

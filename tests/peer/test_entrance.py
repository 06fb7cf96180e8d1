"""Who may take part in a run, as a peer finds out for itself."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from spes_p2p.consensus.membership import Roll
from spes_p2p.errors import PermanentError, StorageBroken
from spes_p2p.files import write_whole
from spes_p2p.ids import NO_HASH
from spes_p2p.observe.events import EventBus
from spes_p2p.peer.connection import Connection
from spes_p2p.peer.entrance import check_kept_is_open, check_not_banned
from spes_p2p.peer.options import NetworkOptions, PeerOptions
from spes_p2p.peer.presence import VitalsKeeper
from spes_p2p.peer.run import run_peer
from spes_p2p.swarm.hivemind_backend.identity import IdentityFile
from spes_p2p.sync.chain import Chain
from spes_p2p.sync.genesis import describe_run
from spes_p2p.sync.organiser_words import ending
from spes_p2p.sync.sealing import KeySealer
from spes_p2p.wire import pack
from tests.sync.chains import A, B, MadeRun


def test_a_peer_is_told_who_has_banned_it_and_who_can_lift_it() -> None:
    made = MadeRun()
    rules, info, genesis = made.rules, made.info, made.genesis(NO_HASH).manifest
    by_organiser = Roll(info.fingerprint, 1, banned=(A,))
    known = Roll(info.fingerprint, 2, vouched=(A,))
    check_not_banned(rules, info, genesis, A)
    check_not_banned(rules, info, replace(genesis, banned=(B,)), A)
    check_not_banned(rules, info, replace(genesis, roll=known), A)
    with pytest.raises(PermanentError, match="the organiser of run tiny has banned this peer") as error:
        check_not_banned(rules, info, replace(genesis, roll=by_organiser), A)
    assert f"run ban --undo {A}" in error.value.fix
    for roll in (None, known):
        with pytest.raises(PermanentError, match="the electors of run tiny have banned this peer") as error:
            check_not_banned(rules, info, replace(genesis, banned=(A,), roll=roll), A)
        assert f"run vouch {A}" in error.value.fix


def test_a_peer_of_a_run_that_is_over_says_so_before_it_looks_for_anybody(tmp_path: Path) -> None:
    signer = IdentityFile(tmp_path / "organiser.key").signer
    made, folder = MadeRun(), tmp_path / "peer" / "run"
    info = describe_run(made.config, NO_HASH, signer.peer_id)
    chain = Chain(folder / "chain")
    write_whole(folder / "info", pack(info))
    write_whole(folder / "words", pack(ending(info, 2, KeySealer(signer))))
    for commit in made.chain(3):
        check_kept_is_open(folder.parent, None)
        chain.append(commit)
    check_kept_is_open(folder.parent, "0000")  # another run is meant
    for fingerprint in (None, info.fingerprint.hex()[:16]):
        with pytest.raises(PermanentError, match="is over: its organiser ended it with round 2") as error:
            check_kept_is_open(folder.parent, fingerprint)
        assert f"spes-p2p export --checkpoint {folder.parent}" in error.value.fix
    (folder / "words").write_bytes(pack(ending(info, 2, made.sealer(A))))  # by somebody else
    check_kept_is_open(folder.parent, None)


def test_join_looks_into_its_folder_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def over(folder: Path, fingerprint: str | None) -> None:
        raise PermanentError("the run is over")

    def connect(*rest: object) -> None:
        raise AssertionError("somebody is dialled")

    monkeypatch.setattr("spes_p2p.peer.run.check_kept_is_open", over)
    monkeypatch.setattr(Connection, "open", connect)
    with pytest.raises(PermanentError, match="over"):
        run_peer(PeerOptions(NetworkOptions(), tmp_path), EventBus(), print, print)


def test_a_disk_that_turned_read_only_is_an_error_with_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*rest: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(tmp_path / "run" / "votes"))

    monkeypatch.setattr(Connection, "open", refuse)
    vitals = VitalsKeeper()
    bus = EventBus(vitals)
    with pytest.raises(StorageBroken, match="votes cannot be read or written: Read-only file system") as error:
        run_peer(PeerOptions(NetworkOptions(), tmp_path), bus, print, print)
    assert "mounted for writing" in error.value.fix
    assert "votes cannot be read" in vitals.now("").warnings[0].message

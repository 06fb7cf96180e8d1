"""Who may take part in a run, as a peer finds out for itself."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from spes_p2p.config.schema import fields_of_tree
from spes_p2p.config.sections import is_private
from spes_p2p.consensus.manifest import WIRE_VERSION
from spes_p2p.consensus.membership import Roll
from spes_p2p.errors import PermanentError, RemoteProtocolError, StorageBroken
from spes_p2p.files import write_whole
from spes_p2p.ids import NO_HASH, PeerId
from spes_p2p.observe.events import EventBus
from spes_p2p.peer.connection import Connection
from spes_p2p.peer.entrance import FoundRun, check_kept_is_open, check_not_banned, find
from spes_p2p.peer.options import NetworkOptions, PeerOptions
from spes_p2p.peer.presence import VitalsKeeper
from spes_p2p.peer.run import run_peer
from spes_p2p.swarm.hivemind_backend.identity import IdentityFile
from spes_p2p.swarm.memory_backend import MemoryNetwork
from spes_p2p.swarm.ports import Blob
from spes_p2p.swarm.records import RUNS_KEY, RunRecord
from spes_p2p.sync.chain import Chain
from spes_p2p.sync.genesis import RunInfo, describe_run
from spes_p2p.sync.organiser_words import ending
from spes_p2p.sync.sealing import KeySealer
from spes_p2p.wire import pack
from tests.simulation.virtual_time import run_virtual
from tests.sync.chains import ORGANISER, A, MadeRun


def test_a_peer_is_told_who_has_banned_it_and_who_can_lift_it() -> None:
    made = MadeRun()
    info, genesis = made.info, made.genesis(NO_HASH).manifest
    by_organiser = Roll(info.fingerprint, 1, banned=(A,))
    known = Roll(info.fingerprint, 2, vouched=(A,))
    check_not_banned(info, genesis, A)
    check_not_banned(info, replace(genesis, roll=known), A)
    with pytest.raises(PermanentError, match="the organiser of run tiny has banned this peer") as error:
        check_not_banned(info, replace(genesis, roll=by_organiser), A)
    assert f"run ban --undo {A}" in error.value.fix


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


@dataclass
class Serving:
    """Who serves this run and nothing else."""

    info: RunInfo

    async def on_call(self, caller: PeerId, request: bytes) -> bytes:
        raise RemoteProtocolError("nothing else")

    async def on_fetch(self, caller: PeerId, request: bytes) -> Blob:
        return Blob(pack(self.info))


def join(folder: Path, info: RunInfo, *overrides: str) -> FoundRun:
    """What `join` finds where this run is served, by all that it does before it claims its folder."""

    async def story() -> FoundRun:
        network = MemoryNetwork()
        organiser, me = network.peer(ORGANISER), network.peer("me")
        await organiser.transport.serve(Serving(info))
        record = RunRecord(info.run_id, info.fingerprint, ORGANISER, WIRE_VERSION, 0, b"", ("/memory/organiser",))
        await organiser.directory.publish(RUNS_KEY, pack(record), 30.0)
        options = PeerOptions(NetworkOptions(), folder, overrides=overrides)
        return await find(cast(Any, me), options, ("/memory/organiser",), lambda text: None)

    return run_virtual(story())


def test_what_is_private_comes_from_this_machine_alone(tmp_path: Path) -> None:
    found = join(tmp_path, MadeRun().info, "data.source=local", "data.path=/of/mine", "output.wandb=true")
    data, output = found.run.config.data, found.run.config.output
    assert (data.source, data.path, data.urls, output.wandb) == ("local", "/of/mine", (), True)


@pytest.mark.parametrize("key", [key for key, field in fields_of_tree() if is_private(field)])
def test_an_organiser_sets_nothing_that_is_private_whatever_the_peer_says_itself(key: str, tmp_path: Path) -> None:
    made = MadeRun()
    section, name = key.split(".")
    value = made.config.model_dump(mode="json")[section][name]
    tree = yaml.safe_load(made.info.config)
    tree[section] = {**tree.get(section, {}), name: value}
    info = replace(made.info, config=yaml.safe_dump(tree))
    own = (f"{key}={json.dumps(value)}",)
    for overrides in ((), own):
        with pytest.raises(PermanentError, match=f"the config of run 'tiny' sets {key}, which is for the owner"):
            join(tmp_path / "peer", info, *overrides)
    assert not (tmp_path / "peer" / "run").exists()

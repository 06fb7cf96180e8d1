"""A bootstrap node stays up though nobody can read its words, and finds its peers again from another address."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import threading
from pathlib import Path
from typing import Any, NoReturn

import pytest

from spes_p2p.consensus.messages import Commit
from spes_p2p.errors import PeerSilent, StateError, StorageBroken
from spes_p2p.exchange.requests import unpack_request
from spes_p2p.ids import PeerId
from spes_p2p.peer import bootstrap
from spes_p2p.peer.bootstrap import BootstrapOptions, RunNode, _Found, _open, serve_until
from spes_p2p.peer.contacts import ADDRESSES_FILE
from spes_p2p.peer.options import NetworkOptions
from spes_p2p.swarm.hivemind_backend import HivemindNetwork, NetworkThread
from spes_p2p.swarm.memory_backend import MemoryNetwork
from spes_p2p.swarm.ports import Blob
from spes_p2p.swarm.records import PeerRecord, peers_key
from spes_p2p.sync.chain import Chain
from spes_p2p.sync.donor import Serving
from spes_p2p.sync.organiser_words import OrganiserWatch
from spes_p2p.wire import pack
from tests.peer.real import SMALL
from tests.simulation.virtual_time import run_virtual
from tests.sync.chains import ORGANISER, A, MadeRun

LOOPBACK = "/ip4/127.0.0.1/tcp/0"


def test_a_full_log_ends_no_node(tmp_path: Path) -> None:
    said, went_on, stop = list[str](), threading.Event(), asyncio.Event()

    def say(text: str) -> None:
        said.append(text)
        if "metrics" in text:
            went_on.set()
        raise OSError(28, "No space left on device")

    options = BootstrapOptions(NetworkOptions((), (LOOPBACK,)), tmp_path, metrics_port=0)
    with NetworkThread() as thread:
        serving = thread.submit(serve_until(stop, options, say))
        while not went_on.wait(0.05):
            if serving.done():
                serving.result()
        thread.loop.call_soon_threadsafe(stop.set)
        serving.result()
    assert said[0].startswith("DHT node at")


def test_it_goes_back_to_those_it_knew_and_does_without_them(tmp_path: Path) -> None:
    async def scenario() -> None:
        peer = await HivemindNetwork.start(host_maddrs=(LOOPBACK,))
        (tmp_path / ADDRESSES_FILE).write_text("00" * 32 + "\n" + "\n".join(peer.transport.addresses))
        options = BootstrapOptions(NetworkOptions((), (LOOPBACK,)), tmp_path)
        again = await _open(options)
        assert [one.peer for one in again.reached] == [peer.transport.peer_id]
        await again.close()
        await peer.close()
        alone = await _open(options)  # founds a DHT of its own
        assert not alone.reached
        await alone.close()

    with NetworkThread() as thread:
        thread.run(scenario())


def test_a_disk_that_fails_is_an_error_with_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(options: BootstrapOptions) -> HivemindNetwork:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(options.folder / "identity.key"))

    monkeypatch.setattr(bootstrap, "_open", fail)
    serving = serve_until(asyncio.Event(), BootstrapOptions(NetworkOptions(), tmp_path), print)
    with pytest.raises(StorageBroken, match=r"identity\.key cannot be read or written: Input/output error"):
        asyncio.run(serving)


def test_a_node_gives_its_invitation_before_it_looks_for_what_the_organiser_has_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where few of a DHT's nodes answer, that takes ten seconds."""
    said, invited, stop = list[str](), list[bool](), asyncio.Event()

    async def look(watch: OrganiserWatch) -> None:
        invited.append(any("volunteers join with" in line for line in said))
        stop.set()

    monkeypatch.setattr(OrganiserWatch, "start", look)
    overrides = (*SMALL, "data.source=local")
    options = BootstrapOptions(NetworkOptions((), (LOOPBACK,)), tmp_path, Path("tiny"), overrides=overrides)
    with NetworkThread() as thread:
        thread.run(serve_until(stop, options, said.append))
    assert invited == [True]
    assert any(line.endswith(" --data DIR") for line in said)


def chain_of(folder: Path, commits: list[Commit]) -> Chain:
    chain = Chain(folder)
    for commit in commits:
        chain.append(commit)
    return chain


async def nobody_answers(*asked: object) -> NoReturn:
    raise PeerSilent("nobody answers")


class Holder:
    """A peer with the whole history."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def on_call(self, caller: PeerId, request: bytes) -> bytes:
        return b""

    async def on_fetch(self, caller: PeerId, request: bytes) -> Blob:
        return self._serving.answer(unpack_request(request), caller)


@pytest.mark.parametrize("is_up", [True, False])
def test_a_damaged_certificate_is_taken_from_a_peer_that_is_up(tmp_path: Path, is_up: bool) -> None:
    made = MadeRun()
    commits = made.chain(3)
    folder = tmp_path / "node"
    chain_of(folder / "run" / "chain", commits)
    (folder / "run" / "chain" / "00000002.commit").write_bytes(b"damaged")

    async def main() -> None:
        network: Any = MemoryNetwork(1)
        if is_up:
            chain = chain_of(tmp_path / "peer", commits)
            record = PeerRecord(made.info.run_id, A, (), "0.1.0", 0, 0, 0, 0.0, (), "peer", False, 0)
            await network.peer(A).directory.publish(peers_key(made.info.run_id), pack(record), 3600.0)
            await network.peer(A).transport.serve(Holder(Serving(made.info, chain, None, lambda *request: None)))
        else:
            network.peer(ORGANISER).directory.read = nobody_answers
        options = BootstrapOptions(NetworkOptions(), folder)
        node = RunNode(options, _Found(made.config, None), made.info, network.peer(ORGANISER), print)
        async with contextlib.AsyncExitStack() as ends:
            chain, _ = await node._open(ends)
            assert chain.newest == commits[-1]

    if is_up:
        run_virtual(main())
    else:
        with pytest.raises(StateError, match=r"00000002\.commit is damaged") as caught:
            run_virtual(main())
        assert "the organiser's node would begin the run a second time" in caught.value.fix

"""A bootstrap node stays up though nobody can read its words, and finds its peers again from another address."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from pathlib import Path

import pytest

from spes_p2p.errors import StorageBroken
from spes_p2p.peer import bootstrap
from spes_p2p.peer.bootstrap import BootstrapOptions, _open, serve_until
from spes_p2p.peer.contacts import ADDRESSES_FILE
from spes_p2p.peer.options import NetworkOptions
from spes_p2p.swarm.hivemind_backend import HivemindNetwork, NetworkThread
from spes_p2p.sync.organiser_words import OrganiserWatch
from tests.peer.real import SMALL

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

"""A libp2p daemon that ends at a bad moment: another one runs in its place or one line says it, and nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from spes_p2p.consensus.actions import Notice
from spes_p2p.errors import DaemonEnded, Stopped
from spes_p2p.exchange.pieces import DataTraffic
from spes_p2p.ids import PeerId
from spes_p2p.peer import bootstrap
from spes_p2p.peer.bootstrap import BootstrapOptions, serve_until
from spes_p2p.peer.connection import Connection
from spes_p2p.peer.options import NetworkOptions, PeerOptions
from spes_p2p.swarm.hivemind_backend import HivemindNetwork, NetworkThread
from spes_p2p.swarm.hivemind_backend.join import Reached
from spes_p2p.swarm.hivemind_backend.transport import HivemindTransport
from spes_p2p.sync.trainer_bridge import TrainerBridge
from tests.swarm.micro import MICRO, is_daemon

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(120)]
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
WAIT_SECONDS = 30.0
Daemons = Callable[[], list[psutil.Process]]


@pytest.fixture(scope="module", autouse=True)
def another_network() -> Iterator[None]:
    """Goes on in the same process meanwhile, as others' may (tests/cli/conftest.py), and starts its daemon again."""
    with NetworkThread() as thread:
        network = thread.run(HivemindNetwork.start(host_maddrs=LOOPBACK), WAIT_SECONDS)
        thread.submit(network.keep_alive(lambda text: None))
        yield
        thread.run(network.close())


@pytest.fixture
def daemons() -> Iterator[Daemons]:
    """Those that run now and were started in this test; the others run on."""
    others = all_daemons()
    yield lambda: [daemon for daemon in all_daemons() if daemon not in others]
    assert [daemon for daemon in others if not is_daemon(daemon)] == []


def all_daemons() -> list[psutil.Process]:
    return list(filter(is_daemon, psutil.Process().children(recursive=True)))


def left_over(daemons: Daemons) -> list[psutil.Process]:
    """Those that run on; a busy machine takes a moment to end what was killed."""
    until = time.monotonic() + WAIT_SECONDS
    while daemons() and time.monotonic() < until:
        time.sleep(0.01)
    return daemons()


def kill_while_attaching(monkeypatch: pytest.MonkeyPatch, daemons: Daemons, times: int) -> None:
    """The daemon ends before it has been told what this peer answers."""
    attach, left = HivemindTransport.attach, [times]

    async def attaching(self: HivemindTransport, *arguments: Any) -> None:
        if left[0]:
            left[0] -= 1
            for daemon in daemons():
                daemon.kill()
        await attach(self, *arguments)

    monkeypatch.setattr(HivemindTransport, "attach", attaching)


def test_a_daemon_that_ends_while_it_is_put_in_the_place_of_another_is_replaced_too(
    monkeypatch: pytest.MonkeyPatch, daemons: Daemons
) -> None:
    async def scenario() -> list[str]:
        network, said = await HivemindNetwork.start(host_maddrs=LOOPBACK), list[str]()
        try:
            kill_while_attaching(monkeypatch, daemons, times=2)
            alive = asyncio.create_task(network.keep_alive(said.append))
            os.kill(network.daemon.pid, signal.SIGKILL)
            async with asyncio.timeout(WAIT_SECONDS):
                while not said and not alive.done():
                    await asyncio.sleep(0.01)
            assert not network.daemon.ended.is_set()
            alive.cancel()
        finally:
            await network.close()
        return said

    with NetworkThread() as thread:
        assert len(thread.run(scenario())) == 1
    assert left_over(daemons) == []


def test_a_daemon_is_replaced_while_the_clock_is_wrong(daemons: Daemons) -> None:
    """As a machine's may be for a moment after it slept; or those who answer first lie."""
    ahead_seconds, said = [0.0], list[str]()

    async def scenario() -> None:
        first = await HivemindNetwork.start(host_maddrs=LOOPBACK)
        second = await HivemindNetwork.start(
            first.transport.addresses, host_maddrs=LOOPBACK, wall_clock=lambda: time.time() + ahead_seconds[0]
        )
        try:
            ahead_seconds[0] = 3600.0
            alive = asyncio.create_task(second.keep_alive(said.append))
            os.kill(second.daemon.pid, signal.SIGKILL)
            async with asyncio.timeout(WAIT_SECONDS):
                while not said and not alive.done():
                    await asyncio.sleep(0.01)
            alive.cancel()
            assert await second.transport.check_refused(first.transport.peer_id) is False
        finally:
            await second.close()
            await first.close()

    with NetworkThread() as thread:
        thread.run(scenario())
    assert len(said) == 1
    assert left_over(daemons) == []


def test_a_start_whose_daemon_ends_says_that_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, daemons: Daemons
) -> None:
    kill_while_attaching(monkeypatch, daemons, times=1)
    with NetworkThread() as thread, pytest.raises(DaemonEnded, match="the libp2p daemon ended") as caught:
        thread.run(HivemindNetwork.start(host_maddrs=LOOPBACK), WAIT_SECONDS)
    assert caught.value.fix
    assert left_over(daemons) == []


@pytest.mark.parametrize("after_seconds", [0.0, 0.02, 0.1])
def test_a_start_that_is_broken_off_leaves_no_daemon_and_no_word(
    after_seconds: float, daemons: Daemons, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As with Ctrl-C in the middle of it."""
    unraisable: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    with caplog.at_level(logging.WARNING), NetworkThread() as thread:
        starting = thread.submit(HivemindNetwork.start(host_maddrs=LOOPBACK))
        until = time.monotonic() + WAIT_SECONDS
        while not daemons() and time.monotonic() < until:
            time.sleep(0.001)
        time.sleep(after_seconds)
        starting.cancel()
    gc.collect()
    assert left_over(daemons) == []
    assert unraisable == []
    assert [record.getMessage() for record in caplog.records] == []


@pytest.mark.parametrize(
    ("error", "told"),
    [(ConnectionResetError, 0), (lambda: asyncio.IncompleteReadError(b"", 1), 0), (ValueError, 1)],
    ids=["reset", "cut off", "a bug"],
)
def test_a_broken_connection_of_a_library_is_no_traceback_and_a_bug_is_one(
    error: Callable[[], Exception], told: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def die() -> None:
        raise error()

    async def scenario() -> None:
        asyncio.get_running_loop().create_task(die())
        await asyncio.sleep(0.01)

    with NetworkThread() as thread:
        thread.run(scenario())
        gc.collect()
    assert len(caplog.records) == told


def test_members_are_asked_first_where_a_daemon_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers may have written a thousand records since."""
    member, strangers = PeerId("member"), [PeerId(f"stranger{number}") for number in range(64)]
    asked = list[str]()

    async def meet(self: HivemindNetwork, addresses: list[str], quiet: Collection[str]) -> list[Reached]:
        asked.extend(addresses)
        return []

    async def scenario() -> None:
        network = await HivemindNetwork.start(host_maddrs=LOOPBACK)
        try:
            for peer in (member, *strangers):
                network.transport.learn(peer, ("/ip4/127.0.0.1/tcp/1",))
            monkeypatch.setattr(network.transport, "is_member", lambda peer: peer == member)
            monkeypatch.setattr(HivemindNetwork, "_meet", meet)
            await network.restart()
        finally:
            await network.close()

    with NetworkThread() as thread:
        thread.run(scenario(), WAIT_SECONDS)
    assert asked[0] == f"/ip4/127.0.0.1/tcp/1/p2p/{member}"


def run_of_nine(folder: Path) -> BootstrapOptions:
    """A node whose run does not begin."""
    overrides = (*MICRO, "data.source=local", "swarm.min_peers=9")
    return BootstrapOptions(NetworkOptions((), LOOPBACK), folder, Path("tiny"), overrides=overrides)


def test_a_peer_that_waits_for_its_run_to_begin_gets_another_daemon(tmp_path: Path) -> None:
    ready, waits, replaced = threading.Event(), threading.Event(), threading.Event()
    addresses = list[str]()

    def on_ready(command: str) -> None:
        addresses.append(command.split("--initial-peers ")[1].split()[0])
        ready.set()

    def say(text: str) -> None:
        if "waiting for others" in text:
            waits.set()

    def enter(connection: Connection) -> None:
        with pytest.raises(Stopped):
            connection.enter()

    def note(notice: Notice) -> None:
        if notice.kind == "network":
            replaced.set()

    with NetworkThread() as thread, NetworkThread() as other:
        stop, gate = asyncio.Event(), TrainerBridge(on_notice=note)
        serving = other.submit(serve_until(stop, run_of_nine(tmp_path / "node"), lambda text: None, on_ready))
        assert ready.wait(WAIT_SECONDS)
        options = PeerOptions(NetworkOptions(tuple(addresses), LOOPBACK), tmp_path / "peer")
        with contextlib.closing(Connection.open(thread, options, gate, say, DataTraffic())) as connection:
            entering = threading.Thread(target=enter, args=(connection,))
            entering.start()
            assert waits.wait(WAIT_SECONDS)
            os.kill(connection._network.daemon.pid, signal.SIGKILL)
            is_replaced = replaced.wait(WAIT_SECONDS)
            gate.stop()
            entering.join()
        assert is_replaced
        other.loop.call_soon_threadsafe(stop.set)
        serving.result()


def test_a_node_that_does_not_serve_yet_gets_another_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, daemons: Daemons
) -> None:
    """It may have terabytes to fetch before."""
    opens, replaced, stop = threading.Event(), threading.Event(), asyncio.Event()

    async def open_for_ever(*arguments: Any) -> None:
        opens.set()
        await asyncio.Event().wait()

    def say(text: str) -> None:
        if "has replaced it" in text:
            replaced.set()

    monkeypatch.setattr(bootstrap.RunNode, "_open", open_for_ever)
    with NetworkThread() as thread:
        serving = thread.submit(serve_until(stop, run_of_nine(tmp_path), say))
        assert opens.wait(WAIT_SECONDS)
        for daemon in daemons():
            daemon.kill()
        is_replaced = replaced.wait(WAIT_SECONDS)
        thread.loop.call_soon_threadsafe(stop.set)
        serving.result()
    assert is_replaced

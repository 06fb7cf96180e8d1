"""Addresses taken apart, and which of them may be taken as evidence that a process is gone."""

from __future__ import annotations

import asyncio
import socket
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from spes_p2p.ids import PeerId
from spes_p2p.swarm.hivemind_backend import NetworkThread
from spes_p2p.swarm.hivemind_backend.connections import Connections
from spes_p2p.swarm.hivemind_backend.daemon import Daemon
from spes_p2p.swarm.hivemind_backend.dial import MOST_PEERS, AddressBook, Dialled, dial_all, parse_address
from spes_p2p.swarm.hivemind_backend.thread import NetworkLoop

PEER = PeerId("QmSoLV4Bbm51jM9C4gDYZQ9Cy3U6aXMJDAbzgu2fzaDs64")
OTHER = "QmY8BDyJuRjjFuKsmgcCQefNchDB5GHyWr5HxtUJimPuPd"


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("/ip4/8.8.8.8/tcp/4000", "8.8.8.8", 4000),
        ("/ip6/::1/tcp/4000", "::1", 4000),
        ("/dns4/node.example.org/tcp/4000", "node.example.org", 4000),
        ("/ip4/8.8.8.8/udp/4000/quic", "", 0),
        (f"/ip4/8.8.8.8/tcp/4000/p2p/{OTHER}/p2p-circuit", "", 0),
    ],
)
def test_addresses_are_taken_apart(text: str, host: str, port: int) -> None:
    for whole, peer in ((text, None), (f"{text}/p2p/{PEER}", PEER)):
        address = parse_address(whole)
        assert (address.text, address.peer, address.host, address.port) == (text, peer, host, port)


@pytest.mark.parametrize("text", ["", "8.8.8.8:4000", "/ip4/8.8.8.888/tcp/1", "/ip4", "/nothing/1"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a multiaddress"):
        parse_address(text)


def test_what_is_wrong_with_an_address_is_said_without_the_address() -> None:
    for text, wrong in (("8.8.8.8:4000", "must begin with /"), ("/nothing/1", "nothing: Unknown Protocol")):
        with pytest.raises(ValueError) as caught:
            parse_address(text)
        assert str(caught.value) == f"not a multiaddress ({wrong})"


def evidence(*addresses: str, met: tuple[tuple[str, int], ...] = ()) -> list[str]:
    book = AddressBook()
    book.learn(PEER, addresses)
    book.met(PEER, met)
    return [f"{address.host}:{address.port}" for address in book.evidence(PEER)]


LOCAL, HOME, PUBLIC = "/ip4/127.0.0.1/tcp/1", "/ip4/192.168.1.7/tcp/1", "/ip4/8.8.8.8/tcp/1"


def test_only_places_that_must_be_the_peer_are_evidence() -> None:
    assert evidence(LOCAL) == ["127.0.0.1:1"]  # everybody is on this machine
    assert evidence(LOCAL, HOME) == []  # another machine of ours may have this address
    assert evidence(LOCAL, HOME, PUBLIC) == ["8.8.8.8:1"]
    assert evidence(LOCAL, HOME, PUBLIC, met=(("192.168.1.7", 1),)) == ["192.168.1.7:1"]
    assert (
        evidence(LOCAL, HOME, PUBLIC, met=(("192.168.1.7", 55_000),)) == []
    )  # it came to us: perhaps through a router
    assert evidence("/ip6/fec0::1/tcp/1", "/ip4/100.64.0.1/tcp/1") == []  # networks at home, too
    assert evidence() == []


def test_addresses_of_others_and_junk_are_not_learnt() -> None:
    book = AddressBook()
    book.learn(PEER, [f"{PUBLIC}/p2p/{OTHER}", "junk", *[LOCAL] * 50])
    assert {address.text for address in book.known(PEER)} == {LOCAL}
    assert len(book.known(PEER)) < 16


def test_addresses_at_relays_are_not_learnt() -> None:
    """With one of them in it the daemon would refuse the whole dial."""
    book = AddressBook()
    book.learn(PEER, [f"{PUBLIC}/p2p/{OTHER}/p2p-circuit/p2p/{PEER}", f"{HOME}/p2p/{OTHER}/p2p/{PEER}", LOCAL])
    assert [address.text for address in book.known(PEER)] == [LOCAL]


def test_peers_that_are_heard_of_no_more_are_forgotten() -> None:
    """Anybody can make ids, and write a record for each."""
    book, many = AddressBook(), [PeerId(f"peer{number}") for number in range(MOST_PEERS)]
    for peer in (PEER, *many[1:], PEER):
        book.learn(peer, [LOCAL])
        book.met(peer, [("127.0.0.1", 1)])
    book.learn(many[0], [HOME])
    book.met(many[0], [("192.168.1.7", 1)])
    assert book.known(PEER)
    assert book.evidence(PEER)
    assert not book.known(many[1])
    assert not book.evidence(many[1])
    assert book.texts(lambda peer: peer == PEER)[:2] == [f"{LOCAL}/p2p/{PEER}", f"{HOME}/p2p/{many[0]}"]
    assert len(book.texts(lambda peer: False)) == MOST_PEERS


def test_of_whom_was_heard_once_the_newest_are_taken_for_connected() -> None:
    background: Any = SimpleNamespace(spawn=lambda work: work.close())
    connections = Connections(cast(Daemon, None), background)
    for number in range(MOST_PEERS + 1):
        connections.heard(PeerId(f"p{number}"))
    assert connections._connected == {PeerId(f"p{MOST_PEERS}")}


def test_threads_that_look_names_up_end_with_their_loop() -> None:
    loop = NetworkLoop()
    loop.run_until_complete(loop.getaddrinfo("127.0.0.1", 1))
    threads = [thread for pool in loop._lookups.values() for thread in pool._threads]
    loop.close()
    for thread in threads:
        thread.join(30)
    assert threads
    assert not any(thread.is_alive() for thread in threads)


def test_names_that_nobody_resolves_keep_no_thread_from_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has a record in the DHT names what it likes, and everybody dials it."""
    asked, over = threading.Event(), threading.Event()

    def resolve(*arguments: Any, **hints: Any) -> Any:
        asked.set()
        over.wait()
        raise socket.gaierror(socket.EAI_AGAIN, "no answer")

    async def scenario() -> list[Dialled]:
        book = AddressBook()
        book.learn(PEER, [f"/dns4/node{number}.example/tcp/1" for number in range(16)])
        dialling = asyncio.create_task(dial_all([*book.plain(PEER)] * 4))
        await asyncio.to_thread(asked.wait)
        async with asyncio.timeout(30.0):
            await asyncio.to_thread(lambda: None)
        over.set()
        return await dialling

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    try:
        with NetworkThread() as thread:
            assert set(thread.run(scenario())) <= {Dialled.SILENT, Dialled.UNREACHABLE}
    finally:
        over.set()


def test_names_that_nobody_resolves_delay_no_name_that_was_found_before(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, over = threading.Semaphore(0), threading.Event()

    def resolve(host: str, port: int, *arguments: Any, **hints: Any) -> Any:
        if host == "honest.example":
            return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("127.0.0.1", port))]
        asked.release()
        over.wait()
        raise socket.gaierror(socket.EAI_AGAIN, "no answer")

    async def scenario() -> list[Dialled]:
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        honest = parse_address(f"/dns4/honest.example/tcp/{server.sockets[0].getsockname()[1]}")
        found = await dial_all([honest])
        strange = [parse_address(f"/dns4/node{number}.example/tcp/1") for number in range(16)]
        dialling = asyncio.create_task(dial_all(strange))
        await asyncio.to_thread(lambda: [asked.acquire() for _ in range(8)])
        found += await dial_all([honest, honest])
        over.set()
        await dialling
        server.close()
        return found

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    try:
        with NetworkThread() as thread:
            assert thread.run(scenario()) == [Dialled.ACCEPTED] * 3
    finally:
        over.set()

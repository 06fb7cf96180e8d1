"""`/dnsaddr/` names, asked of a real DNS server on loopback."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any, cast

import dns.asyncresolver
import dns.message
import dns.rrset
import pytest

from spes_p2p.errors import NetworkError
from spes_p2p.swarm.hivemind_backend import HivemindNetwork, NetworkThread, join

PEER = "QmSoLV4Bbm51jM9C4gDYZQ9Cy3U6aXMJDAbzgu2fzaDs64"
OTHER = "QmY8BDyJuRjjFuKsmgcCQefNchDB5GHyWr5HxtUJimPuPd"
ONE, TWO = f"/ip4/203.0.113.7/tcp/31337/p2p/{PEER}", f"/dns4/mirror.example.org/tcp/1/p2p/{OTHER}"


class Server(asyncio.DatagramProtocol):
    """Answers TXT questions by name; what it does not know it does not answer."""

    def __init__(self, texts: Mapping[str, list[str]]) -> None:
        self._texts = texts

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str | Any, int]) -> None:
        query = dns.message.from_wire(data)
        name = query.question[0].name
        found = self._texts.get(name.to_text())
        if found is not None:
            reply = dns.message.make_response(query)
            if found:
                reply.answer.append(dns.rrset.from_text_list(name, 60, "IN", "TXT", [f'"{text}"' for text in found]))
            self._transport.sendto(reply.to_wire(), addr)


@contextlib.asynccontextmanager
async def serving(texts: Mapping[str, list[str]]) -> AsyncIterator[dns.asyncresolver.Resolver]:
    """Gives a resolver that asks such a server."""
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(lambda: Server(texts), ("127.0.0.1", 0))
    resolver = dns.asyncresolver.Resolver(configure=False)
    resolver.nameservers, resolver.port = ["127.0.0.1"], transport.get_extra_info("sockname")[1]
    try:
        yield resolver
    finally:
        transport.close()


def listed(address: str, texts: Mapping[str, list[str]]) -> tuple[str, ...]:
    async def ask() -> tuple[str, ...]:
        async with serving(texts) as resolver:
            return await join.listed(address, resolver)

    return asyncio.run(ask())


TEXTS = {"_dnsaddr.run.example.org.": [f"dnsaddr={TWO}", "v=spf1 -all", f"dnsaddr={ONE}", "dnsaddr=/ip4/1.2.3.4/tcp/1",
                                       "dnsaddr=/dnsaddr/other.example.org", "dnsaddr=junk"]}  # fmt: skip


def test_a_name_stands_for_the_nodes_that_its_records_list() -> None:
    assert listed("/dnsaddr/run.example.org", TEXTS) == (TWO, ONE)
    assert listed(f"/dnsaddr/run.example.org/p2p/{PEER}", TEXTS) == (ONE,)


@pytest.mark.parametrize(
    ("texts", "said"),
    [({"_dnsaddr.run.example.org.": ["dnsaddr=junk"]}, "names no node"), ({}, "could not be looked up")],
)
def test_a_name_without_nodes_or_without_an_answer_says_so(
    texts: dict[str, list[str]], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(join, "LOOKUP_SECONDS", 0.3)
    with pytest.raises(ValueError, match=said):
        listed("/dnsaddr/run.example.org", texts)


@pytest.mark.swarm
def test_a_node_joins_by_a_name_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        here = ("/ip4/127.0.0.1/tcp/0",)
        first = await HivemindNetwork.start(host_maddrs=here)
        texts = {
            "_dnsaddr.run.example.org.": [f"dnsaddr={address}" for address in first.transport.addresses],
            "_dnsaddr.old.example.org.": [f"dnsaddr=/ip4/127.0.0.1/tcp/1/p2p/{OTHER}"],
        }
        async with serving(texts) as resolver:
            monkeypatch.setattr("dns.asyncresolver.Resolver", lambda: resolver)
            second = await HivemindNetwork.start(["/dnsaddr/run.example.org"], host_maddrs=here)
            assert [one.peer for one in second.reached] == [first.transport.peer_id]
            with pytest.raises(NetworkError, match="names 1 node that does not answer"):
                await HivemindNetwork.start(["/dnsaddr/old.example.org"], host_maddrs=here)
        await second.close()
        await first.close()

    with NetworkThread() as thread:
        thread.run(scenario())

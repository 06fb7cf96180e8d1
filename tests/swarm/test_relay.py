"""What libp2p's relays really do for a peer behind NAT: real daemons in a network namespace, and on plain loopback.

libp2p makes no circuits between addresses that it takes for private, so a namespace has 11.0.0.0/24 on its loopback
device. Which of two relay services wins in a daemon is chance, so both outcomes are right here; what may not be is a
relay that is named to others and cuts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack
from typing import Any

import pytest
from google.protobuf.wrappers_pb2 import BytesValue
from hivemind.p2p import PeerID

from spes_p2p import wire
from spes_p2p.ids import PeerId
from spes_p2p.swarm.hivemind_backend import HivemindNetwork, NetworkThread
from spes_p2p.swarm.hivemind_backend.daemon import SocketFolder, start_daemon
from spes_p2p.swarm.hivemind_backend.dial import parse_address, relay_of
from spes_p2p.swarm.hivemind_backend.relay import LEAST_RELAYS, RELAY_TEST_NAME, TEST_BYTES, RelayReply, RelayRequest
from spes_p2p.testing.namespaces import Lab, may_make_namespaces
from spes_p2p.testing.nat_box import enter_namespace

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(600)]
PORT = 4001


class Echo:
    async def on_call(self, caller: PeerId, request: bytes) -> bytes:
        return request


async def _start(stack: AsyncExitStack, *others: HivemindNetwork, **options: Any) -> HivemindNetwork:
    initial = [address for other in others for address in other.transport.addresses]
    network = await HivemindNetwork.start(initial, use_relay=True, **options)
    stack.push_async_callback(network.close)
    await network.transport.serve(Echo())  # type: ignore[arg-type]
    return network


@pytest.fixture
def outside() -> Iterator[NetworkThread]:
    """A network thread, and its daemons, in a namespace in which libp2p takes addresses for public ones."""
    with ExitStack() as stack:
        lab = Lab(stack)
        space = lab.loopback([f"11.0.0.{at}" for at in range(1, LEAST_RELAYS + 1)])
        thread = stack.enter_context(NetworkThread())

        async def enter() -> None:
            enter_namespace(space)

        thread.run(enter())
        yield thread


@pytest.mark.skipif(not may_make_namespaces(), reason="needs root and iproute2 for network namespaces")
def test_a_relay_that_is_named_to_others_carries_more_than_libp2ps_default(outside: NetworkThread) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            relays: list[HivemindNetwork] = []
            for at in range(1, LEAST_RELAYS + 1):
                here = (f"/ip4/11.0.0.{at}/tcp/{PORT}",)
                relays.append(await _start(stack, *relays, host_maddrs=here, announce_maddrs=here))
            home = await _start(stack, *relays, client_mode=True)
            assert home.relay is not None
            named = {relay_of(address) for address in home.transport.addresses}
            assert named == set(home.relay.passed)
            assert named <= {one.transport.peer_id for one in relays}
            assert bool(named) == bool(home._options["use_relay"]), "without a relay that passed, the daemon has none"
            assert ("carried a test" if named else "no relay is used") in home.relay.words
            if named:
                caller = await _start(stack, client_mode=True)
                caller.transport.learn(home.transport.peer_id, home.transport.addresses)
                said = bytes(range(256)) * (2 * TEST_BYTES // 256)
                assert await caller.transport.call(home.transport.peer_id, said, 10.0) == said
            assert await relays[0].transport.call(home.transport.peer_id, b"x", 10.0) == b"x"

    outside.run(scenario())


@pytest.mark.skipif(not may_make_namespaces(), reason="needs root and iproute2 for network namespaces")
def test_who_asks_for_a_test_cannot_have_a_third_dialled(outside: NetworkThread) -> None:
    """It has no place at the relay, and says to libp2p that it listens at another's address."""

    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            met: list[object] = []

            async def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                met.append(writer.get_extra_info("peername"))
                writer.close()

            third = await asyncio.start_server(note, "11.0.0.3", PORT)
            stack.callback(third.close)
            here = (f"/ip4/11.0.0.1/tcp/{PORT}",)
            relay = await _start(stack, host_maddrs=here, announce_maddrs=here)
            folder = SocketFolder()
            stack.callback(folder.remove)
            liar = await start_daemon(
                folder, host_maddrs=["/ip4/11.0.0.2/tcp/0"], announce_maddrs=[f"/ip4/11.0.0.3/tcp/{PORT}"]
            )
            stack.push_async_callback(liar.shutdown)
            name = PeerID.from_base58(relay.transport.peer_id)
            await liar._client.connect(name, [parse_address(relay.transport.addresses[0]).maddr])
            asked = BytesValue(value=wire.pack(RelayRequest(bytes(16))))
            for _ in range(4):
                reply = await liar.call_protobuf_handler(name, RELAY_TEST_NAME, asked, BytesValue)
                said = wire.unpack(RelayReply, reply.value, max_bytes=1024)
                assert (said.tried, said.received) == (True, 0)
            assert not met

    outside.run(scenario())


def test_without_a_relay_a_peer_goes_on_as_it_would_have() -> None:
    """On loopback libp2p reserves no place at a relay; with fewer initial peers than it wants, nobody waits for one."""

    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            relays: list[HivemindNetwork] = []
            for _ in range(LEAST_RELAYS):
                relays.append(await _start(stack, *relays, host_maddrs=("/ip4/127.0.0.1/tcp/0",)))
            for count, words in ((LEAST_RELAYS, "none has given this machine an address"), (2, "only 2 of")):
                home = await _start(stack, *relays[:count], client_mode=True)
                assert home.relay is not None
                assert words in home.relay.words
                assert home.transport.addresses == ()
                assert not home._options["use_relay"]
                assert await relays[0].transport.call(home.transport.peer_id, b"x", 10.0) == b"x"

    with NetworkThread() as thread:
        thread.run(scenario())

"""How much a circuit through libp2p's relays carries before it is cut, by what the relay believes of its reachability.

python scripts/bench_relay.py --trials 5

Real daemons in a network namespace that has public addresses on its loopback device; needs root and iproute2. Each
trial starts four relays and a peer that listens nowhere, waits for its places at relays, and fetches 8 MiB from it
through each of them. Two relay services compete in a daemon, so the same options give different outcomes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from contextlib import AsyncExitStack, ExitStack
from typing import Any

from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError

from spes_p2p.swarm.hivemind_backend import NetworkThread
from spes_p2p.swarm.hivemind_backend.daemon import SocketFolder, start_daemon
from spes_p2p.swarm.hivemind_backend.dial import parse_address, relay_of, through
from spes_p2p.swarm.hivemind_backend.network import _daemon_options
from spes_p2p.swarm.hivemind_backend.relay import LEAST_RELAYS, circuits_of
from spes_p2p.testing.namespaces import Lab, may_make_namespaces
from spes_p2p.testing.nat_box import enter_namespace

SIZE = 8 * 2**20
PIECE = bytes(2**16)
ADDRESS_SECONDS = 15.0
NAME = "bench-relay"
WAYS: dict[str, dict[str, Any]] = {
    "not forced": {},
    "forced private": {"force_reachability": "private"},
    "forced public (--use-relay)": {"force_reachability": "public"},
}


async def serve(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        for _ in range(SIZE // len(PIECE)):
            writer.write(PIECE)
            await writer.drain()
        await reader.read(1)
    writer.close()


async def carried(folder: SocketFolder, home: P2P, relay: str) -> int:
    """Bytes that came through one relay."""
    scout, got = await start_daemon(folder, no_listen=True, host_maddrs=None, dht_mode="client"), 0
    try:
        with contextlib.suppress(P2PDaemonError, OSError, TimeoutError):
            async with asyncio.timeout(30.0):
                await scout._client.connect(home.peer_id, [through(relay)])
                _, reader, writer = await scout.call_binary_stream_handler(home.peer_id, NAME)
                while got < SIZE and (piece := await reader.read(2**16)):
                    got += len(piece)
                writer.close()
    finally:
        await scout.shutdown()
    return got


async def trial(options: dict[str, Any]) -> tuple[float, list[int]]:
    """(seconds until the first place at a relay, bytes through each relay at which there is one)."""
    async with AsyncExitStack() as stack:
        folder = SocketFolder()
        stack.callback(folder.remove)

        async def start(**kwargs: Any) -> P2P:
            p2p = await start_daemon(folder, **kwargs)
            stack.push_async_callback(p2p.shutdown)
            return p2p

        addresses = []
        for at in range(1, LEAST_RELAYS + 1):
            given = _daemon_options((), (f"/ip4/11.0.0.{at}/tcp/0",), (), False, True)
            given.pop("force_reachability", None)
            relay = await start(**given | options)
            addresses += [str(maddr) for maddr in await relay.get_visible_maddrs(latest=True)]
        home = await start(**_daemon_options(addresses, (), (), True, True))
        await home.add_binary_stream_handler(NAME, serve)
        for address in map(parse_address, addresses):
            await home._client.connect(PeerID.from_base58(address.peer), [address.maddr])
        began = time.monotonic()
        while not (places := await circuits_of(home)) and time.monotonic() - began < ADDRESS_SECONDS:
            await asyncio.sleep(0.1)
        seconds = time.monotonic() - began
        relays = {relay_of(place) for place in places}
        found = [await carried(folder, home, one) for one in addresses if parse_address(one).peer in relays]
        return seconds, found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=5)
    trials = parser.parse_args().trials
    if not may_make_namespaces():
        sys.stdout.write("skipped: needs root and iproute2 for network namespaces\n")
        return 0
    with ExitStack() as stack:
        space = Lab(stack).loopback([f"11.0.0.{at}" for at in range(1, LEAST_RELAYS + 1)])
        thread = stack.enter_context(NetworkThread())

        async def enter() -> None:
            enter_namespace(space)

        thread.run(enter())
        sys.stdout.write("| the relay's reachability | relays tried | carried 8 MiB | KiB at which others cut | s |\n")
        sys.stdout.write("| --- | --- | --- | --- | --- |\n")
        for name, options in WAYS.items():
            outcomes = [thread.run(trial(options)) for _ in range(trials)]
            found = [size for _, sizes in outcomes for size in sizes]
            cut = sorted({size // 2**10 for size in found if size < SIZE})
            slowest = max(seconds for seconds, _ in outcomes)
            whole = sum(size >= SIZE for size in found)
            sys.stdout.write(
                f"| {name} | {len(found)} | {whole} | {', '.join(map(str, cut)) or '-'} | {slowest:.1f} |\n"
            )
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""One peer of the real network as a process of its own, for tests that stop or kill it.

Prints one JSON line (address, pid of its daemon, temporary folder) when it serves, and leaves cleanly at the end of its
input. `--strangers`: it knows no member; `--upload`: bytes a second that it sends at most. `--daemon-bytes`:
a daemon with more memory is ended, and one that ended is replaced.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys

from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import PeerId
from spes_p2p.swarm.hivemind_backend import HivemindNetwork, NetworkThread, daemon
from spes_p2p.swarm.ports import Blob, anybody
from spes_p2p.swarm.stream_server import StreamLimits


class Server:
    """Echoes calls, serves as many bytes as it is asked for."""

    async def on_call(self, caller: PeerId, request: bytes) -> bytes:
        if request == b"no":
            raise RemoteProtocolError("not today")
        return caller.encode() + b":" + request

    async def on_fetch(self, caller: PeerId, request: bytes) -> Blob:
        size = int(request)
        return Blob(pattern(size), b"head")


def pattern(size: int) -> bytes:
    """Bytes that differ from chunk to chunk."""
    return b"".join(index.to_bytes(8, "big") for index in range(size // 8 + 1))[:size]


def nobody(peer: PeerId) -> bool:
    return False


async def main(initial_peers: list[str], strangers: bool, upload: float | None, daemon_bytes: int | None) -> None:
    limits = StreamLimits(upload_bytes_per_second=upload)
    network = await HivemindNetwork.start(initial_peers, host_maddrs=("/ip4/127.0.0.1/tcp/0",), limits=limits)
    try:
        await network.transport.serve(Server(), nobody if strangers else anybody)
        facts = {"address": network.transport.addresses[0], "daemon": network.daemon.pid, "folder": network.folder}
        sys.stdout.write(json.dumps(facts) + "\n")
        sys.stdout.flush()
        if daemon_bytes:
            daemon.MOST_BYTES = daemon_bytes
            living = asyncio.ensure_future(network.keep_alive(lambda text: None))
        await asyncio.to_thread(sys.stdin.read)
        if daemon_bytes:
            living.cancel()
    finally:
        await network.close()


if __name__ == "__main__":
    with NetworkThread() as thread:
        parser = argparse.ArgumentParser()
        parser.add_argument("initial_peers", nargs="*")
        parser.add_argument("--strangers", action="store_true")
        parser.add_argument("--upload", type=float)
        parser.add_argument("--daemon-bytes", type=int)
        thread.run(main(**vars(parser.parse_args())))

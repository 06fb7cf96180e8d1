"""A router of a home, in user space: those behind it reach the listed hosts outside, and nobody outside reaches them.

    ip netns exec INSIDE python tests/swarm/nat_box.py --outside SPACE --host 11.0.0.10:4001 --host 11.0.0.20:4001

It listens inside on the very addresses of those hosts, and passes each connection on from its own address outside, as a
NAT with its table of connections does. `--delay` adds that many seconds to the way of each piece. Needs root.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import os
import socket
import sys

_CLONE_NEWNET = 0x40000000
_PIECE_BYTES = 64 * 2**10
_WINDOW_PIECES = 64


def enter_namespace(name: str) -> None:
    """New sockets of this thread belong to the network namespace `name`; those that are open stay where they are."""
    with open(f"/var/run/netns/{name}") as space:
        if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), name)


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_seconds: float) -> None:
    """Passes bytes on, each piece `delay_seconds` after it came, until the end."""
    loop = asyncio.get_running_loop()
    under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_WINDOW_PIECES)

    async def deliver() -> None:
        while True:
            at, piece = await under_way.get()
            await asyncio.sleep(max(0.0, at - loop.time()))
            if not piece:
                return
            writer.write(piece)
            await writer.drain()

    delivering = loop.create_task(deliver())
    try:
        while piece := await reader.read(_PIECE_BYTES):
            await under_way.put((loop.time() + delay_seconds, piece))
            if delivering.done():
                break
        await under_way.put((loop.time() + delay_seconds, b""))
        await delivering
    except OSError:  # either end is gone: so is the connection
        delivering.cancel()
    finally:
        writer.close()


async def _serve(listening: list[socket.socket], delay_seconds: float) -> None:
    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = writer.get_extra_info("sockname")[:2]
        try:
            far_reader, far_writer = await asyncio.open_connection(host, port)
        except OSError:
            writer.transport.abort()
            return
        await asyncio.gather(
            _carry(reader, far_writer, delay_seconds), _carry(far_reader, writer, delay_seconds), return_exceptions=True
        )

    servers = [await asyncio.start_server(pass_on, sock=sock) for sock in listening]
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await asyncio.gather(*(server.serve_forever() for server in servers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--outside", required=True, help="network namespace of its other side")
    parser.add_argument("--host", action="append", required=True, help="ADDRESS:PORT outside")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds, each way")
    arguments = parser.parse_args()
    listening = []
    for text in arguments.host:
        address, port = text.rsplit(":", 1)
        listening.append(socket.create_server((address, int(port)), backlog=256))
    enter_namespace(arguments.outside)
    asyncio.run(_serve(listening, arguments.delay))


if __name__ == "__main__":
    main()

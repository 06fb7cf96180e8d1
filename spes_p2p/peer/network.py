"""A node's place in the network, by what a person chose for it. Whoever only looks at a run needs no more than this."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from spes_p2p.errors import NetworkError
from spes_p2p.limits import allow_open_files
from spes_p2p.peer.options import JoinTarget, NetworkOptions
from spes_p2p.peer.stopping import leaving_on_signals, until_stopped
from spes_p2p.swarm.hivemind_backend import HivemindNetwork, NetworkThread
from spes_p2p.swarm.stream_server import StreamLimits


async def open_network(options: NetworkOptions, identity: Path) -> HivemindNetwork:
    """Joins the DHT. Raises NetworkError, IdentityInUse or ClockSkewed, each with the fix."""
    allow_open_files()
    return await HivemindNetwork.start(
        options.initial_peers,
        options.identity_path or identity,
        options.host_maddrs,
        options.announce_maddrs,
        options.client_mode,
        StreamLimits(upload_bytes_per_second=options.max_upload, download_bytes_per_second=options.max_download),
        known_peers=options.known_peers,
    )


T = TypeVar("T")


@asynccontextmanager
async def visiting(run: JoinTarget) -> AsyncIterator[HivemindNetwork]:
    """The network of a run, with a throw-away identity, until the block ends. Raises NetworkError, ClockSkewed."""
    with TemporaryDirectory(prefix="spes-p2p-visit-") as folder:
        network = await _open(run, Path(folder) / "identity.key")
        try:
            yield network
        finally:
            await network.close()


async def _open(run: JoinTarget, identity: Path) -> HivemindNetwork:
    """Names the folder that the addresses are from."""
    try:
        return await open_network(NetworkOptions(run.addresses, client_mode=True), identity)
    except NetworkError as error:
        if run.folder is None:
            raise
        raise NetworkError(
            f"no node of run {run.run_id or 'that is meant'} (folder {run.folder}) can be reached: {error}",
            fix="start its bootstrap node again; for another run give its folder with --folder",
        ) from error


def visit(
    run: JoinTarget,
    work: Callable[[HivemindNetwork], Coroutine[Any, Any, T]],
    say: Callable[[str], None] = lambda text: None,
) -> T:
    """The result of `work(network)`, on a thread of its own. Raises Stopped on Ctrl-C, and what `visiting` raises."""

    async def look() -> T:
        async with visiting(run) as network:
            return await work(network)

    with NetworkThread() as thread:
        stop = asyncio.Event()
        with leaving_on_signals(lambda: thread.loop.call_soon_threadsafe(stop.set), say):
            return thread.run(until_stopped(stop, look()))

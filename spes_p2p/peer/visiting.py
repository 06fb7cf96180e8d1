"""A look at a live run by a program that takes no part in it: a network with a throw-away identity."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from spes_p2p.errors import NetworkError
from spes_p2p.peer.network import open_network
from spes_p2p.peer.options import JoinTarget, NetworkOptions
from spes_p2p.peer.stopping import leaving_on_signals, until_stopped
from spes_p2p.swarm.hivemind_backend import HivemindNetwork, NetworkThread

T = TypeVar("T")


@asynccontextmanager
async def visiting(run: JoinTarget) -> AsyncIterator[HivemindNetwork]:
    """The network of a run, until the block ends. Raises NetworkError, ClockSkewed."""
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

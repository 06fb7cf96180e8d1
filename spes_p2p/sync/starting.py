"""What a run started from, fetched: genesis, and the state where it is not made from the seed.

A newcomer fetches that state before it takes part.

So the run does not begin with peers that are still downloading. Where it has begun already, the newest state is what a
newcomer needs; then a base of zeros stands in until that is fetched (see `joining`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable

import numpy as np

from spes_p2p.consensus.certificate import CheckSignature
from spes_p2p.consensus.messages import Commit
from spes_p2p.errors import NetworkError, RemoteProtocolError
from spes_p2p.exchange.patience import first_good
from spes_p2p.exchange.transfers import InThread, Transfers, fill_state
from spes_p2p.ids import Hash, PeerId
from spes_p2p.observe.metrics import bytes_text
from spes_p2p.state.layout import VALUE_BYTES, Tile, Values
from spes_p2p.state.store import StateStore
from spes_p2p.swarm.ports import Transport
from spes_p2p.sync.catch_up import commits_from
from spes_p2p.sync.genesis import check_genesis
from spes_p2p.sync.node import Run

TELL_SECONDS = 60.0
"""A person who waits for the run to begin, or for its first state, is told so this often."""
Sources = Callable[[], Awaitable[Iterable[PeerId]]]


async def fetch_start(
    run: Run, store: StateStore, transport: Transport, sources: Sources, in_thread: InThread, say: Callable[[str], None]
) -> None:
    """Puts the state that a run starts from into an empty store as round 0, or zeros where the run has begun.

    Asks again until somebody gives it, as one waits for genesis. Raises StorageFull.
    """
    root, transfers = Hash(bytes.fromhex(run.config.run.initial_state)), run.transfers(transport)
    size = bytes_text(store.layout.num_values * VALUE_BYTES)
    say(f"fetching the state that the run starts from ({size})")
    loop, told, last = asyncio.get_running_loop(), float("-inf"), ""
    while True:
        holders = tuple(await sources())
        with contextlib.suppress(NetworkError):
            await _genesis(transfers, holders)
            await in_thread(lambda: store.create_initial(zeros))
            return
        try:
            await _fetch(store, root, transfers, holders, in_thread)
            return
        except (NetworkError, RemoteProtocolError) as error:
            text = f"the state that the run starts from could not be fetched yet: {error}"
            if text != last and loop.time() >= told + TELL_SECONDS:  # a stranger says another thing each time
                told, last = loop.time(), text
                say(text)
        await asyncio.sleep(run.heartbeat_seconds)


async def fetch_genesis(run: Run, transport: Transport, check: CheckSignature, sources: Sources) -> Commit:
    """Genesis, checked, as soon as somebody has it; for who takes no part, and so brings none about."""
    transfers = run.transfers(transport)
    while True:
        with contextlib.suppress(NetworkError):  # they wait as we do, or are gone
            return await _genesis(transfers, await sources(), lambda commit: check_genesis(commit, run.info, check))
        await asyncio.sleep(run.heartbeat_seconds)


async def _genesis(
    transfers: Transfers, holders: Iterable[PeerId], check: Callable[[Commit], None] = lambda commit: None
) -> Commit:
    """From the first that has one which `check` does not refuse. Raises NetworkError."""

    async def ask(holder: PeerId) -> Commit:
        part = await commits_from(transfers, holder, 0)
        if not part:
            raise RemoteProtocolError("the run has not begun there")
        check(part[0])
        return part[0]

    return await first_good(holders, ask, "no peer has genesis")


async def _fetch(
    store: StateStore, root: Hash, transfers: Transfers, holders: tuple[PeerId, ...], in_thread: InThread
) -> None:
    wanted = dict(enumerate(await transfers.hash_list(holders, root, 0)))
    staging = store.staged(0) or store.stage(0, None)  # of a try before
    await fill_state(staging, wanted, store, transfers, holders, in_thread)
    await in_thread(staging.finish)
    await in_thread(staging.publish)


def zeros(tile: Tile) -> Values:
    """Stands in for a start that nobody needs any more, as the base of what is fetched."""
    return np.zeros(tile.size, np.float32)

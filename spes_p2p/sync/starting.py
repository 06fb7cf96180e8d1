"""What a run started from, fetched: genesis, and the state where it is not made from the seed.

A newcomer fetches that state before it takes part.

So the run does not begin with peers that are still downloading. Where it has begun already, the newest state is what a
newcomer needs; then a base of zeros stands in until that is fetched (see `joining`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

import numpy as np

from spes_p2p.consensus.certificate import CheckSignature
from spes_p2p.consensus.messages import Commit
from spes_p2p.errors import NetworkError, RemoteProtocolError
from spes_p2p.exchange.transfers import InThread, Transfers, fill_state
from spes_p2p.ids import Hash, PeerId, short
from spes_p2p.observe.metrics import bytes_text
from spes_p2p.state.layout import VALUE_BYTES, Tile, Values
from spes_p2p.state.store import StateStore
from spes_p2p.swarm.ports import Transport
from spes_p2p.sync.catch_up import commits_from
from spes_p2p.sync.genesis import check_genesis
from spes_p2p.sync.node import Run

T = TypeVar("T")
TELL_SECONDS = 60.0
"""A person who waits for the run to begin, or for its first state, is told so this often."""
STRAGGLER_SECONDS = 2.0
"""Once one has said that it has that state, others get this much more to say so, or longer where it gives no tiles."""
Sources = Callable[[], Awaitable[Iterable[PeerId]]]


async def fetch_start(
    run: Run,
    store: StateStore,
    transport: Transport,
    check: CheckSignature,
    sources: Sources,
    in_thread: InThread,
    say: Callable[[str], None],
) -> None:
    """Puts the state that a run starts from into an empty store as round 0, or zeros where the run has begun.

    Asks again until somebody gives it, as one waits for genesis. `in_thread` ends with its thread. Raises StorageFull.
    """
    root, transfers = Hash(bytes.fromhex(run.config.run.initial_state)), run.transfers(transport)
    size = bytes_text(store.layout.num_values * VALUE_BYTES)
    say(f"fetching the state that the run starts from ({size})")
    loop, told, last = asyncio.get_running_loop(), float("-inf"), ""
    while True:
        holders = tuple(await sources())
        try:
            # beside each other: of those who are asked for genesis some may never be done, and there may be none yet
            begun, state = _genesis(run, transport, check, holders), _fetch(store, root, transfers, holders, in_thread)
            await _answers((begun, state), "nobody gave it")
            if store.latest() is None:
                await in_thread(lambda: store.create_initial(zeros))
            return
        except (NetworkError, RemoteProtocolError) as error:
            text = f"the state that the run starts from could not be fetched yet: {error}"
            if text != last and loop.time() >= told + TELL_SECONDS:  # a stranger says another thing each time
                told, last = loop.time(), text
                say(text)
        await asyncio.sleep(run.heartbeat_seconds)


async def fetch_genesis(run: Run, transport: Transport, check: CheckSignature, sources: Sources) -> Commit:
    """Genesis, checked, as soon as somebody has it; for who takes no part, and so brings none about."""
    while True:
        with contextlib.suppress(NetworkError):  # they wait as we do, or are gone
            return await _genesis(run, transport, check, await sources())
        await asyncio.sleep(run.heartbeat_seconds)


async def _genesis(run: Run, transport: Transport, check: CheckSignature, holders: Iterable[PeerId]) -> Commit:
    """Checked, from the first that gives it. Raises NetworkError."""

    async def ask(holder: PeerId) -> Commit:
        part = await commits_from(run.transfers(transport), holder, 0)  # some may never be done with their streams
        if not part:
            raise RemoteProtocolError("the run has not begun there")
        check_genesis(part[0], run.info, check)
        return part[0]

    return (await _answers(map(ask, holders), "no peer has genesis"))[0]


async def _fetch(
    store: StateStore, root: Hash, transfers: Transfers, holders: tuple[PeerId, ...], in_thread: InThread
) -> None:
    async def ask(holder: PeerId) -> tuple[PeerId, tuple[Hash, ...]]:
        return holder, await transfers.hash_list((holder,), root, 0)

    more_seconds = STRAGGLER_SECONDS
    while True:
        # who has the state gives its hashes at once; of others no tile is asked, since they may never be done
        lists = await _answers(map(ask, holders), f"nobody has state {short(root)}", more_seconds)
        staging = store.staged(0) or store.stage(0, None)  # of a try before
        wanted = dict(enumerate(lists[0][1]))
        try:
            await fill_state(staging, wanted, store, transfers, [holder for holder, _ in lists], in_thread)
            break
        except NetworkError:  # the first may have hashes only, and who has tiles a slow link
            if more_seconds > transfers.LEAST_SECONDS:
                raise
            more_seconds *= 4
    await in_thread(staging.finish)
    await in_thread(staging.publish)


async def _answers(works: Iterable[Coroutine[Any, Any, T]], failure: str, more_seconds: float = 0.0) -> list[T]:
    """What those of `works` give that end well: the first, and who does within `more_seconds` after it. The others are
    ended. Raises NetworkError where none does.
    """
    waiting = tasks = [asyncio.create_task(work) for work in works]
    found, reasons = list[T](), list[str]()

    async def wait(seconds: float | None, until: str) -> list[asyncio.Task[T]]:
        done, _ = await asyncio.wait(waiting, timeout=seconds, return_when=until)
        for task in (task for task in waiting if task in done):
            try:
                found.append(task.result())
            except (NetworkError, RemoteProtocolError) as error:
                reasons.append(str(error))
        return [task for task in waiting if task not in done]

    try:
        while waiting and not found:
            waiting = await wait(None, asyncio.FIRST_COMPLETED)
        if waiting and more_seconds:
            await wait(more_seconds, asyncio.ALL_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if not found:
        raise NetworkError(f"{failure} ({'; '.join(dict.fromkeys(reasons)) or 'nobody to ask'})")
    return found


def zeros(tile: Tile) -> Values:
    """Stands in for a start that nobody needs any more, as the base of what is fetched."""
    return np.zeros(tile.size, np.float32)

"""What a run started from, fetched: genesis, and the state where it is not made from the seed.

A newcomer fetches that state before it takes part.

So the run does not begin with peers that are still downloading. Where it has begun already, the newest state is what a
newcomer needs; then a base of zeros stands in until that is fetched (see `joining`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

import numpy as np

from spes_p2p.consensus.certificate import CheckSignature
from spes_p2p.consensus.messages import Commit
from spes_p2p.errors import NetworkError, RemoteProtocolError
from spes_p2p.exchange.transfers import InThread, fill_state
from spes_p2p.ids import Hash, PeerId
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
    root = Hash(bytes.fromhex(run.config.run.initial_state))
    say(f"fetching the state that the run starts from ({bytes_text(store.layout.num_values * VALUE_BYTES)})")
    works: list[asyncio.Task[Any]] = [
        asyncio.create_task(fetch_genesis(run, transport, check, sources)),
        asyncio.create_task(_fetch(run, store, root, transport, sources, in_thread, say)),
    ]
    try:
        done, _ = await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)
        for work in done:
            work.result()
    finally:
        await end_all(works)
    if store.latest() is None:
        await in_thread(lambda: store.create_initial(zeros))


async def fetch_genesis(run: Run, transport: Transport, check: CheckSignature, sources: Sources) -> Commit:
    """Genesis, checked, as soon as somebody has it; for who takes no part, and so brings none about."""

    async def ask(holder: PeerId) -> Commit:
        part = await commits_from(run.transfers(transport), holder, 0)
        if not part:
            raise RemoteProtocolError("the run has not begun there")
        check_genesis(part[0], run.info, check)
        return part[0]

    return (await _answers(run, sources, ask))[0]


async def _fetch(
    run: Run,
    store: StateStore,
    root: Hash,
    transport: Transport,
    sources: Sources,
    in_thread: InThread,
    say: Callable[[str], None],
) -> None:
    transfers = run.transfers(transport)
    loop, told, last = asyncio.get_running_loop(), float("-inf"), ""

    def tell(reasons: str) -> None:
        nonlocal told, last
        text = f"the state that the run starts from could not be fetched yet: {reasons}"
        if text != last and loop.time() >= told + TELL_SECONDS:  # a stranger says another thing each time
            told, last = loop.time(), text
            say(text)

    async def ask(holder: PeerId) -> tuple[PeerId, tuple[Hash, ...]]:
        return holder, await run.transfers(transport).hash_list((holder,), root, 0)

    more_seconds = STRAGGLER_SECONDS
    while True:
        # who has the state gives its hashes at once; of others no tile is asked, since they may never be done
        lists = await _answers(run, sources, ask, tell, more_seconds)
        staging = store.staged(0) or store.stage(0, None)  # of a try before
        wanted = dict(enumerate(lists[0][1]))
        try:
            await fill_state(staging, wanted, store, transfers, [holder for holder, _ in lists], in_thread)
            break
        except (NetworkError, RemoteProtocolError) as error:
            tell(str(error))
            more_seconds = min(4 * more_seconds, 2 * transfers.LEAST_SECONDS)  # some have hashes only, some slow links
        await asyncio.sleep(run.heartbeat_seconds)
    await in_thread(staging.finish)
    await in_thread(staging.publish)


async def _answers(
    run: Run,
    sources: Sources,
    ask: Callable[[PeerId], Awaitable[T]],
    tell: Callable[[str], None] = lambda reasons: None,
    more_seconds: float = 0.0,
) -> list[T]:
    """What `ask` brings from those who have it: from the first, and from who gives it within `more_seconds` after it.

    Who has nothing yet is asked again with each heartbeat, while others have yet to answer: some may never be done, so
    `ask` must use streams of its own for each. `tell` is told why nobody has it.
    """
    asking: dict[PeerId, asyncio.Task[T | None]] = {}
    reasons = list[str]()

    async def unfailing(holder: PeerId) -> T | None:
        try:
            return await ask(holder)
        except (NetworkError, RemoteProtocolError) as error:
            reasons.append(str(error))
            return None

    try:
        while True:
            for holder in await sources():
                if holder not in asking:
                    asking[holder] = asyncio.create_task(unfailing(holder))
            if (first := await first_answer(asking, run.heartbeat_seconds)) is not None:
                break
            tell("; ".join(dict.fromkeys(reasons)) or "nobody has answered")
            reasons.clear()
        if asking:
            await asyncio.wait(asking.values(), timeout=more_seconds)
        more = (task.result() for task in asking.values() if task.done())
        return [first, *(one for one in more if one is not None)]
    finally:
        await end_all(asking.values())


async def first_answer(asking: dict[PeerId, asyncio.Task[T | None]], seconds: float) -> T | None:
    """What one of those who are asked has given within `seconds`; those who have answered are taken out."""
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    while (left := until - loop.time()) > 0:
        if not asking:
            await asyncio.sleep(left)
            break
        await asyncio.wait(asking.values(), timeout=left, return_when=asyncio.FIRST_COMPLETED)
        for peer in [peer for peer, task in asking.items() if task.done()]:
            if (answer := asking.pop(peer).result()) is not None:
                return answer
    return None


async def end_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels them, and waits until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def zeros(tile: Tile) -> Values:
    """Stands in for a start that nobody needs any more, as the base of what is fetched."""
    return np.zeros(tile.size, np.float32)

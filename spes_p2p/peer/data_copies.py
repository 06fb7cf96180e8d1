"""Fetches what `data/copies.py` wants to be kept for the others: beside everything else, and after it.

One answer at a time, and after each one a rest that is REST times longer, so that a part of the link is used, however
fast it is. While a round is synced, or data for training is on its way, nothing is asked for, and what is on its way is
given up. Runs on the network's loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from spes_p2p.data.copies import Copies, Wanted
from spes_p2p.data.feed import Feed
from spes_p2p.data.held import Held
from spes_p2p.data.leases import Leases
from spes_p2p.errors import NetworkError
from spes_p2p.exchange.piece_fetcher import PieceFetcher
from spes_p2p.exchange.pieces import MAX_GIVEN
from spes_p2p.ids import PeerId
from spes_p2p.sync.catch_up import InThread

T = TypeVar("T")
REST = 3
"""After an answer, fetching rests for this many times as long as the answer took."""
LOOK_SECONDS = 5.0
"""How often the others' records are read again."""
PAUSE_SECONDS = 1.0
"""Seconds to wait after an attempt that fetched nothing."""
GLANCE_SECONDS = 0.1
LONGEST_WAIT_SECONDS = 120.0
"""Longest time without any fetch, since with `sync.overlap` a round may be under way all the time."""


@dataclass(frozen=True)
class Surroundings:
    """What is known of the run at the moment. `peers`: those of `held` that are no bootstrap nodes."""

    leases: Leases
    held: Mapping[PeerId, Held]
    peers: frozenset[PeerId]


class DataCopies:
    """Keeps copies as long as `run` runs. `is_busy`: the link is needed for the round."""

    def __init__(
        self,
        feed: Feed,
        copies: Copies,
        fetcher: PieceFetcher,
        look: Callable[[], Surroundings],
        is_busy: Callable[[], bool],
        in_thread: InThread,
    ) -> None:
        self._feed, self._copies, self._fetcher = feed, copies, fetcher
        self._look, self._link_is_busy, self._in_thread = look, is_busy, in_thread

    async def run(self) -> None:
        """For ever; what others do wrong is tried again."""
        looked_at = float("-inf")
        while True:
            if self._now() - looked_at >= LOOK_SECONDS:
                around, looked_at = self._look(), self._now()
                await self._in_thread(partial(self._copies.look, around.leases, around.held, around.peers))
            wanted = await self._in_thread(partial(self._copies.next, MAX_GIVEN))
            if wanted is not None and not wanted.pieces:
                continue
            if wanted is None or not await self._fetch(wanted):
                await asyncio.sleep(max(GLANCE_SECONDS, looked_at + LOOK_SECONDS - self._now()))

    async def _fetch(self, wanted: Wanted) -> bool:
        """Whether there may be more to fetch at once; rests before."""
        is_patient = await self._wait_for_link()
        began = self._now()
        task = asyncio.get_running_loop().create_task(
            self._fetcher.fetch(wanted.pieces, self._take, among=wanted.holders)
        )
        try:
            while not (await asyncio.wait((task,), timeout=GLANCE_SECONDS))[0]:
                if is_patient and self._is_busy():
                    return True
            task.result()
        except NetworkError:
            self._copies.put_off(wanted)
        finally:
            task.cancel()
            await asyncio.wait((task,))
        took, came = self._now() - began, bool(self._feed.cache.has(np.array(wanted.pieces)).any())
        await asyncio.sleep(REST * took if came else PAUSE_SECONDS)
        return came or bool(wanted.spans)

    async def _wait_for_link(self) -> bool:
        """Whether it is free now; False where that takes too long."""
        until = self._now() + LONGEST_WAIT_SECONDS
        while self._is_busy():
            if self._now() >= until:
                return False
            await asyncio.sleep(GLANCE_SECONDS)
        return True

    def _is_busy(self) -> bool:
        return self._link_is_busy() or (not self._feed.trouble and bool(self._feed.missing(1).pieces))

    def _take(self, pieces: Sequence[tuple[int, bytes]]) -> None:
        for piece, joined in pieces:
            self._feed.take(piece, joined)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

"""The run's data for a peer that brings none: the pieces of what it is leased, fetched ahead beside everything else.

Runs on the network's loop. Training meets it in `data/feed.py` and never waits for it longer than it must.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from spes_p2p.data.feed import Feed
from spes_p2p.data.pieces import Catalogue
from spes_p2p.errors import DataError, NetworkError, RemoteProtocolError
from spes_p2p.exchange.piece_fetcher import PieceFetcher
from spes_p2p.files import write_whole
from spes_p2p.ids import Hash
from spes_p2p.sync.genesis import RunInfo

DATA = "data"
"""Folder of the cache, in the node's folder."""
CATALOGUE_FILE = "catalogue"
PIECES_A_PASS = 1024
PAUSE_SECONDS = 1.0
LOOK_SECONDS = 30.0


class DataFeed:
    """Keeps a feed filled, as long as `run` runs."""

    def __init__(self, feed: Feed, fetcher: PieceFetcher) -> None:
        self._feed = feed
        self._fetcher = fetcher
        self._news = asyncio.Event()
        self._current: asyncio.Task[None] | None = None
        self._is_urgent = False

    async def run(self) -> None:
        """For ever; what others do wrong is tried again."""
        loop = asyncio.get_running_loop()
        self._feed.changed = lambda: _call(loop, self._wake)
        try:
            while True:
                self._news.clear()
                missing = self._feed.missing(PIECES_A_PASS)
                if missing.pieces:
                    await self._pass(missing.pieces, missing.urgent)
                else:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(LOOK_SECONDS):
                            await self._news.wait()
        finally:
            self._feed.changed = lambda: None

    async def _pass(self, pieces: Sequence[int], urgent: int) -> None:
        """Fetches these; broken off when training begins to wait for others."""
        self._is_urgent = urgent > 0
        self._current = asyncio.get_running_loop().create_task(self._fetcher.fetch(pieces, self._feed.take, urgent))
        try:
            await asyncio.wait((self._current,))
            if not self._current.cancelled():
                self._current.result()
            self._feed.trouble = ""
        except NetworkError as error:
            self._feed.trouble = str(error)
            await asyncio.sleep(PAUSE_SECONDS)
        finally:
            self._current.cancel()
            await asyncio.wait((self._current,))
            self._current = None

    def _wake(self) -> None:
        self._news.set()
        if self._current is not None and not self._is_urgent and self._feed.missing(1).urgent:
            self._current.cancel()


def _call(loop: asyncio.AbstractEventLoop, what: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended, and with it all fetching
        loop.call_soon_threadsafe(what)


def check_dataset(found: Hash, path: str, info: RunInfo) -> None:
    """Raises DataError where what lies at `path` is not the run's dataset."""
    if found != info.dataset:
        raise DataError(
            f"the data in {path} has hash {found.hex()[:16]}, but the run trains on {info.dataset.hex()[:16]}",
            fix="leave --data out (the data then comes from other peers), use the organiser's shards, or train on "
            "your own with data.source=local",
        )


def kept_catalogue(folder: Path, dataset: Hash) -> Catalogue | None:
    """The catalogue that an earlier life fetched, if it is of this dataset."""
    try:
        return Catalogue.checked((folder / CATALOGUE_FILE).read_bytes(), dataset)
    except (OSError, RemoteProtocolError):  # none, or a damaged one: it is fetched again
        return None


def keep_catalogue(folder: Path, packed: bytes) -> None:
    """For a later life, which may find nobody to ask. Raises StorageFull."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / CATALOGUE_FILE, packed)

"""The run's data at one peer: what it has, what it fetches, and what it answers. Runs on the network's loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np

from spes_p2p.consensus.actions import Notice
from spes_p2p.data.copies import Copies, Wanted
from spes_p2p.data.feed import Feed, PieceDataset
from spes_p2p.data.held import Held
from spes_p2p.data.leases import Leases
from spes_p2p.data.loader import spans_of
from spes_p2p.data.piece_cache import PieceCache
from spes_p2p.data.pieces import PieceGrid
from spes_p2p.data.web_shards import WebMirrors
from spes_p2p.errors import NetworkError
from spes_p2p.exchange.piece_fetcher import DataHolders, PieceFetcher, fetch_catalogue
from spes_p2p.exchange.pieces import MAX_GIVEN, DataTraffic, PieceServing, PieceSource, held_by
from spes_p2p.exchange.requests import DataRequest
from spes_p2p.exchange.transfers import InThread
from spes_p2p.ids import PeerId
from spes_p2p.observe.live import TRAINING
from spes_p2p.observe.metrics import bytes_text
from spes_p2p.peer.data_feed import DATA, DataFeed, keep_catalogue, kept_catalogue
from spes_p2p.peer.entrance import ANSWER_SECONDS, FoundRun, Say
from spes_p2p.peer.options import PeerOptions
from spes_p2p.peer.phases import phase_of
from spes_p2p.peer.web_data import mirrors_of
from spes_p2p.swarm.hivemind_backend import HivemindNetwork
from spes_p2p.swarm.ports import Blob
from spes_p2p.swarm.records import PeerRecord
from spes_p2p.sync.driver import Driver
from spes_p2p.sync.sealing import EnvelopeChecker
from spes_p2p.sync.tasks import Tasks
from spes_p2p.sync.web_sources import SourceKeeper
from spes_p2p.wire import pack

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


@dataclass(eq=False)
class DataCopies:
    """Keeps copies as long as `run` runs. `is_busy`: the link is needed for the round."""

    _feed: Feed
    _copies: Copies
    _fetcher: PieceFetcher
    _look: Callable[[], Surroundings]
    _link_is_busy: Callable[[], bool]
    _in_thread: InThread

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
            self._fetcher.fetch(wanted.pieces, self._feed.take, among=wanted.holders)
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

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


class DataSupply:
    """Nothing is here before `open_feed`, or before `serve` was told where pieces are."""

    def __init__(
        self,
        network: HivemindNetwork,
        found: FoundRun,
        options: PeerOptions,
        traffic: DataTraffic,
        notice: Callable[[Notice], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self.traffic = traffic
        self._network = network
        self._found = found
        self._run = found.run
        self._options = options
        self._folder = options.folder / DATA
        self._notice = notice
        self._tasks = Tasks(failed)
        check = EnvelopeChecker(network.verifier).check
        self._web_sources = SourceKeeper(found.run.info, check, self._folder)
        self._known: Callable[[], Mapping[PeerId, PeerRecord]] = dict
        self._source: PieceSource | None = None
        self._feed: Feed | None = None
        self._copies: Copies | None = None
        self._web: WebMirrors | None = None
        self.driver: Driver | None = None
        """There once the peer takes part."""

    def serve(self, source: PieceSource) -> None:
        """From `start` on others get pieces of the run's dataset from here."""
        self._source = source

    async def open_feed(self, say: Say, warn: Say) -> Feed:
        """The run's dataset, of which pieces come from others from `start` on. Raises NetworkError."""
        dataset, organiser = self._run.info.dataset, self._run.info.organiser
        catalogue = kept_catalogue(self._folder, dataset)
        if catalogue is None:
            holders = [organiser, *(peer for peer in self._found.publishers if peer != organiser)]
            catalogue = await fetch_catalogue(self._network.transport, dataset, holders, ANSWER_SECONDS, self._tell)
            keep_catalogue(self._folder, pack(catalogue))
        grid, most = PieceGrid(catalogue), self._options.max_data_disk
        whole = grid.tokens * grid.item_bytes
        kept = "all of it" if whole <= most else f"at most {bytes_text(most)} of it"
        say(f"data comes from other peers: {bytes_text(whole)} in total; {kept} may be kept here")
        self._feed = Feed(await asyncio.to_thread(partial(PieceCache, self._folder, grid, most)), warn)
        self.serve(self._feed.cache)
        return self._feed

    def start(self, known: Callable[[], Mapping[PeerId, PeerRecord]]) -> None:
        """Pieces are fetched from now on, also while the run has not begun: what is held out is needed in any case.

        `known` are the newest records of the run's nodes.
        """
        if self._source is None:
            return
        self._known, transport = known, self._network.transport
        self._tasks.spawn(self._web_sources.look_on(transport, lambda: tuple(known()), lambda: self._run.stall_seconds))
        if self._feed is None:
            return
        self._web = mirrors_of(
            self._web_sources, self._feed.grid, self._options.web_data, self._run.config.data.urls, self.traffic,
            transport.traffic.download, self._notice,
        )  # fmt: skip
        fetcher = PieceFetcher(
            transport, self._feed.grid, DataHolders(self._run.info.organiser, self._holders, self._web), self._tell,
            self.traffic, lambda: self._run.stall_seconds, self._tasks.in_thread,
        )  # fmt: skip
        self._tasks.spawn(DataFeed(self._feed, fetcher).run())
        spans = spans_of(PieceDataset(self._feed), self._run.config)
        self._copies = Copies(self._feed, spans, self._network.signer.peer_id, self._run.config.data.copies)
        copying = DataCopies(
            self._feed, self._copies, fetcher, self._surroundings, self._is_syncing, self._tasks.in_thread
        )
        self._tasks.spawn(copying.run())

    def answers(self) -> Callable[[DataRequest], Blob] | None:
        """For who asks this peer for data; None where it has none."""
        if self._source is None:
            return None
        return PieceServing(self._source, self.traffic, lambda: self._web_sources.packed).answer

    @property
    def pieces(self) -> int:
        """How many are here."""
        return self._source.held if self._source is not None else 0

    def held(self) -> Held:
        """What this peer tells others that it has."""
        held = self._copies.held if self._copies is not None else held_by(self._source)
        return replace(held, web=self._source is not None and bool(self._web_sources.urls))

    def _tell(self, peer: PeerId, text: str) -> None:
        self._notice(Notice("data", text, peer))

    def _holders(self) -> dict[PeerId, int]:
        return {peer: record.data_pieces for peer, record in self._known().items()}

    def _surroundings(self) -> Surroundings:
        others = {peer: record for peer, record in self._known().items() if peer != self._network.signer.peer_id}
        held = {peer: record.held for peer, record in others.items()}
        peers = frozenset(peer for peer, record in others.items() if record.role == "peer")
        return Surroundings(self.driver.core.tip.leases if self.driver else Leases(), held, peers)

    def _is_syncing(self) -> bool:
        """Or fetching the state of a run that has begun."""
        if self.driver is None:
            return self._found.round > 0
        return phase_of(self.driver.core.state.round) != TRAINING

    async def close(self) -> None:
        """Ends the fetching; what is on disk stays."""
        await self._tasks.stop()
        if self._web is not None:
            await self._web.close()
        if self._feed is not None:
            self._feed.cache.close()

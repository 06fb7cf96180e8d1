"""The whole way of data into a peer that brings none, on the in-memory network: ahead, urgent, bounded, again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from spes_p2p.data.feed import Feed, PieceDataset
from spes_p2p.data.loader import LeasedLoader
from spes_p2p.data.piece_cache import PieceCache
from spes_p2p.data.trees import FolderPieces
from spes_p2p.errors import NetworkError
from spes_p2p.exchange.piece_fetcher import DataHolders, PieceFetcher
from spes_p2p.exchange.pieces import DataTraffic, EmptyShelf, PieceServing, PieceSource
from spes_p2p.exchange.requests import DataRequest, unpack_request
from spes_p2p.ids import PeerId, sha256
from spes_p2p.peer.data_feed import CATALOGUE_FILE, DataFeed, keep_catalogue, kept_catalogue
from spes_p2p.swarm.memory_backend import MemoryNetwork
from spes_p2p.swarm.memory_links import LinkShape
from spes_p2p.swarm.ports import Blob
from spes_p2p.wire import pack
from tests.data.conftest import tiny_config
from tests.data.piece_makers import make_dataset, make_pieces
from tests.simulation.virtual_time import run_virtual

T = TypeVar("T")
BOOT = PeerId("boot")
TOKENS = (1000, 1400)
CONFIG = tiny_config("optimizer.batch_sequences=10", "model.vocab_size=5000")
"""Sequences of 4 tokens, ten a batch; pieces have 8."""


class Shelf:
    """Serves a shelf, and counts what it gave."""

    def __init__(self, shelf: PieceSource) -> None:
        self.traffic = DataTraffic()
        self._serving = PieceServing(shelf, self.traffic)

    async def on_call(self, caller: PeerId, request: bytes) -> bytes:
        return b""

    async def on_fetch(self, caller: PeerId, request: bytes) -> Blob:
        asked = unpack_request(request)
        assert isinstance(asked, DataRequest)
        return self._serving.answer(asked)


class OpenWeb:
    """Web servers with all of the data, as the real ones look to who fetches; counts what leaves them."""

    def __init__(self, whole: FolderPieces) -> None:
        self.can_be_asked, self.trouble = True, ""
        self.given: list[int] = []
        self._whole = whole

    async def pieces(self, numbers: Sequence[int]) -> list[tuple[int, bytes]]:
        await asyncio.sleep(0.05)
        if not self.can_be_asked:
            raise NetworkError("gone")
        self.given += numbers
        return [(number, joined) for number in numbers if (joined := self._whole.find(number)) is not None]


class Volunteer:
    """A peer without data: cache, feed, loader and fetching, as `Connection` puts them together."""

    def __init__(self, site: Site, name: str, slots: int = 10**6, web: OpenWeb | None = None) -> None:
        self.name = PeerId(name)
        self.said: list[str] = []
        size = slots * (site.whole.grid.max_bytes + 8)
        self.feed = Feed(PieceCache(site.folder / name, site.whole.grid, size), self.said.append)
        self.loader = LeasedLoader(PieceDataset(self.feed), CONFIG)
        transport = site.network.peer(name).transport
        self.fetcher = PieceFetcher(
            transport, site.whole.grid, DataHolders(BOOT, lambda: site.held(self.name), web), lambda *_: None,
            DataTraffic(), lambda: 5.0, in_place,
        )  # fmt: skip
        self._task = asyncio.get_running_loop().create_task(DataFeed(self.feed, self.fetcher).run())
        self.given = Shelf(self.feed.cache)
        site.volunteers[self.name] = self

    def lease(self, start: int, stop: int) -> None:
        self.loader.load_state_dict({"ranges": [[start, stop]], "offset": 0})

    async def train(self, batches: int, most_seconds: float = 60.0) -> float:
        """Reads so many batches; the longest wait for one in virtual seconds."""
        longest = 0.0
        for _ in range(batches):
            began = now()
            while not self.loader.wait_for_data(10, lambda: True):
                self.want()
                await asyncio.sleep(0.05)
                assert now() - began < most_seconds
            longest = max(longest, now() - began)
            batch = self.loader.next_batch(10)
            assert (batch.tokens == batch.tokens[:, :1] + np.arange(4)).all()
        return longest

    def want(self) -> None:
        """A blocking wait cannot stand on a virtual clock: `wait` gives up at once, so urgency is set by hand."""
        wanted = self.loader._order.sequences_at(self.loader._next_positions(10))
        self.feed._fill(self.feed.grid.of_tokens(wanted * 4, 4).tolist())

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.wait((self._task,))
        self.feed.cache.close()


class Site:
    """A bootstrap node with data."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.network = MemoryNetwork(5)
        self.whole: FolderPieces = make_pieces(folder / "whole", TOKENS)
        self.boot = Shelf(self.whole)
        self.volunteers: dict[PeerId, Volunteer] = {}
        self.boot_pieces: int | None = None

    async def start_without_data(self) -> None:
        """The bootstrap node knows what the dataset is, and has none of it."""
        self.boot = Shelf(EmptyShelf(self.whole.grid))
        self.boot_pieces = 0
        await self.start()

    def held(self, asker: PeerId) -> dict[PeerId, int]:
        """As peers say it in their records."""
        held = {name: one.feed.cache.held for name, one in self.volunteers.items() if name != asker}
        return held | ({} if self.boot_pieces is None else {BOOT: self.boot_pieces})

    async def start(self) -> None:
        await self.network.peer(BOOT).transport.serve(self.boot)


async def in_place(work: Callable[[], T]) -> T:
    return work()


def now() -> float:
    return asyncio.get_running_loop().time()


def play(folder: Path, story: Callable[[Site], Awaitable[None]], has_data: bool = True) -> None:
    async def main() -> None:
        site = Site(folder)
        await (site.start() if has_data else site.start_without_data())
        await story(site)
        for one in site.volunteers.values():
            await one.stop()

    run_virtual(main())


def test_a_lease_is_fetched_ahead_and_training_waits_only_at_the_start(tmp_path: Path) -> None:
    async def story(site: Site) -> None:
        one = Volunteer(site, "a")
        one.lease(0, 200)
        assert await one.train(1) < 2.0
        await asyncio.sleep(10)
        assert await one.train(19) == 0.0
        assert one.feed.missing(100).pieces == ()
        one.lease(200, 400)
        await asyncio.sleep(10)
        assert await one.train(20) == 0.0

    play(tmp_path, story)


def test_what_training_waits_for_overtakes_what_is_fetched_ahead(tmp_path: Path) -> None:
    async def story(site: Site) -> None:
        site.network.set_link(BOOT, None, LinkShape(bytes_per_second=4_000))
        one = Volunteer(site, "a")
        one.lease(0, 600)
        await asyncio.sleep(0.5)
        one.lease(300, 310)
        one.lease(300, 600)
        took = await one.train(1)
        assert took < 0.5 * 300 * site.whole.grid.max_bytes / 4_000  # half of the time for all that was leased at first

    play(tmp_path, story)


def test_two_peers_give_each_other_what_they_have(tmp_path: Path) -> None:
    async def story(site: Site) -> None:
        both = [Volunteer(site, name) for name in ("a", "b")]
        for one in both:
            await site.network.peer(one.name).transport.serve(one.given)
        both[0].lease(0, 600)
        await asyncio.sleep(30)
        first = site.boot.traffic.sent
        both[1].lease(0, 600)  # the same data, in a later epoch say
        await asyncio.sleep(30)
        assert await both[1].train(60) == 0.0
        assert site.boot.traffic.sent == first
        assert both[0].given.traffic.sent > 0

    play(tmp_path, story)


def test_the_bootstrap_node_goes_and_comes_back(tmp_path: Path) -> None:
    async def story(site: Site) -> None:
        one = Volunteer(site, "a")
        site.network.kill(BOOT)
        one.lease(0, 100)
        await asyncio.sleep(20)
        assert one.feed.trouble
        await site.network.restart(BOOT).transport.serve(site.boot)
        await one.train(10, most_seconds=120)
        assert one.feed.trouble == ""

    play(tmp_path, story)


def test_a_restart_fetches_nothing_again(tmp_path: Path) -> None:
    async def story(site: Site) -> None:
        one = Volunteer(site, "a")
        one.lease(0, 300)
        await asyncio.sleep(30)
        assert await one.train(5) == 0.0
        await one.stop()
        before = site.boot.traffic.sent
        site.network.kill(BOOT)
        site.network.restart("a")
        again = Volunteer(site, "a")
        again.lease(0, 300)
        assert await again.train(30) == 0.0
        assert site.boot.traffic.sent == before

    play(tmp_path, story)


def test_a_small_disk_is_never_exceeded_and_does_for_the_whole_lease(tmp_path: Path) -> None:
    async def story(site: Site) -> None:
        one = Volunteer(site, "a", slots=40)
        one.lease(0, 600)
        for _ in range(60):
            await one.train(1)
            await asyncio.sleep(1)
            size = sum(file.stat().st_size for file in (tmp_path / "a").iterdir())
            assert size <= 40 * (site.whole.grid.max_bytes + 8)
        piece = site.whole.grid.max_bytes
        assert site.boot.traffic.sent < 600 * 2 * piece  # each sequence is in one piece or two: none came in vain

    play(tmp_path, story)


def test_the_catalogue_is_kept_for_a_later_life(tmp_path: Path) -> None:
    catalogue = make_pieces(tmp_path / "whole", TOKENS).catalogue
    assert make_dataset(tmp_path / "whole", TOKENS).tokens == sum(TOKENS)
    folder = tmp_path / "data"
    assert kept_catalogue(folder, catalogue.dataset_hash) is None
    keep_catalogue(folder, pack(catalogue))
    assert kept_catalogue(folder, catalogue.dataset_hash) == catalogue
    assert kept_catalogue(folder, sha256(b"another run")) is None
    (folder / CATALOGUE_FILE).write_bytes(b"damaged")
    assert kept_catalogue(folder, catalogue.dataset_hash) is None


def test_what_no_peer_has_comes_from_the_web_about_once(tmp_path: Path) -> None:
    async def story(site: Site) -> None:
        web = OpenWeb(site.whole)
        peers = [Volunteer(site, name, web=web) for name in "abcd"]
        for one in peers:
            await site.network.peer(one.name).transport.serve(one.given)
            one.lease(0, 600)  # all of them want all
        await asyncio.sleep(60)
        for one in peers:
            assert await one.train(60) == 0.0
        total = site.whole.grid.total
        assert set(web.given) == set(range(total))
        assert len(web.given) < 1.25 * total
        assert site.boot.traffic.sent == 0

    play(tmp_path, story, has_data=False)


def test_training_that_waits_goes_to_the_web_at_once(tmp_path: Path) -> None:
    async def story(site: Site) -> None:
        web = OpenWeb(site.whole)
        one = Volunteer(site, "a", web=web)
        for name in "bcdefgh":  # most are theirs to fetch first, and they do not
            other = Volunteer(site, name)
            await site.network.peer(other.name).transport.serve(other.given)
        one.lease(0, 600)
        assert await one.train(3) < 2.0

    play(tmp_path, story, has_data=False)


def test_peers_and_the_bootstrap_node_come_before_the_web(tmp_path: Path) -> None:
    async def story(site: Site) -> None:
        web = OpenWeb(site.whole)
        one = Volunteer(site, "a", web=web)
        one.lease(0, 600)
        await asyncio.sleep(20)
        assert await one.train(60) == 0.0
        assert web.given == []

    play(tmp_path, story)


def test_a_web_server_that_is_gone_is_asked_again_when_it_is_back(tmp_path: Path) -> None:
    async def story(site: Site) -> None:
        web = OpenWeb(site.whole)
        one = Volunteer(site, "a", web=web)
        web.can_be_asked, web.trouble = False, "example.org answered 503"
        one.lease(0, 100)
        await asyncio.sleep(20)
        assert "(web: example.org answered 503)" in one.feed.trouble
        web.can_be_asked, web.trouble = True, ""
        await one.train(10, most_seconds=70)
        assert one.feed.trouble == ""

    play(tmp_path, story, has_data=False)

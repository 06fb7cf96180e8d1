"""Copies of data that outlive whoever brought it, on the in-memory network: rarest first, bounded, after the round."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import numpy as np

from spes_p2p.data.copies import SPAN_PIECES, Copies
from spes_p2p.data.feed import PieceDataset
from spes_p2p.data.held import Held, coverage
from spes_p2p.data.leases import Leases
from spes_p2p.data.loader import spans_of
from spes_p2p.errors import NetworkError
from spes_p2p.exchange.piece_fetcher import WEB_SECONDS
from spes_p2p.exchange.pieces import MAX_GIVEN
from spes_p2p.ids import PeerId
from spes_p2p.peer.data_supply import GLANCE_SECONDS, LONGEST_WAIT_SECONDS, REST, DataCopies, Surroundings
from spes_p2p.swarm.memory_links import LinkShape
from tests.peer.test_data_feed import BOOT, CONFIG, OpenWeb, Site, Volunteer, in_place, now, play

PIECES = 300
SPANS = 24
"""Of 32 sequences; an epoch of 600 sequences, in 300 pieces, is 19 of them, and the next one has begun."""


class Keeper(Volunteer):
    """A volunteer that keeps copies for others, too, and hands out what it has."""

    def __init__(self, site: Site, name: str, slots: int = 10**6, copies: int = 3) -> None:
        super().__init__(site, name, slots)
        self.site = site
        self.leases = Leases()
        self.syncing = False
        spans = spans_of(PieceDataset(self.feed), CONFIG)
        self.copies = Copies(self.feed, spans, self.name, copies)
        keeping = DataCopies(self.feed, self.copies, self.fetcher, self.look, lambda: self.syncing, in_place)
        self._keeping = asyncio.get_running_loop().create_task(keeping.run())

    async def serve(self) -> Keeper:
        await self.site.network.peer(self.name).transport.serve(self.given)
        return self

    def look(self) -> Surroundings:
        """As records say it in a real run; the bootstrap node has none any more some time after its death."""
        held = told(self.site)
        held.pop(self.name)
        return Surroundings(self.leases, held, frozenset(held) - {BOOT})

    def die(self) -> None:
        """For good, with its disk."""
        self.site.network.kill(self.name)
        self._task.cancel()
        self._keeping.cancel()
        del self.site.volunteers[self.name]

    async def stop(self) -> None:
        self._keeping.cancel()
        await asyncio.wait((self._keeping,))
        await super().stop()


def told(site: Site) -> dict[PeerId, Held]:
    held = {name: one.copies.held for name, one in site.volunteers.items() if isinstance(one, Keeper)}
    return held | ({BOOT: Held(whole=True)} if site.boot_pieces is None else {})


def lose_bootstrap(site: Site) -> None:
    site.network.kill(BOOT)
    site.boot_pieces = 0


async def settled(site: Site, seconds: float = 60.0) -> None:
    await asyncio.sleep(seconds)


def copies_of(site: Site) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Of each piece, at the volunteers."""
    every = np.arange(PIECES)
    return sum((one.feed.cache.has(every).astype(np.int64) for one in site.volunteers.values()), np.zeros(PIECES, int))


def test_a_dataset_that_fits_is_on_every_disk_soon(tmp_path: Path) -> None:
    async def story(site: Site) -> None:
        for name in "abcde":
            await Keeper(site, name).serve()
        await settled(site)
        assert copies_of(site).min() == 5
        assert all(held.whole for held in told(site).values())
        assert coverage(told(site)) == coverage({PeerId(name): Held(whole=True) for name in "abcdef"})

    play(tmp_path, story)


def test_the_bootstrap_node_goes_for_good_and_then_a_peer(tmp_path: Path) -> None:
    """Nobody has trained on most of the data; those who are left train on all of it."""

    async def story(site: Site) -> None:
        keepers = [await Keeper(site, name).serve() for name in "abc"]
        for index, one in enumerate(keepers):
            one.lease(40 * index, 40 * (index + 1))
            await one.train(1)
        await settled(site)
        lose_bootstrap(site)
        keepers[2].die()
        for index, one in enumerate(keepers[:2]):
            one.lease(300 * index, 300 * (index + 1))
            assert await one.train(30) == 0.0

    play(tmp_path, story)


def test_what_nobody_had_as_a_whole_is_put_together_from_what_each_has(tmp_path: Path) -> None:
    """The bootstrap node dies before any peer has copied anything: what was fetched to train on is what there is."""

    async def story(site: Site) -> None:
        two = [await Keeper(site, name, copies=3).serve() for name in "ab"]
        for index, one in enumerate(two):
            one.syncing = True
            one.lease(300 * index, 300 * (index + 1))
        await settled(site, 30)
        assert copies_of(site).min() == 1 < copies_of(site).max()
        lose_bootstrap(site)
        for one in two:
            one.syncing = False
        await settled(site, 200)
        assert copies_of(site).min() == 2

    play(tmp_path, story)


def test_the_rarest_of_what_comes_next_goes_first(tmp_path: Path) -> None:
    async def story(site: Site) -> None:
        one = Volunteer(site, "a")
        copies = Copies(one.feed, spans_of(PieceDataset(one.feed), CONFIG), one.name, 3)
        rare, bits = 11, np.ones(24, bool)
        bits[rare] = False
        others = {PeerId(name): Held(0, np.packbits(bits).tobytes()) for name in ("b", "c")} | {
            PeerId("d"): Held(0, np.packbits(np.arange(24) == rare).tobytes()),
            BOOT: Held(whole=True),
        }
        copies.look(Leases(), others, frozenset(others) - {BOOT})
        wanted = copies.next(SPAN_PIECES)
        assert wanted is not None
        assert set(wanted.pieces) <= set(copies._spans.pieces(rare).tolist())
        assert wanted.holders == (BOOT, PeerId("d"))

    play(tmp_path, story)


def test_what_cannot_be_had_keeps_nothing_else_waiting(tmp_path: Path) -> None:
    async def story(site: Site) -> None:
        one = Volunteer(site, "a")
        copies = Copies(one.feed, spans_of(PieceDataset(one.feed), CONFIG), one.name, 3)
        copies.look(Leases(), {}, ())
        asked: list[int] = []
        while (wanted := copies.next(SPAN_PIECES)) is not None and wanted.spans:
            copies.put_off(wanted)
            asked += wanted.spans
        assert sorted(asked) == list(range(SPANS))
        copies.look(Leases(), {}, ())
        again = copies.next(SPAN_PIECES)
        assert again is not None
        assert again.spans == tuple(asked[: len(again.spans)])

    play(tmp_path, story)


def test_copies_do_not_make_a_lease_wait_longer_for_the_web(tmp_path: Path) -> None:
    """What another peer should have fetched there first is taken after a while, whatever is copied meanwhile."""

    async def story(site: Site) -> None:
        web = OpenWeb(site.whole)
        one, idle = Volunteer(site, "a", web=web), Volunteer(site, "b")
        got: list[int] = []

        async def fetch(*numbers: int, among: tuple[PeerId, ...] | None = None) -> None:
            with contextlib.suppress(NetworkError):
                await one.fetcher.fetch(numbers, lambda pieces: got.extend(piece for piece, _ in pieces), among=among)

        site.held = lambda asker: {idle.name: 1, BOOT: 0}  # type: ignore[method-assign]
        await fetch(*range(PIECES))
        (late, *others) = sorted(set(range(PIECES)) - set(got))  # those that the other one is the first to fetch
        await asyncio.sleep(WEB_SECONDS / 2)
        await fetch(*others, among=())
        assert not set(others) & set(got)
        await asyncio.sleep(WEB_SECONDS / 2 + 1)
        await fetch(late)
        assert late in got

    play(tmp_path, story, has_data=False)


def test_what_is_trained_on_next_goes_before_what_comes_later(tmp_path: Path) -> None:
    """Where not all fits: of what is leased already nothing is kept any more, and the room goes to the next spans."""

    async def story(site: Site) -> None:
        one = await Keeper(site, "a", slots=100).serve()
        one.leases = Leases(cursor=320)
        await settled(site)
        held = one.copies.held
        assert held.first == 10
        spans = one.copies._spans
        kept = [span for span in range(10, 10 + SPANS) if held.has(span)]
        assert kept
        assert len(np.unique(np.concatenate([spans.pieces(span) for span in kept]))) <= 100
        one.leases = Leases(cursor=32 * max(kept) + 32)
        await settled(site)
        assert one.copies.held.first == max(kept) + 1
        assert any(one.copies.held.has(span) for span in range(max(kept) + 1, max(kept) + 20))

    play(tmp_path, story)


def test_small_disks_are_not_exceeded_and_hold_the_data_together(tmp_path: Path) -> None:
    async def story(site: Site) -> None:
        keepers = [await Keeper(site, name, slots=220, copies=1).serve() for name in "abcdef"]
        for one in keepers:
            one.lease(0, 40)
            await one.train(4)
        await settled(site, 120)
        assert all(one.feed.cache.used <= 220 for one in keepers)
        assert copies_of(site).min() >= 1
        before = site.boot.traffic.sent
        await settled(site, 300)
        assert site.boot.traffic.sent == before  # nobody pushes out what it has only to fetch it again
        found = coverage(told(site))
        assert found is not None
        assert found.copies >= 2  # with the bootstrap node
        lose_bootstrap(site)
        keepers[0].lease(0, 600)
        await keepers[0].train(60, most_seconds=30)

    play(tmp_path, story)


def test_training_takes_the_room_back(tmp_path: Path) -> None:
    async def story(site: Site) -> None:
        one = await Keeper(site, "a", slots=120).serve()
        await settled(site)
        assert one.copies.held.bits.strip(b"\0")
        one.lease(0, 600)
        await settled(site)
        assert await one.train(10) == 0.0
        assert one.feed.cache.used <= 120
        whole = [span for span in range(SPANS) if one.copies.held.has(span)]
        assert all(one.feed.cache.has(one.copies._spans.pieces(span)).all() for span in whole)

    play(tmp_path, story)


def test_a_peer_that_wants_no_copies_keeps_nothing_for_others(tmp_path: Path) -> None:
    async def story(site: Site) -> None:
        one = await Keeper(site, "a", copies=0).serve()
        one.lease(0, 40)
        await settled(site)
        assert one.feed.cache.held <= 80
        assert not one.copies.held.bits.strip(b"\0")

    play(tmp_path, story)


def test_the_round_goes_first_and_what_is_on_its_way_is_given_up(tmp_path: Path) -> None:
    async def story(site: Site) -> None:
        one = await Keeper(site, "a").serve()
        one.syncing = True
        await settled(site, LONGEST_WAIT_SECONDS - 1)
        assert site.boot.traffic.sent == 0
        site.network.set_link(BOOT, None, LinkShape(bytes_per_second=5_000))
        one.syncing = False
        await asyncio.sleep(1)
        one.syncing = True
        await asyncio.sleep(2 * GLANCE_SECONDS)
        held = one.feed.cache.held
        await asyncio.sleep(LONGEST_WAIT_SECONDS / 2)
        assert site.boot.traffic.sent <= MAX_GIVEN * site.whole.grid.max_bytes  # the answer that was on its way
        assert one.feed.cache.held == held
        one.syncing = False
        await settled(site, 200)
        assert one.feed.cache.held > held

    play(tmp_path, story)


def test_a_round_that_is_always_on_the_way_does_not_keep_copies_out_for_ever(tmp_path: Path) -> None:
    async def story(site: Site) -> None:
        one = await Keeper(site, "a").serve()
        one.syncing = True
        await settled(site, 8 * LONGEST_WAIT_SECONDS)
        assert one.feed.cache.held == PIECES

    play(tmp_path, story)


def test_data_for_training_goes_first(tmp_path: Path) -> None:
    async def story(site: Site) -> None:
        size = site.whole.grid.max_bytes
        site.network.set_link(BOOT, None, LinkShape(bytes_per_second=20 * size))
        one = await Keeper(site, "a").serve()
        one.lease(0, 200)
        while one.feed.missing(1).pieces:
            await asyncio.sleep(0.1)
        leased = one.feed.grid.of_tokens(one.loader._order.sequences_at(np.arange(200)) * 4, 4)
        assert one.feed.cache.held <= len(leased) + SPAN_PIECES * 2
        await settled(site, 200)
        assert one.feed.cache.held == PIECES

    play(tmp_path, story)


def test_copies_take_a_small_share_of_the_link(tmp_path: Path) -> None:
    async def story(site: Site) -> None:
        size = site.whole.grid.max_bytes
        site.network.set_link(BOOT, None, LinkShape(bytes_per_second=20 * size))
        one = await Keeper(site, "a").serve()
        began = now()
        while one.feed.cache.held < PIECES:
            await asyncio.sleep(0.1)
        assert now() - began > 0.8 * (1 + REST) * PIECES / 20

    play(tmp_path, story)

"""Data from several holders: fastest first, what one lacks from another, and who dies or lies costs nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from spes_p2p.data.piece_cache import PieceCache
from spes_p2p.data.pieces import PieceGrid
from spes_p2p.data.trees import FolderPieces
from spes_p2p.errors import NetworkError, RemoteProtocolError
from spes_p2p.exchange import piece_fetcher
from spes_p2p.exchange.piece_fetcher import AT_ONCE, DataHolders, PieceFetcher, fetch_catalogue
from spes_p2p.exchange.pieces import MAX_GIVEN, DataTraffic, PieceServing, PiecesHead
from spes_p2p.exchange.requests import (
    MAX_PIECES_AT_ONCE,
    CatalogueRequest,
    DataRequest,
    PackedRequest,
    PiecesRequest,
    pack_request,
    unpack_request,
)
from spes_p2p.ids import NO_HASH, PeerId, sha256
from spes_p2p.swarm.memory_backend import MemoryNetwork
from spes_p2p.swarm.memory_links import LinkShape
from spes_p2p.swarm.ports import Blob
from spes_p2p.swarm.stream_server import StreamLimits
from spes_p2p.sync.donor import Serving
from spes_p2p.wire import pack, unpack
from tests.data.piece_makers import make_pieces
from tests.simulation.virtual_time import run_virtual
from tests.sync.chains import MadeRun

T = TypeVar("T")
ME, BOOT, A, B, C = (PeerId(name) for name in ("me", "boot", "a", "b", "c"))
TOKENS = 8 * 300
"""300 pieces of 8 tokens."""


Change = Callable[[DataRequest, Blob], Blob]


class Holder:
    """Serves pieces as a peer does; `change` may spoil its answers."""

    def __init__(self, serving: PieceServing, change: Change | None = None) -> None:
        self._serving = Serving(MadeRun().info, None, None, lambda *request: None, data=serving.answer)  # type: ignore[arg-type]
        self._change = change or (lambda request, blob: blob)
        self.asked: list[DataRequest] = []

    async def on_call(self, caller: PeerId, request: bytes) -> bytes:
        return b""

    async def on_fetch(self, caller: PeerId, request: bytes) -> Blob:
        asked = unpack_request(request)
        assert isinstance(asked, DataRequest)
        self.asked.append(asked)
        return self._change(self.asked[-1], self._serving.answer(self.asked[-1], caller))

    @property
    def numbers(self) -> list[int]:
        """All that it was asked for."""
        return [number for request in self.asked if isinstance(request, PiecesRequest) for number in request.numbers]


class Site:
    """One peer that wants pieces, and as many holders as a story needs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.whole = make_pieces(folder / "whole", (TOKENS,))
        self.network = MemoryNetwork(3)
        self.held: dict[PeerId, int] = {}
        self.told: list[tuple[PeerId, str]] = []
        self.traffic = DataTraffic()
        self.sent = DataTraffic()
        self.got: dict[int, bytes] = {}
        self.fetcher = PieceFetcher(
            self.network.peer(ME).transport, self.whole.grid, DataHolders(BOOT, lambda: self.held),
            lambda *told: self.told.append(told), self.traffic, lambda: 5.0, in_place,
        )  # fmt: skip

    async def holder(
        self,
        name: PeerId,
        numbers: Sequence[int] | None = None,
        change: Change | None = None,
    ) -> Holder:
        """One that has these pieces (None: all)."""
        shelf: FolderPieces | PieceCache = self.whole
        if numbers is not None:
            shelf = PieceCache(self.folder / name, self.whole.grid, 10**9)
            for number in numbers:
                shelf.put(number, self.piece(number))
        holder = Holder(PieceServing(shelf, self.sent), change)
        await self.network.peer(name).transport.serve(holder)
        self.held[name] = shelf.held
        return holder

    def piece(self, number: int) -> bytes:
        found = self.whole.find(number)
        assert found is not None
        return found

    def take(self, pieces: Sequence[tuple[int, bytes]]) -> None:
        self.got.update(pieces)

    async def fetch(self, *numbers: int, urgent: bool = False) -> None:
        await self.fetcher.fetch(numbers or range(300), self.take, urgent)
        assert all(self.got[number] == self.piece(number) for number in numbers or range(300))


async def in_place(work: Callable[[], T], /) -> T:
    return work()


def play(folder: Path, story: Callable[[Site], Awaitable[None]]) -> None:
    async def main() -> None:
        await story(Site(folder))

    run_virtual(main())


def now() -> float:
    return asyncio.get_running_loop().time()


def test_everything_from_the_bootstrap_node_alone(tmp_path: Path) -> None:
    async def story(site: Site) -> None:
        holder = await site.holder(BOOT)
        await site.fetch()
        assert sorted(holder.numbers) == list(range(300))
        assert len(holder.asked) == -(-300 // AT_ONCE)
        size = sum(len(piece) for piece in site.got.values())
        assert site.traffic.received == size == site.sent.sent
        assert site.traffic.take() == (0, size)
        assert site.traffic.take() == (0, 0)
        await site.fetch()
        site.traffic.begin_rounds()
        assert site.traffic.take() == (0, 0)
        assert site.traffic.take_elsewhere() == size

    play(tmp_path, story)


def test_two_holders_in_parallel_the_faster_gives_more(tmp_path: Path) -> None:
    async def story(site: Site) -> None:
        slow, fast = await site.holder(A), await site.holder(B)
        site.network.set_link(A, ME, LinkShape(bytes_per_second=2_000))
        site.network.set_link(B, ME, LinkShape(bytes_per_second=20_000))
        await site.fetch()
        assert 0 < len(slow.numbers) < len(fast.numbers)
        assert len(slow.numbers) + len(fast.numbers) < 300 + 3 * AT_ONCE  # what is late is asked twice, not all

    play(tmp_path, story)


def test_the_bootstrap_node_is_left_for_what_others_lack(tmp_path: Path) -> None:
    async def story(site: Site) -> None:
        boot = await site.holder(BOOT)
        await site.holder(A, range(150))
        await site.holder(B, range(100, 220))
        await site.fetch()
        assert set(boot.numbers) >= set(range(220, 300))
        assert len(boot.numbers) <= 80 + 2 * AT_ONCE
        boot.asked.clear()
        await site.fetch(*range(20), urgent=True)
        assert boot.numbers

    play(tmp_path, story)


def test_a_holder_of_little_is_asked_for_much_at_once(tmp_path: Path) -> None:
    async def story(site: Site) -> None:
        await site.holder(BOOT)
        few = await site.holder(A, range(0, 300, 30))
        await site.fetch()
        assert len(few.asked) == 1
        assert len(few.numbers) == 300

    play(tmp_path, story)


@pytest.mark.parametrize("silent", [True, False], ids=["power cut", "killed"])
def test_a_holder_that_dies_is_replaced(tmp_path: Path, silent: bool) -> None:
    async def story(site: Site) -> None:
        await site.holder(A)
        await site.holder(B)
        for name in (A, B):
            site.network.set_link(name, ME, LinkShape(bytes_per_second=20_000))
        asyncio.get_running_loop().call_later(0.5, lambda: site.network.kill(A, silent=silent))
        await site.fetch()
        assert not site.fetcher.liars
        before = len(site.got)
        await site.fetch(*range(10))  # and is not asked again at once
        assert before == 300

    play(tmp_path, story)


def flipped(request: DataRequest, blob: Blob) -> Blob:
    data = bytearray(blob.data)
    data[len(data) // 2] ^= 1
    return Blob(bytes(data), blob.header)


def other_pieces(request: DataRequest, blob: Blob) -> Blob:
    return Blob(blob.data[::-1], blob.header)


def short_answer(request: DataRequest, blob: Blob) -> Blob:
    return Blob(blob.data[:-1], blob.header)


def more(request: DataRequest, blob: Blob) -> Blob:
    """The last piece comes, and its bit says that it does not."""
    given = bytearray(unpack(PiecesHead, blob.header).given)
    given[-1] &= given[-1] - 1
    return Blob(blob.data, pack(PiecesHead(bytes(given))))


def junk_before(request: DataRequest, blob: Blob) -> Blob:
    return Blob(blob.data, b"junk")


def wrong_bits(request: DataRequest, blob: Blob) -> Blob:
    return Blob(blob.data, pack(PiecesHead(b"\xff" * 200)))


def claims_all(request: DataRequest, blob: Blob) -> Blob:
    assert isinstance(request, PiecesRequest)
    return Blob(b"", pack(PiecesHead(b"\xff" * (len(request.numbers) // 8))))


@pytest.mark.parametrize(
    "lie",
    [flipped, other_pieces, short_answer, more, junk_before, wrong_bits, claims_all],
    ids=lambda lie: lie.__name__,
)
def test_who_lies_is_named_and_asked_no_more(tmp_path: Path, lie: Change) -> None:
    async def story(site: Site) -> None:
        liar = await site.holder(A, change=lie)
        await site.holder(B)
        await site.fetch()
        assert site.fetcher.liars == {A}
        assert [peer for peer, _ in site.told] == [A]
        assert "not asked for data again" in site.told[0][1]
        asked = len(liar.asked)
        await site.fetch(*range(50))
        assert len(liar.asked) == asked

    play(tmp_path, story)


def test_a_stream_that_is_cut_goes_on_where_it_was(tmp_path: Path) -> None:
    async def story(site: Site) -> None:
        await site.holder(BOOT)
        site.network.cut_stream(BOOT, 700, times=3)
        await site.fetch()
        assert not site.fetcher.liars

    play(tmp_path, story)


def test_who_has_another_dataset_or_none_is_no_liar(tmp_path: Path) -> None:
    async def story(site: Site) -> None:
        other = make_pieces(site.folder / "other", (TOKENS + 1,))
        wrong = Holder(PieceServing(other, DataTraffic()))
        await site.network.peer(A).transport.serve(wrong)
        site.held[A] = 300
        with pytest.raises(NetworkError, match="300 pieces of the data could not be fetched"):
            await site.fetch()
        await site.holder(BOOT)
        await asyncio.sleep(120)
        await site.fetch()
        assert not site.fetcher.liars
        assert len(wrong.asked) <= 4

    play(tmp_path, story)


def test_who_says_more_than_it_holds_costs_a_question(tmp_path: Path) -> None:
    async def story(site: Site) -> None:
        empty = await site.holder(A, ())
        site.held[A] = 300
        await site.holder(BOOT)
        await site.fetch()
        assert len(empty.asked) <= piece_fetcher.STREAMS_EACH
        await site.fetch()
        assert len(empty.asked) <= piece_fetcher.STREAMS_EACH  # it rests
        assert not site.fetcher.liars

    play(tmp_path, story)


def test_nobody_to_ask(tmp_path: Path) -> None:
    async def story(site: Site) -> None:
        with pytest.raises(NetworkError, match="could not be fetched"):
            await site.fetch()

    play(tmp_path, story)


def test_what_the_running_round_needs_goes_first(tmp_path: Path) -> None:
    """Data is asked for patiently: on a limited link the others get nine tenths of it meanwhile."""

    async def story(site: Site) -> None:
        limits = StreamLimits(upload_bytes_per_second=40_000)
        site.network.peer(BOOT, limits)
        await site.holder(BOOT)
        began = now()
        data = asyncio.ensure_future(site.fetch())
        urgent = site.network.peer(ME).transport.fetch(
            BOOT, pack_request(CatalogueRequest(site.whole.dataset_hash)), 5.0, 10**6
        )
        await urgent
        assert now() - began < 0.5
        assert not data.done()
        await data
        size = sum(len(piece) for piece in site.got.values())
        assert now() - began > 0.9 * size / 40_000 - 0.2  # and the limit holds

    play(tmp_path, story)


def test_streams_and_holders_are_few_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piece_fetcher, "AT_ONCE", 4)

    async def story(site: Site) -> None:
        most, busy = 0, 0

        def counted(request: DataRequest, blob: Blob) -> Blob:
            nonlocal most, busy
            busy += 1
            most = max(most, busy)
            asyncio.get_running_loop().call_later(0.01, done)
            return blob

        def done() -> None:
            nonlocal busy
            busy -= 1

        for index in range(12):
            await site.holder(PeerId(f"peer-{index}"), change=counted)
        site.network.set_link(None, ME, LinkShape((0.02, 0.02)))
        await site.fetch()
        assert most <= piece_fetcher.MOST_HOLDERS * piece_fetcher.STREAMS_EACH

    play(tmp_path, story)


# ---- the catalogue ----


def test_a_catalogue_that_is_another_one_is_refused_and_its_sender_named(tmp_path: Path) -> None:
    async def story(site: Site) -> None:
        other = make_pieces(site.folder / "other", (TOKENS + 1,))
        await site.holder(A, change=lambda request, blob: Blob(pack(other.catalogue)))
        await site.holder(B, change=lambda request, blob: Blob(bytes(blob.data)[:-1]))
        await site.holder(BOOT)
        transport, name = site.network.peer(ME).transport, site.whole.dataset_hash
        found = await fetch_catalogue(transport, name, [A, C, B, BOOT], 5.0, lambda *told: site.told.append(told))
        assert found == site.whole.catalogue
        assert [peer for peer, _ in site.told] == [A, B]
        with pytest.raises(NetworkError, match="no node could provide the catalogue of the run's data") as caught:
            await fetch_catalogue(transport, name, [A, C], 5.0, lambda *told: site.told.append(told))
        assert "--data" in caught.value.fix

    play(tmp_path, story)


# ---- serving ----


def test_a_server_refuses_what_no_honest_peer_asks(tmp_path: Path) -> None:
    pieces = make_pieces(tmp_path, (TOKENS,))
    serving = PieceServing(pieces, DataTraffic())
    name = pieces.dataset_hash
    for numbers in ([], [0] * (MAX_PIECES_AT_ONCE + 1), [-1, 0]):
        with pytest.raises(RemoteProtocolError, match=r"numbers is -?[0-9]+, not between"):
            unpack_request(pack(PackedRequest("pieces", pack((name, tuple(numbers))))))
    with pytest.raises(RemoteProtocolError, match="piece 300 was requested"):
        serving.answer(PiecesRequest(name, (0, 300)))
    with pytest.raises(RemoteProtocolError, match="this is dataset"):
        serving.answer(PiecesRequest(sha256(b"other"), (0,)))


def test_one_answer_is_bounded_whatever_is_asked(tmp_path: Path) -> None:
    pieces = make_pieces(tmp_path, (TOKENS,))
    serving = PieceServing(pieces, DataTraffic())
    blob = serving.answer(PiecesRequest(pieces.dataset_hash, (0,) * MAX_PIECES_AT_ONCE))
    assert len(blob.data) <= MAX_GIVEN * PieceGrid(pieces.catalogue).max_bytes


def test_a_peer_without_data_says_so() -> None:
    serving = Serving(MadeRun().info, None, None, lambda *request: None)  # type: ignore[arg-type]
    with pytest.raises(RemoteProtocolError, match="this peer has no data of the run"):
        serving.answer(CatalogueRequest(NO_HASH), A)

"""Fetching from others: who lies or breaks off is passed over, and what arrives is what was asked for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from spes_p2p.errors import NetworkError, PeerRefused, PeerSilent, RemoteProtocolError
from spes_p2p.exchange import requests
from spes_p2p.exchange.patience import Patience, ask_small
from spes_p2p.exchange.rates import Turns
from spes_p2p.exchange.requests import (
    ChainPart,
    ChainRequest,
    Request,
    RunRequest,
    TilesRequest,
    ValuesRequest,
    WiresRequest,
    unpack_request,
)
from spes_p2p.exchange.transfers import KEPT_SECONDS, TILES_A_FETCH, Transfers, all_of
from spes_p2p.ids import Hash, PeerId, sha256
from spes_p2p.state.hashes import hash_tile
from spes_p2p.state.layout import Layout, StateTensor
from spes_p2p.swarm.memory_backend import MemoryNetwork
from spes_p2p.swarm.memory_links import LinkShape
from spes_p2p.swarm.ports import Blob
from spes_p2p.swarm.stream_server import StreamLimits
from spes_p2p.sync.catch_up import commits_from
from spes_p2p.wire import pack
from tests.simulation.virtual_time import run_virtual, virtual
from tests.sync.chains import A, B, MadeRun

MADE = MadeRun()
LAYOUT = MADE.layout
COMMITS = MADE.chain(3)
C = PeerId("c")


class Holder:
    """Answers fetches as it is told to."""

    def __init__(self, answer: Callable[[Request], bytes]) -> None:
        self._answer = answer
        self.asked: list[Request] = []

    @property
    def tiles_asked(self) -> list[int]:
        """How many tiles each request was for."""
        return [len(request.hashes) for request in self.asked if isinstance(request, TilesRequest)]

    async def on_call(self, caller: PeerId, request: bytes) -> bytes:
        return b""

    async def on_fetch(self, caller: PeerId, request: bytes) -> Blob:
        self.asked.append(unpack_request(request))
        return Blob(self._answer(self.asked[-1]))


class Waits(Holder):
    """Lets everybody wait."""

    def __init__(self) -> None:
        super().__init__(nothing)

    async def on_fetch(self, caller: PeerId, request: bytes) -> Blob:
        await asyncio.sleep(10_000.0)
        raise AssertionError


class Site:
    """Peer a asks; holders b and c answer."""

    def __init__(self) -> None:
        self.network = MemoryNetwork(1)
        self.moved = 0
        self.refused: list[PeerId] = []
        self.transfers = Transfers(
            self.network.peer(A).transport, LAYOUT, lambda: 5.0, self._on_bytes, self.refused.append
        )

    def _on_bytes(self) -> None:
        self.moved += 1

    async def holder(self, name: PeerId, answer: Callable[[Request], bytes]) -> Holder:
        holder = Holder(answer)
        await self.network.peer(name).transport.serve(holder)
        return holder


def play(story: Callable[[Site], Awaitable[None]]) -> None:
    async def main() -> None:
        await story(Site())

    run_virtual(main())


def tile(tile_id: int) -> bytes:
    return bytes([tile_id]) * (4 * LAYOUT.tiles[tile_id].size)


WANTED = {tile_id: hash_tile(tile(tile_id)) for tile_id in range(6)}
BY_HASH = {tile_hash: tile(tile_id) for tile_id, tile_hash in WANTED.items()}


def right(request: Request) -> bytes:
    assert isinstance(request, TilesRequest)
    return b"".join(BY_HASH[tile_hash] for tile_hash in request.hashes)


def nothing(request: Request) -> bytes:
    raise RemoteProtocolError("not here")


async def fetched(site: Site, *holders: PeerId) -> dict[int, bytes]:
    got: dict[int, bytes] = {}

    async def take(tiles: list[tuple[int, memoryview, Hash]]) -> None:
        for tile_id, data, tile_hash in tiles:
            assert WANTED[tile_id] == tile_hash
            got[tile_id] = bytes(data)

    await site.transfers.tiles(WANTED, holders, take)
    return got


@pytest.mark.parametrize(("room", "most"), [(0, 1), (2, 2), (99, TILES_A_FETCH)])
def test_large_tiles_come_one_by_one(monkeypatch: pytest.MonkeyPatch, room: int, most: int) -> None:
    monkeypatch.setattr(requests, "MAX_JOINED_BYTES", room * 4 * max(LAYOUT.tiles[at].size for at in WANTED))

    async def story(site: Site) -> None:
        holder = await site.holder(B, right)
        assert await fetched(site, B) == {tile_id: tile(tile_id) for tile_id in WANTED}
        assert max(holder.tiles_asked) == most

    play(story)


def test_tiles_come_a_few_at_a_time() -> None:
    async def story(site: Site) -> None:
        holder = await site.holder(B, right)
        assert await fetched(site, B) == {tile_id: tile(tile_id) for tile_id in WANTED}
        assert set(holder.tiles_asked) == {TILES_A_FETCH, 6 - TILES_A_FETCH}
        assert site.moved == 2

    play(story)


@pytest.mark.parametrize(
    "wrong",
    [nothing, lambda request: b"", lambda request: right(request)[:-4], lambda request: right(request)[::-1]],
    ids=["refuses", "sends nothing", "sends less", "sends other bytes"],
)
def test_a_holder_that_is_wrong_is_passed_over(wrong: Callable[[Request], bytes]) -> None:
    async def story(site: Site) -> None:
        await site.holder(B, wrong)
        await site.holder(C, right)
        assert await fetched(site, B, C) == {tile_id: tile(tile_id) for tile_id in WANTED}
        with pytest.raises(NetworkError, match=r"no peer could provide \d tiles from \d on"):
            await fetched(site, B)

    play(story)


def test_a_holder_that_sends_too_much_is_cut_off_before_it_is_read() -> None:
    async def story(site: Site) -> None:
        await site.holder(B, lambda request: bytes(10**7))
        with pytest.raises(NetworkError, match="no peer could provide"):
            await fetched(site, B)
        assert site.network.peer(A).transport.traffic.received < 10**6

    play(story)


def test_a_process_that_is_gone_is_reported() -> None:
    async def story(site: Site) -> None:
        await site.holder(C, right)
        site.network.kill(B)
        assert len(await fetched(site, B, C)) == 6
        assert set(site.refused) == {B}

    play(story)


def test_a_silent_holder_is_waited_for_once() -> None:
    """A whole state is hundreds of fetches: each may not wait for the same silence."""

    async def story(site: Site) -> None:
        holder = await site.holder(C, right)
        await site.holder(B, right)
        site.network.kill(B, silent=True)
        began = asyncio.get_running_loop().time()
        for _ in range(3):
            await fetched(site, B, C)
        assert asyncio.get_running_loop().time() - began < 3 * 6
        assert len(holder.asked) == 3 * 2

    play(story)


def test_who_was_found_silent_by_one_part_is_not_waited_for_by_another() -> None:
    async def story(site: Site) -> None:
        silent = [PeerId(f"silent {number}") for number in range(6)]
        for name in silent:
            await site.holder(name, right)
            site.network.freeze(name)
        await site.holder(B, right)
        began, got = asyncio.get_running_loop().time(), list[int]()

        async def take(tiles: list[tuple[int, memoryview, Hash]]) -> None:
            got.extend(tile_id for tile_id, _, _ in tiles)

        await site.transfers.tiles(WANTED, [*silent, B], take, spread=True)
        assert sorted(got) == list(WANTED)
        assert asyncio.get_running_loop().time() - began < 20.0  # 5 s each, two at a time

    play(story)


@pytest.mark.parametrize("gives_one", [False, True], ids=["gives none", "gives one"])
def test_each_of_those_who_let_us_wait_is_waited_for_once(gives_one: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are: others may be found meanwhile. Nor does a tile at first make each part wait."""
    monkeypatch.setattr(requests, "MAX_JOINED_BYTES", 0)  # tiles come one by one

    class Liar(Waits):
        async def on_fetch(self, caller: PeerId, request: bytes) -> Blob:
            self.asked.append(unpack_request(request))
            if gives_one and len(self.asked) == 1:
                return Blob(right(self.asked[0]))
            return await super().on_fetch(caller, request)

    async def story(site: Site) -> None:
        liars = [PeerId(f"liar {number}") for number in range(4)]
        for name in liars:
            await site.network.peer(name, StreamLimits(stall_seconds=10_000.0)).transport.serve(Liar())
        transfers = Transfers(site.network.peer(A).transport, LAYOUT, lambda: 5.0, patient=True)
        began = asyncio.get_running_loop().time()

        async def take(tiles: list[tuple[int, memoryview, Hash]]) -> None:
            assert gives_one

        with pytest.raises(NetworkError, match="did not finish within"):
            await transfers.tiles(WANTED, liars, take, spread=True)
        assert asyncio.get_running_loop().time() - began < (3.1 if gives_one else 1.1) * Transfers.LEAST_SECONDS

    play(story)


def test_who_gives_other_tiles_meanwhile_only_has_a_long_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two donors, each of which lets one request wait too long."""
    monkeypatch.setattr(requests, "MAX_JOINED_BYTES", 0)  # tiles come one by one

    class Crowded(Holder):
        async def on_fetch(self, caller: PeerId, request: bytes) -> Blob:
            blob = await super().on_fetch(caller, request)
            await asyncio.sleep(10_000.0 if len(self.asked) == 1 else 0.0)
            return blob

    async def story(site: Site) -> None:
        for name in (B, C):
            await site.network.peer(name, StreamLimits(stall_seconds=10_000.0)).transport.serve(Crowded(right))
        transfers, got = Transfers(site.network.peer(A).transport, LAYOUT, lambda: 5.0, patient=True), set[int]()

        async def take(tiles: list[tuple[int, memoryview, Hash]]) -> None:
            got.update(tile_id for tile_id, _, _ in tiles)

        await transfers.tiles(WANTED, (B, C), take, spread=True)
        assert got == set(WANTED)

    play(story)


def test_a_state_is_fetched_from_several_holders() -> None:
    async def story(site: Site) -> None:
        holders = [await site.holder(B, right), await site.holder(C, right)]
        got: list[int] = []

        async def take(tiles: list[tuple[int, memoryview, Hash]]) -> None:
            got.extend(tile_id for tile_id, _, _ in tiles)

        await site.transfers.tiles(WANTED, [B, C], take, spread=True)
        assert sorted(got) == list(WANTED)
        assert [len(holder.asked) for holder in holders] == [1, 1]

    play(story)


def test_nobody_to_ask() -> None:
    async def story(site: Site) -> None:
        with pytest.raises(NetworkError, match="nobody to ask"):
            await fetched(site)

    play(story)


def test_streams_are_few_at_once() -> None:
    busy, most = [0], [0]

    async def story(site: Site) -> None:
        async def take(tiles: list[tuple[int, memoryview, Hash]]) -> None:
            busy[0] -= 1

        def answer(request: Request) -> bytes:
            busy[0] += 1
            most[0] = max(most[0], busy[0])
            return right(request)

        site.network.set_link(B, A, LinkShape((0.1, 0.2), bytes_per_second=10_000))
        await site.holder(B, answer)
        await all_of(site.transfers.tiles({at: WANTED[at]}, [B], take) for at in (0, 1, 2, 3, 4, 5) * 3)
        assert most[0] == Transfers.PARALLEL

    play(story)


VALUES = ValuesRequest(sha256(b"p"), 0, 2, b"the work that a plan counts")
SIZE = 4 * sum(LAYOUT.tiles[at].size for at in range(2))


def test_a_contribution() -> None:
    size = sum(LAYOUT.tiles[at].size for at in range(2))
    values = np.arange(size, dtype=np.float32)

    async def story(site: Site) -> None:
        await site.holder(B, lambda request: values.tobytes())
        assert await site.transfers.values(B, VALUES, SIZE) == values.tobytes()
        await site.holder(C, lambda request: values[1:].tobytes())
        with pytest.raises(RemoteProtocolError, match=r"sent .* bytes for a slice of"):
            await site.transfers.values(C, VALUES, SIZE)

    play(story)


def test_silence_and_refusal_are_told_apart() -> None:
    async def story(site: Site) -> None:
        await site.holder(B, right)
        site.network.kill(B, silent=True)
        with pytest.raises(PeerSilent):
            await site.transfers.values(B, VALUES, SIZE)
        site.network.kill(C)
        with pytest.raises(PeerRefused):
            await site.transfers.values(C, VALUES, SIZE)

    play(story)


def test_commits() -> None:
    packed = [pack(commit) for commit in COMMITS]

    async def story(site: Site) -> None:
        def answer(request: Request) -> bytes:
            assert isinstance(request, ChainRequest)
            return pack(ChainPart(tuple(packed[request.first :])))

        holder = await site.holder(B, answer)
        assert list(await commits_from(site.transfers, B, 1)) == COMMITS[1:]
        assert await site.transfers.chain(B, 3) == ()
        assert holder.asked[0] == ChainRequest(1, 64)
        for wrong in (packed[:1], [packed[1], packed[1]], packed[1:2] * 99, [b"junk"]):
            await site.holder(C, lambda request, wrong=wrong: pack(ChainPart(tuple(wrong))))  # type: ignore[misc]
            with pytest.raises(RemoteProtocolError):
                await commits_from(site.transfers, C, 1)

    play(story)


def test_a_hash_list_hashes_to_its_root() -> None:
    hashes = tuple(sha256(b"%d" % at) for at in range(len(LAYOUT.tiles)))
    root = LAYOUT.root_of(hashes)

    async def story(site: Site) -> None:
        await site.holder(B, lambda request: b"".join(hashes[::-1]))
        await site.holder(C, lambda request: b"".join(hashes))
        assert await site.transfers.hash_list([B, C], root, 1) == hashes
        with pytest.raises(NetworkError, match="does not match the root"):
            await site.transfers.hash_list([B], root, 1)

    play(story)


@pytest.mark.parametrize("is_frozen", [False, True], ids=["lets wait", "is silent"])
def test_who_gives_no_list_is_waited_for_once(is_frozen: bool) -> None:
    """Who catches up asks for a list of each round."""
    names = tuple(sha256(b"%d" % at) for at in range(len(LAYOUT.tiles)))

    async def story(site: Site) -> None:
        await site.network.peer(B, StreamLimits(stall_seconds=10_000.0)).transport.serve(Waits())
        await site.holder(C, lambda request: b"".join(names))
        if is_frozen:
            site.network.freeze(B)
        transfers = Transfers(site.network.peer(A).transport, LAYOUT, lambda: 5.0, patient=True)
        assert await transfers.hash_list((B, C), LAYOUT.root_of(names), 0) == names
        began = asyncio.get_running_loop().time()
        for round in range(1, 5):
            await transfers.hash_list((B, C), LAYOUT.root_of(names), round)
            await transfers.wire_list((B, C), WiresRequest(round, 0), range(len(names)), sha256(*names))
        assert asyncio.get_running_loop().time() - began < 1.0

    play(story)


def test_who_answers_again_is_not_asked_last() -> None:
    patience = Patience(lambda: 1.0, lambda: 1.0)
    patience.note_timeout(B, PeerSilent(""))
    assert patience.gave_nothing(B)
    patience.note_success(B)
    assert not patience.gave_nothing(B)


def test_the_run_of_a_stranger() -> None:
    async def story(site: Site) -> None:
        await site.holder(B, lambda request: pack(MADE.info))
        assert await ask_small(site.network.peer(A).transport, B, RunRequest(), 5.0, 2**20) == pack(MADE.info)

    play(story)


@virtual
async def test_the_first_error_ends_the_others_and_is_raised_as_it_is() -> None:
    ended: list[int] = []

    async def wait(number: int) -> None:
        try:
            await asyncio.sleep(1 if number else 100)
            raise NetworkError(f"number {number}")
        finally:
            ended.append(number)

    with pytest.raises(NetworkError, match="number 1"):
        await all_of(wait(number) for number in (0, 1))
    assert sorted(ended) == [0, 1]
    await all_of([])


def test_the_fastest_holder_gives_most_and_the_slow_one_holds_nothing_up() -> None:
    """Rates are learnt: at first both are asked, then whoever will be done first."""
    many = {tile_id: hash_tile(tile(tile_id)) for tile_id in range(len(LAYOUT.tiles))}
    BY_HASH.update({tile_hash: tile(tile_id) for tile_id, tile_hash in many.items()})
    size = sum(4 * LAYOUT.tiles[tile_id].size for tile_id in many)

    async def story(site: Site) -> None:
        fast, slow = await site.holder(B, right), await site.holder(C, right)
        site.network.set_link(B, A, LinkShape((0.001, 0.002), size / 2))
        site.network.set_link(C, A, LinkShape((0.001, 0.002), size / 20))
        came: list[int] = []

        async def take(tiles: list[tuple[int, memoryview, Hash]]) -> None:
            came.extend(tile_id for tile_id, _, _ in tiles)

        for _ in range(3):
            await site.transfers.tiles(many, (C, B), take, spread=True)
        before, begun = len(slow.asked), asyncio.get_running_loop().time()
        await site.transfers.tiles(many, (C, B), take, spread=True)
        assert sorted(came) == sorted(list(many) * 4)
        assert len(slow.asked) - before <= 1
        assert asyncio.get_running_loop().time() - begun < 3.0
        assert len(fast.asked) > 4 * len(slow.asked) / 2

    play(story)


def test_a_holder_that_dies_in_the_middle_costs_only_what_was_on_its_way() -> None:
    many = {tile_id: hash_tile(tile(tile_id)) for tile_id in range(len(LAYOUT.tiles))}
    BY_HASH.update({tile_hash: tile(tile_id) for tile_id, tile_hash in many.items()})
    size = sum(4 * LAYOUT.tiles[tile_id].size for tile_id in many)

    async def story(site: Site) -> None:
        await site.holder(B, right)
        await site.holder(C, right)
        for name in (B, C):
            site.network.set_link(name, A, LinkShape((0.001, 0.002), size / 6))
        came: dict[int, int] = {}

        async def take(tiles: list[tuple[int, memoryview, Hash]]) -> None:
            for tile_id, data, _ in tiles:
                assert data == tile(tile_id)
                came[tile_id] = came.get(tile_id, 0) + 1

        fetching = asyncio.create_task(site.transfers.tiles(many, (B, C), take, spread=True))
        await asyncio.sleep(1.0)
        site.network.kill(B)
        await fetching
        assert came == dict.fromkeys(many, 1)

    play(story)


def test_what_fewest_have_is_fetched_first() -> None:
    """With one place: the tile of which there is one copy goes before those of which there are two."""
    order: list[int] = []

    async def story(site: Site) -> None:
        site.transfers._turns = Turns(1)
        await site.holder(B, right)
        await site.holder(C, right)

        async def take(tiles: list[tuple[int, memoryview, Hash]]) -> None:
            order.extend(tile_id for tile_id, _, _ in tiles)

        async def one(tile_id: int, *sure: PeerId) -> None:
            await site.transfers.tiles({tile_id: WANTED[tile_id]}, (B, C), take, sure=lambda: sure)

        copies = ((0, (B, C)), (1, (B, C)), (2, (B,)), (3, (B, C)), (4, (C,)))
        await asyncio.gather(*(one(tile_id, *sure) for tile_id, sure in copies))

    play(story)
    assert order == [0, 2, 4, 1, 3], "the first one had the place already"


def test_no_holder_idles_while_another_one_is_waited_for() -> None:
    """With two places for what each of two has half of: both send all the time, though one half was asked for first."""
    many = [tile_id for tile_id in WANTED for _ in range(4)]
    busy: list[tuple[int, int]] = []

    async def story(site: Site) -> None:
        site.transfers._turns = Turns(2)
        holders = {name: await site.holder(name, right) for name in (B, C)}
        for name in holders:
            site.network.set_link(name, A, LinkShape((0.001, 0.002), 2.0 * len(tile(0))))

        async def take(tiles: list[tuple[int, memoryview, Hash]]) -> None:
            busy.append((len(holders[B].asked), len(holders[C].asked)))

        async def one(tile_id: int, sure: PeerId) -> None:
            await site.transfers.tiles({tile_id: WANTED[tile_id]}, (B, C), take, sure=lambda: (sure,))

        await asyncio.gather(*(one(tile_id, name) for name in (B, C) for tile_id in many))

    play(story)
    assert len(busy) == 2 * len(many)
    assert all(abs(one - other) <= 3 for one, other in busy), busy


LARGE = 128 * 2**10
"""Bytes of a tile of `GRID`; they are asked for in two parts."""
GRID = Layout([StateTensor("weight", (2 * TILES_A_FETCH * LARGE // 4,), None, "zeros")], LARGE // 4)
OF_GRID = {at: bytes([at]) * LARGE for at in range(len(GRID.tiles))}
NAMES = {at: hash_tile(data) for at, data in OF_GRID.items()}
BY_HASH.update({NAMES[at]: data for at, data in OF_GRID.items()})
UPLOAD = 100 * 2**10


class SlowSite(Site):
    """The state of `GRID` takes some 10 s from b as from c."""

    def __init__(self) -> None:
        super().__init__()
        for name in (B, C):
            self.network.peer(name, StreamLimits(upload_bytes_per_second=UPLOAD))
        self.transfers = Transfers(self.network.peer(A).transport, GRID, lambda: 5.0)

    async def fetch(self, *holders: PeerId) -> int:
        """Everything; how many bytes came."""
        before = self.network.peer(A).transport.traffic.received
        got: dict[int, bytes] = {}

        async def take(tiles: list[tuple[int, memoryview, Hash]]) -> None:
            got.update({tile_id: bytes(data) for tile_id, data, _ in tiles})

        await self.transfers.tiles(NAMES, holders, take)
        assert got == OF_GRID
        return self.network.peer(A).transport.traffic.received - before

    async def begin(self, *holders: PeerId) -> asyncio.Task[int]:
        """A fetch of which a third is here; the one that gave it gives no more."""
        fetching = asyncio.create_task(self.fetch(*holders))
        await asyncio.sleep(3.3)
        self.network.freeze(holders[0])
        return fetching


WHOLE = len(GRID.tiles) * LARGE


def play_slowly(story: Callable[[SlowSite], Awaitable[None]]) -> None:
    async def main() -> None:
        await story(SlowSite())

    run_virtual(main())


def mixed_up(request: Request) -> bytes:
    return right(request)[::-1]


def test_what_one_has_given_is_not_asked_of_another() -> None:
    async def story(site: SlowSite) -> None:
        await site.holder(B, right)
        await site.holder(C, right)
        assert await (await site.begin(B, C)) == WHOLE
        assert site.transfers._rates.rate(C) < 1.1 * UPLOAD

    play_slowly(story)


@pytest.mark.parametrize("is_cancelled", [False, True])
@pytest.mark.parametrize("others", [(), (C,)], ids=["alone", "another one refuses"])
def test_what_has_come_is_not_asked_for_again(is_cancelled: bool, others: tuple[PeerId, ...]) -> None:
    async def story(site: SlowSite) -> None:
        await site.holder(B, right)
        await site.holder(C, nothing)
        fetching = await site.begin(B, *others)
        before = site.network.peer(A).transport.traffic.received
        assert 0.25 * WHOLE < before < 0.5 * WHOLE
        if is_cancelled:
            fetching.cancel()
        with pytest.raises(asyncio.CancelledError if is_cancelled else NetworkError):
            await fetching
        site.network.thaw(B)
        assert await site.fetch(B) == WHOLE - before

    play_slowly(story)


def test_who_fell_silent_for_a_moment_gives_tiles_again() -> None:
    """Else its uplink would idle for as long as another one gives everything."""

    async def story(site: SlowSite) -> None:
        await site.holder(B, right)
        await site.holder(C, right)
        await (await site.begin(B, C))
        site.network.thaw(B)
        sent, given = site.network.peer(B).transport.traffic, list[int]()
        for _ in range(4):
            before = sent.sent
            await site.fetch(B, C)
            given.append(sent.sent - before)
        assert any(given), given

    play_slowly(story)


def test_a_wrong_beginning_is_not_blamed_on_who_goes_on_with_it() -> None:
    async def story(site: SlowSite) -> None:
        await site.holder(B, mixed_up)
        await site.holder(C, right)
        assert WHOLE < await (await site.begin(B, C)) <= 2 * WHOLE

    play_slowly(story)


def test_who_gave_all_of_what_is_wrong_is_not_asked_once_more() -> None:
    part = {at: NAMES[at] for at in range(TILES_A_FETCH)}

    async def take(tiles: list[tuple[int, memoryview, Hash]]) -> None:
        raise AssertionError

    async def story(site: SlowSite) -> None:
        await site.holder(B, mixed_up)
        await site.holder(C, nothing)
        fetching = asyncio.create_task(site.transfers.tiles(part, (B, C), take))
        await asyncio.sleep(2.0)
        site.network.freeze(B)
        with pytest.raises(NetworkError, match="refused"):
            await fetching
        site.network.thaw(B)
        with pytest.raises(NetworkError, match="do not hash to what was asked for"):
            await site.transfers.tiles(part, (B,), take)
        assert site.network.peer(A).transport.traffic.received == WHOLE / 2

    play_slowly(story)


def test_what_one_has_given_whole_outlasts_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(site: SlowSite) -> None:
        await site.holder(B, right)
        await site.holder(C, nothing)
        with monkeypatch.context() as patched:
            patched.setattr(site.transfers, "_checked", lambda *_: asyncio.sleep(1000.0))
            fetching = asyncio.create_task(site.fetch(B))
            await asyncio.sleep(30.0)
            fetching.cancel()
            with pytest.raises(asyncio.CancelledError):
                await fetching
        assert await site.fetch(C, B) == 0

    play_slowly(story)


def test_a_wrong_end_is_found_out() -> None:
    async def story(site: SlowSite) -> None:
        await site.holder(B, right)
        await site.holder(C, mixed_up)
        with pytest.raises(NetworkError, match="do not hash to what was asked for"):
            await (await site.begin(B, C))
        site.network.thaw(B)
        assert await site.fetch(B) < 2 * WHOLE

    play_slowly(story)


def test_a_part_that_promises_another_length_is_worth_nothing() -> None:
    async def story(site: SlowSite) -> None:
        await site.holder(B, lambda request: right(request)[:-4])
        await site.holder(C, right)
        assert WHOLE < await (await site.begin(B, C)) < 1.5 * WHOLE

    play_slowly(story)


def test_few_parts_are_kept_and_not_for_ever() -> None:
    async def story(site: SlowSite) -> None:
        await site.holder(B, right)
        with pytest.raises(NetworkError):
            await (await site.begin(B))
        kept = site.transfers._kept
        assert len(kept) == 2
        partial = next(iter(kept.values()))[0]
        await asyncio.sleep(0.5 * KEPT_SECONDS)
        for number in range(20):
            site.transfers._keep((sha256(b"%d" % number),), partial, frozenset())
        await asyncio.sleep(0.9 * KEPT_SECONDS)
        assert len(kept) == Transfers.PARALLEL
        await asyncio.sleep(0.1 * KEPT_SECONDS)
        assert not kept

    play_slowly(story)


class EightySeconds(Patience):
    """Always, whatever was waited for in vain."""

    def seconds(self, peer: PeerId, size: int) -> float:
        return 80.0


def test_a_donor_whose_line_is_too_long_sends_nothing_twice() -> None:
    """Each newcomer has its time for waiting in line, and the last of all parts needs twice as long."""

    async def main() -> None:
        network, newcomers = MemoryNetwork(1), 8
        donor = network.peer(B, StreamLimits(upload_bytes_per_second=UPLOAD / 2, max_patient=2)).transport
        await donor.serve(Holder(right))

        async def come(name: str) -> None:
            patience = EightySeconds(lambda: 20.0, lambda: 0.0)
            transfers = Transfers(network.peer(name).transport, GRID, lambda: 60.0, patience=patience, patient=True)
            missing = dict(NAMES)

            async def take(tiles: list[tuple[int, memoryview, Hash]]) -> None:
                for tile_id, _, _ in tiles:
                    del missing[tile_id]

            while missing:
                with contextlib.suppress(NetworkError):
                    await transfers.tiles(dict(missing), (B,), take)

        await asyncio.gather(*(come(f"newcomer {number}") for number in range(newcomers)))
        assert donor.traffic.sent < 1.05 * newcomers * WHOLE

    run_virtual(main(), 10_000.0)

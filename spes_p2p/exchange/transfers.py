"""Getting bytes from other peers: values to reduce, tiles by hash, headers, hash lists.

Asks one holder after the other, the fastest first, until the bytes are here and hash to what they should. Knows
no round; who is asked comes from the state machine.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol, TypeVar

from spes_p2p.errors import NetworkError, PeerRefused, PeerSilent, RemoteProtocolError
from spes_p2p.exchange import requests
from spes_p2p.exchange.patience import Patience, fetch_within, first_good
from spes_p2p.exchange.rates import Place, Rates, Turns
from spes_p2p.exchange.requests import (
    ChainPart,
    ChainRequest,
    HashesRequest,
    Request,
    TilesRequest,
    ValuesRequest,
    WiresRequest,
    pack_request,
)
from spes_p2p.ids import HASH_BYTES, Hash, PeerId, sha256, short
from spes_p2p.state.hashes import hash_tile, split_hashes
from spes_p2p.state.layout import VALUE_BYTES, Layout
from spes_p2p.state.staging import Staging
from spes_p2p.state.store import StateStore
from spes_p2p.swarm.ports import Transport
from spes_p2p.swarm.streams import BlobHead, BlobTooLarge, Partial, WrongBytes
from spes_p2p.wire import MAX_MESSAGE_BYTES, unpack

T = TypeVar("T")
TILES_A_FETCH = 4
"""Tiles asked for at once where they are small: large enough for the way, small enough for the memory of both sides."""
IN_FLIGHT_BYTES = 32 * 2**20
"""What tiles that are being fetched may take of memory; four streams there are in any case."""
KEPT_SECONDS = 600.0
"""Tiles of which a part is here are asked for again within seconds: after this they are not wanted any more."""
TakeTiles = Callable[[list[tuple[int, memoryview, Hash]]], Awaitable[None]]
"""Is given tiles as (id, bytes, hash), the bytes checked."""


class InThread(Protocol):
    """Runs work in a thread and gives its result: `asyncio.to_thread`, `Tasks.in_thread`."""

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]: ...


class WrongSize(RemoteProtocolError):
    """Values for a slice that are more or fewer than it has."""


@dataclass
class _Known:
    """What the parts of one fetch tell each other of the holders."""

    given: Counter[PeerId] = field(default_factory=Counter)
    """How many parts each has given."""
    poor: set[PeerId] = field(default_factory=set)
    silent: set[PeerId] = field(default_factory=set)


class Transfers:
    """All fetches of one peer. `stall_seconds()` is how long a stream may pause before it is given up.

    `patience` says how long a whole fetch may take. `on_bytes` is told that bytes of the round moved;
    `on_refused(peer)` that a peer's process is gone. `patient`: what the running round needs goes first.
    """

    PARALLEL = 12
    """Streams at once: with few, an uplink idles while all of them wait for another one."""
    LEAST_SECONDS = 60.0
    """What a fetch may take where nothing else is said."""

    def __init__(  # noqa: PLR0913 (each is another part of the peer)
        self,
        transport: Transport,
        layout: Layout,
        stall_seconds: Callable[[], float],
        on_bytes: Callable[[], None] = lambda: None,
        on_refused: Callable[[PeerId], None] = lambda peer: None,
        patience: Patience | None = None,
        patient: bool = False,
        rates: Rates | None = None,
    ) -> None:
        """`rates`: what is known of how fast others send, shared with other transfers of this peer."""
        self._rates = rates or Rates(lambda: asyncio.get_running_loop().time())
        self._patient = patient
        self._patience = patience or Patience(lambda: self.LEAST_SECONDS, lambda: 0.0)
        self._transport = transport
        self._layout = layout
        self._stall_seconds = stall_seconds
        self._on_bytes = on_bytes
        self._on_refused = on_refused
        largest = max((tile.size for tile in layout.tiles), default=1) * VALUE_BYTES
        self._parallel = min(self.PARALLEL, max(4, IN_FLIGHT_BYTES // (largest * self._at_once(largest))))
        self._turns = Turns(self._parallel)
        self._kept: dict[tuple[Hash, ...], tuple[Partial, frozenset[PeerId]]] = {}
        """What had come of tiles when their fetch was given up, and who gave it."""
        self._forgetting: asyncio.TimerHandle | None = None

    async def values(
        self, peer: PeerId, request: ValuesRequest, size: int, is_wanted: Callable[[], bool] = lambda: True
    ) -> memoryview:
        """The `size` bytes that a peer has for a slice, its tiles one after the other; not checked.

        The memory is the caller's.

        A peer that has done other work since, in another life, refuses. Raises NetworkError, RemoteProtocolError or
        WrongSize. `is_wanted` is asked when its turn has come; PeerSilent is raised where it is not any more.
        """
        try:
            _, data = await self._ask(peer, request, size, is_wanted)
        except BlobTooLarge as error:
            raise WrongSize(str(error)) from error
        if len(data) != size:
            raise WrongSize(f"{short(peer)} sent {len(data)} bytes for a slice of {size}")
        return data

    async def tiles(
        self,
        wanted: Mapping[int, Hash],
        holders: Sequence[PeerId],
        take: TakeTiles,
        wire: bool = False,
        spread: bool = False,
        sure: Callable[[], Sequence[PeerId]] | None = None,
    ) -> None:
        """Fetches tiles by id and hash, a few at a time, and hands them to `take`: of the state, or (`wire`) what a
        round handed out.

        Holders that are `sure` to have the tiles (by default the first, with `spread` all) are asked before the others,
        in the order in which they will finish. Tiles of holders that send us little now go first, and among them the
        rarest. A holder that failed is asked last from then on; one that was waited for in vain, and meanwhile gave no
        other tiles either, no more.

        Raises NetworkError when nobody has some of the tiles, and what `take` raises.
        """
        ids, known = list(wanted), _Known()
        have = sure or (lambda: holders if spread else holders[:1])

        def place() -> Place:
            return self._rates.place(have())

        def size_of(tile_id: int) -> int:
            tile = self._layout.tiles[tile_id]
            return self._layout.wire_bytes(tile) if wire else tile.size * VALUE_BYTES

        async def some(number: int, part: Sequence[int]) -> None:
            turn = number % len(holders) if spread and holders else 0
            in_turn = [*holders[turn:], *holders[:turn]]
            sizes, hashes = [size_of(tile_id) for tile_id in part], [wanted[tile_id] for tile_id in part]
            data = await self._some_tiles(part, sizes, hashes, in_turn, known, have, place)
            await take([(tile_id, tile, wanted[tile_id]) for tile_id, tile in zip(part, data, strict=True)])

        at_once = self._at_once(max(map(size_of, ids), default=1))
        parts = [ids[at : at + at_once] for at in range(0, len(ids), at_once)]
        await all_of(some(number, part) for number, part in enumerate(parts))

    async def _some_tiles(
        self,
        ids: Sequence[int],
        sizes: Sequence[int],
        hashes: Sequence[Hash],
        holders: Sequence[PeerId],
        known: _Known,
        have: Callable[[], Sequence[PeerId]],
        place: Callable[[], Place],
    ) -> list[memoryview]:
        async def ask(holder: PeerId) -> list[memoryview]:
            given = known.given[holder]
            try:
                tiles = await self._tiles_of(holder, sizes, tuple(hashes))
            except (NetworkError, RemoteProtocolError) as error:
                known.poor.add(holder)
                if isinstance(error, PeerSilent) and known.given[holder] == given:  # else it only has a long line
                    known.silent.add(holder)
                raise
            known.given[holder] += 1
            return tiles

        def next_best() -> Iterator[PeerId]:  # other parts may have found out meanwhile who gives nothing
            left = list(holders)
            while left := [peer for peer in left if peer not in known.silent]:
                left.remove(peer := self._in_order(left, have(), known.poor, sum(sizes))[0])
                yield peer

        async with self._turns.turn(place):  # whom to ask is decided when our turn comes
            return await first_good(next_best(), ask, f"no peer could provide {len(ids)} tiles from {ids[0]} on")

    async def _tiles_of(self, holder: PeerId, sizes: Sequence[int], hashes: tuple[Hash, ...]) -> list[memoryview]:
        """From one holder. What is here of them is asked of nobody again, unless it comes out wrong."""
        partial, givers = self._kept.pop(hashes, (Partial(), frozenset()))
        before, size = partial.received, sum(sizes)
        try:
            _, data = await self._fetch(holder, TilesRequest(hashes), size, partial=partial)
            return await self._checked(holder, data, sizes, hashes)
        except (NetworkError, RemoteProtocolError, asyncio.CancelledError) as error:
            is_wrong = isinstance(error, WrongBytes)
            if not is_wrong and partial.head == BlobHead(size, b""):
                self._keep(hashes, partial, givers | {holder} if partial.received > before else givers)
            if not is_wrong or givers <= {holder}:
                raise
        return await self._tiles_of(holder, sizes, hashes)  # one of them lied: from this one alone

    def _keep(self, hashes: tuple[Hash, ...], partial: Partial, givers: frozenset[PeerId]) -> None:
        """For whoever is asked next: as many as come at once, and not for ever."""
        self._kept[hashes] = partial, givers
        if len(self._kept) > self._parallel:
            del self._kept[next(iter(self._kept))]
        if self._forgetting is not None:
            self._forgetting.cancel()
        self._forgetting = asyncio.get_running_loop().call_later(KEPT_SECONDS, self._kept.clear)

    def _in_order(
        self, holders: Sequence[PeerId], sure: Collection[PeerId], poor: Collection[PeerId], size: int
    ) -> list[PeerId]:
        fast = self._rates.fastest([peer for peer in holders if peer in sure], size)
        others = [peer for peer in holders if peer not in sure]
        return sorted([*fast, *others], key=lambda peer: (peer in poor, self._patience.was_given_up(peer)))

    async def chain(self, holder: PeerId, first: int) -> tuple[bytes, ...]:
        """Commits from round `first` on, some at a time, each packed and unchecked.

        Anybody can claim to have some, and is not given the time that a state may take.
        """
        request = ChainRequest(first, requests.MAX_COMMITS_AT_ONCE)
        async with self._turns.turn():
            _, data = await self._fetch(holder, request, MAX_MESSAGE_BYTES, requests.MAX_CHAIN_BYTES)
        part = unpack(ChainPart, data).commits
        if len(part) > requests.MAX_COMMITS_AT_ONCE:
            raise RemoteProtocolError(f"{short(holder)} sent {len(part)} commits at once")
        return part

    async def hash_list(self, holders: Sequence[PeerId], root: Hash, round: int) -> tuple[Hash, ...]:
        """The state hashes of all tiles, from the first holder that gives a list that hashes to the root.

        Raises NetworkError when nobody does.
        """

        async def ask(holder: PeerId) -> tuple[Hash, ...]:
            hashes = await self._list(holder, HashesRequest(root, round))
            if self._layout.root_of(hashes) != root:
                raise RemoteProtocolError("it sent a list of hashes that does not match the root")
            return hashes

        return await first_good(
            self._given_up_last(holders), ask, f"no peer could provide the hashes of state {short(root)}"
        )

    async def wire_list(
        self, holders: Sequence[PeerId], request: WiresRequest, tile_ids: Sequence[int], root: Hash
    ) -> dict[int, Hash]:
        """What a round handed out, of these tiles, from the first holder whose list hashes to `root`.

        Raises NetworkError when nobody has it.
        """

        async def ask(holder: PeerId) -> dict[int, Hash]:
            hashes = await self._list(holder, request)
            if sha256(*(hashes[at] for at in tile_ids)) != root:
                raise RemoteProtocolError("it sent a list of hashes that does not match the root")
            return {tile_id: hashes[tile_id] for tile_id in tile_ids}

        failure = f"no peer has the tiles that round {request.round} handed out"
        return await first_good(self._given_up_last(holders), ask, failure)

    def _given_up_last(self, holders: Sequence[PeerId]) -> list[PeerId]:
        """Who catches up asks for many lists, and may not wait for each of them."""
        return sorted(holders, key=self._patience.gave_nothing)

    async def _list(self, holder: PeerId, request: HashesRequest | WiresRequest) -> tuple[Hash, ...]:
        """A hash for each tile, unchecked."""
        size = len(self._layout.tiles) * HASH_BYTES
        _, joined = await self._ask(holder, request, size)
        if len(joined) != size:
            raise RemoteProtocolError(f"a list of {len(joined)} bytes instead of {size}")
        return split_hashes(joined)

    async def _ask(
        self, peer: PeerId, request: Request, max_bytes: int, is_wanted: Callable[[], bool] = lambda: True
    ) -> tuple[bytes, memoryview]:
        async with self._turns.turn():
            if not is_wanted():
                raise PeerSilent(f"{short(peer)} is no longer waited for")
            return await self._fetch(peer, request, max_bytes)

    async def _fetch(
        self, peer: PeerId, request: Request, max_bytes: int, usual_bytes: int = 0, partial: Partial | None = None
    ) -> tuple[bytes, memoryview]:
        """`usual_bytes`: where the answer may be up to `max_bytes`, and is hardly ever more than this.

        `partial`: what is here of the answer, to which what comes is added.
        """
        before = partial.received if partial is not None else 0

        def limit_seconds() -> float:  # who can wait may have a link that is slow for all its streams together
            size = max_bytes * (self._parallel if self._patient else 1)
            return self._patience.short_seconds(usual_bytes) if usual_bytes else self._patience.seconds(peer, size)

        try:
            with self._rates.asking(peer, max_bytes) as came:
                header, data = await fetch_within(
                    self._transport,
                    peer,
                    pack_request(request),
                    self._stall_seconds(),
                    max_bytes,
                    limit_seconds,
                    self._patient,
                    partial,
                )
                came(len(data) - before)
        except PeerRefused:
            self._on_refused(peer)
            raise
        except PeerSilent as error:
            self._patience.note_timeout(peer, error)
            raise
        self._patience.note_success(peer)
        self._on_bytes()
        return header, data

    async def _checked(
        self, holder: PeerId, data: memoryview, sizes: Sequence[int], hashes: Sequence[Hash]
    ) -> list[memoryview]:
        if len(data) != sum(sizes):
            raise RemoteProtocolError(f"{short(holder)} sent {len(data)} bytes instead of {sum(sizes)}")
        ends = list(accumulate(sizes))
        parts = [data[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        # in a thread: the streams go on meanwhile, on another core
        found = await asyncio.get_running_loop().run_in_executor(None, lambda: [hash_tile(part) for part in parts])
        if found != list(hashes):
            raise WrongBytes(f"{short(holder)} sent tiles that do not hash to what was asked for")
        return parts

    def _at_once(self, tile_bytes: int) -> int:
        """How many tiles of this size to ask for at once: who has them copies them together."""
        return max(1, min(TILES_A_FETCH, requests.MAX_JOINED_BYTES // tile_bytes))


async def fill_state(
    staging: Staging,
    wanted: Mapping[int, Hash],
    store: StateStore,
    transfers: Transfers,
    holders: Sequence[PeerId],
    in_thread: InThread,
    report: Callable[[int], None] = lambda size: None,
) -> None:
    """Brings the tiles of a state into its staging that it lacks: from this disk where they are, else from the holders.

    `report` is told of bytes that are there now. Raises NetworkError where nobody has some, StorageFull.
    """

    def write(tiles: Iterable[tuple[int, memoryview, Hash]]) -> int:
        size = 0
        for tile_id, data, name in tiles:
            staging.write_state(tile_id, data, name)
            size += len(data)
        return size

    async def take(tiles: Iterable[tuple[int, memoryview, Hash]]) -> None:
        report(await in_thread(lambda: write(tiles)))

    absent = {tile_id: name for tile_id, name in wanted.items() if not staging.has(tile_id)}
    await take(store.recall(absent))  # one after the other: it is found, hashed and written in the thread
    missing = {tile_id: name for tile_id, name in absent.items() if not staging.has(tile_id)}
    await transfers.tiles(missing, holders, take, spread=True)


async def all_of(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Runs them beside each other. The first to fail ends the others, and its error is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except ExceptionGroup as errors:
        failed: Exception = errors
        while isinstance(failed, ExceptionGroup):
            failed = failed.exceptions[0]
        raise failed from None


class FewStreams(Transfers):
    """Takes little of the others' uplinks at a time."""

    PARALLEL = 2

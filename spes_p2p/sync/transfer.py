"""Getting bytes from other peers for a round: contributions to reduce, tiles by hash, headers, hash lists.

Asks one holder after the other until the bytes are here and hash to what they should. Keeps no protocol state; who is
asked comes from the round's state machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from spes_p2p.errors import NetworkError, PeerRefused, RemoteProtocolError
from spes_p2p.ids import Hash, PeerId, short
from spes_p2p.state.hashes import HASH_BYTES, hash_tiles, split_hashes
from spes_p2p.state.layout import VALUE_BYTES, Layout, Values
from spes_p2p.swarm.ports import Transport
from spes_p2p.sync import requests
from spes_p2p.sync.messages import Commit, Slice
from spes_p2p.sync.requests import ChainPart, Request
from spes_p2p.wire import MAX_MESSAGE_BYTES, pack, unpack


class Transfers:
    """All fetches of one peer. `stall_seconds()` is how long a stream may pause before it is given up.

    `on_bytes` is told that bytes of the round moved; `on_refused(peer)` that a peer's process is gone.
    """

    PARALLEL = 4

    def __init__(
        self,
        transport: Transport,
        layout: Layout,
        stall_seconds: Callable[[], float],
        on_bytes: Callable[[], None] = lambda: None,
        on_refused: Callable[[PeerId], None] = lambda peer: None,
    ) -> None:
        self._transport = transport
        self._layout = layout
        self._stall_seconds = stall_seconds
        self._on_bytes = on_bytes
        self._on_refused = on_refused
        self._slots = asyncio.Semaphore(self.PARALLEL)

    async def contribution(self, peer: PeerId, parent: Hash, piece: Slice) -> Values:
        """The values of `peer` for a slice, flat fp32. Raises NetworkError or RemoteProtocolError."""
        size = self._slice_values(piece) * VALUE_BYTES
        request = Request(requests.VALUES, name=parent, first=piece.first_tile, count=piece.tiles)
        data = await self._ask(peer, request, size)
        if len(data) != size:
            raise RemoteProtocolError(f"{short(peer)} sent {len(data)} bytes for a slice of {size}")
        return np.frombuffer(data, np.dtype("<f4"))

    async def tiles(self, first_tile: int, joined: bytes, holders: Sequence[PeerId]) -> list[bytes]:
        """Consecutive tiles from `first_tile` on, by their hashes. Raises NetworkError when no holder has them."""
        ids = range(first_tile, first_tile + len(joined) // HASH_BYTES)
        return await self.tiles_by_id(list(ids), joined, holders)

    async def tiles_by_id(self, tile_ids: Sequence[int], joined: bytes, holders: Sequence[PeerId]) -> list[bytes]:
        """The bytes of each tile; checked against its hash, from the first holder that has them all."""
        sizes = [self._layout.tiles[tile_id].size * VALUE_BYTES for tile_id in tile_ids]
        reasons: list[str] = []
        for holder in holders:
            try:
                data = await self._ask(holder, Request(requests.TILES, hashes=joined), sum(sizes))
                return self._checked(holder, data, sizes, joined)
            except (NetworkError, RemoteProtocolError) as error:
                reasons.append(f"{short(holder)}: {error}")
        raise NetworkError(
            f"nobody gave {len(sizes)} tiles from {tile_ids[0]} on ({'; '.join(reasons) or 'no holder'})"
        )

    async def chain(self, holder: PeerId, first: int) -> tuple[Commit, ...]:
        """Commits from round `first` on, some at a time; unchecked."""
        request = Request(requests.CHAIN, first=first, count=requests.MAX_COMMITS_AT_ONCE)
        return unpack(ChainPart, await self._ask(holder, request, MAX_MESSAGE_BYTES)).commits

    async def hash_list(self, holder: PeerId, root: Hash, round: int) -> tuple[Hash, ...]:
        """The state hashes of all tiles; checked against the root."""
        size = len(self._layout.tiles) * HASH_BYTES
        joined = await self._ask(holder, Request(requests.HASHES, name=root, first=round), size)
        hashes = split_hashes(joined)
        if len(joined) != size or self._layout.root_of(hashes) != root:
            raise RemoteProtocolError(f"{short(holder)} sent a hash list that does not hash to {short(root)}")
        return hashes

    async def _ask(self, peer: PeerId, request: Request, max_bytes: int) -> bytes:
        async with self._slots:
            try:
                _, data = await self._transport.fetch(peer, pack(request), self._stall_seconds(), max_bytes)
            except PeerRefused:
                self._on_refused(peer)
                raise
        self._on_bytes()
        return data

    def _checked(self, holder: PeerId, data: bytes, sizes: list[int], joined: bytes) -> list[bytes]:
        if len(data) != sum(sizes):
            raise RemoteProtocolError(f"{short(holder)} sent {len(data)} bytes instead of {sum(sizes)}")
        parts: list[bytes] = []
        at = 0
        for size in sizes:
            parts.append(data[at : at + size])
            at += size
        if tuple(hash_tiles(parts, threads=1)) != split_hashes(joined):
            raise RemoteProtocolError(f"{short(holder)} sent tiles that do not hash to what was asked for")
        return parts

    def _slice_values(self, piece: Slice) -> int:
        return sum(self._layout.tiles[piece.first_tile + at].size for at in range(piece.tiles))


async def fetch_run(transport: Transport, peer: PeerId, timeout_seconds: float) -> bytes:
    """The packed RunInfo that a peer serves; unchecked."""
    _, data = await transport.fetch(peer, pack(Request(requests.RUN)), timeout_seconds, 2**20)
    return data

"""Damaged tiles of the committed state: found by their hashes, and put back from this disk or from other peers.

The whole state is hashed when a peer starts, and bit by bit while it runs; serving and staging hash what they read of a
version and note what is damaged. Bytes are mended in place (see `Version.mend`). What nobody has is named and asked for
again; a commit usually replaces it. A peer whose next committed state still holds such a tile stops: it would train on
wrong values.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from spes_p2p.consensus.actions import Notice
from spes_p2p.errors import NetworkError, RemoteProtocolError, StateError, StorageFull
from spes_p2p.exchange.transfers import InThread, Transfers, all_of
from spes_p2p.ids import Hash, PeerId
from spes_p2p.state.layout import VALUE_BYTES
from spes_p2p.state.store import StateStore
from spes_p2p.state.version import Version

SCRUB_BYTES = 4 * 2**20
"""Hashed with each heartbeat, and at least one tile: a hundredth of a processor core."""
SCRUB_TILES = 16
"""At most so many tiles with each heartbeat."""
ASK_EVERY = 10
"""Heartbeats after which others are asked again for what nobody had."""


class TileRepairer:
    """Puts damaged tiles back where somebody has them."""

    def __init__(self, store: StateStore, transfers: Transfers, in_thread: InThread) -> None:
        self.store = store
        self._transfers = transfers
        self.in_thread = in_thread

    async def mend(self, version: Version, tile_ids: Iterable[int], holders: Sequence[PeerId]) -> tuple[int, ...]:
        """Mends what can be mended; the tiles that are still damaged. Raises StorageFull."""
        wanted = {tile_id: version.tile_hashes[tile_id] for tile_id in tile_ids}
        version.damaged.update(wanted)
        await self.in_thread(lambda: self._recall(version, wanted))
        await all_of(self._fetch(version, at, wanted[at], holders) for at in wanted if at in version.damaged)
        return tuple(tile_id for tile_id in wanted if tile_id in version.damaged)

    def _recall(self, version: Version, wanted: Mapping[int, Hash]) -> None:
        for tile_id, data, _ in self.store.recall(wanted):
            version.mend(tile_id, data)

    async def _fetch(self, version: Version, tile_id: int, tile_hash: Hash, holders: Sequence[PeerId]) -> None:
        async def take(tiles: list[tuple[int, memoryview, Hash]]) -> None:
            for at, data, _ in tiles:
                await self.in_thread(partial(version.mend, at, data))

        try:
            await self._transfers.tiles({tile_id: tile_hash}, holders, take)
        except (NetworkError, RemoteProtocolError):  # nobody has it: it stays damaged
            return


@dataclass(eq=False)
class Scrubber:
    """Looks through the committed state for ever, a little with each heartbeat, and mends it.

    `holders` are peers that may have the state; `failed` is told what this peer must not go on with.
    """

    _mender: TileRepairer
    _tip_round: Callable[[], int]
    _holders: Callable[[], Sequence[PeerId]]
    _notice: Callable[[Notice], None]
    _failed: Callable[[BaseException], None]
    _heartbeat_seconds: float

    def __post_init__(self) -> None:
        self._store, self._in_thread = self._mender.store, self._mender.in_thread
        self._next = 0
        self._turns = 0
        self._left: dict[int, tuple[Hash, int]] = {}
        """Tiles that nobody had: their hash, and the round in which they were found."""

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_seconds)
            try:
                version = self._store.version(self._tip_round())
            except StateError:  # another one takes its place in this moment
                continue
            await self.look(version)

    async def look(self, version: Version) -> None:
        """One turn: checks some tiles, and mends what is known to be damaged."""
        self._turns += 1
        chosen = self._some(version)
        found = await self._in_thread(lambda: version.unsound(chosen))
        damaged = {*found, *tuple(version.damaged), *self._inherited(version)}
        is_new = any(self._left.get(at) != (version.tile_hashes[at], version.round) for at in damaged)
        if is_new or (damaged and self._turns % ASK_EVERY == 0):
            await self._mend(version, sorted(damaged))

    def _some(self, version: Version) -> list[int]:
        tiles, chosen, size = version.layout.tiles, list[int](), 0
        while len(chosen) < min(SCRUB_TILES, len(tiles)) and (not chosen or size < SCRUB_BYTES):
            tile = tiles[self._next % len(tiles)]
            chosen.append(tile.id)
            size += tile.size * VALUE_BYTES
            self._next = (tile.id + 1) % len(tiles)
        return chosen

    def _inherited(self, version: Version) -> list[int]:
        """Damage of an earlier version that is in this one too, since nothing new came for it; forgets the other."""
        same = {at: known for at, known in self._left.items() if version.tile_hashes[at] == known[0]}
        self._left = same
        return [at for at in same if not version.is_sound(at)]

    async def _mend(self, version: Version, damaged: Sequence[int]) -> None:
        try:
            left = await self._mender.mend(version, damaged, self._holders())
            reason = "no reachable peer has it"
        except (StorageFull, OSError) as error:
            left, reason = tuple(tile_id for tile_id in damaged if tile_id in version.damaged), str(error)
        mended = [tile_id for tile_id in damaged if tile_id not in left]
        for tile_id in mended:
            self._left.pop(tile_id, None)
        if mended:
            more = f", and {len(mended) - 1} more tiles," if len(mended) > 1 else ""
            self._notice(
                Notice("damage", f"{version.damage(mended[0])}{more} and was repaired with the committed bytes")
            )
        for tile_id in left:
            self._keep(version, tile_id, reason)

    def _keep(self, version: Version, tile_id: int, reason: str) -> None:
        """Reports the damage once. If the next committed state still has it, stops the peer."""
        tile_hash = version.tile_hashes[tile_id]
        known, round = self._left.get(tile_id, (None, version.round))
        error = version.damage(tile_id)
        if known != tile_hash:
            self._left[tile_id] = (tile_hash, version.round)
            self._notice(Notice("damage", f"{error}, and cannot be repaired yet: {reason}; it is not served to others"))
        elif version.round > round:
            self._failed(error)

"""The tensors, tiles and streams of a round's work: what `RoundExecutor` asks for. Decides nothing.

Values come through `Transfers`, and everything made lies on the `CandidateState`, which one task at a time may use.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any, TypeVar

from spes_p2p.consensus import actions as do
from spes_p2p.consensus.content import Content
from spes_p2p.consensus.manifest import SHARE, Contribution, Manifest, Merge, Slice
from spes_p2p.consensus.messages import Plan
from spes_p2p.consensus.weights import weighed
from spes_p2p.errors import RemoteProtocolError, TileDamaged
from spes_p2p.exchange.requests import ValuesRequest
from spes_p2p.exchange.transfers import Transfers
from spes_p2p.ids import Hash, PeerId
from spes_p2p.state.hashes import hash_tile
from spes_p2p.state.layout import VALUE_BYTES, Tile, Values
from spes_p2p.state.version import Version, bytes_of
from spes_p2p.sync.candidate_state import CandidateState, wire_tiles
from spes_p2p.sync.interfaces import SliceWork, Sure, Writing
from spes_p2p.sync.outgoing import Outgoing
from spes_p2p.sync.reduce import NON_FINITE
from spes_p2p.sync.slice_mean import Made, hand_out, mean_of, parts_of, sent_values, unfit
from spes_p2p.sync.surroundings import PeerContext
from spes_p2p.wire import pack

T = TypeVar("T")
HELD_BYTES = 2**30
"""What contributions may take of memory: slices beyond that wait, but for the first one, however large it is."""
ALONE_AT_ONCE = 2
"""Slices of ours alone that are made at once: one is averaged while the other is staged."""


class TensorWork:
    """The `RoundWork` of a real peer."""

    def __init__(
        self,
        context: PeerContext,
        outgoing: Outgoing,
        candidate: CandidateState,
        transfers: Transfers,
        held_bytes: int | None = None,
    ) -> None:
        """`held_bytes`: what contributions may take of memory."""
        self.context = context
        self.outgoing = outgoing
        self.candidate = candidate
        self.transfers = transfers
        self._tasks = context.tasks
        self._may_hold_bytes = HELD_BYTES if held_bytes is None else held_bytes
        self._held_bytes = 0
        self._freed = asyncio.Condition()
        self._alone = asyncio.Semaphore(ALONE_AT_ONCE)

    def tiles_of(self, piece: Slice) -> tuple[Tile, ...]:
        return self.context.layout.tiles[piece.first_tile : piece.first_tile + piece.tiles]

    # ---- reducing ----

    @asynccontextmanager
    async def slice_work(self, plan: Plan, piece: Slice) -> AsyncIterator[SliceWork]:
        """What needs nobody else's values is made a few at a time: others fetch the first ones meanwhile."""
        is_alone = piece.contributors == (self.context.core.me,)
        alone: AbstractAsyncContextManager[Any] = self._alone if is_alone else nullcontext()
        async with alone, self._memory_for(piece):
            yield TensorSlice(self, plan, piece)

    @asynccontextmanager
    async def _memory_for(self, piece: Slice) -> AsyncIterator[None]:
        """Waits until the values of all contributors of a slice may be held."""
        needed = len(piece.contributors) * sum(tile.size for tile in self.tiles_of(piece)) * VALUE_BYTES
        async with self._freed:
            await self._freed.wait_for(
                lambda: not self._held_bytes or self._held_bytes + needed <= self._may_hold_bytes
            )
            self._held_bytes += needed
        try:
            yield
        finally:
            self._held_bytes -= needed
            async with self._freed:
                self._freed.notify_all()

    async def together(self, works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
        return await asyncio.gather(*works)

    # ---- the candidate state ----

    async def fetch(self, action: do.Fetch, writing: Writing, sure: Sure) -> None:
        async def take(tiles: list[tuple[int, memoryview, Hash]]) -> None:
            async with writing() as is_wanted:
                if is_wanted:
                    await self._tasks.in_thread(lambda: self.candidate.add(tiles))

        wanted = wire_tiles((action.piece,), (action.hashes,))
        await self.transfers.tiles(wanted, action.holders, take, wire=True, sure=sure)

    async def build(self, action: do.Build, holders: Sequence[PeerId]) -> tuple[Hash, Merge | None]:
        await self._gather(action.slices, action.hashes, holders)
        return await self._tasks.in_thread(lambda: self.candidate.build(action.alpha))

    def check(self, content: Content) -> None:
        self.candidate.check(content)

    async def verify(self, content: Content, holders: Sequence[PeerId]) -> None:
        manifest = content.manifest
        await self._gather(manifest.slices, content.wire_hashes, holders)
        root = await self._tasks.in_thread(lambda: self.candidate.compute(manifest.merge))
        if root != manifest.state_root:
            root = await self._repair(manifest, holders)
        if root != manifest.state_root:
            raise RemoteProtocolError("its tiles do not hash to its root")

    async def _gather(self, slices: Sequence[Slice], joined: Sequence[bytes], holders: Sequence[PeerId]) -> None:
        """These wire tiles and no others; what is not on this disk is fetched."""
        missing = await self._tasks.in_thread(lambda: self.candidate.gather(slices, joined))

        async def take(tiles: list[tuple[int, memoryview, Hash]]) -> None:
            await self._tasks.in_thread(lambda: self.candidate.add(tiles))

        await self.transfers.tiles(missing, holders, take, wire=True)

    async def _repair(self, manifest: Manifest, holders: Sequence[PeerId]) -> Hash:
        """Our arithmetic gives other bits than the leader's: take the tiles that differ, and say so."""
        theirs = await self.transfers.hash_list(holders, manifest.state_root, manifest.round)
        differ = self.candidate.repair(theirs)
        self.context.hooks.notice(
            do.Notice("arithmetic", f"this machine computed other bits for {len(differ)} tiles", holders[0])
        )

        async def take(tiles: list[tuple[int, memoryview, Hash]]) -> None:
            await self._tasks.in_thread(lambda: self.candidate.mend(tiles))

        await self.transfers.tiles({at: theirs[at] for at in differ}, holders, take)
        return await self._tasks.in_thread(lambda: self.candidate.compute(None))


class _Base:
    """The committed values that a slice begins with."""

    def __init__(self, version: Version, tiles: Sequence[Tile]) -> None:
        self._version, self._tiles = version, tiles
        self.values = version.block(tiles[0].block)[tiles[0].start : tiles[-1].stop]
        """Flat fp32, in the order of the tiles."""

    def check_sound(self) -> None:
        """Raises TileDamaged where one of these tiles is or was not as it was committed; the scrubber mends it."""
        for tile, part in zip(self._tiles, parts_of(self._tiles), strict=True):
            self._version.sound_values(tile.id)
            if hash_tile(bytes_of(self.values[part])) != self._version.tile_hashes[tile.id]:
                raise TileDamaged(f"tile {tile.id} was damaged when it was read, and has been mended since")


class TensorSlice:
    """The `SliceWork` of a real peer: values on top of the state that was committed when it began."""

    def __init__(self, work: TensorWork, plan: Plan, piece: Slice) -> None:
        context = work.context
        self._work = work
        self._me, self._rules, self._disk, self._tasks = context.core.me, context.rules, context.disk, context.tasks
        self._parent = plan.parent
        admission = self._rules.admission_of(context.core.tip)
        self._strangers = admission.strangers_of(piece.contributors)
        self._roster = {entry.peer: entry for entry in weighed(plan.roster, admission)}
        self._piece = piece
        committed = context.tip_state()
        self._layout = context.layout
        self._tiles = work.tiles_of(piece)
        self.base = _Base(committed, self._tiles)
        self._found: dict[PeerId, Values] = {}
        self._made: list[Made] = []
        self.shares: tuple[int, ...] = ()

    async def take_own(self, me: PeerId) -> bool:
        piece, outgoing = self._piece, self._work.outgoing
        own = await self._tasks.in_thread(lambda: outgoing.own(self._parent, piece.first_tile, piece.tiles))
        if own is not None:
            self._found[me] = own
        return own is not None

    async def take(self, entry: Contribution, is_wanted: Callable[[], bool]) -> None:
        size = sum(self._layout.wire_bytes(tile) for tile in self._tiles)
        data = await self._work.transfers.values(entry.peer, self._request(entry), size, is_wanted)
        found = await self._tasks.in_thread(lambda: sent_values(self._layout, self._tiles, data, self.base.values))
        self._found[entry.peer] = found

    def _request(self, entry: Contribution) -> ValuesRequest:
        return ValuesRequest(self._parent, self._piece.first_tile, self._piece.tiles, pack(entry))

    async def average(self, left_out: dict[PeerId, str]) -> tuple[PeerId, ...]:
        return await self._tasks.in_thread(lambda: self._average(left_out))

    def _average(self, left_out: dict[PeerId, str]) -> tuple[PeerId, ...]:
        """The weighted mean over those whose values are fit, in roster order, by tile.

        What was found is used up: the mean takes the place of somebody's values. Raises TileDamaged rather than refuse
        what is unfit because our own base is.
        """
        rules = self._rules
        found = {peer: self._found[peer] for peer in self._piece.contributors if peer in self._found}
        refused = unfit(rules, self._layout, self._piece, self._roster, found, self.base.values, self._strangers)
        if refused:
            self.base.check_sound()
        left_out |= refused
        fit = tuple(peer for peer in self._piece.contributors if peer not in left_out)
        if self._strangers.issuperset(fit):  # nobody is left by whom to judge them: the old values stay
            return ()
        spent = next((found[peer] for peer in fit if found[peer].flags.writeable), None)  # our snapshot is not
        tokens = [self._roster[peer].tokens for peer in fit]
        trusted, values = [peer not in self._strangers for peer in fit], [found[peer] for peer in fit]
        mean, shares = mean_of(values, self.base.values, tokens, trusted, spent)
        found.clear()
        self._found.clear()
        unsent = self._disk.residuals.unsent_of_mean
        self._made = hand_out(self._layout, self._tiles, mean, self.base.values, unsent)
        if not self._made:
            self.base.check_sound()
            left_out |= dict.fromkeys(fit, NON_FINITE)  # changes too large for a scale
            return ()
        self.shares = () if all(trusted) else tuple(round(SHARE * share) for share in shares)
        return fit

    async def stage(self) -> tuple[Hash, ...]:
        return await self._tasks.in_thread(self._stage)

    def _stage(self) -> tuple[Hash, ...]:
        hashes = self._work.candidate.write(self._piece.first_tile, [data for data, _ in self._made])
        for tile_id, (_, left), wire_hash in zip(self._piece.tile_ids, self._made, hashes, strict=True):
            if left is not None:
                self._disk.residuals.stage(self._parent, "handed", tile_id, left, wire_hash)
        return hashes

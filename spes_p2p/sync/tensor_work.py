"""The tensors, tiles and streams of a round's work: what `RoundExecutor` asks for. Decides nothing.

Values come through `Transfers`, and everything made lies on the `CandidateState`, which one task at a time may use.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any, TypeVar

import numpy as np

from spes_p2p.consensus import actions as do
from spes_p2p.consensus.content import Content
from spes_p2p.consensus.manifest import Contribution, Manifest, Merge, Slice
from spes_p2p.consensus.messages import Plan
from spes_p2p.consensus.weights import weighed
from spes_p2p.errors import RemoteProtocolError, TileDamaged
from spes_p2p.exchange.requests import ValuesRequest
from spes_p2p.exchange.transfers import Transfers
from spes_p2p.ids import Hash, PeerId
from spes_p2p.state.hashes import hash_tile
from spes_p2p.state.layout import VALUE_BYTES, Tile, Values
from spes_p2p.state.version import Version, bytes_of
from spes_p2p.sync.audit import Likeness, check_committed
from spes_p2p.sync.candidate_state import CandidateState, wire_tiles
from spes_p2p.sync.fraud import Charge, Given
from spes_p2p.sync.interfaces import SliceWork, Sure, Writing
from spes_p2p.sync.outgoing import Outgoing
from spes_p2p.sync.reduce import NON_FINITE
from spes_p2p.sync.slice_mean import Made, hand_out, hashes_of, mean_of, parts_of, sent_values, unfit
from spes_p2p.sync.surroundings import PeerContext
from spes_p2p.sync.work_audit import WorkAuditor
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
        auditor: WorkAuditor,
        held_bytes: int | None = None,
    ) -> None:
        """`held_bytes`: what contributions may take of memory."""
        self.context = context
        self.outgoing = outgoing
        self.candidate = candidate
        self.transfers = transfers
        self.audit_work = auditor.audit
        self._tasks = context.tasks
        self._may_hold_bytes = HELD_BYTES if held_bytes is None else held_bytes
        self._held_bytes = 0
        self._freed = asyncio.Condition()
        self._alone = asyncio.Semaphore(ALONE_AT_ONCE)

    def tiles_of(self, piece: Slice) -> tuple[Tile, ...]:
        return self.context.layout.tiles[piece.first_tile : piece.first_tile + piece.tiles]

    # ---- reducing ----

    @asynccontextmanager
    async def slice_work(self, plan: Plan, piece: Slice, keeps: bool = False) -> AsyncIterator[SliceWork]:
        """What needs nobody else's values is made a few at a time: others fetch the first ones meanwhile."""
        is_alone = piece.contributors == (self.context.core.me,)
        alone: AbstractAsyncContextManager[Any] = self._alone if is_alone else nullcontext()
        async with alone, self._memory_for(piece, keeps):
            work = TensorSlice(self, plan, piece, keeps)
            if keeps:
                await self._tasks.in_thread(work.base.copy)
            yield work

    @asynccontextmanager
    async def _memory_for(self, piece: Slice, keeps: bool) -> AsyncIterator[None]:
        """Waits until the values of all contributors of a slice may be held; with `keeps` those before them, too."""
        needed = (len(piece.contributors) + keeps) * sum(tile.size for tile in self.tiles_of(piece)) * VALUE_BYTES
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

    async def fetch(self, action: do.Fetch, head: Hash, writing: Writing, sure: Sure) -> float:
        likeness, is_audited = Likeness(), self.context.rules.audited_share > 0
        layout = self.context.layout

        def add(tiles: list[tuple[int, memoryview, Hash]]) -> None:
            self.candidate.add(tiles)
            for tile_id, data, _ in tiles if is_audited else ():
                own = self.outgoing.own(head, tile_id, 1)
                if own is not None:
                    base = self._base_of(tile_id)
                    likeness.add(sent_values(layout, (layout.tiles[tile_id],), data, base), own, base)

        async def take(tiles: list[tuple[int, memoryview, Hash]]) -> None:
            async with writing() as is_wanted:
                if is_wanted:
                    await self._tasks.in_thread(lambda: add(tiles))

        wanted = wire_tiles((action.piece,), (action.hashes,))
        await self.transfers.tiles(wanted, action.holders, take, wire=True, sure=sure)
        return likeness.times_ours

    def _base_of(self, tile_id: int) -> Values:
        tile = self.context.layout.tiles[tile_id]
        return self.context.tip_state().block(tile.block)[tile.start : tile.stop]

    async def bring(self, action: do.Try, holders: Sequence[PeerId], open_: Callable[[], None]) -> bool:
        slices = [piece for column in action.columns for piece in column.pieces]
        joined = [part for column in action.columns for part in column.hashes]
        if self.candidate.has(slices, joined):
            return False
        open_()
        await self._gather(slices, joined, holders, exactly=False)
        return True

    async def harmful(self, action: do.Try) -> frozenset[int]:
        judge = self.context.disk.judge
        if judge is None:
            return frozenset()
        async with self.candidate.lock:
            new = await self._tasks.in_thread(self.candidate.blocks)
        committed, columns = self.context.tip_state(), [column.block - 1 for column in action.columns]
        return await self._tasks.in_thread(lambda: judge.harmful(committed, new, columns))

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

    async def _gather(
        self, slices: Sequence[Slice], joined: Sequence[bytes], holders: Sequence[PeerId], exactly: bool = True
    ) -> None:
        """These wire tiles, and no others if `exactly`; what is not on this disk is fetched."""
        missing = await self._tasks.in_thread(lambda: self.candidate.gather(slices, joined, exactly))

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

    @property
    def hashes(self) -> Sequence[Hash]:
        """Of all tiles of the state."""
        return self._version.tile_hashes

    def copy(self) -> None:
        """From here on the disk is read no more: damage may be mended between its use and `check_sound`."""
        self.values = np.array(self.values)

    def check_sound(self) -> None:
        """Raises TileDamaged where one of these tiles is or was not as it was committed; the scrubber mends it."""
        for tile, part in zip(self._tiles, parts_of(self._tiles), strict=True):
            self._version.sound_values(tile.id)
            if hash_tile(bytes_of(self.values[part])) != self.hashes[tile.id]:
                raise TileDamaged(f"tile {tile.id} was damaged when it was read, and has been mended since")


class TensorSlice:
    """The `SliceWork` of a real peer: values on top of the state that was committed when it began."""

    def __init__(self, work: TensorWork, plan: Plan, piece: Slice, keeps: bool) -> None:
        context = work.context
        self._work = work
        self._me, self._rules, self._disk, self._tasks = context.core.me, context.rules, context.disk, context.tasks
        self._keeps = keeps
        self._parent = plan.parent
        self._roster = {
            entry.peer: entry for entry in weighed(plan.roster, self._rules.clips, context.core.tip.members)
        }
        self._piece = piece
        committed = context.tip_state()
        self._layout = context.layout
        self._tiles = work.tiles_of(piece)
        self.base = _Base(committed, self._tiles)
        self._given: dict[PeerId, Given] = {}
        self._found: dict[PeerId, Values] = {}
        self._made: list[Made] = []

    async def take_own(self, me: PeerId) -> bool:
        piece, outgoing = self._piece, self._work.outgoing
        own = await self._tasks.in_thread(lambda: outgoing.own(self._parent, piece.first_tile, piece.tiles))
        if own is not None and await self._tasks.in_thread(lambda: self._is_as_committed(me)):
            self._found[me] = own
        return me in self._found

    def _is_as_committed(self, me: PeerId) -> bool:
        """Whether own values are still those that others get: damage here must not look like another's lie, or ours."""
        piece, outgoing = self._piece, self._work.outgoing
        if not self._rules.audited_share or self._disk.residuals.is_sole(piece.first_tile):
            return True
        shown = outgoing.shown(self._parent, piece.first_tile, piece.tiles)
        try:
            if shown is not None:
                check_committed(self._layout, self._roster[me], shown.header, self._tiles, memoryview(shown.data))
        except RemoteProtocolError:
            return False
        if shown is not None and self._keeps:
            self._given[me] = Given(me, bytes(shown.header), bytes(shown.data))
        return shown is not None

    async def take(self, entry: Contribution, is_wanted: Callable[[], bool]) -> None:
        size = sum(self._layout.wire_bytes(tile) for tile in self._tiles)
        opening, data = await self._work.transfers.values(entry.peer, self._request(entry), size, is_wanted)
        if self._rules.audited_share:
            await self._tasks.in_thread(lambda: check_committed(self._layout, entry, opening, self._tiles, data))
        if self._keeps:
            self._given[entry.peer] = Given(entry.peer, bytes(opening), bytes(data))
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
        found = {peer: self._found[peer] for peer in self._piece.contributors if peer in self._found}  # who audits must
        refused = unfit(rules, self._layout, self._piece, self._roster, found, self.base.values)
        if refused:
            self.base.check_sound()
        left_out |= refused
        fit = tuple(peer for peer in self._piece.contributors if peer not in left_out)
        if not fit:
            return ()
        spent = next((found[peer] for peer in fit if found[peer].flags.writeable), None)  # our snapshot is not
        tokens = [self._roster[peer].tokens for peer in fit]
        mean = mean_of(self._rules, [found[peer] for peer in fit], self.base.values, tokens, spent)
        found.clear()
        self._found.clear()
        unsent = self._disk.residuals.unsent_of_mean
        self._made = hand_out(self._layout, self._tiles, mean, self.base.values, unsent)
        if not self._made:
            self.base.check_sound()
            left_out |= dict.fromkeys(fit, NON_FINITE)  # changes too large for a scale
            return ()
        return fit

    async def check_sound(self) -> None:
        await self._tasks.in_thread(self.base.check_sound)

    async def remade(self) -> tuple[Hash, ...]:
        return await self._tasks.in_thread(lambda: hashes_of(self._made))

    async def keep_proof(self, charge: Charge) -> str:
        state = b"".join(self.base.hashes)
        given = [self._given[peer] for peer in charge.piece.contributors if peer in self._given]
        check = self._work.context.node.checker.check
        keep, before = self._disk.proofs.keep, self.base.values
        path = await self._tasks.in_thread(lambda: keep(charge, state, before, given, check))
        return "" if path is None else self._disk.proofs.name_of(path)

    async def stage(self) -> tuple[Hash, ...]:
        return await self._tasks.in_thread(self._stage)

    def _stage(self) -> tuple[Hash, ...]:
        hashes = self._work.candidate.write(self._piece.first_tile, [data for data, _ in self._made])
        for tile_id, (_, left), wire_hash in zip(self._piece.tile_ids, self._made, hashes, strict=True):
            if left is not None:
                self._disk.residuals.stage(self._parent, "handed", tile_id, left, wire_hash)
        return hashes

"""The long work of a round, as coroutines: reduce a slice, fetch one, build the new state, verify a proposal's.

Each ends by telling the state machine how it went, if the round is still the same. Values come through `Transfers`,
and everything made lies on the `CandidateState`, which one task at a time may use. Decides nothing.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from spes_p2p import failpoints
from spes_p2p.consensus import actions as do
from spes_p2p.consensus import events as on
from spes_p2p.consensus.machine import Consensus
from spes_p2p.consensus.membership import LINK_PUBLIC
from spes_p2p.consensus.messages import Contribution, Manifest, Plan, Proposal, Report, Slice, manifest_hash, plan_hash
from spes_p2p.consensus.reducing import LOST
from spes_p2p.errors import NetworkError, PeerClosed, RemoteProtocolError, TileDamaged
from spes_p2p.exchange.transfers import Transfers, WrongSize
from spes_p2p.failpoints import reached
from spes_p2p.ids import Hash, PeerId, sha256
from spes_p2p.state.basis import Basis
from spes_p2p.state.layout import VALUE_BYTES, Layout, Tile, Values
from spes_p2p.state.staging import TileData
from spes_p2p.state.version import DTYPE, Version
from spes_p2p.sync.candidate_state import CandidateState, wire_tiles
from spes_p2p.sync.coding import changed_values, encoded_change
from spes_p2p.sync.guests import Bases, coordinate_bytes, read_coordinates, screen_coordinates, take_in
from spes_p2p.sync.outgoing import Outgoing
from spes_p2p.sync.reduce import LARGEST_ENCODED, NON_FINITE, WRONG_SIZE, screen, weighted_mean
from spes_p2p.sync.residuals import Residuals
from spes_p2p.sync.tasks import Tasks

HELD_BYTES = 2**30
"""What contributions may take of memory: slices beyond that wait, but for the first one, however large it is."""
ALONE_AT_ONCE = 2
"""Slices of ours alone that are made at once: one is averaged while the other is staged."""


class _Tile(NamedTuple):
    """A tile to hand out, and what of the mean is not in there."""

    data: TileData
    left: Values | None


class RoundExecutor:
    """Carries out Reduce, Fetch, Build and Verify. `tell` hears how they went."""

    def __init__(
        self,
        core: Consensus,
        layout: Layout,
        outgoing: Outgoing,
        residuals: Residuals,
        bench: CandidateState,
        transfers: Transfers,
        tasks: Tasks,
        tell: Callable[[on.Event], None],
        notice: Callable[[do.Notice], None],
        now: Callable[[], float],
        committed: Callable[[], Version],
        bases: Bases,
        held_bytes: int | None = None,
    ) -> None:
        """`committed()` is the state of the tip; `held_bytes` what contributions may take of memory."""
        self._may_hold_bytes = HELD_BYTES if held_bytes is None else held_bytes
        self._core = core
        self._layout = layout
        self._outgoing = outgoing
        self._residuals = residuals
        self._committed = committed
        self._bases = bases
        self._candidate = bench
        self._transfers = transfers
        self._tasks = tasks
        self._tell = tell
        self._notice = notice
        self._now = now
        self._held_bytes = 0
        self._freed = asyncio.Condition()
        self._alone = asyncio.Semaphore(ALONE_AT_ONCE)
        self._slow: tuple[Hash, set[PeerId]] = (core.tip_hash, set())
        self._told: tuple[Hash, set[tuple[PeerId, str]]] = (core.tip_hash, set())
        self.lock = asyncio.Lock()
        """Held by who uses the bench, or publishes what lies on it."""

    # ---- reducing ----

    async def reduce(self, action: do.Reduce) -> None:
        """Collects a slice's contributions, averages those that are fit, and stages the result."""
        plan = action.plan.value
        head, piece = plan.parent, plan.slices[action.index]
        report = Report(plan_hash(plan), action.index, self._core.me, (), ())
        async with self._turn_for(piece), self._memory_for(piece):
            if not self._is_wanted(report):
                return
            try:
                report, left_out = await self._reduced(plan, piece, report)
            except TileDamaged as error:  # somebody else has its values whole; it is mended beside
                left_out = {}
                self._notice(do.Notice("damaged", f"slice {piece.key} is not reduced here: {error}"))
        if self._is_wanted(report):
            for peer, reason in left_out.items():
                if report.contributors or reason != LOST:  # else it is we who reach nobody
                    self._note_left_out(peer, piece, reason, head)
            report = replace(report, left_out=tuple(sorted(left_out.items())))
            self._tell(on.SliceReduced(report))

    async def _reduced(self, plan: Plan, piece: Slice, report: Report) -> tuple[Report, dict[PeerId, str]]:
        """The report of a slice that was reduced and staged, and who was left out."""
        base = self._committed()
        roster = {entry.peer: entry for entry in plan.roster}
        found, left_out = await self._contributions(piece, plan.parent, roster, base)
        reached(failpoints.COLLECTED, peer=self._core.me, round=self._core.tip.round + 1)
        guests = await self._guests(piece, plan)
        made, fit = await self._tasks.in_thread(lambda: self._average(piece, found, roster, base, left_out, guests))
        if made is not None:
            reached(failpoints.STAGE, peer=self._core.me, round=self._core.tip.round + 1)
            hashes = await self._stage(report, piece, plan.parent, made)
            reached(failpoints.STAGED, peer=self._core.me, round=self._core.tip.round + 1)
            report = replace(report, contributors=fit, wire_hashes=hashes)
        return report, left_out

    def _note_left_out(self, peer: PeerId, piece: Slice, reason: str, head: Hash) -> None:
        """Once a round for each peer and reason: it is seldom one slice alone."""
        if self._told[0] != head:
            self._told = (head, set())
        if (peer, reason) not in self._told[1]:
            self._told[1].add((peer, reason))
            self._notice(do.Notice("left out", f"left out of slice {piece.key}: {reason}", peer))

    @asynccontextmanager
    async def _turn_for(self, piece: Slice) -> AsyncIterator[None]:
        """What needs nobody else's values is made a few at a time: others fetch the first ones meanwhile."""
        is_alone = piece.contributors == (self._core.me,) and not self._basis_of(piece)
        async with self._alone if is_alone else nullcontext():
            yield

    @asynccontextmanager
    async def _memory_for(self, piece: Slice) -> AsyncIterator[None]:
        """Waits until the values of all contributors of a slice may be held."""
        needed = len(piece.contributors) * sum(tile.size for tile in self._tiles_of(piece)) * VALUE_BYTES
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

    async def _contributions(
        self, piece: Slice, parent: Hash, roster: Mapping[PeerId, Contribution], base: Version
    ) -> tuple[dict[PeerId, Values], dict[PeerId, str]]:
        """The values of a slice's contributors, and why the others are left out."""
        entries = [roster[peer] for peer in piece.contributors]
        answers = await asyncio.gather(*(self._contribution(entry, piece, parent, base) for entry in entries))
        pairs = list(zip(piece.contributors, answers, strict=True))
        found = {peer: values for peer, values in pairs if not isinstance(values, str)}
        return found, {peer: reason for peer, reason in pairs if isinstance(reason, str)}

    async def _contribution(self, entry: Contribution, piece: Slice, parent: Hash, base: Version) -> Values | str:
        """The reason where there are none; who was silent once in a round is not waited for again."""
        peer = entry.peer
        if peer == self._core.me:
            if not self._core.is_counted(parent, entry):
                return LOST
            own = await self._tasks.in_thread(lambda: self._outgoing.own(parent, piece.first_tile, piece.tiles))
            return LOST if own is None else own
        slow = self._slow_in(parent)
        if peer in slow or not self._core.alive(peer, self._now()):
            return LOST
        try:
            data = await self._transfers.contribution(entry, parent, piece, lambda: peer not in slow)
        except WrongSize:
            return WRONG_SIZE
        except (PeerClosed, RemoteProtocolError):
            return LOST
        except NetworkError:
            slow.add(peer)
            return LOST
        return await self._tasks.in_thread(lambda: self._values_of(piece, data, base))

    async def _guests(self, piece: Slice, plan: Plan) -> dict[PeerId, Values]:
        """The coordinates of those who trained in a slice's column without owning it, as far as they can be had."""
        basis = self._basis_of(piece)
        if basis is None:
            return {}
        link = {member.peer: member.link_class for member in self._core.tip.members}
        entries = [
            entry
            for entry in plan.roster
            if entry.peer not in piece.contributors
            and LINK_PUBLIC in (link.get(entry.peer), link.get(self._core.me))  # one of two can dial the other
        ]
        answers = await asyncio.gather(*(self._guest(entry, piece, plan.parent, basis) for entry in entries))
        found = {entry.peer: values for entry, values in zip(entries, answers, strict=True) if values is not None}
        for peer, reason in screen_coordinates(found).items():
            del found[peer]
            self._note_left_out(peer, piece, reason, plan.parent)
        return found

    async def _guest(self, entry: Contribution, piece: Slice, parent: Hash, basis: Basis) -> Values | None:
        peer, slow = entry.peer, self._slow_in(parent)
        if peer == self._core.me:
            own = self._outgoing.coordinates(parent, piece.first_tile, piece.tiles)
            return None if own is None else read_coordinates(own, basis)
        if peer in slow or not self._core.alive(peer, self._now()):
            return None
        size = coordinate_bytes(self._layout, self._tiles_of(piece))
        try:
            data = await self._transfers.trained(entry, parent, piece, size, lambda: peer not in slow)
        except (PeerClosed, RemoteProtocolError):
            return None
        except NetworkError:
            slow.add(peer)
            return None
        return read_coordinates(data, basis)

    def _basis_of(self, piece: Slice) -> Basis | None:
        return self._bases.now.get(piece.block - 1)

    def _slow_in(self, parent: Hash) -> set[PeerId]:
        """Who was silent on top of `parent`."""
        if self._slow[0] != parent:
            self._slow = (parent, set())
        return self._slow[1]

    def _values_of(self, piece: Slice, data: memoryview, base: Version) -> Values:
        """The values that a contribution stands for."""
        codec = self._layout.codec_of(piece.block)
        if codec == "fp32":
            return np.frombuffer(data, DTYPE)
        before, at, tiles = base.block(piece.block), 0, self._tiles_of(piece)
        values = np.empty(tiles[-1].stop - tiles[0].start, DTYPE)
        for tile in tiles:
            end, part = (
                at + self._layout.wire_bytes(tile),
                slice(tile.start - tiles[0].start, tile.stop - tiles[0].start),
            )
            values[part] = changed_values(codec, data[at:end], before[tile.start : tile.stop])
            at = end
        return values

    def _average(
        self,
        piece: Slice,
        found: dict[PeerId, Values],
        roster: Mapping[PeerId, Contribution],
        base: Version,
        out: dict[PeerId, str],
        guests: Mapping[PeerId, Values],
    ) -> tuple[list[_Tile] | None, tuple[PeerId, ...]]:
        """The weighted mean over those whose values are fit, in roster order, by tile; adds the others to `out`.

        `found` is used up: the mean takes the place of somebody's values. Raises TileDamaged rather than refuse what is
        unfit because our own base is.
        """
        tiles = self._tiles_of(piece)
        before = base.block(piece.block)[tiles[0].start : tiles[-1].stop]
        lossy, rules = self._layout.codec_of(piece.block) != "fp32", self._core.state.rules
        late = (rules.expert_rounds if piece.block else rules.fragments) > 1
        bounded = lossy or self._layout.has_momentum
        steps = None if late else {peer: entry.steps for peer, entry in roster.items()}  # not this round's alone
        refused = screen(found, before, steps, LARGEST_ENCODED if bounded else math.inf)
        if refused:
            _check_sound(base, tiles)
        out |= refused
        fit = tuple(peer for peer in piece.contributors if peer not in out)
        if not fit:
            return None, fit
        spent = next((found[peer] for peer in fit if found[peer].flags.writeable), None)  # our snapshot is not
        mean = weighted_mean([found[peer] for peer in fit], [roster[peer].tokens for peer in fit], spent)
        found.clear()
        basis = self._basis_of(piece)
        if guests and basis is not None:
            shares = [(roster[peer].tokens, values) for peer, values in guests.items()]
            mean = take_in(self._layout, tiles, mean, before, basis, sum(roster[peer].tokens for peer in fit), shares)
        parts = [slice(tile.start - tiles[0].start, tile.stop - tiles[0].start) for tile in tiles]
        made = [self._handed_out(tile, mean[part], before[part]) for tile, part in zip(tiles, parts, strict=True)]
        if not all(tile.left is None or np.isfinite(tile.left).all() for tile in made):
            _check_sound(base, tiles)
            out |= dict.fromkeys(fit, NON_FINITE)  # changes too large for a scale
            return None, ()
        return made, fit

    def _handed_out(self, tile: Tile, mean: Values, before: Values) -> _Tile:
        """A tile as it is handed out, and what that leaves out."""
        codec = self._layout.codec_of(tile.block)
        if codec == "fp32":
            return _Tile(mean, None)
        return _Tile(*encoded_change(codec, mean, before, self._residuals.unsaid(tile.id)))

    async def _stage(self, report: Report, piece: Slice, head: Hash, made: list[_Tile]) -> tuple[Hash, ...]:
        """Puts the wire tiles of a slice on the bench; nothing happens when nobody wants them any more."""

        def stage() -> tuple[Hash, ...]:
            hashes = self._candidate.write(piece.first_tile, [tile.data for tile in made])
            for tile_id, tile, wire_hash in zip(piece.tile_ids, made, hashes, strict=True):
                if tile.left is not None:
                    self._residuals.stage(head, "handed", tile_id, tile.left, wire_hash)
            return hashes

        async with self.lock:
            if not self._is_wanted(report):
                return ()
            self._open_bench()
            return await self._tasks.in_thread(stage)

    def _is_wanted(self, report: Report) -> bool:
        return self._core.wants_reduced(report.plan, report.index)

    def _tiles_of(self, piece: Slice) -> tuple[Tile, ...]:
        return self._layout.tiles[piece.first_tile : piece.first_tile + piece.tiles]

    # ---- fetching ----

    async def fetch(self, action: do.Fetch) -> None:
        """Gets the tiles of a slice by hash, and stages them."""
        head, key = self._core.tip_hash, action.piece.key

        def is_wanted() -> bool:
            return self._core.tip_hash == head and self._core.wants_staged(key, action.hashes)

        async def take(tiles: list[tuple[int, memoryview, Hash]]) -> None:
            async with self.lock:
                if is_wanted():
                    self._open_bench()
                    await self._tasks.in_thread(lambda: self._candidate.add(tiles))

        try:
            await self._transfers.tiles(
                wire_tiles((action.piece,), (action.hashes,)), action.holders, take, wire=True,
                sure=lambda: self._core.sure_holders(action.piece, self._now()),
            )  # fmt: skip
        except (NetworkError, RemoteProtocolError, TileDamaged):  # what is damaged is mended beside
            if is_wanted():
                self._tell(on.FetchFailed(key))
            return
        if is_wanted():
            self._tell(on.SliceStaged(key, action.hashes))

    # ---- the new state ----

    async def build(self, action: do.Build) -> None:
        """Makes the new state that we propose."""
        head = self._core.tip_hash
        try:
            async with self.lock:
                if self._core.tip_hash != head:
                    return
                await self._gather(action.slices, action.hashes, self._others())
                root, merge = await self._tasks.in_thread(lambda: self._candidate.build(action.alpha))
        except (NetworkError, TileDamaged) as error:  # what is damaged is mended beside
            if self._core.tip_hash == head:
                self._notice(do.Notice("missing", f"what was staged is not here any more: {error}"))
                self._tell(on.SlicesLost(tuple(piece.key for piece in action.slices)))
            return
        if self._core.tip_hash == head:
            self._tell(on.StateBuilt(action, sha256(*action.hashes), root, merge))

    async def verify(self, proposal: Proposal) -> None:
        """Brings the state that a proposal names to our disk."""
        head = self._core.tip_hash
        try:
            async with self.lock:
                if self._core.tip_hash != head:
                    return
                await self._make(proposal)
        except (NetworkError, RemoteProtocolError, TileDamaged) as error:
            if self._core.tip_hash == head:
                self._notice(do.Notice("refused", f"could not make the proposed state: {error}", proposal.leader))
                self._tell(on.VerifyFailed())
            return
        if self._core.tip_hash == head:
            self._tell(on.StateVerified(manifest_hash(proposal.manifest)))

    async def _make(self, proposal: Proposal) -> None:
        """Raises RemoteProtocolError where its parts do not fit, NetworkError where tiles are missing."""
        manifest = proposal.manifest
        if self._candidate.finished(manifest.state_root) is not None:
            return
        self._candidate.check(proposal)
        holders = [proposal.leader, *(peer for peer in self._others() if peer != proposal.leader)]
        await self._gather(manifest.slices, proposal.wire_hashes, holders)
        root = await self._tasks.in_thread(lambda: self._candidate.compute(manifest.merge))
        if root != manifest.state_root:
            root = await self._repair(manifest, holders)
        if root != manifest.state_root:
            raise RemoteProtocolError("its tiles do not hash to its root")

    async def _gather(self, slices: Sequence[Slice], joined: Sequence[bytes], holders: Sequence[PeerId]) -> None:
        """Exactly these wire tiles on the bench; what is not on this disk is fetched."""
        self._open_bench()
        missing = await self._tasks.in_thread(lambda: self._candidate.gather(slices, joined))

        async def take(tiles: list[tuple[int, memoryview, Hash]]) -> None:
            await self._tasks.in_thread(lambda: self._candidate.add(tiles))

        await self._transfers.tiles(missing, [peer for peer in holders if peer != self._core.me], take, wire=True)

    async def _repair(self, manifest: Manifest, holders: Sequence[PeerId]) -> Hash:
        """Our arithmetic gives other bits than the leader's: take the tiles that differ, and say so."""
        others = [peer for peer in holders if peer != self._core.me]
        theirs = await self._transfers.hash_list(others, manifest.state_root, manifest.round)
        differ = self._candidate.differing(theirs)
        self._notice(do.Notice("arithmetic", f"{len(differ)} tiles came out differently here", others[0]))
        self._candidate.begin_repair()

        async def take(tiles: list[tuple[int, memoryview, Hash]]) -> None:
            await self._tasks.in_thread(lambda: self._candidate.mend(tiles))

        await self._transfers.tiles({at: theirs[at] for at in differ}, others, take)
        return await self._tasks.in_thread(self._candidate.end_repair)

    def _open_bench(self) -> None:
        """What was made and not signed for is undone: it counts as verified no longer."""
        self._candidate.open()
        self._tell(on.StateLost(self._candidate.lost(self._core.state.round.verified_roots())))

    def _others(self) -> list[PeerId]:
        """Living peers, any of whom may have staged the same."""
        now = self._now()
        return [peer for peer in self._core.state.others.contacts if self._core.alive(peer, now)]


def _check_sound(base: Version, tiles: Sequence[Tile]) -> None:
    """Raises TileDamaged where one of these tiles is not as it was committed; the scrubber mends it."""
    for tile in tiles:
        base.sound_values(tile.id)

"""Looks at what another has trained: fetches a part of what it committed to, and has that judged.

Carries out `AuditWork`. Who is looked at, and what follows, is decided in `consensus/probation.py`; judging is the
trainer's (`WorkJudge`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from spes_p2p.consensus.manifest import Contribution, Manifest
from spes_p2p.consensus.membership import LINK_PUBLIC, WITHHELD
from spes_p2p.consensus.probation import TEXT_SHARE, TILES_SHARE
from spes_p2p.data.leases import take
from spes_p2p.errors import DataNotReady, NetworkError, RemoteProtocolError, TileDamaged
from spes_p2p.exchange.requests import ValuesRequest
from spes_p2p.exchange.transfers import Transfers
from spes_p2p.ids import sha256
from spes_p2p.state.layout import Layout, Tile, Values
from spes_p2p.state.version import Version
from spes_p2p.sync.audit import check_committed
from spes_p2p.sync.outgoing import Outgoing
from spes_p2p.sync.slice_mean import sent_values
from spes_p2p.sync.surroundings import PeerContext, Text
from spes_p2p.wire import pack


@dataclass(frozen=True)
class _Round:
    """The round that the tip has ended: its state before, the work of another, and our own."""

    tip: Manifest
    before: Manifest
    base: Version
    entry: Contribution
    own: Contribution
    tiles: tuple[Tile, ...]
    layout: Layout


class WorkAuditor:
    """What an auditor fetches and reads."""

    def __init__(self, context: PeerContext, outgoing: Outgoing, transfers: Transfers) -> None:
        self._core, self._disk, self._tasks = context.core, context.disk, context.tasks
        self._outgoing, self._transfers = outgoing, transfers

    async def audit(self, entry: Contribution) -> str | None:
        """What is found of work that the tip counts; None where nothing can be said of it, for whatever reason here."""
        judge, seen = self._disk.work_judge, self._round_of(entry)
        if judge is None or seen is None:
            return None
        own = await self._tasks.in_thread(lambda: self._own(seen))
        if own is None:
            return None
        try:
            theirs = await self._theirs(seen)
        except (NetworkError, RemoteProtocolError):
            return WITHHELD if self._is_current(seen) else None
        text = Text(
            take(seen.before.leases.of(entry.peer), entry.sequences)[0],
            take(seen.before.leases.of(self._core.me), seen.own.sequences)[0],
            seen.tip.leases.of(self._core.me),
            sha256(self._core.tip_hash, self._core.me.encode(), entry.peer.encode()),
            int(TEXT_SHARE * sum(seen.layout.wire_bytes(tile) for tile in seen.tiles)),
        )
        while self._is_current(seen):
            try:
                return await self._tasks.in_thread(lambda: judge.finding(seen.base, theirs, own, text))
            except DataNotReady:
                await asyncio.sleep(self._core.state.pace.heartbeat_seconds)
            except TileDamaged:  # our own base; it is mended beside
                return None
        return None

    def _is_current(self, seen: _Round) -> bool:
        return self._core.tip == seen.tip

    def _round_of(self, entry: Contribution) -> _Round | None:
        """None where we took no part in it, or have not its state any more, or cannot reach each other."""
        tip, store = self._core.tip, self._disk.store
        links = {member.peer: member.link_class for member in tip.members}
        own = next((mine for mine in tip.roster if mine.peer == self._core.me), None)
        if own is None or LINK_PUBLIC not in (links.get(entry.peer), links.get(self._core.me)):
            return None
        before = self._disk.chain.commit(tip.round - 1).manifest
        if before.round not in store.rounds() or (base := store.version(before.round)).root != before.state_root:
            return None
        mark = sha256(self._core.tip_hash, self._core.me.encode(), entry.peer.encode(), b"tiles")
        shared = self._disk.store.layout.tiles_of(0)
        number = max(1, round(TILES_SHARE * len(shared)))
        chosen = sorted(shared, key=lambda tile: sha256(mark, tile.id.to_bytes(4, "big")))[:number]
        tiles = tuple(sorted(chosen, key=lambda tile: tile.id))
        return _Round(tip, before, base, entry, own, tiles, store.layout)

    def _own(self, seen: _Round) -> Values | None:
        """The shared values of the round's base with ours in those tiles; None where they are gone."""
        parent, parts = seen.tip.parent, list[tuple[Sequence[Tile], memoryview]]()
        for run in self._runs(seen.tiles):
            data = self._outgoing.serve(parent, run[0].id, len(run))
            if data is None:
                return None
            parts.append((run, memoryview(data)))
        return _with(seen, parts)

    async def _theirs(self, seen: _Round) -> Values:
        """The same with those of the one who is audited. Raises NetworkError, RemoteProtocolError."""
        parts = list[tuple[Sequence[Tile], memoryview]]()
        for run in self._runs(seen.tiles):
            request = ValuesRequest(seen.tip.parent, run[0].id, len(run), pack(seen.entry))
            size = sum(seen.layout.wire_bytes(tile) for tile in run)
            opening, data = await self._transfers.values(seen.entry.peer, request, size, lambda: self._is_current(seen))
            check_committed(seen.layout, seen.entry, opening, run, data)
            parts.append((run, data))
        return await self._tasks.in_thread(lambda: _with(seen, parts))

    def _runs(self, tiles: Sequence[Tile]) -> list[tuple[Tile, ...]]:
        """Neighbours that are fetched together, a slice at most."""
        most = self._core.state.rules.slice_tiles
        runs = (tuple(t for _, t in run) for _, run in groupby(enumerate(tiles), key=lambda at: at[1].id - at[0]))
        return [run[at : at + most] for run in runs for at in range(0, len(run), most)]


def _with(seen: _Round, parts: Sequence[tuple[Sequence[Tile], memoryview]]) -> Values:
    """The shared values of a round's base with what travelled of some tiles."""
    values = np.array(seen.base.block(0))
    for tiles, data in parts:
        place = slice(tiles[0].start, tiles[-1].stop)
        values[place] = sent_values(seen.layout, tiles, data, values[place])
    return values

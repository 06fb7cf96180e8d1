"""How the long work of a round goes: reduce a slice, fetch one, build the new state, verify a proposal's.

Each ends by telling the state machine how it went, if that is still wanted. What touches values, tiles and streams is a
`RoundWork`, and who is asked for values a `Collector`'s.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from spes_p2p import failpoints
from spes_p2p.consensus import actions as do
from spes_p2p.consensus import events as on
from spes_p2p.consensus.content import Content
from spes_p2p.consensus.machine import Consensus
from spes_p2p.consensus.manifest import Contribution, Slice, manifest_hash
from spes_p2p.consensus.messages import LOST, Plan, Report, plan_hash
from spes_p2p.errors import NetworkError, PeerClosed, RemoteProtocolError, TileDamaged
from spes_p2p.exchange.transfers import WrongSize
from spes_p2p.failpoints import reached
from spes_p2p.ids import NO_HASH, Hash, PeerId, sha256
from spes_p2p.sync.coding import UnfitTile
from spes_p2p.sync.dispatcher import Dispatcher
from spes_p2p.sync.interfaces import RoundWork, SliceWork
from spes_p2p.sync.reduce import WRONG_SIZE


class Collector:
    """Collects the values of a slice: whom to ask, and why somebody is missing.

    Asks nobody again who was silent on top of the same manifest.
    """

    def __init__(self, core: Consensus, work: RoundWork, now: Callable[[], float]) -> None:
        self._core, self._work, self._now = core, work, now
        self._slow: tuple[Hash, set[PeerId]] = (NO_HASH, set())

    async def contributions(self, plan: Plan, piece: Slice, values: SliceWork) -> dict[PeerId, str]:
        """Takes what the contributors of a slice have; why some are left out."""
        roster = {entry.peer: entry for entry in plan.roster}
        asked = (self._contribution(roster[peer], plan.parent, values) for peer in piece.contributors)
        reasons = await self._work.together(asked)
        return {peer: reason for peer, reason in zip(piece.contributors, reasons, strict=True) if reason}

    async def _contribution(self, entry: Contribution, parent: Hash, values: SliceWork) -> str:
        """Takes one contribution; returns why it is missing, or "". A peer is not asked again after a silence."""
        if entry.peer == self._core.me:
            return "" if self._core.is_counted(parent, entry) and await values.take_own(entry.peer) else LOST
        peer, slow = entry.peer, self._slow_in(parent)
        if peer in slow or not self._core.alive(peer, self._now()):
            return LOST
        try:
            await values.take(entry, lambda: peer not in slow)
        except WrongSize:
            return WRONG_SIZE
        except (PeerClosed, RemoteProtocolError):
            return LOST
        except NetworkError:
            slow.add(peer)
            return LOST
        return ""

    def _slow_in(self, parent: Hash) -> set[PeerId]:
        """Who was silent on top of `parent`."""
        if self._slow[0] != parent:
            self._slow = (parent, set())
        return self._slow[1]


class RoundExecutor:
    """Carries out Reduce, Fetch, Build and Verify. The dispatcher is told how they went."""

    def __init__(self, dispatcher: Dispatcher, work: RoundWork) -> None:
        self._dispatcher = dispatcher
        self._core, self._candidate, self._lock = dispatcher.core, dispatcher.candidate, dispatcher.candidate.lock
        self._tell, self._notice, self._now = dispatcher.tell, dispatcher.notice, dispatcher.now
        self._work = work
        self._collector = Collector(self._core, work, self._now)
        self._told: tuple[Hash, set[tuple[PeerId, str]]] = (NO_HASH, set())

    # ---- reducing ----

    async def reduce(self, action: do.Reduce) -> None:
        """Collects a slice's contributions, averages those that are fit, and stages the result."""
        plan = action.plan.value
        piece = plan.slices[action.index]
        nothing = replace(piece, reducer=self._core.me, contributors=())
        report = Report(plan.parent, plan_hash(plan), action.index, nothing, ())
        left_out: dict[PeerId, str] = {}
        async with self._work.slice_work(plan, piece) as values:
            if not self._is_wanted(report):
                return
            try:
                left_out = await self._collector.contributions(plan, piece, values)
                reached(failpoints.COLLECTED, peer=self._core.me, round=self._core.tip.round + 1)
                report = await self._staged(report, values, left_out)
            except TileDamaged as error:  # somebody else has its values whole; it is mended beside
                left_out = {}
                self._notice(do.Notice("damaged", f"this peer could not reduce slice {piece.key}: {error}"))
        if self._is_wanted(report):
            for peer, reason in left_out.items():
                if report.contributors or reason != LOST:  # else it is we who reach nobody
                    self._note_left_out(peer, piece, reason, plan.parent)
            self._tell(on.SliceReduced(replace(report, left_out=tuple(sorted(left_out.items())))))

    async def _staged(self, report: Report, values: SliceWork, left_out: dict[PeerId, str]) -> Report:
        """Averages and stages; nothing is written when nobody wants it any more."""
        fit = await values.average(left_out)
        if not fit:
            return report
        reached(failpoints.STAGE, peer=self._core.me, round=self._core.tip.round + 1)
        async with self._writing(lambda: self._is_wanted(report)) as is_wanted:
            hashes = await values.stage() if is_wanted else ()
        reached(failpoints.STAGED, peer=self._core.me, round=self._core.tip.round + 1)
        piece = replace(report.piece, contributors=fit)
        return replace(report, piece=piece, wire_hashes=hashes, shares=values.shares)

    def _note_left_out(self, peer: PeerId, piece: Slice, reason: str, head: Hash) -> None:
        """Once a round for each peer and reason: it is seldom one slice alone."""
        if self._told[0] != head:
            self._told = (head, set())
        if (peer, reason) not in self._told[1]:
            self._told[1].add((peer, reason))
            self._notice(do.Notice("left out", f"its values for slice {piece.key} were left out: {reason}", peer))

    def _is_wanted(self, report: Report) -> bool:
        return self._core.wanted.reduced(report.plan, report.index)

    # ---- fetching ----

    async def fetch(self, action: do.Fetch) -> None:
        """Gets the tiles of a slice by hash, and stages them."""
        head, key = self._core.tip_hash, action.piece.key

        def is_wanted() -> bool:
            return self._core.tip_hash == head and self._core.wanted.staged(key, action.hashes)

        def sure() -> Sequence[PeerId]:
            return self._core.sure_holders(action.piece, self._now())

        event: on.Event
        try:
            await self._work.fetch(action, lambda: self._writing(is_wanted), sure)
            event = on.SliceStaged(key, action.hashes)
        except UnfitTile as error:  # the tiles are those that the report has signed for
            event = on.FetchFailed(key, is_unfit=True)
            if is_wanted():
                self._notice(do.Notice("refused", f"slice {key} will be reduced by another peer: {error}"))
        except (NetworkError, RemoteProtocolError):
            event = on.FetchFailed(key)
        except TileDamaged:  # mended beside
            event = on.StagingFailed(key)
        if is_wanted():
            self._tell(event)

    # ---- the new state ----

    async def build(self, action: do.Build) -> None:
        """Makes the new state that we propose."""
        head = self._core.tip_hash
        try:
            async with self._lock:
                if not self._is_building(action, head):
                    return
                self._open()
                root, merge = await self._work.build(action, self._others())
        except (NetworkError, TileDamaged) as error:  # what is damaged is mended beside
            if self._is_building(action, head):
                self._notice(do.Notice("missing", f"staged tiles are missing: {error}"))
                self._tell(on.SlicesLost(tuple(piece.key for piece in action.slices)))
            return
        if self._is_building(action, head):
            self._tell(on.StateBuilt(action, sha256(*action.hashes), root, merge))

    def _is_building(self, action: do.Build, head: Hash) -> bool:
        return self._core.tip_hash == head and self._core.wanted.built(action)

    async def verify(self, action: do.Verify) -> None:
        """Brings the state that a proposed manifest names to our disk."""
        name = manifest_hash(action.content.manifest)
        try:
            async with self._lock:
                if not self._core.wanted.verified(name):
                    return
                await self._make(action.content)
        except (NetworkError, RemoteProtocolError, TileDamaged) as error:
            if self._core.wanted.verified(name):
                self._notice(do.Notice("refused", f"could not make the proposed state: {error}"))
                self._tell(on.VerifyFailed())
            return
        if self._core.wanted.verified(name):
            self._tell(on.StateVerified(name))

    async def _make(self, content: Content) -> None:
        if self._candidate.finished(content.manifest.state_root) is not None:
            return
        self._work.check(content)
        self._open()
        await self._work.verify(content, self._others())

    # ---- the candidate state ----

    @asynccontextmanager
    async def _writing(self, is_wanted: Callable[[], bool]) -> AsyncIterator[bool]:
        async with self._lock:
            wanted = is_wanted()
            if wanted:
                self._open()
            yield wanted

    def _open(self) -> None:
        """What was made and not signed for is undone: it counts as verified no longer."""
        self._candidate.open()
        self._dispatcher.tell_lost()

    def _others(self) -> list[PeerId]:
        """Living peers, any of whom may have staged the same."""
        now = self._now()
        return [peer for peer in self._core.state.others.contacts if self._core.alive(peer, now)]

"""How the long work of a round goes: reduce a slice, fetch one, build the new state, verify a proposal's.

Each ends by telling the state machine how it went, if that is still wanted. What touches values, tiles and streams is a
`RoundWork`, and who is asked for values a `Collector`'s.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from spes_p2p import failpoints
from spes_p2p.consensus import actions as do
from spes_p2p.consensus import events as on
from spes_p2p.consensus.audits import most_lost
from spes_p2p.consensus.content import Content
from spes_p2p.consensus.machine import Consensus
from spes_p2p.consensus.manifest import Contribution, Slice, manifest_hash
from spes_p2p.consensus.messages import LOST, Plan, Report, plan_hash
from spes_p2p.errors import NetworkError, PeerClosed, RemoteProtocolError, TileDamaged
from spes_p2p.exchange.transfers import WrongSize
from spes_p2p.failpoints import reached
from spes_p2p.ids import NO_HASH, Hash, PeerId, sha256
from spes_p2p.sync.audit import OtherValues
from spes_p2p.sync.coding import UnfitTile
from spes_p2p.sync.dispatcher import Dispatcher
from spes_p2p.sync.fraud import Charge, judged
from spes_p2p.sync.interfaces import RoundWork, SliceWork
from spes_p2p.sync.reduce import OTHER_VALUES, WRONG_SIZE


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
        except OtherValues:
            return OTHER_VALUES
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
        return replace(report, piece=replace(report.piece, contributors=fit), wire_hashes=hashes)

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
            times_ours = await self._work.fetch(action, head, lambda: self._writing(is_wanted), sure)
            event = on.SliceStaged(key, action.hashes, times_ours)
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

    # ---- auditing ----

    async def audit(self, action: do.Audit) -> None:
        """Makes a slice again that another has reduced."""
        report, plan = action.report.value, action.plan.value
        piece = plan.slices[report.index]
        taken = judged(piece.contributors, report)
        finding, ready, tip = on.Finding.OPEN, self._core.state.round.ready, self._core.tip
        async with self._work.slice_work(plan, replace(piece, contributors=taken), keeps=True) as values:
            if not self._core.wanted.audited(action.report):
                return
            with contextlib.suppress(TileDamaged):  # mended beside
                finding = await self._made_again(plan, report, taken, values)
            if finding is on.Finding.FALSE:
                said = tuple(ready[entry] for entry in plan.roster if entry.peer in taken and entry in ready)
                if where := await values.keep_proof(Charge(tip, plan, action.report, said)):
                    text = f"it handed out what is not the mean of slice {piece.key}: the proof is {where}"
                    self._notice(do.Notice("proof", text, report.reducer))
        if self._core.wanted.audited(action.report):
            self._tell(on.SliceAudited(action.report, finding))

    async def _made_again(self, plan: Plan, report: Report, taken: tuple[PeerId, ...], values: SliceWork) -> on.Finding:
        """Whether of those `taken` the same stay out, and the others have that mean."""
        piece = plan.slices[report.index]
        if await self._collector.contributions(plan, replace(piece, contributors=taken), values):
            return on.Finding.OPEN
        lost, most = [peer for peer in piece.contributors if peer not in taken], most_lost(len(piece.contributors))
        is_many = len(lost) > most
        if is_many:
            missing = await self._collector.contributions(plan, replace(piece, contributors=tuple(lost)), values)
            is_many = len(lost) - len(missing) > most
        if await values.average({}) != report.contributors or await values.remade() != report.wire_hashes:
            await values.check_sound()
            return on.Finding.FALSE
        return on.Finding.LOSES_MANY if is_many else on.Finding.SOUND

    async def audit_work(self, action: do.AuditWork) -> None:
        """Looks at the work of another that the tip counts."""
        finding = await self._work.audit_work(action.entry)
        if self._core.wanted.audited_work(action.entry):
            self._tell(on.WorkAudited(action.entry, finding))

    async def try_columns(self, action: do.Try) -> None:
        """Tries columns on held-out text; nobody is called harmful for damage here."""
        harmful, are_here = frozenset[int](), False
        while self._core.wanted.tried(action.columns) and not are_here:
            try:
                async with self._lock:
                    await self._work.bring(action, self._others(), self._open)
                harmful = await self._work.harmful(action)
                async with self._lock:  # a state that was to be made before may have taken them back meanwhile
                    are_here = not await self._work.bring(action, self._others(), self._open)
            except TileDamaged:  # mended beside
                are_here = True
            except (NetworkError, RemoteProtocolError):  # nothing is said of values that nobody has
                if self._core.wanted.tried(action.columns):
                    self._tell(on.SlicesLost(tuple(piece.key for column in action.columns for piece in column.pieces)))
                return
        if self._core.wanted.tried(action.columns):
            names = tuple(column.name for column in action.columns if column.block - 1 in harmful)
            self._tell(on.ColumnsTried(action.columns, names))

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

"""Carries out what the round's state machine decides: messages, disk, arithmetic, on one asyncio loop.

One event goes into `Core` at a time, and its actions are begun in their order; a voting record is fsynced before
anything that follows from it leaves. Long work (reducing, fetching, building) runs beside, and comes back as an event.
Knows no trainer: `Hooks` is what the peer around it provides.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from spes_p2p.errors import NetworkError, RemoteProtocolError, SpesError, StorageFull
from spes_p2p.ids import Hash, PeerId, sha256, short
from spes_p2p.state.hashes import split_hashes
from spes_p2p.state.layout import BlockSource, Layout, Tile, Values
from spes_p2p.state.staging import Staging
from spes_p2p.state.store import StateStore
from spes_p2p.swarm.ports import Blob, Clock, Transport
from spes_p2p.sync import actions as do
from spes_p2p.sync.chain import Chain, VoteBook, check_links
from spes_p2p.sync.genesis import RunInfo
from spes_p2p.sync.inputs import Inputs
from spes_p2p.sync.merge import Neighbours, merge_columns, nearest_experts
from spes_p2p.sync.messages import (
    Commit,
    Contribution,
    Envelope,
    Intent,
    Manifest,
    Merge,
    Report,
    Slice,
    Work,
    manifest_hash,
    plan_hash,
)
from spes_p2p.sync.reduce import screen, weighted_mean
from spes_p2p.sync.requests import Request, Serving
from spes_p2p.sync.round import Core
from spes_p2p.sync.sealing import EnvelopeChecker
from spes_p2p.sync.transfer import Transfers
from spes_p2p.wire import pack, unpack

T = TypeVar("T")
OUTBOX = 32
"""Messages waiting for one slow receiver; older ones are dropped, since every message repeats what matters."""
TILES_A_FETCH = 16
LOST = "lost"


@dataclass
class RoundTimes:
    """When the phases of a round began, in seconds of our clock."""

    started: float
    closed: float = 0.0
    planned: float = 0.0
    proposed: float = 0.0
    decided: float = 0.0
    applied: float = 0.0
    sent_before: int = 0
    received_before: int = 0

    def seconds(self) -> dict[str, float]:
        """Duration of each phase that was seen."""
        marks = [
            ("train", self.started, self.closed),
            ("close", self.closed, self.planned),
            ("reduce", self.planned, self.proposed),
            ("vote", self.proposed, self.decided),
            ("apply", self.decided, self.applied),
        ]
        return {name: round(end - start, 4) for name, start, end in marks if start and end >= start}


@dataclass(frozen=True)
class Applied:
    """A commit that is the state here now.

    `counted` is what the first round after `previous` counted of this peer; `uncounted` are tiles whose slice did not
    take this peer's trained values although it has some; `caught_up` is true when the peer was behind and skipped rounds.
    """

    commit: Commit
    previous: Manifest
    counted: Contribution | None
    uncounted: frozenset[int]
    caught_up: bool
    seconds: dict[str, float]
    bytes_sent: int
    bytes_received: int
    deadline_seconds: float


class Hooks(Protocol):
    """What happens around the protocol. Called on the loop's thread; must not block."""

    def close_training(self) -> None:
        """Finish the running inner step and call `Driver.ready`."""
        ...

    def applied(self, event: Applied) -> None: ...

    def notice(self, notice: do.Notice) -> None: ...

    def failed(self, error: BaseException) -> None:
        """Something broke that is not part of the protocol: the peer should stop and say so."""
        ...


@dataclass
class Disk:
    """Where one peer keeps its part of a run."""

    store: StateStore
    chain: Chain
    votes: VoteBook
    inputs: Inputs


@dataclass
class Arithmetic:
    """What the state arithmetic needs to know of the run: the grid, and how many neighbours a merge has."""

    layout: Layout
    merge_top_k: int


@dataclass
class _Staged:
    """The staging of the round in progress."""

    parent: Hash
    staging: Staging


class Driver:
    """One peer's part in the sync of a run. All coroutines and callbacks belong to one event loop."""

    def __init__(
        self,
        core: Core,
        info: RunInfo,
        transport: Transport,
        checker: EnvelopeChecker,
        disk: Disk,
        arithmetic: Arithmetic,
        hooks: Hooks,
        clock: Clock,
    ) -> None:
        self.core = core
        self._info = info
        self._transport = transport
        self._checker = checker
        self._disk = disk
        self._arithmetic = arithmetic
        self._hooks = hooks
        self._clock = clock
        self._serving = Serving(info, disk.chain, disk.store, disk.inputs.serve)
        self._transfers = Transfers(transport, arithmetic.layout, self._stall_seconds, self._on_bytes, self._on_refused)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._outboxes: dict[PeerId, deque[Envelope]] = {}
        self._sending: dict[PeerId, asyncio.Event] = {}
        self._staged: _Staged | None = None
        self._times = self._fresh_times()
        self._closed = False
        self._full_until: float | None = None
        self._lock = asyncio.Lock()  # one task at a time writes, finishes or publishes the round's staging

    # ---------------------------------------------------------------- life

    async def start(self) -> None:
        """Serves others and begins to tick. The Core must stand on the chain's newest commit whose state is here."""
        await self._transport.serve(self)
        self._restore_accepted()
        self._spawn(self._tick_for_ever())

    async def stop(self) -> None:
        """Ends all tasks; the network and the disk stay open for their owner to close."""
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def training(self, work: Work) -> None:
        """The trainer's progress in the middle of a round."""
        self._run(self.core.trained(work, self._clock.now()))

    def ready(self, work: Work) -> None:
        """The trainer has stopped, and its snapshot is in `Inputs`."""
        self._times.closed = self._clock.now()
        self._run(self.core.trained(work, self._clock.now()))

    def wish(self, intent: Intent) -> None:
        """What this peer wants has changed."""
        self._run(self.core.wish(intent, self._clock.now()))

    # ---------------------------------------------------------------- serving (ports.Handler)

    async def on_call(self, caller: PeerId, request: bytes) -> bytes:
        """One envelope in, our envelope out."""
        envelope = self._checker.open(caller, request)
        self._run(self.core.receive(envelope, self._clock.now()))
        return pack(self.core.reply_to(caller, self._clock.now()))

    async def on_fetch(self, caller: PeerId, request: bytes) -> Blob:
        """Values, tiles, headers: see `requests`."""
        return self._serving.answer(unpack(Request, request))

    # ---------------------------------------------------------------- actions

    def _run(self, actions: Sequence[do.Action]) -> None:
        """Begins actions in order. Nothing is awaited here, so no other event comes between them."""
        for action in actions:
            if isinstance(action, do.Persist):
                try:
                    self._disk.votes.write(action.record)
                except StorageFull as error:
                    self._disk_is_full(error)
                    return
            else:
                self._begin(action)

    def _begin(self, action: do.Action) -> None:
        match action:
            case do.Send():
                self._post(action.to, action.envelope)
            case do.CloseTraining():
                self._hooks.close_training()
            case do.Probe():
                self._spawn(self._probe(action.peer))
            case do.Notice():
                self._hooks.notice(action)
            case _ if self._full_until is None:
                self._begin_work(action)

    def _begin_work(self, action: do.Action) -> None:
        """What needs room on the disk."""
        match action:
            case do.Reduce():
                self._spawn(self._reduce(action))
            case do.Fetch():
                self._spawn(self._fetch(action))
            case do.Build():
                self._spawn(self._build(action))
            case do.Verify():
                self._times.proposed = self._times.proposed or self._clock.now()
                self._spawn(self._verify(action))
            case do.Adopt():
                self._times.decided = self._clock.now()
                self._spawn(self._adopt(action.commit))
            case do.CatchUp():
                self._spawn(self._catch_up(action))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or self._closed:
            return
        error = task.exception()
        if isinstance(error, StorageFull):
            self._disk_is_full(error)
        elif error is not None:
            self._hooks.failed(error)

    async def _tick_for_ever(self) -> None:
        pause = self.core.pace.heartbeat_seconds / 2
        while True:
            self._run(self.core.tick(self._clock.now()))
            self._note_phase()
            self._try_disk_again()
            await asyncio.sleep(pause)

    # ---------------------------------------------------------------- messages

    def _post(self, peer: PeerId, envelope: Envelope) -> None:
        box = self._outboxes.setdefault(peer, deque(maxlen=OUTBOX))
        box.append(envelope)
        if peer not in self._sending:
            self._sending[peer] = asyncio.Event()
            self._spawn(self._deliver(peer))
        self._sending[peer].set()

    async def _deliver(self, peer: PeerId) -> None:
        """Sends what waits for one peer, in order; ends when nothing was said to it for a while."""
        box, more = self._outboxes[peer], self._sending[peer]
        idle_seconds = 20 * self.core.pace.heartbeat_seconds
        with contextlib.suppress(TimeoutError):
            while True:
                while box:
                    await self._call(peer, box.popleft())
                more.clear()
                async with asyncio.timeout(idle_seconds):
                    await more.wait()
        del self._outboxes[peer], self._sending[peer]

    async def _call(self, peer: PeerId, envelope: Envelope) -> None:
        timeout = self.core.pace.suspect_seconds
        try:
            answer = await self._transport.call(peer, pack(envelope), timeout)
            reply = self._checker.open(peer, answer)
        except RemoteProtocolError as error:
            self._hooks.notice(do.Notice("refused", str(error), peer))
            return
        except NetworkError:
            return  # silence is judged by the state machine, from what was heard last
        self._run(self.core.receive(reply, self._clock.now()))

    async def _probe(self, peer: PeerId) -> None:
        if await self._transport.check_refused(peer):
            self._run(self.core.gone(peer, self._clock.now()))

    # ---------------------------------------------------------------- reducing and fetching

    async def _reduce(self, action: do.Reduce) -> None:
        """Collects a slice's contributions, averages those that are fit, and stages the result."""
        plan, head = action.plan.value, action.plan.value.parent
        piece = plan.slices[action.index]
        weights = {entry.peer: entry.tokens for entry in plan.roster}
        found, left_out = await self._contributions(piece, head)
        base = self._version_of_tip()
        report = Report(plan_hash(plan), action.index, self.core.me, (), (), ())
        mean, fit = await self._in_thread(lambda: self._average(piece, found, weights, base, left_out))
        if mean is not None:
            tiles = self._tiles_of(piece)
            starts = [tile.start - tiles[0].start for tile in tiles]
            hashes = await self._write(
                head,
                lambda staging: tuple(
                    staging.write_tile(tile.id, mean[at : at + tile.size])
                    for tile, at in zip(tiles, starts, strict=True)
                ),
            )
            report = replace(report, contributors=tuple(fit), wire_hashes=hashes or ())
        if self.core.head == head:
            for peer, reason in left_out.items():
                self._hooks.notice(do.Notice("left out", f"of {piece.key}: {reason}", peer))
            report = replace(report, left_out=tuple(sorted(left_out.items())))
            self._run(self.core.reduced(report, self._clock.now()))

    async def _contributions(self, piece: Slice, parent: Hash) -> tuple[dict[PeerId, Any], dict[PeerId, str]]:
        async def one(peer: PeerId) -> tuple[PeerId, Any]:
            if peer == self.core.me:
                return peer, self._disk.inputs.values(parent, piece.first_tile, piece.tiles)
            try:
                return peer, await self._transfers.contribution(peer, parent, piece)
            except (NetworkError, RemoteProtocolError) as error:
                return peer, error

        answers = await asyncio.gather(*(one(peer) for peer in piece.contributors))
        found = {peer: values for peer, values in answers if values is not None and not isinstance(values, Exception)}
        left_out = {peer: LOST for peer, values in answers if peer not in found}
        return found, left_out

    def _average(
        self,
        piece: Slice,
        found: dict[PeerId, Values],
        weights: dict[PeerId, int],
        tip: BlockSource,
        out: dict[PeerId, str],
    ) -> tuple[Values | None, list[PeerId]]:
        """The weighted mean over those whose values are fit; adds the others to `out`."""
        tiles = self._tiles_of(piece)
        out |= screen(found, tip.block(piece.block)[tiles[0].start : tiles[-1].stop])
        fit = [peer for peer in piece.contributors if peer not in out]
        if not fit:
            return None, fit
        return weighted_mean([found[peer] for peer in fit], [weights[peer] for peer in fit]), fit

    def _tiles_of(self, piece: Slice) -> tuple[Tile, ...]:
        return self._arithmetic.layout.tiles[piece.first_tile : piece.first_tile + piece.tiles]

    async def _write(self, head: Hash, work: Callable[[Staging], T]) -> T | None:
        """Runs `work` on the staging for the child of `head`; None when we have moved on."""
        async with self._lock:
            if self.core.head != head:
                return None
            staging = self._stage()
            return await self._in_thread(lambda: work(staging))

    async def _fetch(self, action: do.Fetch) -> None:
        head, piece = self.core.head, action.piece
        try:
            parts = await self._transfers.tiles(piece.first_tile, action.hashes, action.holders)
        except NetworkError:
            if self.core.head == head:
                self._run(self.core.fetch_failed(piece.key, self._clock.now()))
            return
        hashes = split_hashes(action.hashes)
        await self._write(
            head,
            lambda staging: [
                staging.write_tile(piece.first_tile + at, part, hashes[at]) for at, part in enumerate(parts)
            ],
        )
        if self.core.head == head:
            self._run(self.core.staged(piece.key, action.hashes, self._clock.now()))

    def _stage(self) -> Staging:
        """The staging for the child of our tip, open for writing."""
        head = self.core.head
        if self._staged is None or self._staged.parent != head:
            round = self.core.tip.round
            self._staged = _Staged(head, self._disk.store.stage(round + 1, round))
        if self._staged.staging.finished is not None:
            self._staged.staging.reopen(keep_state=False)
        return self._staged.staging

    # ---------------------------------------------------------------- the new state

    async def _build(self, action: do.Build) -> None:
        head = self.core.head
        wire_root = sha256(*action.hashes)

        def build(staging: Staging) -> tuple[Hash, Merge | None]:
            neighbours: Neighbours | None = None
            self._keep_only(staging, action.slices)
            if action.alpha:
                neighbours = nearest_experts(self._arithmetic.layout, staging, self._arithmetic.merge_top_k)
            root = self._finish(staging, neighbours, action.alpha)
            return root, Merge(action.alpha, neighbours) if neighbours is not None else None

        built = await self._write(head, build)
        if built is not None and self.core.head == head:
            root, merge = built
            self._run(self.core.built(action, wire_root, root, merge, self._clock.now()))

    async def _verify(self, action: do.Verify) -> None:
        proposal = action.proposal.value
        head, manifest = self.core.head, proposal.manifest
        async with self._lock:
            if self.core.head != head:
                return
            root = await self._in_thread(lambda: self._compute(manifest))
            if root != manifest.state_root:
                root = await self._repair(manifest, proposal.leader)
        if self.core.head != head:
            return
        if root != manifest.state_root or sha256(*proposal.wire_hashes) != manifest.wire_root:
            self._hooks.notice(do.Notice("refused", "a proposal whose roots do not fit its tiles", proposal.leader))
            self._run(self.core.verify_failed(self._clock.now()))
            return
        self._run(self.core.verified(manifest_hash(manifest), self._clock.now()))

    def _compute(self, manifest: Manifest) -> Hash:
        """The state root that our own arithmetic gives for `manifest`; nothing is done twice."""
        staged = self._staged
        done = staged.staging.finished if staged and staged.parent == manifest.parent else None
        if done is not None and done.root == manifest.state_root:
            return done.root
        staging = self._stage()
        self._keep_only(staging, manifest.slices)
        merge = manifest.merge
        return self._finish(staging, merge.neighbours if merge else None, merge.alpha if merge else 0.0)

    def _keep_only(self, staging: Staging, slices: Sequence[Slice]) -> None:
        wanted = {piece.first_tile + at for piece in slices for at in range(piece.tiles)}
        staging.forget(tile.id for tile in self._arithmetic.layout.tiles if tile.id not in wanted)

    def _finish(self, staging: Staging, neighbours: Neighbours | None, alpha: float) -> Hash:
        if neighbours is not None:
            merge_columns(self._arithmetic.layout, staging, neighbours, alpha, staging.write_state)
        return self._arithmetic.layout.root_of(staging.finish())

    async def _repair(self, manifest: Manifest, holder: PeerId) -> Hash:
        """Our arithmetic gives other bits than the leader's: take the tiles that differ from it, and say so."""
        assert self._staged is not None
        staging = self._staged.staging
        try:
            theirs = await self._transfers.hash_list(holder, manifest.state_root, manifest.round)
        except (NetworkError, RemoteProtocolError):
            return self._arithmetic.layout.root_of(staging.finished.tile_hashes if staging.finished else ())
        ours = staging.finished.tile_hashes if staging.finished else ()
        differ = [at for at, (mine, other) in enumerate(zip(ours, theirs, strict=True)) if mine != other]
        self._hooks.notice(do.Notice("arithmetic", f"{len(differ)} tiles came out differently here", holder))
        staging.reopen(keep_state=True)
        await self._fetch_state(staging, differ, theirs, (holder,))
        return self._arithmetic.layout.root_of(await self._in_thread(staging.finish))

    async def _fetch_state(
        self, staging: Staging, tile_ids: Sequence[int], hashes: Sequence[Hash], holders: Sequence[PeerId]
    ) -> None:
        async def part(ids: Sequence[int]) -> None:
            joined = b"".join(hashes[tile_id] for tile_id in ids)
            data = await self._transfers.tiles_by_id(ids, joined, holders)
            for tile_id, tile in zip(ids, data, strict=True):
                staging.write_state(tile_id, tile, hashes[tile_id])

        groups = [tile_ids[at : at + TILES_A_FETCH] for at in range(0, len(tile_ids), TILES_A_FETCH)]
        async with asyncio.TaskGroup() as group:
            for ids in groups:
                group.create_task(part(ids))

    # ---------------------------------------------------------------- committing

    async def _adopt(self, commit: Commit) -> None:
        manifest = commit.manifest
        async with self._lock:
            if manifest.parent != self.core.head:
                return
            staged = self._staged
            finished = staged.staging.finished if staged and staged.parent == manifest.parent else None
            if staged is None or finished is None or finished.root != manifest.state_root:
                self.core.round.verified.discard(commit.certificate.manifest)
                self._run(self.core.catch_up_failed(self._clock.now()))
                return
            self._disk.chain.append(commit)
            staged.staging.publish()
            self._applied(commit, commit.manifest)

    async def _catch_up(self, action: do.CatchUp) -> None:
        """Headers from the holder, checked from our tip on; then the tiles of its newest state that differ."""
        try:
            commits = await self._headers(action.holder)
            newest = commits[-1]
            staging = await self._load_state(newest.manifest, action.holder)
        except (NetworkError, RemoteProtocolError, ExceptionGroup) as error:
            self._hooks.notice(do.Notice("behind", f"could not catch up yet: {_first(error)}", action.holder))
            self._run(self.core.catch_up_failed(self._clock.now()))
            return
        async with self._lock:
            if self.core.tip.round >= newest.manifest.round:
                staging.discard()
                return
            for commit in commits:
                self._disk.chain.append(commit)
            staging.publish()
            self._applied(newest, commits[0].manifest)

    async def _headers(self, holder: PeerId) -> list[Commit]:
        before = self._disk.chain.commit(self.core.tip.round)
        commits: list[Commit] = []
        while True:
            first = (commits[-1] if commits else before).manifest.round + 1
            part = await self._transfers.chain(holder, first)
            if not part:
                break
            last = commits[-1] if commits else before
            await self._in_thread(
                lambda part=part, last=last: check_links(part, last, self._info, self.core.rules, self._checker.check)  # type: ignore[misc]
            )
            commits.extend(part)
        if not commits:
            raise NetworkError(f"{short(holder)} has nothing after round {before.manifest.round}")
        return commits

    async def _load_state(self, manifest: Manifest, holder: PeerId) -> Staging:
        """Stages the state of `manifest`: what we have is kept, what differs is fetched by hash."""
        theirs = await self._transfers.hash_list(holder, manifest.state_root, manifest.round)
        tip = self.core.tip.round
        ours = self._disk.store.version(tip).tile_hashes
        differ = [at for at, (mine, other) in enumerate(zip(ours, theirs, strict=True)) if mine != other]
        staging = self._disk.store.stage(manifest.round, tip, label="fetched")
        others = [peer for peer in self.core.contacts if peer != holder and self.core.alive(peer, self._clock.now())]
        await self._fetch_state(staging, differ, theirs, [holder, *others])
        hashes = await self._in_thread(staging.finish)
        if self._arithmetic.layout.root_of(hashes) != manifest.state_root:
            raise RemoteProtocolError(f"the state of round {manifest.round} does not hash to its root")
        return staging

    def _applied(self, commit: Commit, first: Manifest) -> None:
        """`first` is the child of the tip that we had: the only round that can have counted our snapshot."""
        self._staged = None
        previous, times = self.core.tip, self._times
        deadline = self.core.pace.deadline_seconds(0)
        times.applied = self._clock.now()
        uncounted = self._uncounted(first)
        counted = next((entry for entry in first.roster if entry.peer == self.core.me), None)
        store = self._disk.store
        for round in [r for r in store.rounds() if r < commit.manifest.round - 1]:
            store.drop(round)
        event = Applied(
            commit,
            previous,
            counted,
            uncounted,
            commit.manifest.round > first.round,
            times.seconds(),
            self._transport.bytes_sent - times.sent_before,
            self._transport.bytes_received - times.received_before,
            deadline,
        )
        self._times = self._fresh_times()
        self._run(self.core.applied(commit, self._clock.now()))
        self._hooks.applied(event)

    def _uncounted(self, manifest: Manifest) -> frozenset[int]:
        """Tiles for which we have trained values that did not go in, and that are not poison."""
        inputs = self._disk.inputs
        if inputs.parent != manifest.parent:
            return frozenset()
        me = self.core.me
        done: set[int] = set()
        for piece in manifest.slices:
            if me in piece.contributors:
                done.update(range(piece.first_tile, piece.first_tile + piece.tiles))
        plan = self.core.round.plan
        for index, report in self.core.round.reports.items():
            reason = dict(report.value.left_out).get(me, LOST)
            if plan is not None and reason != LOST:
                piece = plan.value.slices[index]
                done.update(range(piece.first_tile, piece.first_tile + piece.tiles))
        return self._all_inputs() - done

    def _all_inputs(self) -> frozenset[int]:
        inputs, layout = self._disk.inputs, self._arithmetic.layout
        if inputs.parent != self.core.head:
            return frozenset()
        return frozenset(tile_id for block in inputs.blocks for tile_id in layout.tile_ids_of(block))

    def _restore_accepted(self) -> None:
        """After a restart: the state that we had accepted before is still staged, so we go on standing by it."""
        record = self.core.record
        if record.accepted is None:
            return
        manifest = record.accepted.value.manifest
        staging = self._disk.store.staged(manifest.round)
        if staging is not None and staging.finished is not None and staging.finished.root == manifest.state_root:
            self._staged = _Staged(self.core.head, staging)
            self._run(self.core.verified(manifest_hash(manifest), self._clock.now()))

    # ---------------------------------------------------------------- small things

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(None, work)

    def _version_of_tip(self) -> BlockSource:
        return self._disk.store.version(self.core.tip.round)

    def _stall_seconds(self) -> float:
        return max(self.core.pace.suspect_seconds, 2.0)

    def _on_bytes(self) -> None:
        self.core.moved(self._clock.now())

    def _on_refused(self, peer: PeerId) -> None:
        self._run(self.core.gone(peer, self._clock.now()))

    def _disk_is_full(self, error: StorageFull) -> None:
        """Nothing can be staged: say so once, train on, look again later."""
        if self._full_until is None:
            self._hooks.notice(do.Notice("disk", f"{error}; training goes on, but this peer cannot vote until then"))
        self._full_until = self._clock.now() + 10 * self.core.pace.heartbeat_seconds
        self._staged = None
        self._run(self.core.disk_full(self._disk.votes.record or self.core.record, self._clock.now()))

    def _try_disk_again(self) -> None:
        if self._full_until is not None and self._clock.now() > self._full_until:
            self._full_until = None
            self._run(self.core.disk_has_room(self._clock.now()))

    def _note_phase(self) -> None:
        if self.core.round.plan is not None and not self._times.planned:
            self._times.planned = self._clock.now()

    def _fresh_times(self) -> RoundTimes:
        return RoundTimes(
            self._clock.now(),
            sent_before=self._transport.bytes_sent,
            received_before=self._transport.bytes_received,
        )


def _first(error: BaseException) -> str:
    """The words of the first error inside a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) if isinstance(error, SpesError) else repr(error)

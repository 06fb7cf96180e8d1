"""The chain and the committed states of a real peer, on its disk, and what brings others' here. Decides nothing."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from spes_p2p import failpoints
from spes_p2p.checkpoint.save import save_checkpoint
from spes_p2p.consensus import actions as do
from spes_p2p.consensus.actions import CatchUp as CatchUpAction
from spes_p2p.consensus.manifest import Manifest, manifest_hash
from spes_p2p.consensus.messages import Commit
from spes_p2p.errors import StateError, StorageFull
from spes_p2p.exchange.retention import Retention
from spes_p2p.failpoints import reached
from spes_p2p.ids import NO_HASH, Hash, PeerId
from spes_p2p.sync.candidate_state import FETCHED, OTHER, CandidateState, wire_tiles
from spes_p2p.sync.catch_up import CatchUp, Fetched, ForkPoint
from spes_p2p.sync.link_speed_check import LinkSpeedCheck
from spes_p2p.sync.round_log import RoundLog
from spes_p2p.sync.surroundings import Disk, PeerContext

LEFT = "left"
"""Folder of the run with what a peer has gone over from."""


class DiskHistory:
    """The `History` of a real peer, and the states that are kept for whoever still reads them."""

    def __init__(self, context: PeerContext, candidate: CandidateState, catching_up: CatchUp) -> None:
        self._core, self._disk, self._hooks, self._tasks = context.core, context.disk, context.hooks, context.tasks
        self._chain, self._store, self._info = context.disk.chain, context.disk.store, context.run.info
        self._candidate = candidate
        self._catching_up = catching_up
        self.headers, self.meet = catching_up.headers, catching_up.meet
        self.log = RoundLog(context)
        self.retention = Retention(self._store, context.node.clock.now)
        self._looks_on = not context.core.state.own.intent.joining
        self._link_speed_check = LinkSpeedCheck(self._store.layout)
        self._fetching: asyncio.Task[None] | None = None

    # ---- what others have ----

    def hear(self, commit: Commit | None) -> None:
        """For a node without a vote: keeps up with certificates while an older state is being fetched."""
        if self._looks_on and self._fetching is not None and commit is not None:
            self._tasks.spawn(self._catching_up.note(commit))

    @contextmanager
    def being_fetched(self) -> Iterator[None]:
        self._fetching = asyncio.current_task()
        try:
            yield
        finally:
            if self._fetching is asyncio.current_task():
                self._fetching = None

    @property
    def is_catching_up(self) -> bool:
        return self._fetching is not None

    async def break_off(self) -> bool:
        fetching = self._fetching
        if fetching is None:
            return False
        fetching.cancel()
        await asyncio.wait((fetching,))
        return True

    async def take_up(self, tip: int, theirs: Sequence[Commit], action: CatchUpAction) -> Commit:
        return await self._catching_up.take_up(theirs, action)

    async def fetch(self, newest: Commit, tip: int, holder: PeerId, is_ours: bool) -> tuple[Commit, Fetched]:
        reached(failpoints.HEADERS, peer=self._core.me, round=newest.manifest.round)
        self._check_link()
        began, before = self.log.received()
        others = [  # who stands on an older state has not what is wanted, and may be slow to say so
            peer
            for peer, contact in self._core.state.others.contacts.items()
            if peer != holder and self._core.alive(peer, began) and contact.status.round >= newest.manifest.round - 1
        ]
        try:
            if is_ours:
                newest = await self._catching_up.aim(newest, tip, [holder, *others])
            label = FETCHED if is_ours else OTHER
            state = await self._catching_up.state(newest.manifest, tip, [holder, *others], label)
        finally:
            now, received = self.log.received()
            self._link_speed_check.fetched(received - before, now - began)
        reached(failpoints.CAUGHT_UP, peer=self._core.me, round=newest.manifest.round)
        return newest, state

    def _check_link(self) -> None:
        """A newcomer whose link is too slow to ever take part is told so, and ends."""
        length = self._chain.length
        if not self._looks_on and not self._core.state.is_member() and length > 1:
            rounds = range(max(1, length - self._core.state.rules.expert_rounds), length)
            newest = [self._chain.commit(round).manifest for round in rounds]
            self._link_speed_check.headers(self.log.received()[0], length - 1, newest)

    # ---- going on ----

    async def stay(self) -> None:
        await self._tasks.in_thread(self._catching_up.drop_other)

    def _keep(self, left: Manifest) -> None:
        """The tip of more than a round of work that is left stays as a checkpoint; there is one such at most."""
        folder, info = self._store.directory.parent / LEFT, self._info
        run = {"run_id": info.run_id, "fingerprint": info.fingerprint.hex(), "config": info.config}
        private = {"round": left.round, "manifest": manifest_hash(left)}
        with contextlib.suppress(StorageFull, StateError):  # what counts more comes all the same
            shutil.rmtree(folder, ignore_errors=True)
            version = self._store.version(left.round)
            save_checkpoint(folder, version, left.step, private, run | {"tokens": left.tokens}, 1)
            self._hooks.notice(
                do.Notice("fork", f"the state of round {left.round}, which is left, is kept in {folder}")
            )

    def uplink(self) -> int:
        return self.log.uplink()

    async def commit(self, commit: Commit) -> None:
        """Commits, the certificate before the state: a restart completes that, but discards a state without one.

        What else follows from the round is on disk first, since a restart does not make it.
        """

        def write() -> None:
            made = self._candidate.finished(commit.manifest.state_root)
            assert made is not None
            self._disk.residuals.settle(
                commit.manifest, commit.certificate.manifest, lambda tile_id: made.wire.hashes[tile_id]
            )
            self._chain.append(commit)
            reached(failpoints.APPENDED, peer=self._core.me, round=commit.manifest.round)
            self._candidate.publish(commit.manifest.state_root)
            reached(failpoints.PUBLISHED, peer=self._core.me, round=commit.manifest.round)

        await self._tasks.in_thread(write)

    async def renew(self, commit: Commit) -> None:
        now, _ = self.log.received()
        holders = [peer for peer in self._core.state.others.contacts if self._core.alive(peer, now)]
        state = await self._catching_up.state(commit.manifest, self._core.tip.round, holders)
        await self._tasks.in_thread(partial(self._chain.append, commit))
        await self.follow(commit.manifest, commit, state)

    async def follow(self, first: Manifest, newest: Commit, state: Fetched) -> None:
        hashes = wire_tiles(*self._core.handed_out(first))  # here: a thread would look at what changes meanwhile
        await self._tasks.in_thread(lambda: _keep_residuals(self._disk, first, newest.manifest, hashes))
        await self._tasks.in_thread(state.publish)

    async def switch(self, fork: ForkPoint, state: Fetched) -> None:
        if len(fork.ours) > 1 and self._disk.keeps_states:
            await self._tasks.in_thread(partial(self._keep, fork.ours[-1].manifest))
        newest = fork.theirs[-1].manifest if fork.theirs else fork.common
        await self._tasks.in_thread(
            partial(self._chain.switch, fork.theirs) if fork.theirs else partial(self._chain.go_back, newest.round)
        )
        await self._tasks.in_thread(partial(self._disk.residuals.clear, newest))
        await self._tasks.in_thread(state.publish)
        self.retention.clear()  # what is kept for them is of the history that was left

    def entering(self, commit: Commit, first: Manifest | None, fork: ForkPoint | None) -> Callable[[], Awaitable[None]]:
        event = self.log.applied(commit, first, fork)
        self._candidate.enter(commit.manifest.round)
        in_use = self._hooks.rounds_in_use()  # before the trainer goes on
        self.log.begin()

        async def follows() -> None:
            self._hooks.applied(event)
            reached(failpoints.APPLIED, peer=self._core.me, round=commit.manifest.round)
            # the trainer may have taken what was pending just before this commit
            await self._drop_all_but(in_use | self._hooks.rounds_in_use())

        return follows

    def make_room(self) -> None:
        """The disk is full: a fetch under way ends, without a message, and what is kept for others goes."""
        if self._fetching is not None:
            self._fetching.cancel()  # asked for again when there is room
        self.retention.clear()
        self._tasks.spawn(self._drop_unused())

    async def _drop_unused(self) -> None:
        async with self._candidate.lock:  # a state that is being committed is no one to drop
            await self._drop_all_but(self._hooks.rounds_in_use())

    async def _drop_all_but(self, in_use: frozenset[int]) -> None:
        """Forgets all states but the tip's, the one before it, and what somebody still reads."""
        tip = self._core.tip.round
        states, wires = self.retention.needed(tip)
        await self._tasks.in_thread(partial(self._drop, in_use | {tip, tip - 1} | states, wires))

    def _drop(self, keep: frozenset[int], wires: frozenset[int]) -> None:
        bases = {one.parent.round for one in self._store.stagings if one.outlives and one.parent is not None}
        for round in set(self._store.rounds()) - keep - bases:
            self._store.drop(round, keep_wire=round in wires)
        self._store.wires.drop_all_but(wires)


def _keep_residuals(disk: Disk, first: Manifest, newest: Manifest, hashes: Mapping[int, Hash]) -> None:
    """What lossy codecs left, brought to the round that we caught up with; `hashes`: what `first` handed out."""
    rounds = range(first.round + 1, newest.round + 1)
    later = (disk.chain.commit(round).manifest for round in rounds)
    disk.residuals.settle(first, manifest_hash(newest), lambda tile_id: hashes.get(tile_id, NO_HASH), later)

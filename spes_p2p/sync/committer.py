"""How a peer comes to another committed state: its round's own child, a later one of its line, or another history's.

Decides what is fetched and given up, whether another history goes before ours, and in which order chain, votes and
state go over; bytes and files are a `History`'s job: the real one has a store and streams, a simulator's has symbols.
"""

from __future__ import annotations

import contextlib
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any, Generic

from spes_p2p.consensus import actions as do
from spes_p2p.consensus import events as on
from spes_p2p.consensus.columns import lost_columns, tokens_gone
from spes_p2p.consensus.manifest import Manifest, manifest_hash
from spes_p2p.consensus.messages import RENEWAL, Commit
from spes_p2p.consensus.place import goes_before, twins_text
from spes_p2p.consensus.vote_record import VoteRecord
from spes_p2p.errors import LinkTooSlow, NetworkError, RemoteProtocolError, StorageFull, TileDamaged
from spes_p2p.ids import Hash
from spes_p2p.sync.catch_up import ForkPoint, HistoryDiverged
from spes_p2p.sync.dispatcher import Dispatcher
from spes_p2p.sync.interfaces import History, S
from spes_p2p.sync.round_executor import RoundExecutor


def long_work(action: do.Work, executor: RoundExecutor, committer: Committer[S]) -> Coroutine[Any, Any, None]:
    """How an action that takes long is carried out."""
    match action:
        case do.Reduce():
            return executor.reduce(action)
        case do.Fetch():
            return executor.fetch(action)
        case do.Build():
            return executor.build(action)
        case do.Verify():
            return executor.verify(action)
        case do.Adopt():
            return committer.adopt(action.commit)
        case do.CatchUp():
            return committer.catch_up(action)


class Committer(Generic[S]):
    """Carries out Adopt and CatchUp."""

    def __init__(self, dispatcher: Dispatcher, history: History[S]) -> None:
        self._dispatcher = dispatcher
        self._core, self._votes, self._chain = dispatcher.core, dispatcher.votes, dispatcher.chain
        self._candidate, self._lock = dispatcher.candidate, dispatcher.candidate.lock
        self._tell, self._notice = dispatcher.tell, dispatcher.notice
        self._history = history
        self._is_going_over = False
        self._twins: set[Hash] = set()
        """Manifests with two children by quorums, of which a person was told."""

    async def adopt(self, commit: Commit) -> None:
        """The state that was made here becomes the committed one; that of a renewal is the one that is here."""
        # from somebody who claims to be further: what is here is certain. Another history goes on coming meanwhile
        if not self._is_going_over and await self._history.break_off():
            self._tell(on.CatchUpFailed(is_ours=True))
        async with self._lock:
            if commit.manifest.parent != self._core.tip_hash:
                return
            if commit.certificate.kind == RENEWAL:
                await self._renew(commit)
                return
            if self._candidate.finished(commit.manifest.state_root) is None:
                self._dispatcher.tell_lost()
                self._tell(on.AdoptFailed())
                return
            await self._history.commit(commit)
            await self._applied(commit, commit.manifest)

    async def _renew(self, commit: Commit) -> None:
        tip = self._core.tip
        is_new = not self._chain.has(commit.certificate.manifest, commit.manifest.round)
        last = self._chain.length - 1
        newest = self._chain.commit(last).manifest if last > tip.round else tip
        try:
            await self._history.renew(commit)
        except (NetworkError, RemoteProtocolError, TileDamaged) as error:  # what is damaged is mended beside
            self._notice(do.Notice("behind", f"could not take up the renewal yet: {error}"))
            self._tell(on.AdoptFailed())
            return
        if newest.round > tip.round and is_new:
            self._tell_of_lost_states(tip, newest)
        await self._applied(commit, commit.manifest)

    async def catch_up(self, action: do.CatchUp) -> None:
        """Headers from the holder, checked from our tip on; then the tiles of its newest state that differ."""
        tip, head = self._core.tip.round, self._core.tip_hash
        try:
            with self._history.being_fetched():
                newest, fork = await self._headers(tip, action)
                if newest is None:
                    await self._history.stay()
                    self._tell(on.LighterFound(action.head))
                    return
                if fork is not None:
                    self._is_going_over = True
                    self._tell(on.HeavierFound(newest.manifest))
                newest, state = await self._history.fetch(newest, tip, action.holder, is_ours=fork is None)
        except LinkTooSlow:
            raise
        except (NetworkError, RemoteProtocolError, TileDamaged) as error:  # what is damaged is mended beside
            self._notice(do.Notice("behind", f"could not catch up yet: {error}", action.holder))
            self._tell(on.CatchUpFailed())
            return
        finally:
            self._is_going_over = False
        async with self._lock:
            if fork is not None:
                await self._go_over(action, newest, fork, state)
            elif self._core.tip_hash == head:  # else our own child was committed meanwhile
                await self._follow(tip, newest, state)

    async def _headers(self, tip: int, action: do.CatchUp) -> tuple[Commit | None, ForkPoint | None]:
        """(the commit to go to, None to stay; where the two parted if it is on another history)."""
        history, is_longer = self._history, action.round >= self._chain.length
        if is_longer or (action.round > tip and self._chain.has(action.head, action.round)):
            with contextlib.suppress(HistoryDiverged):
                return await history.headers(tip, action), None
        fork = await history.meet(tip, action)
        if action.is_back:
            return fork.theirs[-1] if fork.theirs else self._chain.commit(fork.common.round), fork
        self._tell_of_twins(fork)
        if not goes_before(fork.theirs, fork.ours, fork.common, self._core.state.rules.faults):
            return None, None
        if fork.ours:
            return fork.theirs[-1], fork
        return await history.take_up(tip, fork.theirs, action), None

    def _tell_of_twins(self, fork: ForkPoint) -> None:
        """Two quorums' children of one parent prove a lie, or a disk that was restored: the names are said."""
        text, parent = twins_text(fork.common, fork.ours, fork.theirs), manifest_hash(fork.common)
        if text and parent not in self._twins:
            self._twins.add(parent)
            self._notice(do.Notice("twins", text))

    async def _follow(self, tip: int, newest: Commit, state: S) -> None:
        first = self._chain.commit(tip + 1).manifest
        await self._history.follow(first, newest, state)
        await self._applied(newest, first)

    async def _go_over(self, action: do.CatchUp, newest: Commit, fork: ForkPoint, state: S) -> None:
        """The rounds that ours had since the two parted are left, with what it has committed meanwhile."""
        common, faults = fork.common, self._core.state.rules.faults
        if not self._chain.has(manifest_hash(common), common.round) or self._core.tip.round < common.round:
            self._tell(on.CatchUpFailed(is_ours=True))
            return
        ours = tuple(self._chain.commit(round) for round in range(common.round + 1, self._core.tip.round + 1))
        fork = replace(fork, ours=ours)
        if not action.is_back and not goes_before(fork.theirs, ours, common, faults):
            await self._history.stay()
            self._tell(on.LighterFound(action.head))
            return
        await self._history.switch(fork, state)
        left = ours[-1].manifest if ours else common
        if action.is_back:
            self._tell_of_lost_states(common, left)
        else:
            text = f"this peer goes over to round {newest.manifest.round} of a history that counts more: "
            self._notice(do.Notice("fork", text + _left_text(common, left), action.holder))
        with contextlib.suppress(StorageFull):  # a restart would take it for a newcomer: no vote is given twice
            self._votes.write(VoteRecord(newest.certificate.manifest))
        await self._enter(on.HistorySwitched(newest), None, fork)

    def _tell_of_lost_states(self, common: Manifest, left: Manifest) -> None:
        text = f"nobody who is heard has the state of round {left.round}: {_left_text(common, left)}"
        self._notice(do.Notice("fork", text))

    async def _applied(self, commit: Commit, first: Manifest) -> None:
        """`first` is the child of the tip that we had: the only round that can have counted our snapshot."""
        if self._core.state.rules.expert_rounds > 1 and (lost := lost_columns(self._core.tip, first)):
            self._tell_what_is_gone(first, lost)
        await self._enter(on.CommitApplied(commit), first, None)

    def _tell_what_is_gone(self, child: Manifest, columns: Sequence[int]) -> None:
        """Reports work in columns that is lost because their owners left before handing it out."""
        rounds = range(min(child.column_rounds[column] for column in columns), child.round)
        before = [self._chain.commit(round).manifest for round in rounds]
        for column, tokens in tokens_gone(before, child, columns).items():
            since = child.column_rounds[column]
            text = f"{tokens:,} tokens trained on column {column} since round {since} are lost with its owner"
            self._notice(do.Notice("column", text))

    async def _enter(
        self, change: on.CommitApplied | on.HistorySwitched, first: Manifest | None, fork: ForkPoint | None
    ) -> None:
        """The state machine and the trainer go on from a new committed state."""
        follows = self._history.entering(change.commit, first, fork)
        self._tell(on.UplinkMeasured(self._history.uplink()))
        self._dispatcher.found_room()
        self._tell(change)
        await follows()


def _left_text(common: Manifest, left: Manifest) -> str:
    rounds, tokens = left.round - common.round, left.tokens - common.tokens
    return f"{rounds} rounds with {tokens:,} tokens are left (the two parted after round {common.round})"

"""How a peer comes to another committed state: its round's own child, a later one of its line, or another history's.

Decides what is fetched and given up, whether a fork is taken, and in which order chain, votes and state go over; bytes
and files are a `History`'s job: the real one has a store and streams, a simulator's has symbols.
"""

from __future__ import annotations

import contextlib
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Generic

from spes_p2p.consensus import actions as do
from spes_p2p.consensus import events as on
from spes_p2p.consensus.columns import lost_columns, tokens_gone
from spes_p2p.consensus.forks import ForkDecision, parted_text, tokens_lost
from spes_p2p.consensus.manifest import Manifest, manifest_hash
from spes_p2p.consensus.messages import Commit
from spes_p2p.errors import LinkTooSlow, NetworkError, RemoteProtocolError, TileDamaged
from spes_p2p.ids import Hash, PeerId
from spes_p2p.sync.catch_up import ForkPoint, HistoryDiverged
from spes_p2p.sync.dispatcher import Dispatcher
from spes_p2p.sync.histories import Choices
from spes_p2p.sync.interfaces import History, S
from spes_p2p.sync.round_executor import RoundExecutor


def long_work(action: do.Work, executor: RoundExecutor, committer: Committer[S]) -> Coroutine[Any, Any, None]:
    """How an action that takes long is carried out."""
    match action:
        case do.Reduce():
            return executor.reduce(action)
        case do.Fetch():
            return executor.fetch(action)
        case do.Audit():
            return executor.audit(action)
        case do.AuditWork():
            return executor.audit_work(action)
        case do.Try():
            return executor.try_columns(action)
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

    def __init__(self, dispatcher: Dispatcher, history: History[S], follow: str = "") -> None:
        """`follow`: see `Choices`."""
        self._dispatcher = dispatcher
        self._core, self._votes, self._chain = dispatcher.core, dispatcher.votes, dispatcher.chain
        self._candidate, self._lock = dispatcher.candidate, dispatcher.candidate.lock
        self._tell, self._notice, self._now = dispatcher.tell, dispatcher.notice, dispatcher.now
        self._history = history
        self._choices = Choices(follow)
        self._parted: set[Hash] = set()
        """Manifests after which another final history than ours goes on, and of which a person was told."""

    async def adopt(self, commit: Commit) -> None:
        """The state that was made here becomes the committed one, unless we are about to move to another history."""
        async with self._history.moving:
            pass
        if await self._history.break_off():  # from somebody who claims to be further: what is here is certain
            self._tell(on.CatchUpFailed(is_ours=True))
        async with self._lock:
            if commit.manifest.parent != self._core.tip_hash:
                return
            if self._candidate.finished(commit.manifest.state_root) is None:
                self._dispatcher.tell_lost()
                self._tell(on.AdoptFailed())
                return
            await self._history.commit(commit)
            await self._applied(commit, commit.manifest)

    async def catch_up(self, action: do.CatchUp) -> None:
        """Headers from the holder, checked from our tip on; then the tiles of its newest state that differ."""
        tip, head = self._core.tip.round, self._core.tip_hash
        try:
            with self._history.being_fetched():
                newest, fork, way = await self._headers(tip, action)
                if newest is None:
                    self._tell(on.ForkRejected(action.head, way is ForkDecision.WAIT))
                    return
                async with self._history.moving if fork is not None else contextlib.nullcontext():
                    newest, state = await self._history.fetch(newest, tip, action.holder, is_ours=fork is None)
        except LinkTooSlow:
            raise
        except (NetworkError, RemoteProtocolError, TileDamaged) as error:  # what is damaged is mended beside
            self._notice(do.Notice("behind", f"could not catch up yet: {error}", action.holder))
            self._tell(on.CatchUpFailed())
            return
        async with self._lock:
            if self._core.tip_hash != head:  # our own child was committed meanwhile
                return
            if fork is not None:
                await self._switch(newest, fork, state, action.holder)
            elif self._core.still_takes(self._chain.commit(tip + 1)):
                await self._follow(tip, newest, state)
            else:
                self._tell(on.ForkRejected(action.head, look_again=True))

    async def _headers(self, tip: int, action: do.CatchUp) -> tuple[Commit | None, ForkPoint | None, ForkDecision]:
        """(the commit to switch to, None to stay; the fork that leads to it if it is on another history)."""
        history = self._history
        if action.round >= self._chain.length or (action.round > tip and self._chain.has(action.head, action.round)):
            with contextlib.suppress(HistoryDiverged):
                return await history.headers(tip, action.holder, action.round), None, ForkDecision.MOVE
        fork = await history.meet(tip, action.holder, action.round)
        if self._choices.meet(fork):
            self._tell_choices()
        way = self._core.way_to(fork.ours, fork.theirs, self._now())
        if way is ForkDecision.PARTED and manifest_hash(fork.common) not in self._parted:
            self._parted.add(manifest_hash(fork.common))
            self._notice(do.Notice("parted", parted_text(fork.common, fork.ours, fork.theirs)))
        if way is not ForkDecision.MOVE:
            return None, None, way
        if fork.ours:
            return fork.theirs[-1], fork, way
        return await history.take_up(tip, fork.theirs, action.holder, action.round), None, way

    def choose(self, children: Mapping[Hash, Hash]) -> None:
        """What the organiser has chosen where histories part, by parent."""
        self._choices.told(children)
        self._tell_choices()

    def _tell_choices(self) -> None:
        self._tell(on.HistoryChosen(tuple(sorted(self._choices.children))))

    async def renew(self, tip: int, commit: Commit, state: S) -> None:
        """Moves from round `tip` to a later commit of our chain and its state, unless the tip has changed meanwhile."""
        async with self._lock:
            if self._core.tip.round == tip:
                await self._follow(tip, commit, state)

    async def _follow(self, tip: int, newest: Commit, state: S) -> None:
        first = self._chain.commit(tip + 1).manifest
        await self._history.follow(first, newest, state)
        await self._applied(newest, first)

    async def _switch(self, commit: Commit, fork: ForkPoint, state: S, holder: PeerId) -> None:
        """We go over to another history: the rounds that ours had since the two parted are lost."""
        self._votes.leave(self._core.state.record)
        await self._history.switch(fork, state)
        lost = tokens_lost(fork.common, fork.ours)
        text = f"{len(fork.ours)} rounds with {lost:,} tokens are lost: another history of the run won"
        self._notice(do.Notice("fork", f"{text} (the histories split after round {fork.common.round})", holder))
        self._votes.leave(self._core.state.record)  # again: it may have voted meanwhile; from here nothing may
        self._votes.arrive(manifest_hash(commit.manifest))
        ledger = self._chain.ledger(commit.manifest.round)
        await self._enter(on.HistorySwitched(commit, ledger, self._votes.incarnation), None, fork)

    async def _applied(self, commit: Commit, first: Manifest) -> None:
        """`first` is the child of the tip that we had: the only round that can have counted our snapshot."""
        if self._core.state.rules.expert_rounds > 1 and (lost := lost_columns(self._core.tip, first)):
            self._tell_what_is_gone(first, lost)
        ledger = None if commit.manifest == first else self._chain.ledger(commit.manifest.round)
        await self._enter(on.CommitApplied(commit, ledger), first, None)

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

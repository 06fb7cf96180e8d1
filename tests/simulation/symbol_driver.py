"""The real driver's parts over symbols: what a simulated peer has in the place of tensors, files and streams.

`SymbolDriver` puts a `Dispatcher`, a `RoundExecutor` and a `Committer` together, the very ones of the real driver. Here
stands what they ask for: staging tiles, fetching them, building states, writing chains and votes, on a `Disk` of
hashes. When work is begun, what comes of asking others and whether the peer lives to see it is up to a scheduler
(`Surroundings`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from spes_p2p.consensus import actions as do
from spes_p2p.consensus import events as on
from spes_p2p.consensus.machine import Consensus
from spes_p2p.consensus.manifest import Manifest, manifest_hash
from spes_p2p.consensus.messages import Commit
from spes_p2p.consensus.vote_record import VoteRecord
from spes_p2p.errors import NetworkError, PeerSilent, StorageFull
from spes_p2p.ids import NO_HASH, PeerId
from spes_p2p.sync.catch_up import ForkPoint, HistoryDiverged
from spes_p2p.sync.committer import Committer, long_work
from spes_p2p.sync.dispatcher import Dispatcher
from spes_p2p.sync.round_executor import RoundExecutor
from tests.simulation.judge import Violation
from tests.simulation.sim_state import STATE, VOTE, Disk, State, root_of
from tests.simulation.symbols import (
    LOCKED_SECONDS,
    PUBLISHING_SECONDS,
    Died,
    Pause,
    Surroundings,
    SymbolCandidate,
    SymbolWork,
)

WRITES = 3
"""Of a state that is fetched, one after the other."""
MOVED_SECONDS = 1.0
"""So often some of a state comes that takes long."""


class SymbolVotes:
    """The `Votes` of a simulated peer."""

    def __init__(self, disk: Disk, around: Surroundings, name: PeerId) -> None:
        self._disk = disk
        self._around = around
        self._name = name

    @property
    def record(self) -> VoteRecord:
        return self._disk.record or VoteRecord(NO_HASH)

    @property
    def incarnation(self) -> int:
        return self._disk.incarnation

    def write(self, record: VoteRecord) -> None:
        self._disk.check_room(VOTE)
        before, self._disk.record = self.record, record
        self._around.judge.saw_record(self._name, record, self._disk)
        self._around.wrote(before, record)

    def forget(self, above: int) -> None:
        self._disk.record = None
        self._disk.incarnation = max(self._around.new_incarnation(), above + 1)


class SymbolChain:
    """The `KnownChain` of a simulated peer: it ends with its state. `line` is what came here of a later one."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self.has = disk.is_on_chain
        self.line: tuple[Commit, ...] = ()

    @property
    def length(self) -> int:
        return len(self._disk.chain) + 1

    def commit(self, round: int) -> Commit:
        return [*self._disk.chain, *self.line][round - 1]


class SymbolHistory:
    """The `History` of a simulated peer."""

    def __init__(
        self, core: Consensus, disk: Disk, chain: SymbolChain, around: Surroundings, tell: Callable[[on.Event], None]
    ) -> None:
        self._core = core
        self._tell = tell
        self._disk = disk
        self._chain = chain
        self._around = around
        self.running: Coroutine[Any, Any, None] | None = None
        self.fetching: Coroutine[Any, Any, None] | None = None
        self._broken_off: Coroutine[Any, Any, None] | None = None

    @contextmanager
    def being_fetched(self) -> Iterator[None]:
        if self.fetching is not None:
            raise Violation("catch-up", f"{self._core.me} fetches two states at once, into one place on its disk")
        self.fetching = self.running
        try:
            yield
        finally:
            self.fetching = self._broken_off = None

    def cancel(self) -> bool:
        """What is being fetched breaks off: not before its pause is over, as a thread would not."""
        if self.fetching is None or self.fetching is self.running:
            return False
        self._broken_off = self.fetching
        return True

    def has_broken_off(self, work: Coroutine[Any, Any, None]) -> bool:
        """Whether this work must not go on; it is undone."""
        if work is not self._broken_off:
            return False
        work.close()
        return True

    async def break_off(self) -> bool:
        if not self.cancel():
            return False
        while self._broken_off is not None:
            await Pause(LOCKED_SECONDS)
        return True

    async def _ask(self, holder: PeerId) -> Disk:
        await Pause(self._around.work_seconds())
        disk = self._around.others.disk_of(holder)
        if disk is None:
            raise PeerSilent(holder)
        return disk

    async def headers(self, tip: int, action: do.CatchUp) -> Commit:
        theirs = await self._ask(action.holder)
        common = self._disk.shared_with(theirs)
        if len(theirs.chain) <= tip:
            raise NetworkError(action.holder)
        if common < tip:
            raise HistoryDiverged(action.holder)
        return await self.take_up(tip, theirs.chain[tip:], action)

    async def meet(self, tip: int, action: do.CatchUp) -> ForkPoint:
        theirs = await self._ask(action.holder)
        common = self._disk.shared_with(theirs)
        return ForkPoint(self._disk.manifest(common), tuple(self._disk.chain[common:]), tuple(theirs.chain[common:]))

    async def take_up(self, tip: int, theirs: Sequence[Commit], action: do.CatchUp) -> Commit:
        self._chain.line = tuple(theirs)
        for commit in theirs:
            self._around.judge.saw_commit(commit)
        return theirs[-1]

    async def fetch(self, newest: Commit, tip: int, holder: PeerId, is_ours: bool) -> tuple[Commit, State]:
        self._around.judge.saw_commit(newest)
        theirs, name = await self._ask(holder), newest.certificate.manifest
        for _ in range(WRITES):
            self._disk.check_room()
            await Pause(self._around.work_seconds())
        if not theirs.is_on_chain(name, newest.manifest.round):
            raise NetworkError(holder)
        lacks_it = not theirs.keeps_states and newest.manifest.state_root != self._core.tip.state_root
        if lacks_it and self._core.state.own.keeps_states:
            raise NetworkError(holder)
        left = self._around.fetch_seconds()
        while left > 0:
            await Pause(min(left, MOVED_SECONDS))
            left -= MOVED_SECONDS
            self._tell(on.BytesMoved())
        state = self._around.judge.known[name].state
        if manifest_hash(theirs.tip) == name and root_of(theirs.state) != newest.manifest.state_root:
            raise Violation("state", f"{holder} serves another state than it committed")
        return newest, state

    async def commit(self, commit: Commit) -> None:
        await Pause(PUBLISHING_SECONDS)
        self._disk.check_room()
        self._around.judge.saw_commit(commit)
        await self._publish((commit,), self._disk.finished[commit.manifest.state_root])

    async def renew(self, commit: Commit) -> None:
        await Pause(PUBLISHING_SECONDS)
        self._disk.check_room()
        self._around.judge.saw_commit(commit)
        await self._publish((commit,), self._disk.state)

    async def follow(self, first: Manifest, newest: Commit, state: State) -> None:
        self._disk.check_room()
        await self._publish(self._chain.line, state)

    async def _publish(self, line: Sequence[Commit], state: State) -> None:
        self._disk.publish(line, state)
        await Pause(PUBLISHING_SECONDS)

    async def stay(self) -> None:
        """A fetched state is a symbol, which takes no room."""

    async def switch(self, fork: ForkPoint, state: State) -> None:
        self._disk.check_room()
        if self._core.state.own.keeps_states:
            self._around.judge.saw_switch(self._core.me, fork.common, fork.ours, fork.theirs)
        self._disk.switch(fork.common.round, fork.theirs, state)
        await Pause(PUBLISHING_SECONDS)

    def uplink(self) -> int:
        return 0

    def entering(self, commit: Commit, first: Manifest | None, fork: ForkPoint | None) -> Callable[[], Awaitable[None]]:
        line = self._disk.chain[self._core.tip.round :] if fork is None else fork.theirs or (commit,)
        self._around.judge.saw_state(self._core.me, commit.manifest, self._disk.state)
        self._around.judge.saw_place(self._core.me, commit.manifest, self._disk)
        self._around.trainer.stands_on(line, switched=fork is not None)
        self._chain.line = ()

        async def follows() -> None:
            self._around.trainer.goes_on()

        return follows


class SymbolDispatcher(Dispatcher):
    """Checks what no driver looks at, and lets a peer die before any action."""

    def __init__(self, driver: SymbolDriver, chain: SymbolChain, around: Surroundings) -> None:
        core, disk = driver.core, driver.disk
        votes, candidate = SymbolVotes(disk, around, core.me), SymbolCandidate(core, disk)
        super().__init__(core, votes, chain, candidate, driver, driver, around.now)
        self._around = around

    def carry_out(self, actions: Sequence[do.Action]) -> None:
        receivers = [action.to for action in actions if isinstance(action, do.Send)]
        if len(set(receivers)) < len(receivers):
            raise Violation("storm", f"{self.core.me} sends two envelopes to one peer for one event: {receivers}")
        super().carry_out(actions)
        if self.halted:
            raise Died

    def begin(self, action: do.Action) -> None:
        self._around.before(action)
        super().begin(action)


class SymbolDriver:
    """What a `Driver` is, over symbols: owner and effects of its own dispatcher."""

    def __init__(self, core: Consensus, disk: Disk, around: Surroundings) -> None:
        self.core = core
        self.disk = disk
        self._around = around
        chain = SymbolChain(disk)
        self.dispatcher = SymbolDispatcher(self, chain, around)
        self.history = SymbolHistory(core, disk, chain, around, self.tell)
        self.executor = RoundExecutor(self.dispatcher, SymbolWork(core, disk, around))
        self.committer: Committer[State] = Committer(self.dispatcher, self.history)

    def tell(self, event: on.Event) -> None:
        self.dispatcher.tell(event)

    @property
    def is_between_rounds(self) -> bool:
        """Whether a commit is on its way from the disk to the consensus."""
        return self.core.tip_hash != manifest_hash(self.disk.tip)

    def work(self, action: do.Work) -> Coroutine[Any, Any, None]:
        """An action that takes long, to be carried out by `go_on`."""
        return long_work(action, self.executor, self.committer)

    def go_on(self, work: Coroutine[Any, Any, None]) -> float | None:
        """Goes on with work until it pauses, for so many seconds, or ends: None."""
        if self.history.has_broken_off(work):
            return None
        self.history.running = work
        try:
            seconds: float = work.send(None)
            return seconds
        except StopIteration:
            return None
        except StorageFull as error:
            self.dispatcher.disk_is_full(error)
            return None
        finally:
            self.history.running = None

    # ---- Owner ----

    def close_training(self) -> None:
        self._around.trainer.close()

    def notice(self, notice: do.Notice) -> None:
        if notice.kind == "refused" and notice.peer and notice.peer not in self._around.judge.liars:
            raise Violation("refused", f"{self.core.me} refused what {notice.peer} said: {notice.text}")
        self._around.notice(notice)

    def failed(self, error: BaseException) -> None:
        raise error

    # ---- Effects ----

    def send(self, action: do.Send) -> None:
        self._around.send(action)

    def begin(self, action: do.Work) -> None:
        self._around.begin_work(action)

    def make_room(self) -> None:
        self.history.cancel()

    def is_catching_up(self) -> bool:
        return self.history.fetching is not None

    def has_room(self) -> bool:
        return self.disk.free >= STATE

"""The real driver's parts over symbols: what a simulated peer has in the place of tensors, files and streams.

`SymbolDriver` puts a `Dispatcher`, a `RoundExecutor` and a `Committer` together, the very ones of the real driver. Here
stands what they ask for: staging tiles, fetching them, building states, writing chains and votes, on a `Disk` of
hashes. When work is begun, what comes of asking others and whether the peer lives to see it is up to a scheduler
(`Surroundings`).
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any

from spes_p2p.consensus import actions as do
from spes_p2p.consensus import events as on
from spes_p2p.consensus.machine import Consensus
from spes_p2p.consensus.manifest import manifest_hash
from spes_p2p.errors import StorageFull
from spes_p2p.ids import Hash
from spes_p2p.sync.committer import Committer, long_work
from spes_p2p.sync.dispatcher import Dispatcher
from spes_p2p.sync.histories import Choices
from spes_p2p.sync.round_executor import RoundExecutor
from spes_p2p.testing.judge import Violation
from spes_p2p.testing.sim_state import Disk, State
from spes_p2p.testing.symbol_history import SymbolHistory, SymbolVotes
from spes_p2p.testing.symbols import Died, Lock, Surroundings, SymbolWork


class SymbolDispatcher(Dispatcher):
    """Checks what no driver looks at, and lets a peer die before any action."""

    def __init__(self, core: Consensus, votes: SymbolVotes, effects: SymbolDriver, around: Surroundings) -> None:
        super().__init__(core, votes, effects, effects, around.now)
        self._around = around

    def carry_out(self, actions: Sequence[do.Action]) -> None:
        self._around.handled()
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
        votes = SymbolVotes(disk, around, core.me)
        self.dispatcher = SymbolDispatcher(core, votes, self, around)
        self.lock = Lock()
        self.history = SymbolHistory(core, disk, around)
        work = SymbolWork(self.dispatcher, disk, around)
        self.executor = RoundExecutor(core, work, self.lock, self.dispatcher.tell, around.notice, around.now)
        self.committer: Committer[State] = Committer(
            self.dispatcher, votes, self.history, self.lock, around.now, around.notice, Choices()
        )

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
        if work.cr_frame is None:  # type: ignore[attr-defined]
            return None  # broken off
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
        if notice.kind == "refused" and notice.peer not in self._around.judge.liars:
            raise Violation("refused", f"{self.core.me} refused what {notice.peer} said: {notice.text}")

    def failed(self, error: BaseException) -> None:
        raise error

    # ---- Effects ----

    def is_ours(self, tip: Hash, round: int) -> bool:
        return self.disk.is_on_chain(tip, round)

    def send(self, action: do.Send) -> None:
        self._around.send(action)

    def begin(self, action: do.Work) -> None:
        self._around.begin_work(action)

    def make_room(self) -> None:
        self.history.cancel()

    def is_writing(self) -> bool:
        return self.lock.is_held

    def recover(self) -> None:
        self.disk.recover(self.dispatcher.is_bound)

    def is_finished(self, root: Hash) -> bool:
        return root in self.disk.finished

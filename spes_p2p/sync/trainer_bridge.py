"""Between two threads: the protocol runs on the network's loop, training in a thread of its own.

`TrainerBridge` is the `Hooks` of the driver on one side and what the training loop waits for on the other. Holds no
tensors.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from spes_p2p.consensus.actions import Notice
from spes_p2p.consensus.messages import Intent, Work
from spes_p2p.ids import Hash
from spes_p2p.sync.driver import Driver
from spes_p2p.sync.surroundings import Applied


class TrainerBridge:
    """Thread-safe. `on_applied` and `on_notice` are called on the network's thread and must be quick."""

    def __init__(
        self,
        on_applied: Callable[[Applied], None] = lambda event: None,
        on_notice: Callable[[Notice], None] = lambda notice: None,
    ) -> None:
        self._changed = threading.Condition()
        self._applied: list[Applied] = []
        self._closing = False
        self.stopping = False
        self.stopped_at = 0.0
        """When the peer was asked to end, monotonic seconds."""
        self._failure: BaseException | None = None
        self._on_applied = on_applied
        self._on_notice = on_notice
        self._driver: Driver | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._in_use: frozenset[int] = frozenset()
        self._on_stop: list[Callable[[], object]] = []

    def attach(self, driver: Driver, loop: asyncio.AbstractEventLoop) -> None:
        """The driver whose hooks this is, and the loop that it runs on."""
        self._driver, self._loop = driver, loop
        self.use(driver.core.tip.round)  # what training will begin with, however late it is

    # ---- Hooks: the network's thread ----

    def close_training(self) -> None:
        with self._changed:
            self._closing = True

    def applied(self, event: Applied) -> None:
        self._on_applied(event)
        with self._changed:
            # the next round may be closed already: in the step that began it, or before training has taken this commit
            self._closing = self._driver is not None and self._driver.core.state.round.close_asked
            self._applied.append(event)
            self._changed.notify_all()

    def rounds_in_use(self) -> frozenset[int]:
        with self._changed:
            return self._in_use | _rounds(self._applied[:1])

    def notice(self, notice: Notice) -> None:
        self._on_notice(notice)

    def failed(self, error: BaseException) -> None:
        """The peer must end: who waits for news, or for the run to begin, hears of it at once. For any thread."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()
            calls = tuple(self._on_stop)
        for call in calls:
            call()

    def check(self) -> None:
        """Raises what the peer failed with."""
        if self._failure is not None:
            raise self._failure

    # ---- anybody ----

    def stop(self) -> None:
        """The peer should end: training stops after the running step."""
        with self._changed:
            self.stopping, self.stopped_at = True, time.monotonic()
            self._changed.notify_all()
            calls = tuple(self._on_stop)
        for call in calls:
            call()

    @contextlib.contextmanager
    def on_stop(self, call: Callable[[], object]) -> Iterator[None]:
        """`call` is made when the peer should end, by whoever says so; at once where that has happened already."""
        with self._changed:
            late = self.stopping or self._failure is not None
            self._on_stop.append(call)
        if late:
            call()
        try:
            yield
        finally:
            with self._changed:
                self._on_stop.remove(call)

    # ---- the training thread ----

    def should_stop(self) -> bool:
        """Whether to end the round after the running step: it closes, is over, or the peer should stop."""
        return self._closing or self.has_news()

    def has_news(self) -> bool:
        """Whether there is a commit to go on from, or a reason to stop."""
        return self.stopping or bool(self._applied) or self._failure is not None

    def wait(self, until: float = float("inf"), heed_stop: bool = True) -> tuple[Applied, ...]:
        """Waits for commits, which come in order; none when the peer should stop (if heeded), or at `until` (monotonic
        seconds).

        The states of the first and of the newest stay on disk until the next call of `use`. Raises what the driver
        failed with.
        """
        with self._changed:
            while not self._applied:
                if self._failure is not None:
                    raise self._failure
                left = until - time.monotonic()
                if left <= 0 or (heed_stop and self.stopping):
                    return ()
                self._changed.wait(min(left, 1.0))
            events, self._applied = tuple(self._applied), []
            self._in_use |= _rounds((events[0], events[-1]))
            return events

    def use(self, round: int) -> None:
        """From now on training reads the state of this round alone; others may be removed."""
        with self._changed:
            self._in_use = frozenset({round})

    def report(self, work: Work, head: Hash) -> None:
        """Progress on top of `head`, its end too, once the snapshot is taken; too late when the round is decided."""
        self._call(lambda driver: driver.progressed(work) if driver.core.tip_hash == head else None)

    def wish(self, intent: Intent) -> None:
        """What this peer wants has changed."""
        self._call(lambda driver: driver.wish(intent))

    def _call(self, what: Callable[[Driver], object]) -> None:
        driver, loop = self._driver, self._loop
        assert driver is not None
        assert loop is not None

        def run() -> None:
            try:
                what(driver)
            except Exception as error:  # noqa: BLE001 (it must reach the training thread, not the loop's log)
                self.failed(error)

        loop.call_soon_threadsafe(run)


def _rounds(events: Iterable[Applied]) -> frozenset[int]:
    return frozenset(event.commit.manifest.round for event in events)

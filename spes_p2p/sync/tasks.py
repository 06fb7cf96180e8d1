"""Work that runs beside an event loop's callbacks: started here, and ended here for certain.

A task that dies of an error says so to its owner; nothing that was started outlives `stop`, threads included. Knows
nothing of what the work is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Tasks:
    """The tasks and threads of one owner on one loop. `failed` is told what a task died of."""

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed
        self._tasks: dict[asyncio.Task[None], None] = {}  # in order, so that a run is repeated exactly
        self._threads: dict[asyncio.Future[Any], None] = {}
        self.stopped = False

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` beside; not any more once stopped."""
        if self.stopped:
            work.close()
            return
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._ended)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises. A caller that is cancelled goes on when the thread has ended, not before."""
        running = asyncio.get_running_loop().run_in_executor(None, work)
        self._threads[running] = None
        running.add_done_callback(lambda done: self._threads.pop(done, None))
        return await _to_its_end(running)

    def halt(self) -> None:
        """Cancels all tasks and begins none any more; does not wait for them."""
        self.stopped = True
        for task in list(self._tasks):
            task.cancel()

    async def stop(self) -> None:
        """Cancels all tasks and returns when they and all threads have ended."""
        self.halt()
        while under_way := [*self._tasks, *self._threads]:
            await asyncio.wait(under_way)
            await asyncio.sleep(0)  # lets their callbacks run, which take them off the lists

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None and not self.stopped:
            self._failed(error)


async def in_thread(work: Callable[[], T]) -> T:
    """The same as `Tasks.in_thread`, for one that waits for its threads in any case."""
    return await _to_its_end(asyncio.get_running_loop().run_in_executor(None, work))


async def _to_its_end(running: asyncio.Future[T]) -> T:
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise

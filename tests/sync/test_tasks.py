"""Work beside the loop: its errors are told, and nothing of it outlives stop."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from spes_p2p.sync.tasks import Tasks


def test_an_error_is_told_to_the_owner() -> None:
    failures: list[BaseException] = []

    async def main() -> None:
        tasks = Tasks(failures.append)

        async def fail() -> None:
            raise ValueError("broken")

        tasks.spawn(fail())
        await asyncio.sleep(0.001)
        await tasks.stop()

    asyncio.run(main())
    assert [str(error) for error in failures] == ["broken"]


def test_stop_ends_tasks_and_waits_for_threads() -> None:
    began, done = threading.Event(), threading.Event()
    ended: list[BaseException] = []

    def work() -> None:
        began.set()
        time.sleep(0.05)
        done.set()

    async def main() -> None:
        tasks = Tasks(ended.append)

        async def wait_for_thread() -> None:
            await tasks.in_thread(work)
            raise AssertionError("not reached after a cancellation")

        tasks.spawn(wait_for_thread())
        tasks.spawn(asyncio.sleep(1000))
        while not began.is_set():
            await asyncio.sleep(0.001)
        await tasks.stop()
        assert done.is_set()
        assert len(asyncio.all_tasks()) == 1
        tasks.spawn(asyncio.sleep(1000))  # too late: not begun
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())
    assert not ended


def test_a_cancelled_caller_waits_for_its_thread() -> None:
    """What the thread writes to must not be taken away meanwhile."""
    steps: list[str] = []
    began = threading.Event()

    def work() -> None:
        began.set()
        time.sleep(0.05)
        steps.append("thread")

    async def main() -> None:
        tasks = Tasks(lambda error: None)
        caller = asyncio.create_task(tasks.in_thread(work))
        while not began.is_set():
            await asyncio.sleep(0.001)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        steps.append("caller")
        await tasks.stop()

    asyncio.run(main())
    assert steps == ["thread", "caller"]


def test_results_and_errors_come_out_of_the_thread() -> None:
    async def main() -> None:
        tasks = Tasks(lambda error: None)
        assert await tasks.in_thread(lambda: 7) == 7
        with pytest.raises(ZeroDivisionError):
            await tasks.in_thread(lambda: 1 // 0)

    asyncio.run(main())

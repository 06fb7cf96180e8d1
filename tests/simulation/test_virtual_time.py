"""The virtual clock: jumps, keeps order, reports deadlocks and endless programs."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.simulation.virtual_time import VirtualDeadlock, VirtualTimeout, run_virtual


def test_hours_pass_at_once_and_in_order() -> None:
    seen: list[tuple[str, float]] = []

    async def note(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        seen.append((name, asyncio.get_running_loop().time()))

    async def main() -> float:
        async with asyncio.TaskGroup() as group:
            for name, seconds in (("late", 7200.0), ("soon", 0.1), ("middle", 60.0)):
                group.create_task(note(name, seconds))
        return asyncio.get_running_loop().time()

    started = time.process_time()
    assert run_virtual(main(), max_virtual_seconds=10_000) == 7200.0
    assert seen == [("soon", 0.1), ("middle", 60.0), ("late", 7200.0)]
    assert time.process_time() - started < 5


def test_timers_that_are_almost_equal_do_not_stop_the_clock() -> None:
    async def main() -> int:
        await asyncio.sleep(1e6)
        for _ in range(100):
            await asyncio.sleep(1e-13)
        return 1

    assert run_virtual(main(), max_virtual_seconds=1e7) == 1


def test_timeout_and_wait_see_virtual_time() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(30)


def test_a_deadlock_says_where_the_tasks_wait() -> None:
    async def wait_for_nobody() -> None:
        await asyncio.Event().wait()

    with pytest.raises(VirtualDeadlock, match=r"nothing can happen.*\n.*wait"):
        run_virtual(wait_for_nobody())


def test_an_endless_program_is_stopped_and_its_tasks_are_cancelled() -> None:
    ended: list[str] = []

    async def tick() -> None:
        try:
            while True:
                await asyncio.sleep(1)
        finally:
            ended.append("cancelled")

    async def main() -> None:
        task = asyncio.create_task(tick())
        await task

    with pytest.raises(VirtualTimeout, match="100 virtual seconds"):
        run_virtual(main(), max_virtual_seconds=100)
    assert ended == ["cancelled"]


def test_an_executor_runs_inline_and_hands_on_errors() -> None:
    async def main() -> int:
        loop = asyncio.get_running_loop()
        with pytest.raises(ZeroDivisionError):
            await loop.run_in_executor(None, lambda: 1 // 0)
        return await asyncio.to_thread(sum, [1, 2, 3])

    assert run_virtual(main()) == 6


def test_the_error_of_the_program_comes_through() -> None:
    async def main() -> None:
        await asyncio.sleep(5)
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        run_virtual(main())

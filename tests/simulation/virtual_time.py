"""An asyncio loop whose clock is virtual: when nothing is ready it jumps to the next timer at once.

Hours of a swarm run in milliseconds and in the same order every time. There is no input or output: no sockets, no
subprocesses, no threads; what is handed to an executor runs inline. A program in which nothing can ever happen again is
reported as a deadlock with the places where its tasks wait, instead of hanging.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class VirtualDeadlock(RuntimeError):
    """Nothing is ready and no timer is set, but the main coroutine has not ended."""


class VirtualTimeout(RuntimeError):
    """The main coroutine has not ended within the virtual seconds allowed."""


class _JumpingSelector:
    """Stands where a loop waits for sockets: instead of waiting, it moves the clock."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise VirtualDeadlock(f"nothing can happen any more at {self._loop.time():g} s:\n{_waiting(self._loop)}")
        if timeout > 0:
            self._loop.advance(timeout)
        return []

    def close(self) -> None:
        """Nothing is held."""


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """Starts at 0 s. `limit_seconds` of virtual time end it with VirtualTimeout."""

    def __init__(self, limit_seconds: float = float("inf")) -> None:
        super().__init__()
        self._now = 0.0
        self.limit_seconds = limit_seconds
        self._clock_resolution = 1e-9
        self._selector = _JumpingSelector(self)

    def time(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Moves the clock; called where another loop would sleep."""
        timers: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
        # Set to the timer's own time: adding a tiny difference might not change the number, and never get there.
        self._now = max(self._now, timers[0].when()) if timers else self._now + seconds
        if self._now > self.limit_seconds:
            raise VirtualTimeout(f"not finished after {self.limit_seconds:g} virtual seconds:\n{_waiting(self)}")

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - an executor hands every error to whoever awaits
            future.set_exception(error)
        return future

    def _process_events(self, event_list: list[Any]) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """Nobody sleeps who would have to be woken."""


def run_virtual(main: Coroutine[Any, Any, T], max_virtual_seconds: float = 3600.0) -> T:
    """Runs `main` to its end on a fresh virtual clock and returns its result.

    Raises VirtualDeadlock, VirtualTimeout, and what `main` raises. Tasks that are left are cancelled.
    """
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(max_virtual_seconds)) as runner:
        try:
            return runner.run(main)
        except (VirtualDeadlock, VirtualTimeout):
            _free(runner.get_loop())
            raise


def _free(loop: asyncio.AbstractEventLoop) -> None:
    """Lets the tasks that are left be cancelled without the limit hitting them again."""
    assert isinstance(loop, VirtualTimeLoop)
    loop.limit_seconds = float("inf")


def _waiting(loop: asyncio.AbstractEventLoop) -> str:
    lines = []
    for task in asyncio.all_tasks(loop):
        frames = task.get_stack(limit=1)
        where = f"{frames[-1].f_code.co_qualname}:{frames[-1].f_lineno}" if frames else "?"
        lines.append(f"  {task.get_name()} waits in {_innermost(task) or where}")
    return "\n".join(sorted(lines))


def _innermost(task: asyncio.Task[Any]) -> str:
    """Where the chain of awaits of a task ends: the line that matters."""
    place = ""
    awaited: Any = task.get_coro()
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "ag_frame", None)
        if frame is not None:
            place = f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno} ({frame.f_code.co_name})"
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "ag_await", None)
    return place


def virtual(test: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """A test that runs whole on a virtual clock."""

    @wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return run_virtual(test(*args, **kwargs))

    return run

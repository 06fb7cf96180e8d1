"""The one permanent thread with the one asyncio loop on which all networking of a process runs.

It must outlive everything that it starts: the kernel ends the libp2p daemon when the *thread* that started it ends.
Leaves out signals: who leaves cleanly closes the network first and stops the thread then.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from asyncio.subprocess import Process
from collections.abc import Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, P2PHandlerError

from spes_p2p.errors import LocalProtocolError
from spes_p2p.parent import ending_with_us

T = TypeVar("T")
_BROKEN = (ConnectionError, asyncio.IncompleteReadError, P2PDaemonError, P2PHandlerError)
_STOP_SECONDS = 10.0
_LOOKUPS = 8
"""Names that are looked up at a time: of those that were found before, and of others."""
_MOST_FOUND = 1024


class NetworkLoop(asyncio.SelectorEventLoop):
    """A loop whose child processes die with it, and hear no Ctrl-C that is meant for us.

    hivemind starts its daemon through the running loop, so this reaches it without touching hivemind. SIGKILL, since
    the daemon has nothing to save and must not linger; a session of its own, since the terminal sends SIGINT and SIGHUP
    to whole groups while we still need the daemon to say good-bye.
    """

    def __init__(self) -> None:
        super().__init__()
        self.starting: set[asyncio.Future[Any]] = set()
        """Processes being started. Do not cancel them: a bug of asyncio would make that wait for ever."""
        self._lookups = {known: ThreadPoolExecutor(_LOOKUPS, "names") for known in (True, False)}
        self._found: dict[Any, None] = {}
        """Names whose last lookup gave addresses in time, the newest last."""

    async def getaddrinfo(self, host: Any, port: Any, **hints: Any) -> Any:
        """In threads of its own: the servers of names that strangers announce may not answer, and the run's work on
        the disk waits for the loop's few threads. Nor does a name that was found before wait for such names."""
        lookups, look_up = self._lookups[host in self._found], partial(socket.getaddrinfo, host, port, **hints)
        try:
            found = await self.run_in_executor(lookups, look_up)
        finally:
            self._found.pop(host, None)
        self._found[host] = None
        if len(self._found) > _MOST_FOUND:
            del self._found[next(iter(self._found))]
        return found

    def close(self) -> None:
        for lookups in self._lookups.values():
            lookups.shutdown(wait=False, cancel_futures=True)
        super().close()

    async def subprocess_exec(self, protocol_factory: Any, program: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs.setdefault("preexec_fn", ending_with_us(signal.SIGKILL))
        kwargs.setdefault("start_new_session", True)
        starting = asyncio.ensure_future(super().subprocess_exec(protocol_factory, program, *args, **kwargs))
        self.starting.add(starting)
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            transport, protocol = await starting
            transport.close()
            await Process(transport, protocol, self).wait()
            raise
        finally:
            self.starting.discard(starting)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Silences library tasks that died of a broken connection; whoever needs the connection reports it."""
        if not isinstance(context.get("exception"), _BROKEN):
            super().call_exception_handler(context)


class NetworkThread:
    """Start one per process, before CUDA is touched and before anything forks; use it as a context or call `stop`."""

    def __init__(self, name: str = "network") -> None:
        self.loop = NetworkLoop()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts `work` on the loop; for other threads."""
        if threading.current_thread() is self._thread or not self._thread.is_alive():
            work.close()
            raise LocalProtocolError("network work must be run on the network thread while that is running")
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine[Any, Any, T], timeout_seconds: float | None = None) -> T:
        """Runs `work` on the loop and waits for it; cancels it when the wait is broken off (Ctrl-C, time-out)."""
        future = self.submit(work)
        try:
            return future.result(timeout_seconds)
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """Cancels what still runs and ends the thread; safe to call twice."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(_STOP_SECONDS)

    def __enter__(self) -> NetworkThread:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            _finish(self.loop)
        finally:
            self.loop.close()


def _finish(loop: NetworkLoop) -> None:
    if loop.starting:
        loop.run_until_complete(asyncio.wait(set(loop.starting), timeout=_STOP_SECONDS / 2))
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        if not task.cancelling():  # else it is cleaning up, and would not come to the end of that
            task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks, timeout=_STOP_SECONDS / 2))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.run_until_complete(loop.shutdown_default_executor())

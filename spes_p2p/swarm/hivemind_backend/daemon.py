"""The libp2p daemon of a peer: started in process, with sockets in a folder of its own, ended without leaving anything.

Leaves out what is said through it.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import re
import signal
import socket
import tempfile
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

from hivemind.p2p import P2P
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError

from spes_p2p.errors import ConfigError, DaemonEnded, NetworkError, PermanentError
from spes_p2p.locks import Scratch
from spes_p2p.swarm.hivemind_backend.dial import Address, parse_address

NO_LOOKUP = "none"
"""A `dht_mode` of ours: the daemon dials the addresses that it is given, and never those that others tell of a peer."""
DAEMON_GONE = (OSError, asyncio.IncompleteReadError)
"""Errors that the daemon's socket raises once the daemon has ended."""
_MAX_FOLDER_CHARACTERS = 50
_END_SECONDS = 5.0
_NOTICED_SECONDS = 0.2
"""How long to wait for the news that the daemon has ended, after an error that this would explain."""
MOST_BYTES = 2**30
"""Resident memory of a daemon that is ended for it: it keeps what others have sent half, as long as they like."""
_LOOK_SECONDS = 2.0
_SAID_NOTHING = "Daemon failed to start: None"
"""hivemind's message for a daemon that was killed; otherwise the message contains the daemon's reason."""


def socket_folder() -> Scratch:
    """A folder for a daemon's sockets. Raises ConfigError where its path would be too long for them."""
    if len(temporary := tempfile.gettempdir()) > _MAX_FOLDER_CHARACTERS:
        raise ConfigError(
            f"the path of the temporary folder {temporary} is too long for a socket", fix="set TMPDIR=/tmp"
        )
    return Scratch("spes-p2p-net-")


async def start_daemon(folder: Scratch, **options: Any) -> P2P:
    """A running daemon (hivemind's `P2P.create` with `options`). Raises NetworkError with the daemon's own words.

    Where this is cancelled, or fails, no daemon is left.
    """
    owner, made = os.getpid(), list[P2P]()
    check_ports(options.get("host_maddrs") or ())

    class RunP2P(P2P):
        _UNIX_SOCKET_PREFIX = f"/unix{folder.path}/"
        DHT_MODE_MAPPING: ClassVar[dict[str, dict[str, int]]] = {**P2P.DHT_MODE_MAPPING, NO_LOOKUP: {}}

        def __init__(self) -> None:
            super().__init__()
            made.append(self)

        def _terminate(self) -> None:
            if os.getpid() != owner:  # a forked child must not end its parent's daemon
                return
            child = self._child
            self._child: Any = None  # asyncio would take its exit code away from who waits for it, who complains then
            super()._terminate()
            self._child = child
            if child is not None and child.returncode is None:
                with suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGTERM)

    try:
        p2p = await RunP2P.create(**options)
    except BaseException as error:
        for one in made:
            kill_daemon(one)  # one that has just begun does not listen to SIGTERM
            await one.shutdown()
        if isinstance(error, (P2PDaemonError, *DAEMON_GONE)):
            raise _explained(str(error)) from error
        raise
    p2p._client.control._pending_calls = _PendingCalls()
    return p2p


def kill_daemon(p2p: P2P) -> None:
    """Ends the daemon at once, without waiting for it."""
    if p2p._child is not None and p2p._child.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(p2p._child.pid, signal.SIGKILL)


class Daemon:
    """The daemon of one peer, under one identity: another one may take the place of one that ended."""

    p2p: P2P
    """That of now."""

    def __init__(self, folder: Scratch, identity_path: Path) -> None:
        self._folder, self._identity_path = folder, identity_path
        self.ended = asyncio.Event()
        """Set while there is none: nothing can be reached."""
        self.has_grown = False
        """The one that ended last was ended for its memory."""
        self._watching: asyncio.Task[None] | None = None
        """Done when it has ended without us; None while none is meant to run."""

    @property
    def pid(self) -> int:
        pid: int = self.p2p._child.pid
        return pid

    async def start(self, options: dict[str, Any]) -> None:
        """Raises as `start_daemon`."""
        self.p2p, self.has_grown = (
            await start_daemon(self._folder, identity_path=str(self._identity_path), **options),
            False,
        )
        self._watching = asyncio.create_task(self._watch(self.p2p))

    async def stop(self) -> None:
        """Ends the daemon, if one runs."""
        watch, self._watching = self._watching, None
        if watch is None:
            return
        try:
            async with asyncio.timeout(_END_SECONDS):
                await self.p2p.shutdown()
        except TimeoutError:
            kill_daemon(self.p2p)
        await asyncio.wait((watch,), timeout=_END_SECONDS)
        watch.cancel()

    async def work(self, work: Coroutine[Any, Any, None]) -> None:
        """`work`, unless the daemon ends meanwhile: some of hivemind's calls would wait for ever for its answer.

        Raises DaemonEnded then, whatever else its end has broken.
        """
        task = asyncio.create_task(work)
        try:
            while not task.done() and not self._is_lost():
                waited = (task,) if self._watching is None else (task, self._watching)
                await asyncio.wait(waited, timeout=_NOTICED_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if task.done() and isinstance(task.exception(), (*DAEMON_GONE, P2PDaemonError, NetworkError)):
                await asyncio.sleep(_NOTICED_SECONDS)
            if self._is_lost():
                raise daemon_ended()
        finally:
            task.cancel()
            await asyncio.wait((task,))
        task.result()

    def require(self) -> None:
        """Raises NetworkError while there is none."""
        if self.ended.is_set():
            raise NetworkError("the libp2p daemon has ended", fix="start this peer again")

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Raises NetworkError where there is none, or where it is gone before it has answered."""
        self.require()
        try:
            yield
        except DAEMON_GONE as error:
            raise NetworkError(f"the libp2p daemon does not answer: {error}", fix="start this peer again") from error

    def _is_lost(self) -> bool:
        return self._watching is not None and self._watching.done()

    async def _watch(self, p2p: P2P) -> None:
        """Until the daemon ends, or hivemind no longer reads its answers (which is as bad)."""
        reading = p2p._client.control._read_task
        ended = asyncio.ensure_future(p2p._child.wait())
        waited = (ended, reading) if reading else (ended,)
        try:
            while not (await asyncio.wait(waited, timeout=_LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED))[0]:
                if _resident_bytes(p2p._child.pid) > MOST_BYTES:
                    self.has_grown = True
                    kill_daemon(p2p)
        finally:
            ended.cancel()
        self.ended.set()


def _resident_bytes(pid: int) -> int:
    """Of a process; 0 once it is gone."""
    import psutil  # here, since who only looks at a run needs none

    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


class _PendingCalls(dict[Any, "asyncio.Future[Any]"]):
    """hivemind's table of unanswered calls, from which abandoned ones disappear.

    hivemind's reader hands each answer to the call that it finds here. If that call had just timed out, the reader
    would die of an InvalidStateError, and the peer would receive no answers or requests any more.
    """

    def __contains__(self, call_id: object) -> bool:
        future = self.get(call_id)
        return future is not None and not future.done()


def check_ports(host_maddrs: Iterable[str]) -> None:
    """Raises NetworkError where something listens at one of these addresses already, PermanentError if one is none.

    libp2p shares a port with other libp2p processes (SO_REUSEPORT), and each of them gets some of the connections.
    """
    for maddr in host_maddrs:
        try:
            place = _place(parse_address(maddr))
        except ValueError as error:
            raise PermanentError(
                f"--host-maddrs {maddr} is {error}", fix="write it as /ip4/0.0.0.0/tcp/PORT, or give --port"
            ) from error
        if place is None or place[1] == 0:
            continue
        try:
            with socket.socket(socket.AF_INET6 if ":" in place[0] else socket.AF_INET) as one:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what was closed just now is free
                one.bind(place)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise _taken(f"port {place[1]}") from error


def _place(address: Address) -> tuple[str, int] | None:
    """(IP address, port) of a TCP address; None for others, which the daemon judges."""
    try:
        ipaddress.ip_address(address.host)
    except ValueError:
        return None
    return address.host, address.port


def _taken(port: str) -> NetworkError:
    return NetworkError(
        f"{port} is in use: another program listens there", fix="choose another with --port; 0 takes a free one"
    )


def daemon_ended() -> DaemonEnded:
    """For what broke because the daemon is no more."""
    return DaemonEnded(
        "the libp2p daemon ended while it was needed", fix="find out what ends it (out of memory?), then start again"
    )


def _explained(words: str) -> NetworkError:
    if "address already in use" in words:
        found = re.search(r":(\d+): bind", words)
        return _taken(f"port {found[1]}" if found else "the port to listen on")
    if _SAID_NOTHING in words or not words.startswith("Daemon failed"):
        return daemon_ended()
    return NetworkError(f"the libp2p daemon did not start: {words}", fix="check --host-maddrs and --announce-maddrs")

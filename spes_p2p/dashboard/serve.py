"""`run_dashboard`: from what was asked for to a page that is served until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from spes_p2p.dashboard.follow import Open, follow
from spes_p2p.dashboard.history import History
from spes_p2p.dashboard.replay import replay
from spes_p2p.dashboard.source import SwarmSource
from spes_p2p.dashboard.web import make_app
from spes_p2p.errors import ConfigError, Stopped
from spes_p2p.peer.network import visiting
from spes_p2p.peer.options import JoinTarget
from spes_p2p.peer.stopping import leaving_on_signals, until_stopped
from spes_p2p.swarm.hivemind_backend import NetworkThread

Say = Callable[[str], None]


@dataclass(frozen=True)
class DashboardOptions:
    """`meeting` None: the history in `database` is shown as it is. `replays`: files of a past run, kept nowhere."""

    meeting: JoinTarget | None
    host: str = "127.0.0.1"
    port: int = 8080
    database: Path = Path("dashboard.sqlite")
    replays: Sequence[Path] = ()


def run_dashboard(options: DashboardOptions, say: Say) -> None:
    """Serves until SIGINT or SIGTERM. Raises ConfigError, and NetworkError where nothing is known of the run yet."""
    with _listening(options.host, options.port) as listener, contextlib.closing(_history(options)) as history:
        serving = Serving(history, listener)
        with NetworkThread() as thread, leaving_on_signals(serving.stop, lambda text: None):
            following = None
            if options.meeting is not None:
                # now, since else the page shows the other run until somebody answers
                history.check_is_of(options.meeting.run_id or "", options.meeting.fingerprint or "")
                open_source = _opener(options.meeting)
                is_known = history.get("head") is not None
                try:
                    source = None if is_known else thread.run(until_stopped(serving.stopped_on(thread), open_source()))
                except Stopped:
                    return
                following = thread.submit(follow(open_source, history, source))
            try:
                say(f"dashboard: {serving.address}")
                asyncio.run(serving.run(lambda: following is not None and following.done()))
            finally:
                if following is not None and not following.cancel():
                    following.result()


def _history(options: DashboardOptions) -> History:
    if options.replays:
        history = History()
        replay(options.replays, history)
        return history
    if options.meeting is None and not options.database.exists():
        raise ConfigError(
            f"no invitation was given, and {options.database} does not exist",
            fix="give the invitation that the organiser printed (spes1...), or a past run with --replay DIR",
        )
    return History(options.database)


@contextlib.contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    """Raises ConfigError where the port cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen()  # who comes as soon as the address is told waits for the server
            yield listener
    except OSError as error:
        raise ConfigError(
            f"the page cannot be served at {host} port {port}: {error.strerror or error}",
            fix="choose another --port, or an address of this machine with --host",
        ) from error


def _opener(run: JoinTarget) -> Open:
    async def open_source() -> SwarmSource:
        async with contextlib.AsyncExitStack() as opened:
            network = await opened.enter_async_context(visiting(run))
            return SwarmSource(network, run.run_id, run.fingerprint, opened.pop_all().aclose)

    return open_source


class _Server(uvicorn.Server):
    """Leaves signals to us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Serving:
    """The page of `history` on a bound socket, until `stop`, which any thread may call."""

    def __init__(self, history: History, listener: socket.socket) -> None:
        self.app = make_app(history)
        self._listener = listener
        config = uvicorn.Config(
            self.app, log_level="warning", access_log=False, timeout_graceful_shutdown=2, lifespan="off", ws="none"
        )
        self._server = _Server(config)
        self._on_stop: list[Callable[[], object]] = []

    @property
    def address(self) -> str:
        host, port = self._listener.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/"

    def stop(self) -> None:
        self.app.state.stopping = True
        self._server.should_exit = True
        for call in self._on_stop:
            call()

    def stopped_on(self, thread: NetworkThread) -> asyncio.Event:
        """Set on the loop of `thread` once `stop` was called."""
        event = asyncio.Event()
        self._on_stop.append(lambda: thread.loop.call_soon_threadsafe(event.set))
        return event

    async def run(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Until `stop`, or until `is_over`."""
        task = asyncio.ensure_future(self._server.serve(sockets=[self._listener]))
        while not (await asyncio.wait((task,), timeout=0.5))[0]:
            if is_over():
                self.stop()
        task.result()

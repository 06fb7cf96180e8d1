"""Starts many `spes-p2p` processes quickly: each is forked from one that has imported everything already.

Importing costs seconds of CPU time a process, most of what a small swarm costs. A forked process is one of its own in
every other way: process group, output, environment, network namespace, exit code, end by signal. What it cannot show is
how the program starts, and its command line says `fork_server`. Linux only.

`ForkedSwarm` starts its processes this way. `ForkServer` is the side that asks; `python -m tests.fork_server` answers,
a JSON line for each: asked to start a program, the pid; of a process that ended, its exit code (negative: the signal).
It leaves with its input, and its processes with it. What these leave behind becomes a child of it, too, and so can be
found.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from spes_p2p.errors import SpesError
from spes_p2p.parent import end_with, ending_with_us
from spes_p2p.quickstart.processes import LOOPBACK, Host, Running, children
from tests.simulation.faulty_swarm import FaultySwarm

_PRELOADED = ("numpy.random", "spes_p2p.cli.join", "spes_p2p.peer.run", "spes_p2p.peer.bootstrap")
START_SECONDS = 90.0
_PR_SET_CHILD_SUBREAPER = 36
_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None)


class ForkServer:
    """One server. Not for several threads."""

    def __init__(self, environment: Mapping[str, str], before_exec: Callable[[], None] | None) -> None:
        """`environment`: of the server; what libraries read of it when they load holds for all that it starts."""
        self._codes: dict[int, int] = {}
        self._started: list[int] = []
        self._rest = b""
        paths = [str(Path(__file__).parents[1]), *filter(None, [environment.get("PYTHONPATH")])]
        self._server = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**environment, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,
            preexec_fn=before_exec,
        )

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        output: Path,
        errors: Path | None = None,
        namespace: str = "",
    ) -> Child:
        """Runs `python -m module arguments`; what it prints is appended to `output`, or in part to `errors`.

        `environment`: all of it. `namespace`: a named network namespace; needs root.
        """
        assert self._server.stdin is not None
        order = {
            "module": module, "arguments": list(arguments), "environment": dict(environment), "namespace": namespace,
            "output": str(output), "errors": str(errors or output),
        }  # fmt: skip
        self._server.stdin.write(json.dumps(order).encode() + b"\n")
        self._server.stdin.flush()
        end = time.monotonic() + START_SECONDS
        while not self._started:
            if time.monotonic() > end:
                raise SpesError(f"the process that starts others did not answer in {START_SECONDS:g} s")
            self._read(timeout_seconds=1.0)
        return Child(self, self._started.pop())

    def code(self, pid: int) -> int | None:
        """How a process has ended, None while it runs."""
        if pid not in self._codes:
            self._read(timeout_seconds=0.0)
        return self._codes.get(pid)

    def running(self) -> list[int]:
        """The processes that were started here and still run, with all that they started, also before they ended."""
        return children(self._server.pid)

    def close(self) -> None:
        """Ends the server, and by it what still runs."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.stdout.close()
        self._server.wait()

    def _read(self, timeout_seconds: float) -> None:
        assert self._server.stdout is not None
        descriptor = self._server.stdout.fileno()
        while select.select([descriptor], [], [], timeout_seconds)[0]:
            data = os.read(descriptor, 2**16)
            if not data:
                raise SpesError(f"the process that starts others ended with {self._server.wait()}")
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                self._note(json.loads(line))
            if lines or not timeout_seconds:
                return

    def _note(self, said: dict[str, int]) -> None:
        if "code" in said:
            self._codes[said["pid"]] = said["code"]
        else:
            self._codes.pop(said["pid"], None)  # of an earlier process, or of one that was left behind
            self._started.append(said["pid"])


class Child:
    """A process that a fork server started, as `subprocess.Popen` shows one."""

    def __init__(self, fork_server: ForkServer, pid: int) -> None:
        self._fork_server = fork_server
        self.pid = pid

    def poll(self) -> int | None:
        return self._fork_server.code(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired([], timeout or 0.0)
            time.sleep(0.01)
        return code


class ForkedSwarm(FaultySwarm):
    """A swarm whose processes are forked from one that has imported the program, one for all swarms of this process."""

    def launch(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        output: Path,
        errors: Path,
        host: Host = LOOPBACK,
        fresh: bool = False,
    ) -> Running:
        if fresh:
            return super().launch(module, arguments, environment, output, errors, host, fresh)
        return _fork_server().start(module, arguments, environment, output, errors, host.namespace)

    def left_behind(self, patience_seconds: float) -> list[int]:
        """What still runs after so long, of all swarms of this process: one of their processes has left it behind."""
        until = time.monotonic() + patience_seconds
        while (left := _fork_server().running()) and time.monotonic() < until:
            time.sleep(0.05)
        return left


@cache
def _fork_server() -> ForkServer:
    """It ends with this process."""
    fork_server = ForkServer(os.environ | {"OMP_NUM_THREADS": "1"}, ending_with_us(signal.SIGTERM))
    atexit.register(fork_server.close)
    return fork_server


# ---- the server ----


def serve() -> None:
    """Starts what the lines of the input ask for, until the input ends."""
    for module in _PRELOADED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # forked processes share these pages as long as nobody touches them
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    woken, wake = os.pipe()
    for descriptor in (woken, wake):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    rest = b""
    while True:
        ready = select.select([0, woken], [], [])[0]
        if woken in ready:
            os.read(woken, 2**10)
            _tell_who_ended()
        if 0 in ready:
            data = os.read(0, 2**16)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                _tell(pid=_start(json.loads(line)))


def _tell(**what: int) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")


def _tell_who_ended() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        _tell(pid=pid, code=os.waitstatus_to_exitcode(status))


def _start(order: dict[str, Any]) -> int:
    """The pid of the process that runs it. In that process this never returns: it leaves as any program does."""
    server = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    _become(order, server)
    runpy.run_module(order["module"], run_name="__main__", alter_sys=True)
    sys.exit()


def _become(order: dict[str, Any], server: int) -> None:
    """What a fresh process would be."""
    import numpy as np

    os.setsid()
    end_with(server, signal.SIGTERM)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if order["namespace"]:
        _enter_namespace(order["namespace"])
    output, errors = (
        os.open(order[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644) for name in ("output", "errors")
    )
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (errors, 2)):
        os.dup2(source, target)
    faulthandler.enable()
    os.environ.clear()
    os.environ.update(order["environment"])
    tempfile.tempdir = None  # what the server has read of its own environment, and may be gone by now
    np.random.seed()
    sys.argv = ["", *order["arguments"]]


def _enter_namespace(name: str) -> None:
    space = os.open(f"/run/netns/{name}", os.O_RDONLY)
    if _LIBC.setns(space, _CLONE_NEWNET):
        os.write(2, f"network namespace {name} cannot be entered\n".encode())
        os._exit(1)
    os.close(space)


if __name__ == "__main__":
    serve()

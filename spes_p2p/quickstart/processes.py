"""A swarm of real processes on this machine: a bootstrap node and peers over loopback, each the installed program.

The quickstart shows it to people, tests break it on purpose. Every process is a child in its own process group, ended
by its pid at the latest when the swarm is closed, and by the kernel when whoever started it is gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, Self

import psutil

from spes_p2p.errors import SpesError
from spes_p2p.observe.events import Event, Round
from spes_p2p.observe.sinks import EventReader
from spes_p2p.parent import ending_with_us

PROGRAM = "spes_p2p.cli.main"
BOOTSTRAP = "bootstrap"
"""The name of the bootstrap node among the processes of a swarm."""
START_SECONDS = 90.0
STACKS_SECONDS = 10.0
"""For writing down what a process that hangs was doing."""
LONG_SECONDS = 180.0
"""For some rounds of a tiny swarm, on a machine that has much else to do."""


@dataclass(frozen=True)
class Host:
    """Where a process runs: its address, and the named network namespace where that is, if not this one."""

    address: str = "127.0.0.1"
    namespace: str = ""
    port: int = 0
    """0: any that is free."""

    @property
    def prefix(self) -> tuple[str, ...]:
        """The command that starts others there."""
        return ("ip", "netns", "exec", self.namespace) if self.namespace else ()

    @property
    def maddr(self) -> str:
        return f"/ip4/{self.address}/tcp/{self.port}"


LOOPBACK = Host()


class Running(Protocol):
    """A process as `subprocess.Popen` shows it."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...


@dataclass
class Process:
    """One `spes-p2p` process; its output goes to `log`."""

    name: str
    folder: Path
    log: Path
    popen: Running
    events: EventReader
    seen: list[tuple[float, Event]] = field(default_factory=list)

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self.popen.poll()

    def output(self) -> str:
        """All that it printed so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def read_events(self) -> list[tuple[float, Event]]:
        """New events since the last call; `seen` has all."""
        new = self.events.read()
        self.seen += new
        return new

    def rounds(self) -> list[Round]:
        """Rounds that it applied, as far as it has written them down."""
        self.read_events()
        return [event for _, event in self.seen if isinstance(event, Round)]

    def send(self, number: signal.Signals) -> None:
        """A signal to this process alone."""
        if self.exit_code is None:
            _signal(self.pid, number)

    def freeze(self) -> None:
        """SIGSTOP to it and all that it started, as when a laptop sleeps."""
        stop_process(self.pid)  # first: it clears away and starts nothing from now on
        for pid in children(self.pid):
            stop_process(pid)

    def thaw(self) -> None:
        """SIGCONT to all of them."""
        for pid in (*children(self.pid), self.pid):
            _signal(pid, signal.SIGCONT)

    def wait(self, timeout_seconds: float) -> int:
        """Its exit code. Raises SpesError with what it was doing when it does not end in time, and ends it."""
        try:
            return self.popen.wait(timeout_seconds)
        except subprocess.TimeoutExpired as error:
            said = self.last_words()
            self.send(signal.SIGABRT)  # faulthandler writes the stacks of all threads
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(STACKS_SECONDS)
            _, _, stacks = self.output().partition("Fatal Python error")
            raise SpesError(f"{self.name} did not end in {timeout_seconds:g} s; {said}\n{stacks}") from error

    def last_words(self) -> str:
        lines = [line for line in self.output().splitlines() if line.strip()]
        return "its last lines: " + " | ".join(lines[-3:]) if lines else "it printed nothing"

    def end(self) -> None:
        """SIGKILL, if it still runs."""
        self.send(signal.SIGKILL)
        self.popen.wait()


def children(pid: int) -> list[int]:
    """Processes that `pid` started and that still run, with theirs."""
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _signal(pid: int, number: signal.Signals) -> None:
    """To nobody where it has ended: who starts processes for us may not have told of that yet."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def stop_process(pid: int, timeout_seconds: float = 30.0) -> None:
    """SIGSTOP, and waits until it took effect: on a busy machine a thread may go on for a while.

    Raises SpesError where it does not stop in time. A process that has ended counts as stopped.
    """
    _signal(pid, signal.SIGSTOP)
    end = time.monotonic() + timeout_seconds
    while not all(_is_still(stat) for stat in Path(f"/proc/{pid}/task").glob("*/stat")):
        if time.monotonic() > end:
            raise SpesError(f"process {pid} did not stop in {timeout_seconds:g} s", fix="look at what it waits for")
        time.sleep(0.001)


def _is_still(thread_stat: Path) -> bool:
    """Whether a thread is stopped, or has ended."""
    try:
        return thread_stat.read_text().rpartition(")")[2].split()[0] in "TtZX"
    except OSError:
        return True


class LocalSwarm:
    """A bootstrap node and any number of peers. A context manager: leaving it ends every process.

    Use it from a thread that outlives it: for the kernel, that thread is whoever started the processes.
    """

    def __init__(
        self,
        folder: Path,
        environment: Mapping[str, str] | None = None,
        hosts: Mapping[str, Host] | None = None,
    ) -> None:
        """`hosts`: where each process runs, by name, if not on loopback. Each has one CPU thread by default."""
        self._hosts = hosts or {}
        self.folder = folder
        self.processes: dict[str, Process] = {}
        self.address = ""
        self._environment = os.environ | {"OMP_NUM_THREADS": "1"} | dict(environment or {})

    def bootstrap(self, config: str | Path, data: Path | None = None, overrides: Sequence[str] = ()) -> Process:
        """Starts the bootstrap node, or the same again, and waits until peers can come.

        Raises SpesError when it ends instead.
        """
        arguments = ["bootstrap", "--config", str(config), "--output", str(self.folder / BOOTSTRAP)]
        arguments += ["--data", str(data)] if data is not None else []
        before = self.processes.get(BOOTSTRAP)
        said = len(before.output()) if before is not None else 0
        process = self._start(BOOTSTRAP, [*arguments, *overrides])
        until = time.monotonic() + START_SECONDS
        while "spes-p2p join --initial-peers " not in process.output()[said:]:
            if process.exit_code is not None or time.monotonic() > until:
                raise SpesError(f"the bootstrap node did not start; {process.last_words()}", fix=f"see {process.log}")
            time.sleep(0.05)
        line = next(line for line in process.output()[said:].splitlines() if "spes-p2p join --initial-peers " in line)
        self.address = line.split("--initial-peers ")[1].split()[0]
        return process

    def mirror(self, name: str, invite: str, arguments: Sequence[str] = ()) -> Process:
        """Starts a mirror of the run that is invited to."""
        return self._start(name, ["bootstrap", "--mirror", invite, "--output", str(self.folder / name), *arguments])

    def peer(
        self,
        name: str,
        data: Path | None = None,
        arguments: Sequence[str] = (),
        initial_peer: str | None = None,
    ) -> Process:
        """Starts one peer, or the same again; on the CPU unless these name a device.

        Several peers on one machine would each take all of its GPUs.
        """
        return self._start(name, self.join_command(name, data, arguments, initial_peer))

    def join_command(
        self, name: str, data: Path | None, arguments: Sequence[str], initial_peer: str | None
    ) -> list[str]:
        """The words after `spes-p2p` with which `peer` starts one."""
        command = ["join", "--initial-peers", initial_peer or self.address, "--output", str(self.folder / name)]
        command += ["--data", str(data)] if data is not None else []
        command += [] if any(word.partition("=")[0] == "--device" for word in arguments) else ["--device", "cpu"]
        return [*command, *arguments]

    def ask(self, *arguments: str, timeout_seconds: float = 60.0) -> str:
        """What a short command such as `status` prints. Raises SpesError where it fails, or takes too long."""
        with tempfile.TemporaryDirectory() as folder:
            output, errors = Path(folder) / "output", Path(folder) / "errors"
            asked = self.launch(PROGRAM, arguments, self._environment, output, errors)
            try:
                code: int | None = asked.wait(timeout_seconds)
            except subprocess.TimeoutExpired:
                _signal(asked.pid, signal.SIGKILL)
                code = asked.wait()
            if code:
                raise SpesError(f"{arguments[0]} ended with {code}: {errors.read_text().strip()[-500:]}")
            return output.read_text()

    def wait_until(
        self,
        found: Callable[[], bool],
        what: str,
        names: Sequence[str],
        timeout_seconds: float = LONG_SECONDS,
        fine: tuple[int | None, ...] = (None,),
    ) -> None:
        """Until `found()`. Raises SpesError when one of `names` has an exit code that is not `fine`, or late."""
        until = time.monotonic() + timeout_seconds
        while not found():
            for process in (self.processes[name] for name in names):
                if process.exit_code not in fine:
                    words = f"{process.name} ended with {process.exit_code} before {what}; {process.last_words()}"
                    raise SpesError(words, fix=f"see {process.log}")
            if time.monotonic() > until:
                words = "; ".join(f"{name}: {self.processes[name].last_words()}" for name in names)
                raise SpesError(f"{what}: not in {timeout_seconds:g} s; {words}", fix=f"see the logs in {self.folder}")
            time.sleep(0.1)

    def wait_for_round(self, round: int, names: Sequence[str], timeout_seconds: float = LONG_SECONDS) -> None:
        """Until each of these peers has applied `round`. Raises SpesError when one ends before, or time is over."""

        def found() -> bool:
            return all(any(event.round >= round for event in self.processes[name].rounds()) for name in names)

        self.wait_until(found, f"round {round}", names, timeout_seconds)

    def wait_for_end(
        self, names: Sequence[str], timeout_seconds: float, watch: Callable[[str, float, Event], None] | None = None
    ) -> None:
        """Until all of these have ended with 0; `watch` gets their events (peer, time, event).

        Raises SpesError as soon as one fails, since the others would wait for it in vain, and when time is over.
        """

        def ended() -> bool:
            codes = [self.processes[name].exit_code for name in names]
            for name in names:
                for at, event in self.processes[name].read_events():
                    if watch is not None:
                        watch(name, at, event)
            return all(code == 0 for code in codes)

        self.wait_until(ended, "the end", names, timeout_seconds, fine=(None, 0))

    def close(self) -> None:
        """Ends what still runs: SIGTERM, a few seconds, SIGKILL."""
        for process in self.processes.values():
            process.send(signal.SIGTERM)
        until = time.monotonic() + 12.0
        for process in self.processes.values():
            while process.exit_code is None and time.monotonic() < until:
                time.sleep(0.05)
            process.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(
        self,
        name: str,
        arguments: Sequence[str],
        module: str = PROGRAM,
        more: Mapping[str, str] | None = None,
        fresh: bool = False,
    ) -> Process:
        """`more`: variables for its environment. `fresh`: see `launch`."""
        folder, host = self.folder / name, self._hosts.get(name, LOOPBACK)
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / "output.log"
        again = self.address if name == BOOTSTRAP else ""
        maddr = again.partition("/p2p/")[0] or host.maddr  # where peers know it to be
        arguments = [*arguments, "--host-maddrs", maddr]
        popen = self.launch(module, arguments, self._environment | dict(more or {}), log, log, host, fresh)
        before = self.processes.get(name)
        events = before.events if before else EventReader(folder / "metrics.jsonl")
        process = Process(name, folder, log, popen, events, before.seen if before else [])
        self.processes[name] = process
        return process

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
        """Runs `python -m module arguments`, for a class that starts processes in another way to override.

        `fresh`: as here in any case, since the process must not share anything.
        """
        with open(output, "ab") as stream, open(errors, "ab") as error_stream:
            return subprocess.Popen(
                [*host.prefix, sys.executable, "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=error_stream,
                env=environment,
                start_new_session=True,
                preexec_fn=ending_with_us(signal.SIGTERM),
            )

"""The process of one other rank: started, watched and ended from rank 0. What it does is in `worker`."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

from spes_p2p.errors import SpesError

_FIX = "if memory ran out, use fewer ranks, a smaller micro_batch_sequences or activation checkpointing"


class Child:
    """One rank's process, and the thread that starts it and waits for its end.

    The thread lives as long as the process: the kernel sends PR_SET_PDEATHSIG when the thread that started a process
    ends, not only when the whole parent does.
    """

    def __init__(self, rank: int, command: list[str], folder: Path, on_end: Callable[[Child], None]) -> None:
        """Starts `command`, whose output goes to a file in `folder`. Raises SpesError where that fails.

        `on_end` is called in the thread of this object.
        """
        self.rank = rank
        self._command = command
        self._log = folder / f"rank-{rank}.log"
        self._on_end = on_end
        self._process: subprocess.Popen[bytes] | None = None
        self._failure: OSError | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"rank-{rank}", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            raise SpesError(f"rank {rank} could not be started: {self._failure}", fix="use fewer ranks")

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def loss(self) -> SpesError:
        """The error that says how the process ended."""
        code = None if self._process is None else self._process.returncode
        if code is not None and code < 0:
            return SpesError(f"local rank {self.rank} was killed by {signal.Signals(-code).name}", fix=_FIX)
        return SpesError(f"local rank {self.rank} ended with exit code {code}{self._last_words()}", fix=_FIX)

    def end(self, patience_seconds: float) -> None:
        """Waits for the end, which is forced after `patience_seconds`."""
        self._thread.join(patience_seconds)
        if self._thread.is_alive() and self._process is not None:
            self._process.kill()
            self._thread.join()

    def kill(self) -> None:
        """SIGKILL; `on_end` is called as ever."""
        if self._process is not None:
            self._process.kill()

    def is_stopped(self) -> bool:
        """Whether a signal such as SIGSTOP has stopped it."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] in "Tt"

    def _run(self) -> None:
        try:
            with open(self._log, "wb") as log:
                self._process = subprocess.Popen(
                    self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=_environment()
                )
        except OSError as error:
            self._failure = error
            return
        finally:
            self._started.set()
        self._process.wait()
        self._on_end(self)

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").split("\n") if self._log.exists() else []
        words = [line for line in lines if line.strip()]
        return f": {words[-1][:300]}" if words else ""


def _environment() -> dict[str, str]:
    """Ours, and where this package lies, which may be in a source tree that only this process knows of."""
    source = str(Path(__file__).parents[2])
    paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}

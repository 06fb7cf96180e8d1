"""Tasks of lm-evaluation-harness while a peer trains: `spes-p2p eval` on its newest checkpoint, in a process beside it.

A process of its own, on the CPU and behind everything else there, since the harness takes minutes and gigabytes that
training should not miss. Whose turn it is, and when, is decided in `training`.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from spes_p2p.config.schema import EvalConfig
from spes_p2p.interop.evaluate import Score, flat
from spes_p2p.observe.events import Event, Tasks, Warning

PROGRAM = "spes_p2p.cli.main"
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
_LEAST_NICE = 19


class TaskRunner:
    """At most one evaluation at a time; another that is due meanwhile is left out."""

    def __init__(self, checkpoints: Path, config: EvalConfig, emit: Callable[[Event], None]) -> None:
        self._command = [
            sys.executable, "-m", PROGRAM, "eval", "--checkpoint", str(checkpoints), "--suite", config.tasks,
            "--limit", str(config.tasks_limit), "--device", "cpu", "--no-append", "--json",
        ]  # fmt: skip
        if config.include_path:
            self._command += ["--include-path", config.include_path]
        self._emit = emit
        self._process: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None
        self._closing = False

    def start(self) -> None:
        """Begins one, unless one is under way; its scores, or why there are none, come as an event."""
        if self._thread is None or not self._thread.is_alive():
            # the kernel ends the process with the thread that started it
            self._thread = threading.Thread(target=self._run, name="tasks", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Ends what is under way."""
        self._closing = True
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        # ours, since who is killed cannot remove the model that it has exported there
        with tempfile.TemporaryDirectory(prefix="spes-p2p-eval-", ignore_cleanup_errors=True) as temporary:
            code, output, errors = self._evaluate(temporary)
        if not self._closing:
            self._emit(_event(code, output, errors.splitlines()))

    def _evaluate(self, temporary: str) -> tuple[int, str, str]:
        own = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "TMPDIR": temporary}
        process = self._process = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | own, preexec_fn=_behind_others,
        )  # fmt: skip
        if self._closing:
            process.kill()
        output, errors = process.communicate()
        return process.returncode, output, errors


def _event(code: int, output: str, errors: Sequence[str]) -> Event:
    if code:
        why = errors[-1] if errors else f"it ended with {code}"
        return Warning(f"the tasks of eval.tasks were not evaluated: {why}")
    found = json.loads(output)
    return Tasks(found["round"], found["step"], flat([Score(**score) for score in found["scores"]]))


def _behind_others() -> None:
    """In the new process, before the program."""
    os.nice(_LEAST_NICE)
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

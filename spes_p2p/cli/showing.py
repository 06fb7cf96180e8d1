"""What commands say on standard error; of work on many bytes a bar on a terminal, else a line now and then."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from spes_p2p.observe.metrics import bytes_text

PLAIN_LINE_SECONDS = 10.0
"""Without a terminal, one line of progress is printed this often."""

Report = Callable[[str, int, int], None]
"""Called with (what is being done, bytes done, bytes in total); the first may change along the way."""


@contextmanager
def shown_bytes() -> Iterator[Report]:
    """Gives a `Report` that shows progress on standard error while the block runs."""
    if not sys.stderr.isatty():
        yield _PlainLines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        tasks: dict[str, TaskID] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        yield show


@contextmanager
def loading_torch() -> Iterator[None]:
    """Ctrl-C ends the process at once: in PyTorch's C++ code a KeyboardInterrupt could be lost, or abort."""
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def show_hub_bars() -> None:
    """The hub's library draws bars of its own: only on a terminal, from here on."""
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()


def told(text: str) -> None:
    """To standard error."""
    typer.echo(text, err=True)


def model_at(source: Path) -> Path:
    """The folder of a model; one of the hub (ORG/NAME) is downloaded. See `interop.hub.model_folder`."""
    from spes_p2p.interop.hub import model_folder

    if not source.exists():
        show_hub_bars()
    return model_folder(source, told)


class _PlainLines:
    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, what: str, done: int, total: int) -> None:
        if time.monotonic() - self._last < PLAIN_LINE_SECONDS:
            return
        self._last = time.monotonic()
        typer.echo(f"{what}: {100 * done // max(1, total)}% of {bytes_text(total)}", err=True)

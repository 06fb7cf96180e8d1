"""Where events are written: `metrics.jsonl`, lines of text, TensorBoard, Weights & Biases; and reading the file again.

`unfailing` is for lines that are no events.

TensorBoard and wandb are optional and loaded only when asked for. The live screen is in `live`.
"""

from __future__ import annotations

import contextlib
import os
import time as wall_time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from spes_p2p.errors import ConfigError, StorageFull
from spes_p2p.files import storing
from spes_p2p.observe.events import Event, LastError, Note, Sink, from_json, to_json
from spes_p2p.observe.text import line, scalars

METRICS_FILE = "metrics.jsonl"


class JsonLines:
    """Appends one JSON object a line; every line reaches the system before `write` returns, whole or not at all.

    Others may append to the same file: `spes-p2p eval` does.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        _cut_unfinished_line(self._file)

    def write(self, time: float, event: Event) -> None:
        data = to_json(time, event).encode() + b"\n"
        written = 0
        try:
            with storing(self._path, len(data)):
                while written < len(data):
                    written += os.write(self._file, data[written:])
        except (OSError, StorageFull):
            self._take_back(written)
            raise

    def close(self) -> None:
        os.close(self._file)

    def _take_back(self, written: int) -> None:
        """Removes the beginning of a line that did not fit, unless another process has appended to the file since."""
        end = os.lseek(self._file, 0, os.SEEK_CUR)  # of what we wrote last
        if written and os.fstat(self._file).st_size == end:
            os.ftruncate(self._file, end - written)


def _cut_unfinished_line(file: int) -> None:
    """A crash can leave half a line at the end: removes it."""
    size = keep = os.fstat(file).st_size
    while keep > 0:
        start = max(0, keep - 65536)
        newline = os.pread(file, keep - start, start).rfind(b"\n")
        keep = start + newline + 1 if newline >= 0 else start
        if newline >= 0:
            break
    if keep < size:
        os.ftruncate(file, keep)


class EventReader:
    """Reads a `metrics.jsonl` that another process is still writing: each `read` gives what is new and whole."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._offset = 0

    def read(self) -> list[tuple[float, Event]]:
        """(time, event) of the lines since the last call; none while the file does not exist.

        Lines that are no events of this version are left out.
        """
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        events = []
        for text in whole.splitlines():
            with contextlib.suppress(ValueError):
                events.append(from_json(text))
        return events


def unfailing(say: Callable[[str], None]) -> Callable[[str], None]:
    """Wraps `say` so that a line that cannot be written (full disk, closed pipe) is dropped.

    A process that runs for weeks must not end because of its output.
    """

    def say_if_possible(text: str) -> None:
        with contextlib.suppress(OSError):
            say(text)

    return say_if_possible


class TextStream(Protocol):
    """What lines are written to."""

    def write(self, text: str, /) -> object: ...

    def flush(self) -> object: ...


class PlainLines:
    """One line of text an event, for logs and pipes; none for what the command itself says in the end."""

    def __init__(self, stream: TextStream) -> None:
        self._stream = stream

    def write(self, time: float, event: Event) -> None:
        if not isinstance(event, LastError):
            self._stream.write(f"{line(event)}\n")
            self._stream.flush()

    def close(self) -> None:
        self._stream.flush()


class JsonStream(PlainLines):
    """Writes the lines of `metrics.jsonl` to a stream, for log collectors; other text becomes a `note`."""

    def write(self, time: float, event: Event) -> None:
        self._stream.write(f"{to_json(time, event)}\n")
        self._stream.flush()

    def say(self, text: str) -> None:
        """A line for people, such as where others can dial this machine. Raises OSError."""
        self.write(wall_time.time(), Note(text))


class TensorBoard:
    """Scalars over the global step, as TensorBoard files in `folder`. Raises ConfigError where it is not installed."""

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _not_installed("output.tensorboard", "tensorboard", error) from error
        self._writer: Any = SummaryWriter(str(folder))

    def write(self, time: float, event: Event) -> None:
        step, numbers = scalars(event)
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, global_step=step, walltime=time)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Scalars over the global step to Weights & Biases; WANDB_MODE=offline keeps them in `folder`.

    Raises ConfigError where wandb is not installed or not logged in.
    """

    def __init__(self, folder: str | Path, run_id: str, peer: str, settings: Mapping[str, Any] | None = None) -> None:
        try:
            import wandb
        except ImportError as error:
            raise _not_installed("output.wandb", "wandb", error) from error
        Path(folder).mkdir(parents=True, exist_ok=True)
        quiet = wandb.Settings(console="off", silent=True)  # the terminal is ours
        shown = dict(settings or {})
        try:
            self._run = wandb.init(
                project="spes-p2p", group=run_id, name=peer, dir=str(folder), config=shown, settings=quiet
            )
        except wandb.errors.Error as error:
            fix = "run `wandb login`, or set WANDB_MODE=offline, or output.wandb=false"
            raise ConfigError(f"Weights & Biases could not be started: {error}", fix=fix) from error
        # Steps of training and of rounds come interleaved, so the global step is an axis and not wandb's own counter.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, time: float, event: Event) -> None:
        step, numbers = scalars(event)
        if numbers:
            self._run.log({"step": step, **numbers})

    def close(self) -> None:
        self._run.finish()


def _not_installed(key: str, extra: str, error: ImportError) -> ConfigError:
    return ConfigError(
        f"{key} is true, but {extra} cannot be imported ({error})",
        fix=f"install it with scripts/venv.sh {extra}, or set {key}=false",
    )


def file_sinks(
    folder: str | Path,
    *,
    tensorboard: bool = False,
    wandb: bool = False,
    run_id: str = "",
    peer: str = "",
    settings: Mapping[str, Any] | None = None,
) -> list[Sink]:
    """What a peer always writes (`metrics.jsonl`), and what it asked for. Raises ConfigError for what is missing."""
    folder = Path(folder)
    sinks: list[Sink] = []
    if tensorboard:
        sinks.append(TensorBoard(folder / "tensorboard"))
    if wandb:
        sinks.append(Wandb(folder, run_id, peer, settings))
    return [JsonLines(folder / METRICS_FILE), *sinks]

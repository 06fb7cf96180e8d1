"""`spes-p2p tokenize`: corpus files to token shards. Flags and what is shown; the work is in `data/tokenize.py`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from spes_p2p.data.tokenize import TokenizeProgress

PLAIN_LINE_SECONDS = 10.0
"""Without a terminal, progress is a line this often."""


def tokenize(
    inputs: Annotated[
        list[str],
        typer.Argument(
            help="Files, folders or quoted globs (** too): .jsonl .json (also .gz, .zst) .parquet .txt",
            show_default=False,
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the shards and manifest.json.")],
    tokenizer: Annotated[
        str, typer.Option(help="byte, a tokenizer.json, a folder with one, or a name on the Hugging Face hub.")
    ] = "byte",
    eos_token: Annotated[str | None, typer.Option(help="The token that ends a document (default: found).")] = None,
    text_field: Annotated[str, typer.Option(help="Where the text stands in a JSON record or Parquet table.")] = "text",
    processes: Annotated[int | None, typer.Option(help="Worker processes (default: one a core).", min=1)] = None,
    max_shard_bytes: Annotated[int, typer.Option(help="Largest size of a shard.")] = 256 * 2**20,
    strict: Annotated[bool, typer.Option("--strict", help="A bad line is an error, not only counted.")] = False,
    sequence_length: Annotated[
        int, typer.Option(help="Of the run that it is for: less text than one sequence is an error.", min=1)
    ] = 128,
    url: Annotated[
        list[str] | None,
        typer.Option(
            help="Where the output folder will lie on the web: https://... or hf://datasets/... (again: mirrors).",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Turns text into the token shards that a run trains on; an interrupted call goes on where it stopped.

    Example: spes-p2p tokenize "corpus/**/*.jsonl.zst" --tokenizer Qwen/Qwen3-0.6B --output shards
    """
    from spes_p2p.data.tokenize import TokenizeOptions
    from spes_p2p.data.tokenize import tokenize as run

    options: dict[str, Any] = {"processes": processes} if processes is not None else {}
    options |= {"max_shard_bytes": max_shard_bytes, "strict": strict}
    options |= {"tokenizer": tokenizer, "eos_token": eos_token, "text_field": text_field}
    options |= {"sequence_length": sequence_length, "urls": tuple(url or ())}
    with _shown() as report:
        result = run(inputs, output, TokenizeOptions(**options), report)
    manifest = result.manifest
    for example in result.examples:
        typer.echo(f"bad line {example}", err=True)
    if manifest.bad_lines:
        typer.echo(f"{manifest.bad_lines:,} bad lines were left out (--strict makes them an error)", err=True)
    if result.files_skipped:
        typer.echo(f"{result.files_skipped} of {len(manifest.inputs)} input files were finished before")
    typer.echo(
        f"{output}: {manifest.tokens:,} tokens ({manifest.dtype}) of {manifest.documents:,} documents in "
        f"{len(manifest.shards)} shards; vocabulary {manifest.vocab_size:,} ({manifest.tokenizer})"
    )


@contextmanager
def _shown() -> Iterator[Callable[[TokenizeProgress], None]]:
    """A progress bar on a terminal, else a line now and then, on standard error."""
    if not sys.stderr.isatty():
        yield _PlainProgress().show
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("tokenize", total=None)
        speed = _Speed()

        def show(progress: TokenizeProgress) -> None:
            words = f"{progress.file}  {_count(progress.tokens)} tokens  {_count(speed(progress.tokens))}/s"
            bar.update(task, completed=progress.bytes_done, total=progress.bytes_total, description=words)

        yield show


class _Speed:
    """Tokens per second since the first call; what earlier runs did does not count."""

    def __init__(self) -> None:
        self._start: tuple[float, int] | None = None

    def __call__(self, tokens: int) -> float:
        self._start = self._start or (time.monotonic(), tokens)
        seconds = time.monotonic() - self._start[0]
        return (tokens - self._start[1]) / seconds if seconds > 0 else 0.0


class _PlainProgress:
    def __init__(self) -> None:
        self._speed = _Speed()
        self._last = time.monotonic()

    def show(self, progress: TokenizeProgress) -> None:
        speed = self._speed(progress.tokens)
        if time.monotonic() - self._last < PLAIN_LINE_SECONDS:
            return
        self._last = time.monotonic()
        percent = 100 * progress.bytes_done // max(1, progress.bytes_total)
        bad = f", {progress.bad_lines} bad lines" if progress.bad_lines else ""
        typer.echo(f"{percent}%  {_count(progress.tokens)} tokens, {_count(speed)}/s, {progress.file}{bad}", err=True)


def _count(number: float) -> str:
    from spes_p2p.observe.metrics import count_text

    return count_text(number)

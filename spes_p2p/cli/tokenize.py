"""`spes-p2p tokenize`: corpus files to token shards. Flags and what is shown; the work is in `data/tokenize.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from spes_p2p.cli.arguments import option
from spes_p2p.cli.showing import shown_bytes, told


def tokenize(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE",
            help="Files, folders or quoted globs (** too), here or on the Hugging Face hub "
            "(hf://datasets/OWNER/NAME/PATH): .jsonl .json (also .gz, .zst) .parquet .txt",
            show_default=False,
        ),
    ],
    output: Annotated[Path, option("Folder for the shards and manifest.json.", "--output", "-o")],
    tokenizer: Annotated[
        str, option("byte, a tokenizer.json, a folder with one, or a name on the Hugging Face hub.")
    ] = "byte",
    eos_token: Annotated[str | None, option("Token that ends a document (default: detected).")] = None,
    text_field: Annotated[str, option("JSON field or Parquet column that holds the text.")] = "text",
    processes: Annotated[int | None, option("Worker processes (default: one per core).", min=1)] = None,
    max_shard_bytes: Annotated[int, option("Largest size of a shard, in bytes.")] = 256 * 2**20,
    strict: Annotated[bool, option("Treat a bad line as an error instead of counting it.", "--strict")] = False,
    sequence_length: Annotated[
        int, option("Sequence length of the run; less text than one sequence is an error.", min=1)
    ] = 128,
    url: Annotated[
        list[str] | None,
        option("URL that the output folder will have: https://... or hf://datasets/... (repeat for mirrors)."),
    ] = None,
) -> None:
    """Turns text into the token shards that a run trains on; an interrupted call resumes where it stopped.

    Example: spes-p2p tokenize "corpus/**/*.jsonl.zst" --tokenizer Qwen/Qwen3-0.6B --output shards
    """
    from spes_p2p.data.readers import other_files
    from spes_p2p.data.tokenize import TokenizeOptions
    from spes_p2p.data.tokenize import tokenize as run

    options: dict[str, Any] = {"processes": processes} if processes is not None else {}
    options |= {"max_shard_bytes": max_shard_bytes, "strict": strict}
    options |= {"tokenizer": tokenizer, "eos_token": eos_token, "text_field": text_field}
    options |= {"sequence_length": sequence_length, "urls": tuple(url or ())}
    with shown_bytes() as report:
        result = run(inputs, output, TokenizeOptions(**options), lambda done, total: report("tokenize", done, total))
    manifest = result.manifest
    if others := other_files(inputs):
        more = f" and {len(others) - 1:,} more" if len(others) > 1 else ""
        told(f"left out: {others[0]}{more}, of no known kind (rename plain text to .txt)")
    for example in result.examples:
        typer.echo(f"bad line {example}", err=True)
    if manifest.bad_lines:
        typer.echo(f"{_lines(manifest.bad_lines)} left out (--strict makes that an error)", err=True)
    if result.files_skipped:
        typer.echo(f"{result.files_skipped} of {len(manifest.inputs)} input files had been finished before")
    documents, shards = manifest.documents, len(manifest.shards)
    typer.echo(
        f"{output}: {manifest.tokens:,} tokens ({manifest.dtype}) of {documents:,} document{'s' * (documents != 1)} in "
        f"{shards} shard{'s' * (shards != 1)}; vocabulary {manifest.vocab_size:,} ({manifest.tokenizer})"
    )


def _lines(count: int) -> str:
    return "1 bad line was" if count == 1 else f"{count:,} bad lines were"

"""Turns corpus files into a dataset of token shards, in parallel, and goes on where an interrupted run stopped.

One process reads all files in order and deals batches of records to worker processes, which parse and tokenize; the
results are written in the order of the input. Each input file is cut into shards of its own, so the bytes on disk
depend on neither the number of processes, the batch size, nor interruptions. After each shard a record in
`.progress/` says where in the input the next one begins. It leaves out what is shown to people.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from spes_p2p.data.encode import Encode, Encoded, encoder
from spes_p2p.data.manifest import FORMAT_VERSION, MANIFEST, Dataset, InputFile, Manifest
from spes_p2p.data.progress import Settings, Unit, UnitProgress, Workspace, is_output
from spes_p2p.data.readers import NO_FIELD, NO_JSON, Bad, CorpusFile, Piece, Record, find_inputs, size_of
from spes_p2p.data.shards import ShardWriter
from spes_p2p.data.tokenizers import Tokenizer, load_tokenizer
from spes_p2p.data.trees import FolderPieces
from spes_p2p.data.web_url import checked_urls
from spes_p2p.errors import ConfigError, DataError

BATCH_BYTES = 2**20
"""A batch is dealt out when it holds this much text, even before it has `batch_size` records."""
BATCHES_IN_FLIGHT = 4
"""Per process: enough that none waits, few enough to bound memory."""
MAX_EXAMPLES = 20
"""Bad lines that are reported one by one, for each input file."""
SEQUENCE_LENGTH = 128
"""Of the bundled config with the shortest sequences."""
_FIXES = {
    NO_FIELD: "name the field that holds the text with --text-field",
    NO_JSON: "correct the lines that are not JSON",
    "UTF-8": "convert it to UTF-8",
    "zero byte": "convert it to UTF-8",
}
"""By what the reasons of bad lines say."""
Report = Callable[[int, int], None]
"""Called with (bytes done, bytes in total) of the input files, as stored on disk."""


@dataclass(frozen=True)
class TokenizeOptions:
    """How to tokenize; the fields are the options of `spes-p2p tokenize`.

    `sequence_length`: fewer tokens in all than one sequence of the run are refused. `urls`: of web servers where the
    output will lie.
    """

    tokenizer: str = "byte"
    eos_token: str | None = None
    text_field: str = "text"
    processes: int = field(default_factory=lambda: os.cpu_count() or 1)
    batch_size: int = 1000
    max_shard_bytes: int = 256 * 2**20
    strict: bool = False
    sequence_length: int = SEQUENCE_LENGTH
    urls: tuple[str, ...] = ()


@dataclass(frozen=True)
class TokenizeResult:
    manifest: Manifest
    examples: tuple[str, ...]
    """The first bad lines of each input, as `file:line: reason`."""
    files_skipped: int
    """Input files that an earlier run had finished."""


class _Batch(NamedTuple):
    unit: Unit
    first_record: int
    records: list[Record]
    bytes_read: int
    end: bool


def tokenize(
    patterns: Sequence[str],
    output_dir: Path,
    options: TokenizeOptions,
    report: Report = lambda done, total: None,
) -> TokenizeResult:
    """Tokenizes all files that `patterns` name into shards, their hash trees and a manifest in `output_dir`.

    Raises DataError (nothing to read, damaged input, a file whose lines are mostly bad, too little text for one
    sequence, no or too large tokenizer, a bad line under `strict`, an output folder of another corpus or other
    settings), ConfigError (impossible options) and StorageFull. Whatever it raises, finished shards stay, no file is
    half-written, and the same call goes on from there.
    """
    _check(options)
    urls = checked_urls(options.urls)
    paths = [path for path in find_inputs(patterns) if not is_output(path)]
    if not paths:
        raise DataError(f"{' '.join(patterns)} holds no text, but what tokenize made", fix="name the files of the text")
    units = Unit.of_all(paths)
    _refuse_overwriting(units, output_dir / MANIFEST)
    tokenizer = load_tokenizer(options.tokenizer, options.eos_token)
    dtype = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
    settings = Settings(tokenizer.fingerprint, tokenizer.eos_id, options.text_field, dtype, options.max_shard_bytes)
    with Workspace.opened(output_dir, settings, units) as workspace:
        open_units = [unit for unit in units if not workspace.progress(unit).done]
        if open_units:
            (output_dir / MANIFEST).unlink(missing_ok=True)  # it would describe files that are about to change
        _Run(workspace, units, tokenizer, options, report).process(open_units)
        examples = tuple(example for unit in units for example in workspace.progress(unit).examples)
        if options.strict and examples:  # of files that an earlier run without --strict has finished
            raise _bad_line(examples[0])
        manifest = _manifest(workspace, units, tokenizer)
        _refuse_if_short(manifest, options.sequence_length)
        manifest = replace(manifest, urls=urls)
        manifest.write(output_dir)
        FolderPieces.open(Dataset.open(output_dir), output_dir, lambda text: None)  # a web server needs them beside it
    return TokenizeResult(manifest, examples, len(units) - len(open_units))


class _Run:
    """The way of all open inputs through the workers and into shards."""

    def __init__(
        self,
        workspace: Workspace,
        units: list[Unit],
        tokenizer: Tokenizer,
        options: TokenizeOptions,
        report: Report,
    ) -> None:
        self._workspace, self._tokenizer, self._options, self._report = workspace, tokenizer, options, report
        self._bytes = {unit: size_of(unit.path) for unit in units}

    def process(self, units: list[Unit]) -> None:
        batches = (batch for unit in units for batch in self._batches(unit))
        with self._encoder() as encode:
            results = _in_order(batches, encode, BATCHES_IN_FLIGHT * self._options.processes)
            for unit in units:
                self._write_unit(unit, results)

    def _encoder(self) -> AbstractContextManager[Encode]:
        text_field, dtype = self._options.text_field, self._workspace.settings.dtype
        return encoder(self._options.processes, self._tokenizer, text_field, dtype)

    def _batches(self, unit: Unit) -> Iterator[_Batch]:
        first = self._workspace.progress(unit).records
        with CorpusFile(unit.path, self._options.text_field) as file:
            records: list[Record] = []
            size = 0
            for record in islice(file, first, None):
                records.append(record)
                size += _size(record)
                if len(records) == self._options.batch_size or size >= BATCH_BYTES:
                    yield _Batch(unit, first, records, file.bytes_read, end=False)
                    first += len(records)
                    records, size = [], 0
            yield _Batch(unit, first, records, file.total_bytes, end=True)

    def _write_unit(self, unit: Unit, results: Iterator[tuple[_Batch, Encoded]]) -> None:
        """Takes the batches of `unit` from `results` and writes its shards, saving its progress after each."""
        progress = self._workspace.progress(unit)
        settings = self._workspace.settings
        folder, limit = self._workspace.folder, settings.max_shard_bytes
        with ShardWriter(folder, unit.stem, settings.dtype, limit, progress.shards) as writer:
            for batch, encoded in results:
                if self._options.strict and encoded.bad:
                    raise _bad_line(_examples(batch, encoded)[0])
                skip = min(progress.skip_tokens, len(encoded.tokens))
                for written in writer.write(encoded.tokens[skip:]):
                    finished = replace(progress, skip_tokens=skip + written, shards=writer.finished)
                    self._workspace.save(unit, finished)
                progress = _after(progress, batch, encoded)
                self._tell(batch)
                if batch.end:
                    break
            if 2 * progress.bad_lines > progress.lines > 0:
                self._workspace.drop(unit)  # it may well be left out next time
                raise _no_text(unit, progress)
        self._workspace.save(unit, replace(progress, shards=writer.finished, done=True))

    def _tell(self, batch: _Batch) -> None:
        """Bytes of the input as stored; what earlier runs did counts."""
        done = sum(size for unit, size in self._bytes.items() if self._workspace.progress(unit).done)
        self._report(done + batch.bytes_read, sum(self._bytes.values()))


def _size(record: Record) -> int:
    content = record.content
    return 0 if isinstance(content, Bad) else len(content.data if isinstance(content, Piece) else content)


def _after(progress: UnitProgress, batch: _Batch, encoded: Encoded) -> UnitProgress:
    """Where the input stands after `batch`, with its counts added. Shards are added when they are finished."""
    return replace(
        progress,
        records=batch.first_record + len(batch.records),
        skip_tokens=max(0, progress.skip_tokens - len(encoded.tokens)),
        documents=progress.documents + encoded.documents,
        lines=progress.lines + encoded.lines,
        bad_lines=progress.bad_lines + len(encoded.bad),
        examples=(progress.examples + _examples(batch, encoded))[:MAX_EXAMPLES],
    )


def _examples(batch: _Batch, encoded: Encoded) -> tuple[str, ...]:
    return tuple(f"{batch.unit.path}:{line}: {reason}" for line, reason in encoded.bad[:MAX_EXAMPLES])


def _bad_line(example: str) -> DataError:
    return DataError(f"bad line {example}", fix="correct or remove it, or run without --strict to skip bad lines")


def _no_text(unit: Unit, progress: UnitProgress) -> DataError:
    """A few bad lines are left out; where most are, the file is something else than it was taken for."""
    found = (fix for reason, fix in _FIXES.items() if any(reason in example for example in progress.examples))
    fixes = list(dict.fromkeys(found))
    return DataError(
        f"{unit.path} has text in less than half of its lines: {progress.bad_lines:,} of {progress.lines:,} are bad, "
        f"such as {progress.examples[0]}",
        fix=f"{', '.join(fixes or ['correct these lines'])}, or leave the file out",
    )


def _refuse_if_short(manifest: Manifest, sequence_length: int) -> None:
    if manifest.tokens < sequence_length:
        raise DataError(
            f"the text gives {manifest.tokens} tokens, fewer than one sequence of {sequence_length}",
            fix="give more text, or set --sequence-length to the run's data.sequence_length if that is shorter",
        )


def _check(options: TokenizeOptions) -> None:
    for name in ("processes", "batch_size", "sequence_length"):
        if getattr(options, name) < 1:
            raise ConfigError(f"{name} is {getattr(options, name)}, must be at least 1", fix=f"raise {name}")


def _refuse_overwriting(units: list[Unit], manifest: Path) -> None:
    if any(isinstance(unit.path, Path) and unit.path.resolve() == manifest.resolve() for unit in units):
        raise DataError(f"{manifest} is part of the text, and would be overwritten", fix="give another --output")
    # Path.exists raises where we may not look, or the name is too long: who makes the folder says so
    if os.path.exists(manifest) and not is_output(manifest):
        raise DataError(
            f"{manifest} was not written here by tokenize, and would be overwritten",
            fix="give another --output, or remove the file",
        )
    if os.path.exists(manifest.with_name("identity.key")):
        raise DataError(
            f"{manifest.parent} is the folder of a peer or of a bootstrap node", fix="give another --output"
        )


def _manifest(workspace: Workspace, units: list[Unit], tokenizer: Tokenizer) -> Manifest:
    progress = [workspace.progress(unit) for unit in units]
    inputs = [
        InputFile(unit.path.name, done.documents, done.tokens, done.bad_lines)
        for unit, done in zip(units, progress, strict=True)
    ]
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        dtype=workspace.settings.dtype,
        tokenizer=tokenizer.name,
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        documents=sum(item.documents for item in inputs),
        tokens=sum(item.tokens for item in inputs),
        bad_lines=sum(item.bad_lines for item in inputs),
        inputs=tuple(inputs),
        shards=tuple(shard for done in progress for shard in done.shards),
    )
    if not manifest.tokens:
        example = next((example for done in progress for example in done.examples), "every file is empty")
        raise DataError(f"no text was found: {example}", fix="check the files, or set --text-field")
    return manifest


def _in_order(batches: Iterator[_Batch], encode: Encode, in_flight: int) -> Iterator[tuple[_Batch, Encoded]]:
    """Each batch with its result, in the order of `batches`, while up to `in_flight` later ones are under way."""
    pending: deque[tuple[_Batch, Callable[[], Encoded]]] = deque()
    for batch in batches:
        pending.append((batch, encode(batch.records)))
        if len(pending) > in_flight:
            first, result = pending.popleft()
            yield first, result()
    for batch, result in pending:
        yield batch, result()

"""Records of a corpus to token ids, in this process or in several others.

It leaves out where records come from and where tokens go.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from functools import partial
from io import BytesIO
from typing import NamedTuple

import numpy as np

from spes_p2p.data.readers import Bad, Content, Piece, Record, parse_line
from spes_p2p.data.tokenizers import Ids, Tokenizer
from spes_p2p.errors import DataError


class Encoded(NamedTuple):
    """What a batch of records became."""

    tokens: Ids
    documents: int
    lines: int
    """Of text, or records of a table or of JSON."""
    bad: tuple[tuple[int, str], ...]
    """Line and reason of each of them that could not be used."""


Encode = Callable[[list[Record]], Callable[[], Encoded]]
"""Starts to encode records; what it returns waits for the result."""


def encode_records(records: Sequence[Record], text_field: str, tokenizer: Tokenizer, dtype: str) -> Encoded:
    """Tokens of all usable `records`, each document followed by the end-of-text id. Empty texts give nothing."""
    texts: list[str] = []
    ends: list[bool] = []
    lines: list[int] = []
    bad: list[tuple[int, str]] = []
    total = 0
    for line, content in records:
        total += _lines_of(content)
        if isinstance(content, Piece):
            text: str | Bad = _decoded(content.data, line, bad)
        else:
            text = parse_line(content, text_field) if isinstance(content, bytes) else content
        if isinstance(text, Bad):
            bad.append((line, text.reason))
        elif text or isinstance(content, Piece):
            texts.append(text)
            ends.append(not isinstance(content, Piece) or content.last)
            lines.append(line)
    parts: list[Ids] = [np.empty(0, dtype)]
    documents = 0
    eos = np.array([tokenizer.eos_id], np.uint32)
    for ids, end, line in zip(_encoded(texts, tokenizer), ends, lines, strict=True):
        if ids is None:
            bad.append((line, "a lone surrogate is not valid Unicode"))
            continue
        parts += [ids, eos] if end else [ids]
        documents += end
    tokens = np.concatenate(parts, dtype=dtype, casting="unsafe")  # the dtype was chosen to hold all ids
    return Encoded(tokens, documents, total, tuple(sorted(bad)))


def _lines_of(content: Content) -> int:
    """A last line may lack its newline."""
    if not isinstance(content, Piece):
        return 1
    return content.data.count(b"\n") + (not content.data.endswith(b"\n"))


def _encoded(texts: list[str], tokenizer: Tokenizer) -> list[Ids | None]:
    """The ids of each text, None where it is no valid Unicode (JSON can escape what UTF-8 cannot hold)."""
    try:
        return [*tokenizer.encode(texts)]
    except ValueError:
        return [_encoded_alone(text, tokenizer) for text in texts]


def _encoded_alone(text: str, tokenizer: Tokenizer) -> Ids | None:
    try:
        return tokenizer.encode([text])[0]
    except ValueError:
        return None


def _decoded(data: bytes, first_line: int, bad: list[tuple[int, str]]) -> str:
    """The text of a piece, without the lines that are no text, which are added to `bad`."""
    if b"\0" not in data:
        with suppress(UnicodeDecodeError):
            return data.decode()
    kept = []
    for line, part in enumerate(BytesIO(data), start=first_line):
        text = _decoded_line(part)
        if isinstance(text, Bad):
            bad.append((line, text.reason))
        else:
            kept.append(text)
    return "".join(kept)


def _decoded_line(line: bytes) -> str | Bad:
    """UTF-16 read as UTF-8 has zero bytes, and so have most files that are no text."""
    if (zero := line.find(b"\0")) >= 0:
        return Bad(f"a zero byte at byte {zero}")
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        return Bad(f"invalid UTF-8 at byte {error.start}")


_worker: tuple[Tokenizer, str, str] | None = None
"""In a worker process: what `_start_worker` was given."""


def _start_worker(tokenizer: Tokenizer, text_field: str, dtype: str) -> None:
    global _worker
    _worker = tokenizer, text_field, dtype
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core a process
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    """A killed parent leaves workers waiting for ever; they hold both ends of the pipe they wait on."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def _encode_in_worker(records: list[Record]) -> Encoded:
    assert _worker is not None
    tokenizer, text_field, dtype = _worker
    return encode_records(records, text_field, tokenizer, dtype)


@contextmanager
def encoder(processes: int, tokenizer: Tokenizer, text_field: str, dtype: str) -> Iterator[Encode]:
    """Encodes in this process where `processes` is 1, else in that many others.

    Raises DataError when one of them is killed.
    """
    if processes == 1:
        yield lambda records: partial(encode_records, records, text_field, tokenizer, dtype)
        return
    pool = ProcessPoolExecutor(
        processes,
        mp_context=multiprocessing.get_context("spawn"),  # the caller may have threads
        initializer=_start_worker,
        initargs=(tokenizer, text_field, dtype),
    )

    def encode(records: list[Record]) -> Callable[[], Encoded]:
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a worker that this starts keeps it so
        try:
            return pool.submit(_encode_in_worker, records).result
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    try:
        yield encode
    except BrokenProcessPool as error:
        fix = "if memory ran out, use fewer --processes; the same command resumes from here"
        raise DataError("a tokenizer process was killed", fix=fix) from error
    finally:
        pool.shutdown(cancel_futures=True)

"""Corpus files to numbered records: JSON lines, JSON, Parquet and plain text, compressed or not.

Reading is sequential and cheap: JSON lines leave here as bytes and are parsed where they are tokenized. It leaves out
what a record's text becomes, and which records of a file are already done.
"""

from __future__ import annotations

import glob
import gzip
import importlib
import io
import itertools
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple, cast
from urllib.parse import unquote

from fsspec.utils import glob_translate

from spes_p2p.data.web_url import HUB_DATASET
from spes_p2p.errors import DataError, NetworkError, SpesError, first_line

SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst", ".parquet", ".txt")
NO_FIELD = "no field"
NO_JSON = "invalid JSON"
"""Begin the reasons why a line is bad."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
PIECE_BYTES = 2**20
"""A plain text file is tokenized in pieces of whole lines of about this size."""


@dataclass(frozen=True, order=True)
class HubFile:
    """A file of a dataset of the Hugging Face hub: as much of a Path as reading a corpus needs.

    It is read as it is needed: nothing is kept on the disk. Its dataset is pinned to the commit that is the newest when
    it is named, so that all files are of one time.
    `size`: bytes; `content`: the hub's hash of them.
    """

    url: str
    size: int
    content: str

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        return PurePosixPath(self.url).name

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.url).suffix

    @property
    def suffixes(self) -> list[str]:
        return PurePosixPath(self.url).suffixes

    def open(self, mode: str = "rb") -> BinaryIO:
        """What is read of it is fetched then, by ranges."""
        return cast(BinaryIO, _file_system().open(self.url, mode))


Source = Path | HubFile
"""An input file: here, or on the hub."""


def is_on_hub(pattern: str) -> bool:
    """Whether an input of `tokenize` is one of the hub."""
    return pattern.startswith("hf://")


def find_hub_files(pattern: str, suffixes: tuple[str, ...]) -> list[HubFile]:
    """The files of `hf://datasets/OWNER/NAME[@REVISION][/PATH]`; PATH: a file, a folder, or a glob with * and **.

    Of a folder, those with one of `suffixes`. Raises DataError where it names nothing that this machine may read.
    """
    found = HUB_DATASET.fullmatch(pattern)
    if found is None:
        raise DataError(f"{pattern} names no dataset on the hub", fix="write hf://datasets/OWNER/NAME or .../NAME/PATH")
    name, revision, path = found[1], unquote(found[2] or "") or None, (found[3] or "").strip("/")
    try:
        commit = _hub().dataset_info(name, revision=revision).sha
        root = f"datasets/{name}@{commit}"
        fixed = re.split(r"[*?\[]", path, maxsplit=1)[0]
        start = path if fixed == path else fixed.rpartition("/")[0]
        listed = _file_system().find(f"{root}/{start}".rstrip("/"), detail=True)
    except FileNotFoundError:
        return []
    except Exception as error:  # the hub, and the network before it, fail in many ways
        raise DataError(
            f"{pattern} cannot be opened: {first_line(error)}",
            fix="check the name and the network; for a private or gated dataset log in with `hf auth login`",
        ) from error
    wanted = re.compile(glob_translate(path)) if fixed != path else None
    files = [HubFile(f"hf://{at}", int(about["size"]), _content(about)) for at, about in listed.items()]
    if wanted is not None:
        return [file for file in files if wanted.fullmatch(file.url.partition(f"{root}/")[2])]
    return [file for file in files if file.name.endswith(suffixes) or file.url.endswith(f"{root}/{path}")]


def _content(about: dict[str, Any]) -> str:
    large = about.get("lfs")
    return str(large["sha256"] if large else about["blob_id"])


def _hub() -> Any:
    from huggingface_hub import HfApi

    return HfApi()


def _file_system() -> Any:
    from huggingface_hub import HfFileSystem

    return HfFileSystem(skip_instance_cache=True)


class Piece(NamedTuple):
    """Whole lines of a plain text file; `last` ends the document."""

    data: bytes
    last: bool


class Bad(NamedTuple):
    """A record that the reader itself found unusable."""

    reason: str


Content = bytes | str | Piece | Bad
"""A line of JSON, a text, a part of a text, or nothing usable."""


class Record(NamedTuple):
    """One document or piece. `line` counts from 1: a line of a text file, a row of a table, an item of an array."""

    line: int
    content: Content


class CorpusFile:
    """One input file, opened for reading once. Use as a context manager; `bytes_read` tells how far it got.

    Iterating raises DataError when the file is damaged or needs a library that is not installed, and NetworkError
    when one of the hub cannot be read.
    """

    def __init__(self, path: Source, text_field: str) -> None:
        self.path = path
        self.total_bytes = size_of(path)
        self._text_field = text_field
        self._stack = ExitStack()
        self._position: Callable[[], int] = lambda: 0

    @property
    def bytes_read(self) -> int:
        """Bytes of the file, as stored, that were read so far."""
        return min(self._position(), self.total_bytes)

    def __enter__(self) -> CorpusFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __iter__(self) -> Iterator[Record]:
        try:
            yield from self._records()
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise self._damaged(error) from error
        except Exception as error:
            if _is_of_arrow(error):
                raise self._damaged(error) from error
            if isinstance(self.path, HubFile) and not isinstance(error, SpesError):
                raise NetworkError(
                    f"{self.path} cannot be read: {first_line(error)}",
                    fix="type the same command again: it goes on where it stopped",
                ) from error
            raise

    def _damaged(self, error: Exception) -> DataError:
        return DataError(f"{self.path} is damaged or cut short: {error}", fix="copy or download it again")

    def _records(self) -> Iterator[Record]:
        if self.path.name.endswith(".parquet"):
            return self._parquet_rows()
        stream = self._open()
        if self.path.name.endswith(".txt"):
            return _pieces(stream)
        if ".jsonl" in self.path.suffixes:
            return _lines(stream)
        return _json_records(stream, self._text_field)

    def _open(self) -> BinaryIO:
        raw = self._stack.enter_context(self.path.open("rb"))
        self._position = raw.tell
        if self.path.suffix == ".gz":
            return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
        if self.path.suffix == ".zst":
            frames = _pyarrow("pyarrow", self.path).CompressedInputStream(raw, "zstd")
            return self._stack.enter_context(cast(BinaryIO, io.BufferedReader(frames, PIECE_BYTES)))
        return raw

    def _parquet_rows(self) -> Iterator[Record]:
        parquet = _pyarrow("pyarrow.parquet", self.path)
        file = self._stack.enter_context(self.path.open("rb"))
        table = self._stack.enter_context(parquet.ParquetFile(file))
        if self._text_field not in table.schema_arrow.names:
            columns = ", ".join(table.schema_arrow.names)
            raise DataError(f"{self.path} has no column {self._text_field!r}, only {columns}", fix="set --text-field")
        rows = max(1, table.metadata.num_rows)
        line = 0
        self._position = lambda: self.total_bytes * line // rows
        for batch in table.iter_batches(batch_size=1024, columns=[self._text_field]):
            for scalar in batch.column(0):
                line += 1
                yield Record(line, _cell(scalar, self._text_field))


def size_of(path: Source) -> int:
    """Bytes of a file, as stored."""
    return path.size if isinstance(path, HubFile) else path.stat().st_size


def stamp_of(path: Source) -> str | int:
    """Changes when the file does."""
    return path.content if isinstance(path, HubFile) else path.stat().st_mtime_ns


def find_inputs(patterns: Sequence[str]) -> list[Source]:
    """The files that `patterns` (files, folders, globs with **, datasets of the hub) name, sorted, each once.

    One that has several names, by links or by other ways to it, counts by the first.

    Raises DataError when a pattern matches nothing or a file is of no known kind.
    """
    found: set[Source] = set()
    for pattern in patterns:
        matches: Sequence[Source] = find_hub_files(pattern, SUFFIXES) if is_on_hub(pattern) else _matches(pattern)
        if not matches and (others := other_files([pattern])):
            raise DataError(
                f"{others[0]} exists, but {others[0].suffix or 'a file without a suffix'} is not a known kind of file",
                fix=f"rename it to .txt if it is plain text; known kinds of files are {', '.join(SUFFIXES)}",
            )
        kinds = ", ".join(SUFFIXES)
        if not matches and not is_on_hub(pattern) and Path(pattern).is_dir():
            raise DataError(
                f"the folder {pattern} has no file of a known kind",
                fix=f"put text into it; known kinds of files are {kinds}",
            )
        if not matches:
            raise DataError(f"no file matches {pattern!r}", fix=f"check the path; known kinds of files are {kinds}")
        found.update(matches)
    here = sorted((path for path in found if isinstance(path, Path)), reverse=True)
    ordered: list[Source] = [*sorted({path.resolve(): path for path in here}.values())]
    ordered += sorted(path for path in found if isinstance(path, HubFile))
    for path in ordered:
        if not path.name.endswith(SUFFIXES):
            raise DataError(
                f"{path} has none of the suffixes {', '.join(SUFFIXES)}",
                fix="rename it to .txt if it is plain text, convert it, or narrow the pattern",
            )
    return ordered


def other_files(patterns: Sequence[str]) -> list[Path]:
    """Files in the folders among `patterns` that are left out, since they are of no known kind; hidden ones apart."""
    folders = [Path(pattern) for pattern in patterns if not is_on_hub(pattern) and Path(pattern).is_dir()]
    return sorted(file for folder in folders for file in _files_in(folder) if not file.name.endswith(SUFFIXES))


def _matches(pattern: str) -> list[Path]:
    path = Path(pattern)
    if path.is_file():
        return [path]
    if path.is_dir():
        return [file for file in _files_in(path) if file.name.endswith(SUFFIXES)]
    return [Path(name) for name in glob.glob(pattern, recursive=True) if Path(name).is_file()]


def _files_in(folder: Path) -> Iterator[Path]:
    """All but hidden ones, also behind links to folders; a folder that is reached twice, as in a ring, once."""
    seen: set[str] = set()
    for place, folders, files in os.walk(folder, followlinks=True):
        if (real := os.path.realpath(place)) in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (file for name in files if not name.startswith(".") and (file := Path(place, name)).is_file())


def text_of(value: Any, text_field: str) -> str | Bad:
    """The text of a parsed JSON record."""
    if not isinstance(value, dict):
        return Bad(f"a {type(value).__name__} instead of a JSON object")
    if text_field not in value:
        return Bad(f"{NO_FIELD} {text_field!r}")
    text = value[text_field]
    return text if isinstance(text, str) else Bad(f"{text_field!r} is not a text but {type(text).__name__}")


def parse_line(line: bytes, text_field: str) -> str | Bad:
    """The text of one line of JSON, or why it has none."""
    try:
        return text_of(json.loads(line.rstrip().decode()), text_field)
    except UnicodeDecodeError as error:
        return Bad(f"invalid UTF-8 at byte {error.start}")
    except json.JSONDecodeError as error:
        return Bad(f"{NO_JSON} at character {error.pos + 1}")
    except (ValueError, RecursionError) as error:
        return Bad(f"{NO_JSON}: {error}")


def _cell(scalar: Any, text_field: str) -> str | Bad:
    """The text of one cell of a column of Arrow."""
    try:
        value = scalar.as_py()
    except UnicodeDecodeError as error:
        return Bad(f"invalid UTF-8 at byte {error.start}")
    return value if isinstance(value, str) else Bad(f"{text_field!r} is not a text but {type(value).__name__}")


def _lines(stream: Iterable[bytes]) -> Iterator[Record]:
    """Lines that are not blank."""
    for number, line in enumerate(stream, start=1):
        content = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
        if content and not content.isspace():
            yield Record(number, content)


def _json_records(stream: BinaryIO, text_field: str) -> Iterator[Record]:
    """A .json file is JSON lines (as many corpora name them), or one value: an object or an array of objects."""
    first = stream.readline()
    if _is_object(first):
        yield from _lines(itertools.chain([first], stream))
        return
    whole = first + stream.read()
    try:
        value = json.loads(whole.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        yield from _lines(io.BytesIO(whole))
        return
    for number, item in enumerate(value if isinstance(value, list) else [value], start=1):
        yield Record(number, text_of(item, text_field))


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line.decode("utf-8-sig")), dict)
    except (ValueError, RecursionError):
        return False


def _pieces(stream: BinaryIO) -> Iterator[Record]:
    line, data = 1, _piece(stream).removeprefix(BYTE_ORDER_MARK)
    while data:
        following = _piece(stream)
        yield Record(line, Piece(data, last=not following))
        line += data.count(b"\n")
        data = following


def _piece(stream: BinaryIO) -> bytes:
    return stream.read(PIECE_BYTES) + stream.readline()


def _is_of_arrow(error: Exception) -> bool:
    """Whether pyarrow, which may not be installed, found the content damaged; errors of the disk have a number."""
    return type(error).__name__ == "ArrowInvalid" or (type(error) is OSError and error.errno is None)


def _pyarrow(module: str, path: Source) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(
            f"{path} needs pyarrow, which is not installed", fix="install it with scripts/venv.sh data"
        ) from error

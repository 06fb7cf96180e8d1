"""A dataset on disk: a list of token files, checked and named by hash.

Two forms are read: a folder with `manifest.json` as `spes-p2p tokenize` writes it, and a text file that lists raw
headerless memmaps as the published SPES script makes them. It leaves out how tokens become sequences (`memmap.py`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import numpy as np

from spes_p2p.bounds import Bounded, between
from spes_p2p.data.shards import Shard
from spes_p2p.errors import DataError
from spes_p2p.files import write_whole

MANIFEST = "manifest.json"
FORMAT_VERSION = 1
_NPY_MAGIC = b"\x93NUMPY"

Dtype = Literal["uint16", "uint32"]


@dataclass(frozen=True)
class InputFile:
    """What one corpus file gave."""

    file: str
    documents: int
    tokens: int
    bad_lines: int


@dataclass(frozen=True)
class Manifest(Bounded):
    """The content of `manifest.json`, in the order of its keys. Raises ValueError or TypeError for impossible ids."""

    format_version: int
    dtype: str
    tokenizer: str
    tokenizer_fingerprint: str
    vocab_size: Annotated[int, between(1, 2**32)]
    eos_id: Annotated[int, between(0, 2**32 - 1)]
    documents: int
    tokens: int
    bad_lines: int
    inputs: tuple[InputFile, ...]
    shards: tuple[Shard, ...]
    urls: tuple[str, ...] = ()
    """Of web servers where the same folder lies. They say nothing of what the dataset is: its hash leaves them out."""

    def dataset(self, files: Iterable[TokenFile] = ()) -> Dataset:
        """What it says of the dataset, with its files where these are here. Raises DataError."""
        return Dataset(
            dataset_dtype(self.dtype), tuple(files), self.vocab_size, self.eos_id, self.tokenizer,
            self.tokenizer_fingerprint, self.urls,
        )  # fmt: skip

    def write(self, folder: Path) -> Path:
        """Writes `folder/manifest.json` atomically. Raises StorageFull."""
        path = folder / MANIFEST
        plain = dataclasses.asdict(self)
        if not self.urls:  # older versions can read it then
            del plain["urls"]
        write_whole(path, (json.dumps(plain, indent=1) + "\n").encode())
        return path

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Raises DataError when the file is no manifest that this version understands."""
        return cls.parse(path.read_bytes(), str(path))

    @classmethod
    def parse(cls, data: bytes, path: str) -> Manifest:
        """The same of what was read already; `path` names it in errors."""
        try:
            plain: dict[str, Any] = json.loads(data)
            version = plain["format_version"]
            if version != FORMAT_VERSION:
                fix = "update spes-p2p, or tokenize the corpus again"
                raise DataError(
                    f"{path} has format version {version}, but this program reads {FORMAT_VERSION}", fix=fix
                )
            plain["inputs"] = tuple(InputFile(**item) for item in plain["inputs"])
            plain["shards"] = tuple(Shard(**item) for item in plain["shards"])
            plain["urls"] = tuple(plain.get("urls", ()))
            return cls(**plain)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(
                f"{path} is damaged: {_fault(error)}", fix="copy it again, or run spes-p2p tokenize again"
            ) from error


def _fault(error: Exception) -> str:
    """What is wrong with a manifest, in words for people."""
    if isinstance(error, json.JSONDecodeError):
        return f"it is not valid JSON at line {error.lineno}, character {error.colno}"
    if isinstance(error, KeyError):
        return f"it has no {error}"
    return "it is not what spes-p2p tokenize writes"


@dataclass(frozen=True)
class TokenFile:
    """Where `tokens` ids of one shard lie: flat, little-endian, from `offset_bytes` on. `sha256` may be unknown."""

    path: Path
    tokens: int
    offset_bytes: int
    sha256: str | None = None


@dataclass(frozen=True)
class Dataset:
    """A dataset that was opened: every file is there and has the right size and type."""

    dtype: Dtype
    files: tuple[TokenFile, ...]
    vocab_size: int | None = None
    """Of the tokenizer; unknown for raw lists."""
    eos_id: int | None = None
    tokenizer: str | None = None
    tokenizer_fingerprint: str | None = None
    urls: tuple[str, ...] = ()
    """Where it lies on the web, by its manifest; not checked yet."""
    parts: tuple[tuple[str, int], ...] = ()
    """Of several datasets that were listed: the name of each folder, and how many of the files are its."""

    @property
    def tokens(self) -> int:
        return sum(file.tokens for file in self.files)

    def tokens_of_parts(self) -> Iterator[tuple[str, int]]:
        """Name and tokens of each of `parts`."""
        files = iter(self.files)
        for name, count in self.parts:
            yield name, sum(file.tokens for file in islice(files, count))

    @classmethod
    def open(cls, path: str | Path, raw_dtype: str = "auto", vocab_size: int | None = None) -> Dataset:
        """Opens a folder with a manifest (or the manifest itself), or a text file with one path of a raw memmap a line.

        Args:
            raw_dtype: of raw memmaps: "uint16", "uint32", or "auto": uint16 where the ids of `vocab_size` fit.
        Raises DataError naming the file that is missing, truncated or of another type.
        """
        path = Path(path)
        if path.is_dir():
            path = path / MANIFEST
        if not path.is_file():
            fix = "run spes-p2p tokenize, or set data.path to a folder with manifest.json or a text file of paths"
            raise DataError(f"there is no dataset at {path}", fix=fix)
        if path.name == MANIFEST:
            return _from_manifest(path)
        return _from_list(path, raw_dtype, vocab_size)


def hash_tokens(file: TokenFile) -> str:
    """SHA-256 in hex over the token bytes of one file."""
    digest = hashlib.sha256()
    with open(file.path, "rb") as stream:
        stream.seek(file.offset_bytes)
        while chunk := stream.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


def _from_manifest(path: Path) -> Dataset:
    manifest = Manifest.read(path)
    files = []
    for shard in manifest.shards:
        if not isinstance(shard.file, str) or Path(shard.file).name != shard.file:  # it would be handed out to others
            raise DataError(
                f"{path} names the shard {shard.file!r}, which is not in its folder",
                fix="run spes-p2p tokenize, and ask whoever gave you this folder",
            )
        dtype, file = _inspect(path.parent / shard.file, manifest.dtype)
        if (dtype, file.tokens) != (manifest.dtype, shard.tokens):
            raise DataError(
                f"shard {file.path} holds {file.tokens} tokens of {dtype}, but the manifest says {shard.tokens} of "
                f"{manifest.dtype}",
                fix=_repair(file.path),
            )
        files.append(dataclasses.replace(file, sha256=shard.sha256))
    return manifest.dataset(files)


def _from_list(path: Path, raw_dtype: str, vocab_size: int | None) -> Dataset:
    if raw_dtype == "auto":
        if vocab_size is None:
            raise DataError(f"the dtype of the raw memmaps in {path} is not known", fix="set data.raw_dtype")
        raw_dtype = "uint16" if vocab_size <= 2**16 else "uint32"
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
    except UnicodeDecodeError as error:
        fix = "give a folder with manifest.json, or a text file with one path per line"
        raise DataError(f"{path} is not a text file of paths", fix=fix) from error
    paths = [path.parent / line for line in lines if line and not line.startswith("#")]
    if not paths:
        raise DataError(f"{path} lists no file", fix="write the path of one memmap per line")
    if any(os.path.isdir(item) for item in paths):
        return _from_folders(path, paths)
    missing = next((item for item in paths if not os.path.isfile(item)), None)  # a line of prose is no valid path
    if missing is not None:
        raise DataError(
            f"{path} lists {str(missing)[:100]}, which is not a file",
            fix="list token files in it, or give a folder of token shards as spes-p2p tokenize makes it from text",
        )
    inspected = [_inspect(item, raw_dtype) for item in paths]
    dtypes = {dtype for dtype, _ in inspected}
    if len(dtypes) != 1:
        raise DataError(f"{path} lists files of {' and '.join(sorted(dtypes))}", fix="list files of one dtype")
    return Dataset(dataset_dtype(dtypes.pop()), tuple(file for _, file in inspected))


def _from_folders(path: Path, folders: list[Path]) -> Dataset:
    """Several datasets as one. Raises DataError where they were not tokenized alike."""
    other = next((folder for folder in folders if not folder.is_dir()), None)
    names = [folder.resolve().name for folder in folders]
    if other is not None or len(set(names)) < len(names):
        raise DataError(
            f"{path} lists {names}, of which one is no folder, or two have the same name",
            fix="list folders of token shards with different names, one a line",
        )
    datasets = [Dataset.open(folder) for folder in folders]
    first = datasets[0]
    for name, dataset in zip(names, datasets, strict=True):
        if _cut_by(dataset) != _cut_by(first):
            raise DataError(
                f"datasets {names[0]} and {name} in {path} were not made with the same tokenizer",
                fix="tokenize them with one tokenizer, and the same --eos-token",
            )
    files = tuple(file for dataset in datasets for file in dataset.files)
    parts = tuple((name, len(dataset.files)) for name, dataset in zip(names, datasets, strict=True))
    return dataclasses.replace(first, files=files, urls=(), parts=parts)


def _cut_by(dataset: Dataset) -> tuple[str, str | None, int | None]:
    return dataset.dtype, dataset.tokenizer_fingerprint, dataset.eos_id


def _inspect(path: Path, raw_dtype: str) -> tuple[str, TokenFile]:
    """The dtype and extent of a token file: by its .npy header, or by its size where it has none."""
    if not path.is_file():
        raise DataError(f"shard {path} is missing", fix=_repair(path))
    size = path.stat().st_size
    with open(path, "rb") as stream:
        dtype, tokens = _npy_content(path, stream) or (raw_dtype, None)
        offset = stream.tell()
    whole, rest = divmod(size - offset, np.dtype(dtype).itemsize)
    if rest or tokens not in (None, whole):
        expected = f"{tokens} tokens" if tokens is not None else "whole tokens"
        raise DataError(
            f"shard {path} is truncated: {size - offset} bytes are not {expected} of {dtype}", fix=_repair(path)
        )
    return dtype, TokenFile(path, whole, offset)


def _npy_content(path: Path, stream: BinaryIO) -> tuple[str, int] | None:
    """(dtype, tokens) of a .npy file, with the stream after its header; None, and the stream at 0, for a raw memmap."""
    magic = stream.read(len(_NPY_MAGIC))
    stream.seek(0)
    if magic != _NPY_MAGIC:
        return None
    try:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(stream)
    except ValueError as error:
        raise DataError(f"shard {path} has a damaged header: {error}", fix=_repair(path)) from error
    if len(shape) != 1:
        raise DataError(f"shard {path} has {len(shape)} dimensions, not one", fix=_repair(path))
    return dtype.newbyteorder("=").name, int(shape[0])


def dataset_dtype(name: str) -> Dtype:
    """Raises DataError for a type that tokens cannot have."""
    if name == "uint16":
        return "uint16"
    if name == "uint32":
        return "uint32"
    raise DataError(f"tokens of type {name} are not supported", fix="use uint16 or uint32")


def _repair(path: Path) -> str:
    return f"copy {path.name} again, or delete it and run spes-p2p tokenize again"

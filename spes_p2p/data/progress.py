"""What a folder under `tokenize` remembers, so that the next run goes on where this one stopped.

`.progress/settings.json` says how the shards are made, one file for each input says which of its shards are finished
and where the next one begins, and a lock keeps two runs apart. It leaves out tokens and the final manifest.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spes_p2p.data.manifest import MANIFEST
from spes_p2p.data.readers import SUFFIXES, Source, size_of, stamp_of
from spes_p2p.data.shards import Shard
from spes_p2p.errors import DataError
from spes_p2p.files import PARTIAL, make_folder, write_whole
from spes_p2p.locks import FileLock

FOLDER = ".progress"
_SETTINGS = "settings.json"


@dataclass(frozen=True)
class Settings:
    """All that decides the bytes of the shards, apart from the input."""

    tokenizer_fingerprint: str
    eos_id: int
    text_field: str
    dtype: str
    max_shard_bytes: int


@dataclass(frozen=True)
class Unit:
    """One input file and the stem of the names of its shards."""

    path: Source
    stem: str

    @classmethod
    def of_all(cls, paths: Sequence[Source]) -> list[Unit]:
        """Stems are the names without their suffix; files of one name in several folders are numbered."""
        seen: Counter[str] = Counter()
        units: dict[str, Unit] = {}
        for path in paths:
            name = stem = _stem(path)
            while not seen[stem] or name in units:  # a file may be called as another one is numbered
                seen[stem] += 1
                name = stem if seen[stem] == 1 else f"{stem}~{seen[stem]}"
            units[name] = cls(path, name)
        return [*units.values()]

    def identity(self) -> list[str | int]:
        """Changes when the file does."""
        return [self.path.name, size_of(self.path), stamp_of(self.path)]


@dataclass(frozen=True)
class UnitProgress:
    """How far one input file is: its finished shards, and where the first token after them comes from."""

    records: int = 0
    """Records of the input before the one batch in which the next shard begins."""
    skip_tokens: int = 0
    """Tokens from that record on that the finished shards already hold."""
    documents: int = 0
    """Counts of what lies before that record, or, when done, of everything."""
    lines: int = 0
    """0 also where an older version has counted none."""
    bad_lines: int = 0
    examples: tuple[str, ...] = ()
    shards: tuple[Shard, ...] = ()
    done: bool = False

    @property
    def tokens(self) -> int:
        """In finished shards."""
        return sum(shard.tokens for shard in self.shards)


class Workspace:
    """The output folder of one run of `tokenize`, locked."""

    def __init__(self, folder: Path, settings: Settings, units: Sequence[Unit]) -> None:
        self.folder, self.settings = folder, settings
        self._identity = {unit: unit.identity() for unit in units}
        self._progress = {unit: self._load(unit) for unit in units}

    @classmethod
    @contextmanager
    def opened(cls, folder: Path, settings: Settings, units: Sequence[Unit]) -> Iterator[Workspace]:
        """Creates or continues `folder`.

        Raises ConfigError where it cannot be made, DataError when it is in use or holds other inputs or settings.
        """
        make_folder(folder)
        make_folder(folder / FOLDER)
        with ExitStack() as stack:
            try:
                stack.callback(FileLock(folder / FOLDER / "lock").release)
            except BlockingIOError as error:
                raise DataError(f"another tokenize is writing to {folder}", fix="wait for it to end") from error
            for leftover in folder.glob(f"*{PARTIAL}"):
                leftover.unlink()
            _check_settings(folder, settings)
            _check_strangers(folder, units)
            yield cls(folder, settings, units)

    def progress(self, unit: Unit) -> UnitProgress:
        return self._progress[unit]

    def save(self, unit: Unit, progress: UnitProgress) -> None:
        """Makes `progress` of `unit` durable. Raises StorageFull."""
        plain = {"input": self._identity[unit], **dataclasses.asdict(progress)}
        write_whole(_record_path(self.folder, unit), json.dumps(plain).encode())
        self._progress[unit] = progress

    def drop(self, unit: Unit) -> None:
        """Removes the finished shards of `unit`, as if it had never been among the inputs."""
        self._remove(unit, self._progress[unit])
        self._progress[unit] = UnitProgress()

    def _load(self, unit: Unit) -> UnitProgress:
        path = _record_path(self.folder, unit)
        if not path.is_file():
            return UnitProgress()
        plain: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        identity = plain.pop("input")
        plain["examples"] = tuple(plain["examples"])
        plain["shards"] = tuple(Shard(**shard) for shard in plain["shards"])
        progress = UnitProgress(**plain)
        if identity == self._identity[unit] and all(self._is_whole(shard) for shard in progress.shards):
            return progress
        self._remove(unit, progress)  # the input changed, or shards were deleted: this file is done again
        return UnitProgress()

    def _remove(self, unit: Unit, progress: UnitProgress) -> None:
        for shard in progress.shards:
            (self.folder / shard.file).unlink(missing_ok=True)
        _record_path(self.folder, unit).unlink(missing_ok=True)

    def _is_whole(self, shard: Shard) -> bool:
        path = self.folder / shard.file
        return path.is_file() and path.stat().st_size > shard.tokens


def is_output(path: Source) -> bool:
    """Whether `tokenize` wrote this file, into a folder among its inputs."""
    return isinstance(path, Path) and path.name == MANIFEST and (path.parent / FOLDER).is_dir()


def _stem(path: Source) -> str:
    suffix = max((suffix for suffix in SUFFIXES if path.name.endswith(suffix)), key=len)
    return path.name.removesuffix(suffix) or "corpus"


def _record_path(folder: Path, unit: Unit) -> Path:
    return folder / FOLDER / f"{unit.stem}.unit.json"


def _check_settings(folder: Path, settings: Settings) -> None:
    path = folder / FOLDER / _SETTINGS
    plain = dataclasses.asdict(settings)
    if not path.is_file():
        write_whole(path, json.dumps(plain, indent=1).encode())
        return
    before = json.loads(path.read_text(encoding="utf-8"))
    for key, value in plain.items():
        if before.get(key) != value:
            raise DataError(
                f"{folder} holds shards made with {key} {before.get(key)}, but now it is {value}",
                fix="give another --output, or delete that folder",
            )


def _check_strangers(folder: Path, units: Sequence[Unit]) -> None:
    ours = {_record_path(folder, unit) for unit in units}
    for record in sorted((folder / FOLDER).glob("*.unit.json")):
        if record not in ours:
            stem = record.name.removesuffix(".unit.json")
            raise DataError(
                f"{folder} also holds shards of {stem!r}, which is not among the input files",
                fix="name that file too, give another --output, or delete the folder",
            )

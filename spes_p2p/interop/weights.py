"""Weights in folders as Hugging Face publishes them: safetensors files, several with an index where one is too large.

Both ways go tensor by tensor, so that memory never holds more than one file's worth: `write_weights` asks for a tensor
when its turn comes, `PublishedWeights` reads one from the memory-mapped file that holds it. Which names there are, and
what the tensors mean, is told by others (`hf`).
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from stat import S_IMODE
from typing import Any, Literal

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from spes_p2p.errors import CheckpointError
from spes_p2p.files import storing

Dtype = Literal["fp32", "bf16", "fp16"]
TORCH_DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_PATTERN = "model{suffix}.safetensors"
_FIX = "copy the folder again; it needs config.json and safetensors files"

Report = Callable[[int, int], None]
"""Is told of (bytes done, bytes in all)."""


@dataclass(frozen=True)
class Piece:
    """One tensor to be written. `load` gives its values, in any floating type, when its turn comes."""

    name: str
    shape: tuple[int, ...]
    load: Callable[[], Tensor]


@dataclass(frozen=True)
class Format:
    """How weights are written: their type, and the largest size of a file (a larger tensor has one of its own)."""

    dtype: Dtype = "fp32"
    max_shard_bytes: int = 5 * 10**9


FORMAT = Format()


def say_nothing(done: int, total: int) -> None:
    """Nobody looks on."""


def write_weights(folder: Path, pieces: Sequence[Piece], how: Format, report: Report = say_nothing) -> None:
    """Writes `pieces` in their order.

    Holds one file, the library's copy of it and one tensor in memory. Raises StorageFull.
    """
    wanted = TORCH_DTYPES[how.dtype]
    by_name = {piece.name: piece for piece in pieces}

    def size_of(piece: Piece) -> int:
        return torch.Size(piece.shape).numel() * wanted.itemsize

    split = split_state_dict_into_shards_factory(
        by_name, get_storage_size=size_of, filename_pattern=_PATTERN, max_shard_size=how.max_shard_bytes
    )
    total, done = sum(map(size_of, pieces)), 0
    for file, names in split.filename_to_tensors.items():
        tensors: dict[str, Tensor] = {}
        for name in names:
            # a copy: two pieces may be made of one tensor, which the library refuses
            tensors[name] = by_name[name].load().to(wanted, copy=True, memory_format=torch.contiguous_format)
            done += size_of(by_name[name])
            report(done, total)
        _save(folder / file, tensors)
        tensors.clear()  # before the next file's are loaded
    if split.is_sharded:
        index = {"metadata": {"total_size": total}, "weight_map": split.tensor_to_filename}
        with storing(folder / INDEX_FILE, 0):
            (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _save(path: Path, tensors: dict[str, Tensor]) -> None:
    size = sum(tensor.nbytes for tensor in tensors.values())
    try:
        with storing(path, size):
            path.touch()
            mode = path.stat().st_mode  # as the umask has it: the library makes a file for its owner alone
            save_file(tensors, path, metadata={"format": "pt"})
            path.chmod(S_IMODE(mode))
    except SafetensorError as error:  # how the library passes on what the disk says
        with storing(path, size):
            raise _as_os_error(error) from error


def _as_os_error(error: SafetensorError) -> Exception:
    """The library names the system's error only in its text."""
    found = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(found[1]), str(error)) if found else error


class PublishedWeights:
    """The tensors of a published folder by name, memory-mapped. Made by `open`, which closes them again."""

    def __init__(self, folder: Path, files: dict[str, str], opened: dict[str, Any]) -> None:
        self.folder = folder
        self._files = files
        self._opened = opened

    @classmethod
    @contextlib.contextmanager
    def open(cls, folder: Path) -> Iterator[PublishedWeights]:
        """Raises CheckpointError naming the file that is missing or damaged."""
        with contextlib.ExitStack() as stack:
            opened = {file: stack.enter_context(_open(folder / file)) for file in _file_names(folder)}
            files = {name: file for file, handle in opened.items() for name in handle.keys()}  # noqa: SIM118
            yield cls(folder, files, opened)

    @property
    def names(self) -> frozenset[str]:
        """All tensors that the files hold."""
        return frozenset(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it. Raises CheckpointError where it is missing."""
        return tuple(self._handle(name).get_slice(name).get_shape())

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises CheckpointError unless there is a tensor of this name and shape."""
        found = self.shape(name)
        if found != shape:
            raise CheckpointError(
                f"{self.folder}: {name} has shape {list(found)} instead of {list(shape)}",
                fix="check that config.json and the weights are of one model",
            )

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The values of a tensor of this shape, in fp32. Raises CheckpointError."""
        self.check(name, shape)
        values: Tensor = self._handle(name).get_tensor(name)
        if not values.is_floating_point() or values.itemsize == 1:
            raise CheckpointError(
                f"{self.folder}: {name} holds {values.dtype}", fix="give an unquantised model (fp32, bf16 or fp16)"
            )
        return values.float()

    def _handle(self, name: str) -> Any:
        if name not in self._files:
            raise CheckpointError(f"{self.folder} has no tensor {name}", fix=_FIX)
        return self._opened[self._files[name]]


def _file_names(folder: Path) -> list[str]:
    index = folder / INDEX_FILE
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            if (outside := next((name for name in names if Path(name).name != name), None)) is not None:
                raise ValueError(
                    f"it names {outside[:80]!r}, which is not in its folder"
                )  # another's words, from the hub
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} is damaged: {error}", fix=_FIX) from error
        return names
    if (folder / SINGLE_FILE).is_file():
        return [SINGLE_FILE]
    raise CheckpointError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}", fix=_FIX)


def _open(path: Path) -> Any:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing", fix=_FIX)
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged: {error}", fix=_FIX) from error

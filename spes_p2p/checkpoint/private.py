"""A peer's private training state as two files: the tree of values (JSON) and its tensors (safetensors).

The tree is opaque: nested dicts, lists and tuples of None, bool, int, float, str, bytes, numpy arrays and scalars,
and torch tensors come back with the same types, keys and bits (torch tensors on the CPU and without gradients). The
tensor file is written as a stream, without a second copy in memory, and any safetensors reader can open it. Torch is
imported only where a tree holds its tensors.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from spes_p2p.files import storing

if TYPE_CHECKING:
    import torch

TREE_FILE = "private.json"
TENSORS_FILE = "private.safetensors"
_NUMPY_TYPES = {
    name: np.dtype(code)
    for name, code in zip(
        ("F64", "F32", "F16", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL", "BF16"),
        ("<f8", "<f4", "<f2", "<i8", "<i4", "<i2", "i1", "<u8", "<u4", "<u2", "u1", "?", "<i2"),
    )
}
"""By safetensors name. numpy has no bfloat16: its bits are taken as integers."""
_FORMAT_NAMES = {kind: name for name, kind in _NUMPY_TYPES.items() if name != "BF16"}


@dataclass(frozen=True)
class FileRecord:
    """What the metadata keeps of a file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class _Entry:
    """One tensor to be written: `load` brings its bytes to the CPU when its turn comes."""

    name: str
    format: str
    shape: tuple[int, ...]
    load: Callable[[], NDArray[Any]]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * _NUMPY_TYPES[self.format].itemsize


def write_private(folder: Path, tree: Any) -> dict[str, FileRecord]:
    """Writes `tree` into `folder`, synced; a record of each file. Raises StorageFull; TypeError for other types."""
    entries: list[_Entry] = []
    text = json.dumps(_encode(tree, "", entries)).encode()
    return {
        TREE_FILE: _write(folder / TREE_FILE, [text], len(text)),
        TENSORS_FILE: _write(folder / TENSORS_FILE, *_tensor_stream(entries)),
    }


def read_private(folder: Path) -> Any:
    """The tree that `write_private` wrote. The files are checked by the caller."""
    tensors = _read_tensors(folder / TENSORS_FILE)
    return _decode(json.loads((folder / TREE_FILE).read_bytes()), tensors)


def _write(path: Path, parts: Any, total_bytes: int) -> FileRecord:
    digest = hashlib.sha256()
    with storing(path, total_bytes), open(path, "xb") as file:
        for part in parts:
            digest.update(part)
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(total_bytes, digest.hexdigest())


def _tensor_stream(entries: list[_Entry]) -> tuple[Iterator[Any], int]:
    header, offset = {}, 0
    for entry in entries:
        header[entry.name] = {
            "dtype": entry.format,
            "shape": list(entry.shape),
            "data_offsets": [offset, offset + entry.bytes],
        }
        offset += entry.bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)

    def parts() -> Iterator[Any]:
        yield len(text).to_bytes(8, "little") + text
        for entry in entries:
            yield np.ascontiguousarray(entry.load()).reshape(-1).view(np.uint8).data

    return parts(), 8 + len(text) + offset


def _read_tensors(path: Path) -> dict[str, NDArray[Any]]:
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        start = file.tell()
        return {name: _read_tensor(file, start, entry) for name, entry in header.items()}


def _read_tensor(file: BinaryIO, start: int, entry: dict[str, Any]) -> NDArray[Any]:
    file.seek(start + entry["data_offsets"][0])
    count = math.prod(entry["shape"])
    values: NDArray[Any] = np.fromfile(file, _NUMPY_TYPES[entry["dtype"]], count)
    return values.reshape(entry["shape"])


def _encode(value: Any, path: str, entries: list[_Entry]) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (list, tuple):
        items = [_encode(item, f"{path}/{at}", entries) for at, item in enumerate(value)]
        return items if type(value) is list else {"tuple": items}
    if isinstance(value, dict):
        pairs = [[_encode(key, path, entries), _encode(value[key], f"{path}/{key}", entries)] for key in value]
        return {"dict": pairs}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    return _encode_tensor(value, f"{len(entries)}{path}", entries)  # the number keeps names apart


def _encode_tensor(value: Any, name: str, entries: list[_Entry]) -> Any:
    if isinstance(value, np.ndarray | np.generic) and value.dtype in _FORMAT_NAMES:
        array = np.asarray(value)
        entries.append(_Entry(name, _FORMAT_NAMES[array.dtype], array.shape, lambda: array))
        return {"numpy" if isinstance(value, np.ndarray) else "scalar": name}
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        bfloat16 = value.dtype == torch.bfloat16
        bits = value.detach().view(torch.int16) if bfloat16 else value.detach()
        kind = "BF16" if bfloat16 else _FORMAT_NAMES[torch.empty(0, dtype=value.dtype).numpy().dtype]
        entries.append(_Entry(name, kind, tuple(value.shape), lambda: bits.cpu().numpy()))
        return {"torch": name, "bfloat16": bfloat16}
    raise TypeError(f"private training state {name!r} holds a {type(value).__name__}, which cannot be saved")


def _decode(value: Any, tensors: dict[str, NDArray[Any]]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    kind, inner = next(iter(value.items()))
    if kind == "dict":
        return {_decode(key, tensors): _decode(item, tensors) for key, item in inner}
    if kind == "tuple":
        return tuple(_decode(item, tensors) for item in inner)
    if kind == "bytes":
        return bytes.fromhex(inner)
    if kind == "torch":
        return _as_torch(tensors[inner], value["bfloat16"])
    return tensors[inner] if kind == "numpy" else tensors[inner][()]


def _as_torch(values: NDArray[Any], bfloat16: bool) -> torch.Tensor:
    import torch

    tensor = torch.from_numpy(values)
    return tensor.view(torch.bfloat16) if bfloat16 else tensor

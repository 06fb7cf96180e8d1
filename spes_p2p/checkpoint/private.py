"""A peer's private training state as two files: the tree of values (JSON) and its tensors (safetensors).

The tree is opaque: nested dicts, lists and tuples of None, bool, int, float, str, bytes and tensors come back with the
same types, keys and bits (tensors on the CPU and without gradients). The tensor file is written as a stream, without a
second copy in memory, and any safetensors reader can open it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from spes_p2p.files import storing

TREE_FILE = "private.json"
TENSORS_FILE = "private.safetensors"
_FORMAT_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""The types that can be saved, as safetensors calls them."""


@dataclass(frozen=True)
class FileRecord:
    """What the metadata keeps of a file."""

    bytes: int
    sha256: str


def write_private(folder: Path, tree: Any) -> dict[str, FileRecord]:
    """Writes `tree` into `folder`, synced; a record of each file. Raises StorageFull; TypeError for other types."""
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_encode(tree, "", tensors)).encode()
    return {
        TREE_FILE: _write(folder / TREE_FILE, [text], len(text)),
        TENSORS_FILE: _write(folder / TENSORS_FILE, *_tensor_stream(tensors)),
    }


def read_private(folder: Path) -> Any:
    """The tree that `write_private` wrote. The files are checked by the caller."""
    # copied: what safetensors gives lies in the file, which then takes its place on the disk until the tensor is gone
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / TENSORS_FILE).items()}
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


def _tensor_stream(tensors: Mapping[str, Tensor]) -> tuple[Iterator[Any], int]:
    header, offset = {}, 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        header[name] = {
            "dtype": _FORMAT_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)

    def parts() -> Iterator[Any]:
        yield len(text).to_bytes(8, "little") + text
        for tensor in tensors.values():  # each comes to the CPU when its turn comes
            yield tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data

    return parts(), 8 + len(text) + offset


def _encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Plain values for JSON; adds the tensors that are in it, by the names that stand in their places."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (list, tuple):
        items = [_encode(item, f"{path}/{at}", tensors) for at, item in enumerate(value)]
        return items if type(value) is list else {"tuple": items}
    if isinstance(value, dict):
        pairs = [[_encode(key, path, tensors), _encode(value[key], f"{path}/{key}", tensors)] for key in value]
        return {"dict": pairs}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    name = f"{len(tensors)}{path}"  # the number keeps names apart
    if not isinstance(value, Tensor) or value.dtype not in _FORMAT_NAMES:
        raise TypeError(f"private training state {name!r} holds a {type(value).__name__}, which cannot be saved")
    tensors[name] = value.detach()
    return {"torch": name, "bfloat16": value.dtype == torch.bfloat16}  # by which others read it; we ask the tensor


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    kind, inner = next(iter(value.items()))
    if kind == "dict":
        return {_decode(key, tensors): _decode(item, tensors) for key, item in inner}
    if kind == "tuple":
        return tuple(_decode(item, tensors) for item in inner)
    return bytes.fromhex(inner) if kind == "bytes" else tensors[inner]

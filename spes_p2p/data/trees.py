"""The hash trees of a dataset that lies on this disk: its catalogue, and its pieces with their proofs for others.

Hashing reads all shards once; the trees (64 bytes a piece, 0.8% of the data) are kept in a file beside the dataset, or
in a folder of one's own where that cannot be written, and used again as long as the shards are the same. So a folder
of token shards needs nothing new to be served.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import psutil

from spes_p2p.data.manifest import Dataset, TokenFile
from spes_p2p.data.merkle import EMPTY_ROOT, leaf_hash, level_sizes, parents, siblings
from spes_p2p.data.pieces import CATALOGUE_VERSION, MAX_CATALOGUE_BYTES, PIECE_BYTES, Catalogue, PieceGrid, ShardRoot
from spes_p2p.errors import DataError, RemoteProtocolError, StorageFull
from spes_p2p.files import PARTIAL, whole_file
from spes_p2p.ids import HASH_BYTES, NO_HASH, Hash, sha256
from spes_p2p.wire import pack, unpack

TREES = "pieces.hashes"
LONG_BYTES = 2**30
"""Hashing more than this many bytes takes seconds and is announced."""
_MAGIC = b"spes-p2p pieces\n"
_SIZE_BYTES = 8
HEAD_START_BYTES = len(_MAGIC) + _SIZE_BYTES
_READ_BYTES = 4 * 2**20
_NODES_AT_ONCE = 2**16


@dataclass(frozen=True)
class _Head:
    """What the file of trees begins with. `key` names the shards that were hashed."""

    key: Hash
    catalogue: Catalogue


class FolderPieces:
    """The pieces of a dataset that is here as a whole. Thread-safe."""

    def __init__(self, dataset: Dataset, catalogue: Catalogue, trees: Path, first_tree_byte: int) -> None:
        self._files = dataset.files
        self._trees = trees
        self.grid = PieceGrid(catalogue)
        self._starts, self.end = level_starts(self.grid, first_tree_byte)

    @classmethod
    def open(
        cls, dataset: Dataset, own_folder: Path, say: Callable[[str], None], piece_bytes: int = PIECE_BYTES
    ) -> FolderPieces:
        """Reads the trees that were kept, or hashes the shards; `own_folder` is where they may be kept in any case.

        Raises DataError where a shard cannot be read, and StorageFull.
        """
        key = _key(dataset, piece_bytes)
        alone = bool(dataset.files) and not dataset.parts  # of several datasets each has its own
        beside = dataset.files[0].path.parent / TREES if alone else own_folder / TREES
        for path in (beside, own_folder / TREES):
            if (found := _kept(path, dataset, key)) is not None:
                return found
        size = sum(file.tokens for file in dataset.files) * (2 if dataset.dtype == "uint16" else 4)
        if size > LONG_BYTES:
            say(f"hashing the dataset ({size / 1e9:.0f} GB), so that others can check its pieces; this is done once")
        try:
            return _made(beside, dataset, key, piece_bytes)
        except (OSError, StorageFull):  # a folder that is only read, or a disk that the shards fill
            return _made(own_folder / TREES, dataset, key, piece_bytes)

    @property
    def catalogue(self) -> Catalogue:
        return self.grid.catalogue

    @property
    def dataset_hash(self) -> Hash:
        return self.catalogue.dataset_hash

    @property
    def held(self) -> int:
        return self.grid.total

    def find(self, piece: int) -> bytes | None:
        """The piece and its proof, joined; None where this disk does not give the bytes that were hashed."""
        place = self.grid.place(piece)
        file = self._files[place.shard]
        try:
            offset = file.offset_bytes + place.index * self.catalogue.piece_bytes
            data = _read_at(file.path, offset, place.size)
            proof = self._proof(place.shard, place.index, place.pieces)
        except OSError:
            return None
        return data + proof if self.grid.is_sound(piece, data, proof) else None

    def _proof(self, shard: int, index: int, pieces: int) -> bytes:
        starts = self._starts[shard]
        with open(self._trees, "rb", buffering=0) as file:
            wanted = [starts[level] + at * HASH_BYTES for level, at in siblings(index, pieces)]
            return b"".join(os.pread(file.fileno(), HASH_BYTES, at) for at in wanted)


def level_starts(grid: PieceGrid, first_tree_byte: int) -> tuple[list[list[int]], int]:
    """For each shard, where each level of its tree begins in the file; and where the file ends."""
    found, at = [], first_tree_byte
    for size in (tree_pieces(shard.tokens, grid) for shard in grid.catalogue.shards):
        starts = []
        for nodes in level_sizes(size):
            starts.append(at)
            at += nodes * HASH_BYTES
        found.append(starts)
    return found, at


def first_tree_byte(catalogue: Catalogue) -> int:
    """Of a file of trees of this dataset, whoever wrote it."""
    return len(_MAGIC) + _SIZE_BYTES + len(pack(_Head(NO_HASH, catalogue)))


def head_bytes(start: bytes) -> int:
    """How long what goes before the trees is, by the first HEAD_START_BYTES. Raises DataError for another file."""
    size = int.from_bytes(start[len(_MAGIC) :], "big")
    if not start.startswith(_MAGIC) or size > MAX_CATALOGUE_BYTES + 2**10:
        raise DataError(
            f"{TREES} is not a file of hashes", fix="copy it again from the folder that spes-p2p tokenize wrote"
        )
    return HEAD_START_BYTES + size


def catalogue_of(head: bytes) -> Catalogue:
    """From all that goes before the trees. Raises RemoteProtocolError where it is damaged."""
    return unpack(_Head, head[HEAD_START_BYTES:], MAX_CATALOGUE_BYTES + 2**10).catalogue


def tree_pieces(tokens: int, grid: PieceGrid) -> int:
    """Pieces of a shard of so many tokens."""
    return -(-tokens // grid.piece_tokens)


def _key(dataset: Dataset, piece_bytes: int) -> Hash:
    """Names the shards by their hashes where a manifest lists these, else by size and time of change."""
    parts = [f"{dataset.dtype} {piece_bytes}".encode()]
    for file in dataset.files:
        stat = file.path.stat()
        name = file.sha256 or f"{file.path.name} {stat.st_size} {stat.st_mtime_ns}"
        parts.append(f"\n{file.tokens} {name}".encode())
    return sha256(*parts)


def _kept(path: Path, dataset: Dataset, key: Hash) -> FolderPieces | None:
    """What was hashed before, where it is whole and of these shards."""
    try:
        with open(path, "rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                return None
            size = int.from_bytes(file.read(_SIZE_BYTES), "big")
            head = unpack(_Head, file.read(min(size, 32 * 2**20)))
            found = FolderPieces(dataset, head.catalogue, path, file.tell())
            kept = os.fstat(file.fileno())
            is_newer = any(
                one.path.stat().st_mtime_ns > kept.st_mtime_ns for one in dataset.files
            )  # altered, or copied
            return found if head.key == key and kept.st_size == found.end and not is_newer else None
    except (OSError, RemoteProtocolError, ValueError):  # not there, or not what it should be: it is made anew
        return None


def _made(path: Path, dataset: Dataset, key: Hash, piece_bytes: int) -> FolderPieces:
    path.parent.mkdir(parents=True, exist_ok=True)
    _hash_all(dataset, key, piece_bytes, path)
    kept = _kept(path, dataset, key)
    if kept is None:
        raise DataError(
            f"{path} changed while it was written", fix="start again, and use the dataset from one process only"
        )
    return kept


def _hash_all(dataset: Dataset, key: Hash, piece_bytes: int, path: Path) -> None:
    empty = Catalogue(
        CATALOGUE_VERSION,
        dataset.dtype,
        piece_bytes,
        tuple(ShardRoot(file.tokens, EMPTY_ROOT) for file in dataset.files),
    )
    _remove_left_ones(path)
    with whole_file(path, mark=f".{os.getpid()}") as out:  # several processes may make the same one at a time
        _write_head(out, _Head(key, empty))
        grid = PieceGrid(empty)
        roots = [_write_tree(out, file, grid) for file in dataset.files]
        shards = tuple(ShardRoot(file.tokens, root) for file, root in zip(dataset.files, roots, strict=True))
        out.seek(0)
        _write_head(out, _Head(key, Catalogue(CATALOGUE_VERSION, dataset.dtype, piece_bytes, shards)))


def _write_head(out: BinaryIO, head: _Head) -> None:
    packed = pack(head)  # of the same length whatever the roots are
    out.write(_MAGIC + len(packed).to_bytes(_SIZE_BYTES, "big") + packed)


def _write_tree(out: BinaryIO, file: TokenFile, grid: PieceGrid) -> Hash:
    """All levels, from the leaves up. A level is read again from the file, since a shard may be huge."""
    sizes = level_sizes(tree_pieces(file.tokens, grid))
    if not sizes:
        return EMPTY_ROOT
    below = out.tell()
    for hashes in _leaves(file, grid):
        out.write(hashes)
    for size in sizes[:-1]:
        out.flush()
        start = out.tell()
        for at in range(0, size, _NODES_AT_ONCE):
            count = min(_NODES_AT_ONCE, size - at)
            out.write(parents(os.pread(out.fileno(), count * HASH_BYTES, below + at * HASH_BYTES)))
        below = start
    out.flush()
    return Hash(os.pread(out.fileno(), HASH_BYTES, below))


def _leaves(file: TokenFile, grid: PieceGrid) -> Iterator[bytes]:
    """Joined hashes of the pieces; raises DataError where the file is not what its manifest says."""
    piece_bytes = grid.catalogue.piece_bytes
    left, read = file.tokens * grid.item_bytes, max(1, _READ_BYTES // piece_bytes) * piece_bytes
    whole = hashlib.sha256()
    with open(file.path, "rb") as stream:
        stream.seek(file.offset_bytes)
        while left:
            data = memoryview(stream.read(min(read, left)))
            if not len(data):
                raise DataError(f"shard {file.path} is truncated by {left} bytes", fix="copy it again")
            left -= len(data)
            if file.sha256 is not None:
                whole.update(data)
            yield b"".join(leaf_hash(data[at : at + piece_bytes]) for at in range(0, len(data), piece_bytes))
    if file.sha256 not in (None, whole.hexdigest()):
        raise DataError(
            f"shard {file.path} was altered: its hash is not the manifest's",
            fix=f"copy {file.path.name} again, or delete it and run spes-p2p tokenize again",
        )


def _remove_left_ones(path: Path) -> None:
    """Removes unfinished files of processes that were killed."""
    for left in path.parent.glob(f"{path.name}.*{PARTIAL}"):
        number = left.name.removeprefix(f"{path.name}.").removesuffix(PARTIAL)
        if number.isdecimal() and not psutil.pid_exists(int(number)):
            with suppress(OSError):  # of somebody else, in a folder that several use
                left.unlink()


def _read_at(path: Path, offset: int, size: int) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return os.pread(file.fileno(), size, offset)

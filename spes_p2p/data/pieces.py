"""What a dataset's hash stands for: its catalogue, and the pieces that can be checked against it one by one.

The catalogue lists the root of a hash tree over each shard's pieces; the dataset hash is the hash of the catalogue. So
whoever knows the dataset hash can check the catalogue, and then every piece that a stranger sends with its proof.
Pieces are numbered through all shards. Leaves out where pieces lie and how they travel.

Pieces are small because single sequences are leased in random order: of a piece that is fetched for one sequence of 4
KiB the rest may not be needed for long. `scripts/bench_data_swarm.py` shows the bytes for each size.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from spes_p2p.bounds import Bounded, between, length, matching
from spes_p2p.data.merkle import leaf_hash, level_sizes, proof_length, root_by
from spes_p2p.errors import DataError, RemoteProtocolError
from spes_p2p.ids import HASH_BYTES, Hash, sha256
from spes_p2p.wire import pack, unpack

PIECE_BYTES = 8 * 2**10
CATALOGUE_VERSION = 1
MAX_CATALOGUE_BYTES = 16 * 2**20
MAX_SHARDS = 100_000
MAX_PIECES = 2**31 - 2
_ITEM_BYTES = {"uint16": 2, "uint32": 4}


@dataclass(frozen=True)
class ShardRoot(Bounded):
    """One shard: how many tokens it has, and the root of the tree over its pieces."""

    tokens: Annotated[int, between(0, 2**48 - 1)]
    root: Annotated[Hash, length(HASH_BYTES, HASH_BYTES)]


@dataclass(frozen=True)
class Catalogue(Bounded):
    """All shards of a dataset in their order. Raises ValueError for what no dataset has."""

    version: Annotated[int, between(CATALOGUE_VERSION, CATALOGUE_VERSION)]
    dtype: Annotated[str, matching("|".join(_ITEM_BYTES))]
    piece_bytes: Annotated[int, between(16, 2**20)]
    """Of token bytes (little-endian, without any header), in fours; the last piece of a shard is shorter."""
    shards: Annotated[tuple[ShardRoot, ...], length(0, MAX_SHARDS)]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.piece_bytes % 4:
            raise ValueError(f"piece_bytes is {self.piece_bytes}, which is no multiple of 4")

    @cached_property
    def dataset_hash(self) -> Hash:
        return sha256(pack(self))

    @classmethod
    def checked(cls, data: bytes, dataset: Hash) -> Catalogue:
        """What somebody sent as the catalogue of `dataset`. Raises RemoteProtocolError where it is not."""
        if sha256(data) != dataset:
            raise RemoteProtocolError(f"a catalogue of {len(data)} bytes that does not hash to {dataset.hex()[:16]}")
        return unpack(cls, data, MAX_CATALOGUE_BYTES)


def hashes_of_parts(catalogue: Catalogue, tokens: Sequence[int]) -> list[Hash]:
    """Of several datasets in one, by their tokens: the hash that each has alone.

    Raises DataError where a shard does not end where a dataset does.
    """
    found, shards = [], list(catalogue.shards)
    for wanted in tokens:
        part = list[ShardRoot]()
        while shards and sum(shard.tokens for shard in part) < wanted:
            part.append(shards.pop(0))
        if sum(shard.tokens for shard in part) != wanted:
            raise DataError(
                f"the run's data has no dataset of {wanted:,} tokens", fix="ask the organiser: data.datasets is wrong"
            )
        found.append(replace(catalogue, shards=tuple(part)).dataset_hash)
    return found


@dataclass(frozen=True)
class PieceLocation:
    """Where one piece stands."""

    shard: int
    index: int
    size: int
    """Bytes."""
    pieces: int
    """Of its shard."""

    @property
    def proof_bytes(self) -> int:
        return HASH_BYTES * proof_length(self.index, self.pieces)


class PieceGrid:
    """The numbers of a catalogue's pieces: which tokens are in which, and how to check one.

    Raises DataError for more pieces than can be numbered.
    """

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        self.item_bytes = _ITEM_BYTES[catalogue.dtype]
        self.piece_tokens = catalogue.piece_bytes // self.item_bytes
        tokens = np.array([shard.tokens for shard in catalogue.shards], dtype=np.int64)
        self._token_ends = np.cumsum(tokens)
        self._token_starts = self._token_ends - tokens
        counts = -(-tokens // self.piece_tokens)
        self._piece_ends = np.cumsum(counts)
        self._piece_starts = self._piece_ends - counts
        self._ends: list[int] = self._piece_ends.tolist()
        self.tokens = int(tokens.sum())
        self.total = int(counts.sum())
        if self.total > MAX_PIECES:
            raise DataError(
                f"the dataset has {self.total} pieces of {catalogue.piece_bytes} bytes, more than {MAX_PIECES}",
                fix="train on a smaller part of it",
            )
        self.max_proof_bytes = HASH_BYTES * (len(level_sizes(int(counts.max(initial=0)))) - 1 if self.total else 0)

    @property
    def max_bytes(self) -> int:
        """Of the longest piece with its proof."""
        return self.catalogue.piece_bytes + self.max_proof_bytes

    def place(self, piece: int) -> PieceLocation:
        shard = bisect_right(self._ends, piece)
        first, end = int(self._piece_starts[shard]), self._ends[shard]
        index = piece - first
        left = self.catalogue.shards[shard].tokens - index * self.piece_tokens
        return PieceLocation(shard, index, min(left, self.piece_tokens) * self.item_bytes, end - first)

    def first_token(self, piece: int) -> int:
        """The token at which a piece begins, counted through all shards."""
        place = self.place(piece)
        return int(self._token_starts[place.shard]) + place.index * self.piece_tokens

    def of_tokens(self, starts: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """Pieces that hold tokens [start, start + length) of each start, each once, in the order of first need."""
        if not len(starts) or not length:
            return np.empty(0, np.int64)
        first, last = self._at(starts), self._at(starts + length - 1)
        spans = last - first + 1
        offsets = np.arange(int(spans.sum())) - np.repeat(np.cumsum(spans) - spans, spans)
        return ordered_once(np.repeat(first, spans) + offsets)

    def _at(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        shard = np.searchsorted(self._token_ends, tokens, side="right")
        found: NDArray[np.int64] = self._piece_starts[shard] + (tokens - self._token_starts[shard]) // self.piece_tokens
        return found

    def is_sound(self, piece: int, data: bytes | memoryview, proof: bytes) -> bool:
        """Whether these are the bytes of that piece, by its proof."""
        place = self.place(piece)
        if len(data) != place.size or len(proof) != place.proof_bytes:
            return False
        hashes = [proof[at : at + HASH_BYTES] for at in range(0, len(proof), HASH_BYTES)]
        found = root_by(place.index, place.pieces, leaf_hash(data), hashes)
        return found == self.catalogue.shards[place.shard].root


def ordered_once(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Each number once, where it stands first."""
    _, first = np.unique(numbers, return_index=True)
    return numbers[np.sort(first)]

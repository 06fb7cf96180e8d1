"""Where every value of the state lies: tensors in blocks, blocks cut into tiles.

Block 0 holds the shared tensors, block 1 + e those of expert column e, each in the order in which the tensors are
given (design section 4 "Bytes"; the canonical list comes from the name table of interop). A block is a flat array of
row-major fp32 values without padding. Tiles are cut inside each block, so that no tile spans two blocks; their global
ids count through the blocks. What a round hands out of a tile is as long as its block's codec makes it, for all tiles
alike. Where a run has an outer optimizer, as many blocks again follow, in the same order and with the same grid: its
momentum. No round hands those out, since everybody computes them. Pure arithmetic: no files, no torch.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from spes_p2p.codecs.sizes import Codec, encoded_bytes
from spes_p2p.errors import ConfigError
from spes_p2p.ids import Hash, sha256

VALUE_BYTES = 4
"""Bytes of one value of the state: fp32."""

Values = NDArray[np.float32]
"""Flat little-endian fp32 values."""

Init = Literal["normal", "ones", "zeros"]

MOMENTUM_PREFIX = "outer_momentum."
"""Before the name of a tensor: the outer optimizer's momentum of it."""


class BlockSource(Protocol):
    """Anything that hands out whole blocks: a version, a staging area, or arrays in memory."""

    def block(self, index: int) -> Values:
        """The flat fp32 values of a block, shape [block size]."""


@dataclass(frozen=True)
class StateTensor:
    """One tensor of the state: its Hugging Face name, and the column that it belongs to (None = shared)."""

    name: str
    shape: tuple[int, ...]
    column: int | None
    init: Init

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Placed:
    """A tensor and its offset in values from the start of its block."""

    tensor: StateTensor
    offset: int


@dataclass(frozen=True)
class Block:
    """Block `index` (0 = shared, 1 + e = column e, 1 + E + b = momentum of block b) of `size` values."""

    index: int
    size: int
    tensors: tuple[Placed, ...]


@dataclass(frozen=True)
class Tile:
    """Values [start, stop) of one block; `id` counts through all blocks."""

    id: int
    block: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of values."""
        return self.stop - self.start


class Layout:
    """The grid of a run: the same at every peer, and the same for the whole run."""

    def __init__(
        self,
        tensors: Sequence[StateTensor],
        tile_values: int,
        shared_codec: Codec = "fp32",
        expert_codec: Codec = "fp32",
        has_momentum: bool = False,
    ) -> None:
        """Places `tensors` in the given order. Raises ConfigError for a layout that makes no sense."""
        if tile_values < 1:
            raise ConfigError(f"sync.tile_values is {tile_values}, not positive", fix="set it to 1048576")
        self.tile_values = tile_values
        self._codecs = shared_codec, expert_codec
        self.tensors = tuple(tensors)
        self.num_columns = _count_columns(self.tensors)
        self.has_momentum = has_momentum
        self.model_blocks = _placed(self.tensors, self.num_columns)
        self.blocks = self.model_blocks + (_momentum_of(self.model_blocks) if has_momentum else ())
        self._tile_ranges = _tile_ranges(self.blocks, tile_values)
        self.tiles = tuple(
            Tile(tile_range[at], block.index, start, min(start + tile_values, block.size))
            for block, tile_range in zip(self.blocks, self._tile_ranges)
            for at, start in enumerate(range(0, block.size, tile_values))
        )
        self._places = {placed.tensor.name: (block.index, placed) for block in self.blocks for placed in block.tensors}
        self.num_model_tiles = self._tile_ranges[self.num_columns].stop
        """Tiles of the model's values: what rounds reduce and hand out. Those of the momentum follow them."""
        if len(self._places) != len(self.tensors) * (1 + has_momentum):
            raise ConfigError("two tensors of the state have the same name", fix="give each tensor its own name")

    @property
    def num_values(self) -> int:
        """Values of the whole state, momentum included."""
        return sum(block.size for block in self.blocks)

    def momentum_tile(self, tile_id: int) -> int:
        """The tile with the momentum of a tile of the model, in a layout that has momentum."""
        return tile_id + self.num_model_tiles

    def tile_ids_of(self, block: int) -> range:
        """The global ids of a block's tiles."""
        return self._tile_ranges[block]

    def tile_ids_in(self, blocks: Iterable[int]) -> frozenset[int]:
        """The same of several blocks together."""
        return frozenset(tile_id for block in blocks for tile_id in self._tile_ranges[block])

    def tiles_of(self, block: int) -> tuple[Tile, ...]:
        """The tiles of a block, in order."""
        tile_range = self._tile_ranges[block]
        return self.tiles[tile_range.start : tile_range.stop]

    def consecutive(self, first_tile: int, count: int) -> tuple[Tile, ...]:
        """Consecutive tiles, as others ask for them; none where they are not all there, or not of one block."""
        tiles = self.tiles[first_tile : first_tile + count] if first_tile >= 0 and count > 0 else ()
        return tiles if tiles and len(tiles) == count and tiles[0].block == tiles[-1].block else ()

    def codec_of(self, block: int) -> Codec:
        """How what a round changes of a block travels; momentum never does."""
        return self._codecs[block > 0] if block <= self.num_columns else "fp32"

    def wire_bytes(self, tile: Tile) -> int:
        """Length of what a round hands out of a tile."""
        return encoded_bytes(self.codec_of(tile.block), tile.size)

    def wire_offset(self, tile: Tile) -> int:
        """Where that begins among the bytes of its block."""
        return tile.start // self.tile_values * encoded_bytes(self.codec_of(tile.block), self.tile_values)

    def wire_block_bytes(self, block: int) -> int:
        """Length of what a round hands out of a whole block."""
        tiles = self.tiles_of(block)
        return self.wire_offset(tiles[-1]) + self.wire_bytes(tiles[-1]) if tiles else 0

    def locate(self, name: str) -> tuple[int, int, tuple[int, ...]]:
        """(block, offset in values, shape) of a tensor. Raises KeyError for an unknown name."""
        block, placed = self._places[name]
        return block, placed.offset, placed.tensor.shape

    def view(self, block_array: NDArray[Any], name: str) -> NDArray[Any]:
        """The tensor `name` as a view, in its shape, of its block's flat array."""
        _, offset, shape = self.locate(name)
        return block_array[offset : offset + math.prod(shape)].reshape(shape)

    def tensor_at(self, block: int, offset: int) -> Placed:
        """The tensor that holds value `offset` of a block."""
        tensors = self.blocks[block].tensors
        return tensors[bisect_right(tensors, offset, key=lambda placed: placed.offset) - 1]

    @staticmethod
    def root_of(tile_hashes: Iterable[Hash]) -> Hash:
        """The root of a list of tile hashes: SHA-256 of their concatenation in the order of the tile ids."""
        return sha256(*tile_hashes)


def _count_columns(tensors: Sequence[StateTensor]) -> int:
    columns = {tensor.column for tensor in tensors if tensor.column is not None}
    if columns != set(range(len(columns))):
        raise ConfigError(
            f"the expert columns are {sorted(columns)}, not 0..{len(columns) - 1}",
            fix="number the columns without gaps",
        )
    return len(columns)


def _placed(tensors: Sequence[StateTensor], columns: int) -> tuple[Block, ...]:
    """Block 0 and those of the columns, each with its tensors one behind the other."""
    placed: list[list[Placed]] = [[] for _ in range(1 + columns)]
    sizes = [0] * (1 + columns)
    for tensor in tensors:
        index = 0 if tensor.column is None else 1 + tensor.column
        placed[index].append(Placed(tensor, sizes[index]))
        sizes[index] += tensor.size
    return tuple(Block(index, sizes[index], tuple(found)) for index, found in enumerate(placed))


def _momentum_of(blocks: tuple[Block, ...]) -> tuple[Block, ...]:
    """The same blocks after these, for values that begin at zero."""
    return tuple(
        Block(
            len(blocks) + block.index,
            block.size,
            tuple(
                replace(at, tensor=replace(at.tensor, name=MOMENTUM_PREFIX + at.tensor.name, init="zeros"))
                for at in block.tensors
            ),
        )
        for block in blocks
    )


def _tile_ranges(blocks: Sequence[Block], tile_values: int) -> tuple[range, ...]:
    ranges, first = [], 0
    for block in blocks:
        stop = first + -(-block.size // tile_values)
        ranges.append(range(first, stop))
        first = stop
    return tuple(ranges)

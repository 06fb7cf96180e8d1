"""What it takes to make another's reduction again: what contributors have committed to, and what is worth a look.

Before anybody knows who reduces what, each peer says its commitment: a hash of the hashes of all blocks that it brings,
each a hash of its tiles' hashes. So reducers and those who check them get the same values, or none; nobody can bring an
honest reducer under suspicion by giving different ones to each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from spes_p2p.consensus.manifest import Contribution
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import HASH_BYTES, Hash, sha256, short
from spes_p2p.state.hashes import hash_tile
from spes_p2p.state.layout import Layout, Tile, Values
from spes_p2p.swarm.streams import MAX_HEADER_BYTES
from spes_p2p.wire import pack, unpack

ANOTHER_WAY = 1e9
"""Times ours: more than any slice goes. Finite, since it is recorded."""


class OtherValues(RemoteProtocolError):
    """A peer's values are not those that it has committed to."""


@dataclass(frozen=True)
class BlockHashes:
    """(block, the hash of its tiles' joined hashes) of each block that a peer brings, sorted."""

    blocks: tuple[tuple[int, Hash], ...]


@dataclass(frozen=True)
class Opening:
    """What shows that tiles of a block belong to a commitment: the hashes of all blocks, and of this one's tiles."""

    hashes: BlockHashes
    tiles: bytes


def opening_bytes(layout: Layout) -> int:
    """The most that an opening takes."""
    largest = max(len(layout.tile_ids_of(block.index)) for block in layout.model_blocks)
    return HASH_BYTES * largest + (HASH_BYTES + 8) * len(layout.model_blocks) + 64


def commitment_to(hashes: Mapping[int, bytes]) -> Hash:
    """To values by the hashes of their tiles."""
    return sha256(pack(_block_hashes(hashes)))


def opening_of(hashes: Mapping[int, bytes], block: int) -> bytes:
    """The packed opening of a block."""
    return pack(Opening(_block_hashes(hashes), hashes[block]))


def _block_hashes(hashes: Mapping[int, bytes]) -> BlockHashes:
    return BlockHashes(tuple((block, sha256(joined)) for block, joined in sorted(hashes.items())))


def check_committed(
    layout: Layout, entry: Contribution, opening: bytes, tiles: Sequence[Tile], data: memoryview
) -> None:
    """Raises OtherValues where `data` is not what `entry` has committed to in these tiles of one block, in order."""
    shown, block = unpack(Opening, opening, max_bytes=MAX_HEADER_BYTES), tiles[0].block
    is_shown = (block, sha256(shown.tiles)) in shown.hashes.blocks and sha256(pack(shown.hashes)) == entry.commitment
    first, at = layout.tiles_of(block)[0].id, 0
    for tile in tiles:
        end, place = at + layout.wire_bytes(tile), HASH_BYTES * (tile.id - first)
        if not is_shown or hash_tile(data[at:end]) != shown.tiles[place : place + HASH_BYTES]:
            raise OtherValues(f"{short(entry.peer)} sent values of tile {tile.id} that it has not committed to")
        at = end


class Likeness:
    """Compares what a reducer hands out with what was trained here, tile by tile."""

    def __init__(self) -> None:
        self._theirs = self._own = self._product = 0.0

    def add(self, mean: Values, own: Values, base: Values) -> None:
        """Adds some values: those handed out, ours, and those that both began with."""
        their_change, own_change = (np.subtract(values, base, dtype=np.float64) for values in (mean, own))
        self._theirs += float(np.dot(their_change, their_change))
        self._own += float(np.dot(own_change, own_change))
        self._product += float(np.dot(their_change, own_change))

    @property
    def times_ours(self) -> float:
        """The length of the change that was handed out over that of ours; `ANOTHER_WAY` where it goes there."""
        if self._product < 0 or self._theirs > 0 == self._own:
            return ANOTHER_WAY
        return min(ANOTHER_WAY, math.sqrt(self._theirs / self._own)) if self._own else 0.0

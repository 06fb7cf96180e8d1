"""Hashes of tiles: BLAKE3 over the raw bytes, on a few threads where there are many tiles.

All bytes of the model go through here at every peer, so it is BLAKE3, which needs no instructions of its own to be
fast; it lets go of the interpreter lock, so threads are enough. What the hashes are compared with is up to the callers.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from blake3 import blake3

from spes_p2p.ids import HASH_BYTES, Hash

HASH_THREADS = min(4, os.cpu_count() or 1)
_BATCH = 64  # tiles in flight: bounds what is held of a long iterator


def hash_tile(data: bytes | memoryview) -> Hash:
    """The hash of one tile's bytes."""
    return Hash(blake3(data).digest())


def hash_tiles(tiles: Iterable[bytes | memoryview], threads: int = HASH_THREADS) -> Iterator[Hash]:
    """The hash of each tile, in order; reads ahead no more than a few tiles."""
    with ThreadPoolExecutor(threads) as pool:
        batch: list[bytes | memoryview] = []
        for tile in tiles:
            batch.append(tile)
            if len(batch) == _BATCH:
                yield from pool.map(hash_tile, batch)
                batch.clear()
        yield from pool.map(hash_tile, batch)


def split_hashes(joined: bytes | memoryview) -> tuple[Hash, ...]:
    """The tile hashes that a hash file or message holds one after the other."""
    return tuple(Hash(bytes(joined[at : at + HASH_BYTES])) for at in range(0, len(joined), HASH_BYTES))

"""Hashes of tiles, against the vectors that BLAKE3's authors publish."""

from __future__ import annotations

from itertools import islice

import pytest

from spes_p2p.state.hashes import hash_tile, hash_tiles

PUBLISHED = {
    0: "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262",
    1: "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213",
    1024: "42214739f095a406f3fc83deb889744ac00df831c10daa55189b5d121c855af7",
}
"""Of so many bytes that count from 0 to 250, again and again."""


@pytest.mark.parametrize("size", PUBLISHED)
def test_a_tile_has_the_hash_that_other_programs_give_it(size: int) -> None:
    assert hash_tile(bytes(at % 251 for at in range(size))).hex() == PUBLISHED[size]


def test_many_tiles_are_hashed_in_order() -> None:
    tiles = [bytes([at % 256]) * (at + 1) for at in range(200)]
    assert list(hash_tiles(tiles)) == [hash_tile(tile) for tile in tiles]
    assert len(list(islice(hash_tiles(iter(tiles)), 3))) == 3

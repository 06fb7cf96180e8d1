"""Pieces by number: which tokens are where, and what cannot be passed off as a dataset or as a piece of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_p2p.data.merkle import EMPTY_ROOT
from spes_p2p.data.pieces import CATALOGUE_VERSION, Catalogue, PieceGrid, ShardRoot
from spes_p2p.errors import DataError, RemoteProtocolError
from spes_p2p.ids import sha256
from spes_p2p.wire import pack
from tests.data.piece_makers import TOKENS, make_pieces


def catalogue(*tokens: int, piece_bytes: int = 16, dtype: str = "uint16") -> Catalogue:
    return Catalogue(CATALOGUE_VERSION, dtype, piece_bytes, tuple(ShardRoot(count, EMPTY_ROOT) for count in tokens))


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=6),
    st.sampled_from(["uint16", "uint32"]),
    st.lists(st.integers(0, 200), max_size=8),
    st.integers(1, 30),
)
def test_the_pieces_of_a_sequence_are_those_that_hold_its_tokens(
    tokens: list[int], dtype: str, starts: list[int], length: int
) -> None:
    grid = PieceGrid(catalogue(*tokens, dtype=dtype))
    inside = [start for start in starts if start + length <= sum(tokens)]
    piece_of, number = list[int](), 0
    for count in tokens:
        pieces = -(-count // grid.piece_tokens)
        piece_of += [number + at // grid.piece_tokens for at in range(count)]
        number += pieces
    expected = list(dict.fromkeys(piece_of[at] for start in inside for at in range(start, start + length)))
    assert grid.of_tokens(np.array(inside, np.int64), length).tolist() == expected
    assert grid.total == number
    for piece in range(number):
        assert grid.first_token(piece) == piece_of.index(piece)
        assert grid.place(piece).size == piece_of.count(piece) * grid.item_bytes


def test_only_the_bytes_of_a_piece_with_its_proof_pass(tmp_path: Path) -> None:
    pieces = make_pieces(tmp_path)
    grid = pieces.grid
    assert grid.tokens == sum(TOKENS)
    joined = [pieces.find(piece) or b"" for piece in range(grid.total)]
    for number in range(grid.total):
        size = grid.place(number).size
        assert grid.is_sound(number, joined[number][:size], joined[number][size:])
        for other in range(grid.total):
            assert grid.is_sound(other, joined[number][:size], joined[number][size:]) == (other == number)
        changed = bytearray(joined[number])
        for at in range(0, len(changed), 5):
            changed[at] ^= 1
            assert not grid.is_sound(number, bytes(changed[:size]), bytes(changed[size:]))
            changed[at] ^= 1
        assert not grid.is_sound(number, joined[number][: size - 1], joined[number][size:])
        assert not grid.is_sound(number, joined[number][:size], joined[number][size:] + bytes(32))


def test_a_catalogue_is_believed_only_where_it_hashes_to_the_dataset() -> None:
    good = catalogue(5, 6)
    assert Catalogue.checked(pack(good), good.dataset_hash) == good
    assert sha256(pack(good)) == good.dataset_hash
    with pytest.raises(RemoteProtocolError, match="does not hash to"):
        Catalogue.checked(pack(catalogue(5, 7)), good.dataset_hash)
    with pytest.raises(RemoteProtocolError):
        Catalogue.checked(b"junk", sha256(b"junk"))


def test_more_pieces_than_can_be_numbered_are_one_error() -> None:
    with pytest.raises(DataError, match="pieces of 16 bytes"):
        PieceGrid(catalogue(2**47, 2**47))


@pytest.mark.parametrize(
    "make",
    [
        lambda: catalogue(1, piece_bytes=0),
        lambda: catalogue(1, piece_bytes=18),
        lambda: catalogue(1, piece_bytes=2**21),
        lambda: catalogue(1, dtype="float32"),
        lambda: catalogue(-1),
        lambda: Catalogue(2, "uint16", 16, ()),
    ],
)
def test_what_no_dataset_has_is_refused(make: object) -> None:
    with pytest.raises(ValueError):
        make()  # type: ignore[operator]

"""The lossy codecs: lengths, errors within half a step, bits that never change, and what is not finite."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from spes_p2p.codecs.lossy import decode, encode
from spes_p2p.codecs.sizes import BLOCK_VALUES, CODECS, Codec, encoded_bytes
from spes_p2p.ids import sha256

LOSSY: tuple[Codec, ...] = CODECS[1:]
SIZES = (0, 1, 2, 31, 33, 128, 1000, 4096, 4097, 10_001)


def change(values: int, seed: int = 0) -> NDArray[np.float32]:
    """Heavy tails over six orders of magnitude, as changes of weights have."""
    rng = np.random.default_rng(seed)
    made: NDArray[np.float32] = (rng.standard_t(3, values) * 10.0 ** rng.uniform(-8, -2, values)).astype(np.float32)
    return made


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("values", SIZES)
def test_lengths_are_those_that_are_announced(codec: Codec, values: int) -> None:
    data = encode(codec, change(values))
    assert len(data) == encoded_bytes(codec, values)
    assert decode(codec, data, values).shape == (values,)


@pytest.mark.parametrize(("codec", "largest"), [("int8", 127), ("int4", 7)])
@given(values=st.integers(1, 700), seed=st.integers(0, 2**32 - 1))
def test_no_value_is_off_by_more_than_half_a_step(codec: Codec, largest: int, values: int, seed: int) -> None:
    given_values = change(values, seed)
    found = decode(codec, encode(codec, given_values), values)
    for start in range(0, values, BLOCK_VALUES[codec]):
        part = slice(start, start + BLOCK_VALUES[codec])
        step = np.abs(given_values[part]).max() / largest * (1 + 2**-7)  # bf16 rounds the scale up
        assert (np.abs(found[part] - given_values[part]) <= 0.5001 * step).all()


def test_ternary_sends_signs_of_what_is_large_and_their_mean_size() -> None:
    values = 2 * 128 + 7
    given_values = change(values)
    given_values[5:20] = 0  # rows of a vocabulary that nobody met: they must not make the others look small
    data = encode("ternary", given_values)
    assert len(data) == 3 * 2 + 53
    found = decode("ternary", data, values)
    for part in (slice(0, 128), slice(128, 256), slice(256, values)):
        size, sent = np.abs(given_values[part]), np.abs(found[part])
        is_sent = size > size[size > 0.75 * size[size > 0].mean()].mean() / 2
        assert is_sent.any()
        assert (sent[~is_sent] == 0).all()
        np.testing.assert_allclose(sent[is_sent], size[is_sent].mean(), rtol=2**-8)
    assert (np.sign(found)[found != 0] == np.sign(given_values)[found != 0]).all()


def test_ternary_leaves_of_normal_values_hardly_more_than_three_levels_must() -> None:
    """The least is 0.1902 of the square with one scale for all (Max, Quantizing for minimum distortion, 1960)."""
    given_values = np.random.default_rng(0).standard_normal(2**18).astype(np.float32)
    left = given_values - decode("ternary", encode("ternary", given_values), 2**18)
    assert np.square(left).sum() < 0.1902 * np.square(given_values).sum()


@pytest.mark.parametrize("codec", LOSSY)
def test_what_was_sent_is_sent_again_unchanged(codec: Codec) -> None:
    """Decoded values are on the grid: encoding them loses nothing more."""
    once = decode(codec, encode(codec, change(5000)), 5000)
    again = decode(codec, encode(codec, once), 5000)
    np.testing.assert_allclose(again, once, rtol=2**-6, atol=0)


@pytest.mark.parametrize("codec", LOSSY)
def test_error_feedback_sends_everything_in_the_end(codec: Codec) -> None:
    """Of a change that stays the same, the mean of what is sent comes close, whatever a single message loses."""
    wanted, kept, sent, rounds = change(4096), np.zeros(4096, np.float32), np.zeros(4096), 400
    for _ in range(rounds):
        kept += wanted
        found = decode(codec, encode(codec, kept), 4096)
        kept -= found
        sent += found
    assert np.abs(sent / rounds - wanted).max() < 0.05 * np.abs(wanted).max()
    np.testing.assert_allclose(sent + kept, rounds * wanted.astype(np.float64), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("poison", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_does_not_come_out_finite(codec: Codec, poison: float) -> None:
    given_values = change(5000)
    given_values[4321] = poison
    found = decode(codec, encode(codec, given_values), 5000)
    assert not np.isfinite(found).all()
    assert (found[~np.isfinite(found)] == np.inf).all()  # of NaN each machine has its own bits


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("values", [1, 130, 4096])
def test_nothing_is_nothing(codec: Codec, values: int) -> None:
    assert not decode(codec, encode(codec, np.zeros(values, np.float32)), values).any()


@pytest.mark.parametrize("codec", LOSSY)
def test_any_bytes_decode(codec: Codec) -> None:
    """What a liar sends is values, finite or not, never an error deep inside."""
    rng = np.random.default_rng(0)
    for values in SIZES:
        assert decode(codec, rng.bytes(encoded_bytes(codec, values)), values).shape == (values,)
    with pytest.raises(ValueError, match="for 9 values"):
        decode(codec, b"", 9)


EXPECTED = {
    "bf16": "cf450d4b2bfbd6be",
    "int8": "bba7729552406d70",
    "int4": "97ff564c491d30e0",
    "ternary": "36a4e4dcf9591f45",
}


@pytest.mark.parametrize("codec", LOSSY)
def test_the_format_never_changes(codec: Codec) -> None:
    """By whole numbers, each size once, so that the test needs nobody's random numbers and no tie is broken."""
    at = np.arange(5000)
    sizes = 1 + at * 1237 % 5003  # 5003 is prime
    given_values = (np.where(at % 3, sizes, -sizes) * 2.0**-20).astype(np.float32)
    data = encode(codec, given_values)
    digest = sha256(data, decode(codec, data, 5000).tobytes()).hex()[:16]
    assert digest == EXPECTED[codec]

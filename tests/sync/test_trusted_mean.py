"""The mean of a slice to which strangers contribute: what counts, and how far any of them may pull it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from spes_p2p.errors import LocalProtocolError
from spes_p2p.state.layout import Values
from spes_p2p.sync.reduce import _AT_ONCE, weighted_mean
from spes_p2p.sync.trusted_mean import ALONE_SPREAD, CHUNK, LARGEST_PULL, trusted_mean

SIZE = 100 * CHUNK + 17
BEFORE = np.random.default_rng(0).standard_normal(SIZE).astype(np.float32)
SIGNAL = np.random.default_rng(1).standard_normal(SIZE)
NOISE = np.random.default_rng(3).standard_normal(SIZE)
Changes = NDArray[np.float64]


def changes(number: int, seed: int = 2, noise: float = 1.0) -> list[Changes]:
    """What honest peers change: the same, and each something of its own."""
    return [*(SIGNAL + noise * np.random.default_rng(seed).standard_normal((number, SIZE)))]


def mean_change(
    trusted: Sequence[Changes], strangers: Sequence[Changes], tokens: Sequence[int] | None = None
) -> tuple[Changes, tuple[float, ...]]:
    """What becomes of the changes, and how much each stranger counted."""
    values = [(BEFORE + change).astype(np.float32) for change in (*trusted, *strangers)]
    roles = [True] * len(trusted) + [False] * len(strangers)
    mean, counted = trusted_mean(values, BEFORE, tokens or [7] * len(values), roles)
    assert mean.dtype == np.float32
    assert counted[: len(trusted)] == (1.0,) * len(trusted)
    return mean.astype(np.float64) - BEFORE, counted[len(trusted) :]


def chunk_lengths(change: Changes) -> Changes:
    return np.array([np.linalg.norm(change[at : at + CHUNK]) for at in range(0, SIZE, CHUNK)])


def bounds(trusted: Sequence[Changes]) -> Changes:
    """How far each chunk of equally weighted changes may be pulled, as the textbook has the standard error."""
    spread = chunk_lengths(np.std(trusted, axis=0, ddof=1))
    bound: Changes = LARGEST_PULL * spread / np.sqrt(len(trusted))
    return bound


@pytest.mark.parametrize("number", [1, 2, 5])
def test_of_trusted_contributors_it_is_their_weighted_mean(number: int) -> None:
    values = [(BEFORE + change).astype(np.float32) for change in changes(number)]
    tokens = list(range(3, 3 + number))
    mean, counted = trusted_mean(values, BEFORE, tokens, [True] * number)
    assert mean.tobytes() == weighted_mean(values, tokens).tobytes()
    assert counted == (1.0,) * number


def test_without_a_trusted_contributor_there_is_no_mean() -> None:
    with pytest.raises(LocalProtocolError, match="trusted"):
        trusted_mean([BEFORE], BEFORE, [1], [False])


def test_honest_strangers_count_in_full_and_bring_the_mean_nearer() -> None:
    honest = changes(14)
    mean, counted = mean_change(honest[:4], honest[4:])
    assert np.mean(counted) > 0.97
    alone, _ = mean_change(honest[:4], [])
    assert np.linalg.norm(mean - SIGNAL) < (1 - 0.7 * LARGEST_PULL) * np.linalg.norm(alone - SIGNAL)


LIES: dict[str, Callable[[], Changes]] = {
    "turned": lambda: -SIGNAL,
    "nothing": lambda: 0 * SIGNAL,
    "not a number": lambda: np.where(np.arange(SIZE) == 5, np.nan, SIGNAL),
    "infinite": lambda: np.where(np.arange(SIZE) == 5, np.inf, SIGNAL),
    "minus infinite": lambda: np.full(SIZE, -np.inf),
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("number", [1, 4])
def test_what_cannot_agree_leaves_no_trace(lie: str, number: int) -> None:
    trusted = changes(number)
    with np.errstate(all="raise", invalid="ignore"):
        mean, counted = mean_change(trusted, [LIES[lie]()] * 9)
    assert counted == (0.0,) * 9
    assert mean.tobytes() == mean_change(trusted, [])[0].tobytes()


def test_noise_counts_for_next_to_nothing() -> None:
    _, counted = mean_change(changes(4), [NOISE])
    assert counted[0] < 0.05


@pytest.mark.parametrize("times", [1e3, 1e30])
def test_a_long_change_counts_as_one_of_the_median_length(times: float) -> None:
    trusted, stranger = changes(4), changes(1, seed=9)[0]
    far = stranger * np.median([np.linalg.norm(change) for change in trusted]) / np.linalg.norm(stranger)
    long, _ = mean_change(trusted, [times * stranger])
    short, _ = mean_change(trusted, [far])
    np.testing.assert_allclose(long, short, atol=1e-5)


def push(trusted: Sequence[Changes], direction: Changes) -> Changes:
    """A change as long and as near to the trusted mean as a trusted one, all else of it one harmful direction."""
    root = np.mean(trusted, axis=0)
    unit = root / np.linalg.norm(root)
    cosine = float(np.median([change @ unit / np.linalg.norm(change) for change in trusted]))
    across = direction - unit * (unit @ direction)
    across /= np.linalg.norm(across)
    pushed: Changes = np.linalg.norm(trusted[0]) * (cosine * unit + np.sqrt(1 - cosine**2) * across)
    return pushed


def one_row(values: int) -> Changes:
    return np.where(np.arange(SIZE) // values == 3, NOISE, 0.0)


PUSHES = {
    "everywhere": NOISE,
    "a row": one_row(CHUNK),
    "half a row": one_row(CHUNK // 2),
    "the last values": np.where(np.arange(SIZE) >= SIZE - 17, 1.0, 0.0),
    "one value": one_row(1),
    "even values": NOISE * (np.arange(SIZE) % 2),
    "signs": np.sign(NOISE),
}


@pytest.mark.parametrize("direction", PUSHES)
@pytest.mark.parametrize("strangers", [1, 6, 50])
@pytest.mark.parametrize("number", [2, 4])
def test_strangers_together_pull_no_chunk_further_than_chance(direction: str, strangers: int, number: int) -> None:
    trusted = changes(number)
    mean, counted = mean_change(trusted, [push(trusted, PUSHES[direction])] * strangers)
    assert min(counted) > 0.9
    pulled = chunk_lengths(mean - np.mean(trusted, axis=0))
    assert (pulled <= bounds(trusted) * (1 + 1e-5) + 1e-6).all()


def test_pushes_that_hide_in_noise_or_are_split_are_bounded_as_well() -> None:
    trusted = changes(4)
    common = push(trusted, NOISE)
    hidden = [common + noise - SIGNAL for noise in changes(6, seed=21)]
    split = [push(trusted, NOISE * (np.arange(SIZE) % 6 == at)) for at in range(6)]
    for strangers in (hidden, split):
        mean, _ = mean_change(trusted, strangers)
        pulled = chunk_lengths(mean - np.mean(trusted, axis=0))
        assert (pulled <= bounds(trusted) * (1 + 1e-5) + 1e-6).all()


def test_beside_one_trusted_contributor_a_stranger_pulls_by_a_share_of_its_change() -> None:
    owner = changes(1)
    mean, counted = mean_change(owner, [push(owner, NOISE), *changes(1, seed=9)])
    assert min(counted) > 0.9
    assert (chunk_lengths(mean - owner[0]) <= ALONE_SPREAD * LARGEST_PULL * chunk_lengths(owner[0]) * (1 + 1e-5)).all()


def test_where_the_trusted_do_not_differ_strangers_change_nothing() -> None:
    same = [SIGNAL] * 3
    mean, _ = mean_change(same, changes(5))
    np.testing.assert_allclose(mean, mean_change(same, [])[0], atol=1e-6)


def test_tokens_weigh_trusted_and_strangers_alike() -> None:
    """A contributor with twice the tokens is as two with the same change, but for the chance that they have."""
    trusted, (one, other) = changes(4), changes(2, seed=9, noise=0.2)
    weighed, counted = mean_change(trusted, [one, other], [5, 5, 5, 5, 2, 1])
    doubled, _ = mean_change(trusted, [one, one, other], [5, 5, 5, 5, 1, 1, 1])
    assert counted == (1.0, 1.0)
    np.testing.assert_allclose(weighed, doubled, atol=1e-6)
    heavy, _ = mean_change(trusted, [one], [1000, 1, 1, 1, 1])
    assert np.linalg.norm(heavy - trusted[0]) < 0.02 * np.linalg.norm(heavy)


@pytest.mark.parametrize("size", [_AT_ONCE, 2 * _AT_ONCE + 64, 2 * _AT_ONCE + 3])
def test_a_long_slice_has_what_its_parts_have(size: int) -> None:
    """Changes alike in every part, so that a part alone counts as the whole does: the chunks are the same."""
    period = np.random.default_rng(5).standard_normal((6, _AT_ONCE))
    long = [np.resize(one, size).astype(np.float32) for one in 1 + period]
    before = np.zeros(size, np.float32)
    roles = [True] * 3 + [False] * 3
    mean, counted = trusted_mean(long, before, [1] * 6, roles)
    part, counted_alone = trusted_mean([one[:_AT_ONCE] for one in long], before[:_AT_ONCE], [1] * 6, roles)
    np.testing.assert_allclose(counted, counted_alone, atol=1e-3)
    whole = size // CHUNK * CHUNK
    np.testing.assert_allclose(mean[:whole], np.resize(part, whole), atol=2e-3)
    assert np.isfinite(mean).all()


def test_it_is_put_where_it_is_wanted_with_the_same_bits() -> None:
    values = [(BEFORE + change).astype(np.float32) for change in changes(6)]
    roles, tokens = [True, False, True, False, False, True], [4, 3, 2, 5, 1, 9]
    mean, counted = trusted_mean(values, BEFORE, tokens, roles)
    again, counted_again = trusted_mean(values, BEFORE, tokens, roles, values[3])
    assert again is values[3]
    assert again.tobytes() == mean.tobytes()
    assert counted == counted_again


@given(
    st.integers(1, 4), st.integers(1, 4), st.integers(1, 3 * CHUNK), st.integers(0, 2**32 - 1),
    st.sampled_from([0.0, 1e-20, 1.0, 1e20, 3e38]),
)  # fmt: skip
def test_whatever_strangers_send_the_mean_is_finite_and_near_the_root(
    number: int, strangers: int, size: int, seed: int, far: float
) -> None:
    rng = np.random.default_rng(seed)
    values: list[Values] = [rng.uniform(-1, 1, size).astype(np.float32) for _ in range(number)]
    lies = [(far * rng.uniform(-1, 1, size)).astype(np.float32) for _ in range(strangers)]
    before, tokens = np.zeros(size, np.float32), [int(one) for one in rng.integers(1, 9, number + strangers)]
    mean, counted = trusted_mean([*values, *lies], before, tokens, [True] * number + [False] * strangers)
    root = weighted_mean(values, tokens[:number])
    assert all(0 <= one <= 1 for one in counted)
    furthest = max(np.linalg.norm(one - root) for one in values) if number > 1 else np.linalg.norm(root)
    assert np.linalg.norm(mean - root) <= furthest * np.sqrt(number) + 1e-5

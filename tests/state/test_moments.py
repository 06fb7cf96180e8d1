"""What optimizer moments from another peer must obey: what training gives does, what would spoil does not."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from spes_p2p.errors import RemoteProtocolError
from spes_p2p.state.layout import Values
from spes_p2p.state.moments import Moments, check_moments

BETAS = (0.9, 0.95)
CLIP = 1.0
SIZE = 32


def averaged(gradients: list[Values], betas: tuple[float, float] = BETAS) -> Moments:
    """AdamW's moments after these gradients, in fp32."""
    mean, square = np.zeros(SIZE, np.float32), np.zeros(SIZE, np.float32)
    for gradient in gradients:
        mean = np.float32(betas[0]) * mean + np.float32(1 - betas[0]) * gradient
        square = np.float32(betas[1]) * square + np.float32(1 - betas[1]) * gradient * gradient
    return Moments(len(gradients), mean, square)


def changed(moments: Moments, **parts: Values | int) -> Moments:
    return Moments(**{"steps": moments.steps, "mean": moments.mean, "square": moments.square, **parts})  # type: ignore[arg-type]


@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1), st.integers(1, 60), st.sampled_from([1.0, 1e-8, 1e-16, 1e-22]), st.booleans())
def test_what_clipped_gradients_average_to_is_taken(seed: int, steps: int, scale: float, steady: bool) -> None:
    """Steady gradients with decaying weights come closest to the bound of the mean."""
    rng = np.random.default_rng(seed)
    gradients = []
    for step in range(steps):
        gradient = rng.standard_normal(SIZE).astype(np.float32) * np.float32(scale)
        if steady:
            gradient = np.full(SIZE, scale * (0.9 / 0.95) ** (steps - step), np.float32)
        norm = float(np.linalg.norm(gradient.astype(np.float64)))
        gradients.append(gradient * np.float32(min(1.0, CLIP / norm)) if norm > CLIP else gradient)
    check_moments(averaged(gradients), BETAS, CLIP)


GOOD = averaged([np.full(SIZE, 0.1, np.float32)] * 5)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (changed(GOOD, steps=-1), "step count of -1"),
        (changed(GOOD, steps=2**62), "step count"),
        (changed(GOOD, mean=np.full(SIZE, np.nan, np.float32)), "not finite"),
        (changed(GOOD, square=np.full(SIZE, np.inf, np.float32)), "not finite"),
        (changed(GOOD, square=-GOOD.square), "negative"),
        (changed(GOOD, square=np.zeros(SIZE, np.float32)), "larger than"),
        (changed(GOOD, mean=-100 * GOOD.mean), "larger than"),
        (changed(GOOD, square=GOOD.square + 1), "norm of"),
    ],
)
def test_what_no_training_gives_is_refused(bad: Moments, words: str) -> None:
    check_moments(GOOD, BETAS, CLIP)
    with pytest.raises(RemoteProtocolError, match=words):
        check_moments(bad, BETAS, CLIP)


def test_without_a_bound_on_the_mean_the_rest_is_checked() -> None:
    betas = (0.99, 0.9)
    check_moments(averaged([np.full(SIZE, 0.1, np.float32)] * 5, betas), betas, CLIP)
    with pytest.raises(RemoteProtocolError, match="norm of"):
        check_moments(changed(GOOD, square=GOOD.square + 1), betas, CLIP)

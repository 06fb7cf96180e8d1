"""The arithmetic of one slice: who is fit to contribute, and the weighted mean.

Plain fp32 on the host, in roster order; only the reducer computes it, everyone else takes its bytes. Needs no network.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

import numpy as np

from spes_p2p.ids import PeerId
from spes_p2p.state.layout import Values

NORM_LIMIT = 20.0
"""A change this many times larger than the median of the others is no honest training."""
NON_FINITE = "non-finite values"
WRONG_SIZE = "values of the wrong size"
TOO_LARGE = "a change far larger than the others'"
_AT_ONCE = 2**16
"""Values that one step takes: what is made of them on the way stays in the processor's cache."""
LARGEST_ENCODED = 1e30
"""Beyond this a lossy codec's scale, a sum with what was left before, or an outer optimizer's momentum may not be
finite: it would spoil the mean."""


def useless(values: Mapping[PeerId, Values], largest: float = math.inf) -> dict[PeerId, str]:
    """Contributors whose values no sum can take, each with the reason: not finite, or beyond `largest`."""
    refused = {peer: NON_FINITE for peer, array in values.items() if not _is_finite(array)}
    if math.isfinite(largest):
        refused |= {p: TOO_LARGE for p, array in values.items() if p not in refused and _is_beyond(array, largest)}
    return refused


def far_off(
    values: Mapping[PeerId, Values], base: Values, steps: Mapping[PeerId, int], rounds: int = 1
) -> dict[PeerId, str]:
    """Contributors that went much farther than the others, each with the reason.

    `values` are their values, `base` the committed ones, all of one shape and finite; `steps` the inner steps behind
    them: a fast peer moves further than a slow one, so changes are compared a step. `rounds`: the most rounds that a
    change may have grown for, where some have just begun. Of fewer than three nobody can say who is far off.
    """
    norms = {peer: _norm(array, base) / max(1, steps[peer]) for peer, array in values.items()}
    if len(norms) < 3:
        return {}
    limit = NORM_LIMIT * rounds * median(norms.values())
    return {peer: TOO_LARGE for peer, norm in norms.items() if norm > limit > 0}


def weighted_mean(values: Sequence[Values], weights: Sequence[float], into: Values | None = None) -> Values:
    """sum_p w_p * x_p / sum_p w_p in fp32, in the given order (design 3.2); one contributor: exactly its values.

    `into`: where to put it; one of `values` will do, and is lost then.
    """
    if len(values) == 1:
        return values[0]
    total = sum(weights)
    shares = [np.float32(weight / total) for weight in weights]
    mean = np.empty(values[0].shape, np.float32) if into is None else into
    sums, product = np.empty((2, min(_AT_ONCE, len(mean))), np.float32)
    for part in parts_of(mean):
        size = len(mean[part])
        np.multiply(values[0][part], shares[0], out=sums[:size])
        for array, share in zip(values[1:], shares[1:], strict=True):
            np.add(sums[:size], np.multiply(array[part], share, out=product[:size]), out=sums[:size])
        mean[part] = sums[:size]
    return mean


def parts_of(array: Values) -> Iterator[slice]:
    """What of a long array is worked on at once."""
    return (slice(at, at + _AT_ONCE) for at in range(0, len(array), _AT_ONCE))


def _is_finite(array: Values) -> bool:
    return all(np.isfinite(array[part]).all() for part in parts_of(array))


def _is_beyond(array: Values, largest: float) -> bool:
    return any(np.abs(array[part]).max() > largest for part in parts_of(array))


def _norm(array: Values, base: Values) -> float:
    square = 0.0
    with np.errstate(over="ignore"):  # an infinite norm is far too large, whatever the exact one
        for part in parts_of(array):
            change = np.subtract(array[part], base[part])
            square += float(np.dot(change, change))
    return math.sqrt(square)

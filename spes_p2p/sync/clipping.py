"""The mean of a slice where some contributors may lie (`sync.aggregate: clip`).

Whoever points another way than most do stays out. The others' changes are averaged by centered clipping (Karimireddy,
He and Jaggi, arXiv 2012.10333, formula 1): a few times v += sum_p w_p (x_p - v) min(1, radius / |x_p - v|). Two things
are not as there. v begins at the geometric median of the changes (as in Pillutla, Kakade and Harchaoui, arXiv
1912.13445) and not at the last round's mean: nothing of earlier rounds must be kept, and a column that was handed out
long ago has no last mean worth the name. And the radius is the median distance from there, so that nobody has to choose
one.

All of it follows from the inner products of the changes, and the result is a weighted mean of the values: what a
contribution counts for is a matter of a few numbers, whatever its size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from spes_p2p.consensus.weights import FEWEST
from spes_p2p.ids import PeerId
from spes_p2p.state.layout import Values
from spes_p2p.sync.reduce import parts_of, weighted_mean

LEAST_AGREEMENT = 0.5
"""Times the median agreement: honest changes are all about as near to the others, and lies that harm much are not."""
CLIPPINGS = 3
MEDIAN_STEPS = 16
"""Of Weiszfeld's algorithm; each brings the geometric median several times nearer."""
OPPOSED = "a change that points another way than the others'"
_RESOLUTION = 2.0**-24
"""Of the share of a contribution."""
_TINY = float(np.finfo(np.float32).tiny)
Matrix = NDArray[np.float64]


def opposed(values: Mapping[PeerId, Values], base: Values) -> dict[PeerId, str]:
    """Contributors that must stay out of a slice, each with the reason: all `values` and `base` of one shape, finite.

    Agreement is the cosine of a change and the geometric median of all directions, less its own part of that. A turned
    sign has a negative one, noise, no change at all and the like have about none. Nobody is judged by how far it went,
    nor by how many steps it claims.
    """
    if len(values) < FEWEST:
        return {}
    products = _inner_products(list(values.values()), base)
    lengths = np.maximum(np.sqrt(np.diag(products)), _TINY)
    cosines = products / np.outer(lengths, lengths)
    shares = _geometric_median(cosines)
    own = shares * np.diag(cosines)
    with_others = cosines @ shares - own
    squares = shares @ cosines @ shares - 2 * shares * with_others - shares * own
    agreements = with_others / np.sqrt(np.maximum(squares, _TINY))
    by_chance = 2 / np.sqrt(len(base))
    least = LEAST_AGREEMENT * np.median(agreements) - by_chance
    return {peer: OPPOSED for peer, agreement in zip(values, agreements, strict=True) if agreement < least}


def clipped_mean(values: Sequence[Values], base: Values, weights: Sequence[int], into: Values | None = None) -> Values:
    """base + the changes from `base` averaged by centered clipping; of two the weighted mean.

    `into`: where to put it, as in `weighted_mean`; one of `values` will do, and is lost then.
    """
    if len(values) < FEWEST:
        return weighted_mean(values, weights, into)
    products = _inner_products(values, base)
    shares = _geometric_median(products)
    radius = float(np.median(_distances(products, shares)))
    wanted = np.array([weight / sum(weights) for weight in weights])
    for _ in range(CLIPPINGS):
        taken = wanted * np.minimum(1.0, radius / np.maximum(_distances(products, shares), _TINY))
        shares = shares * (1.0 - taken.sum()) + taken
    shares = np.round(shares / _RESOLUTION) * _RESOLUTION  # the last bits are not the same on all processors
    return weighted_mean(values, [float(share) for share in shares], into)


def _inner_products(values: Sequence[Values], base: Values) -> Matrix:
    """Of the changes, in float64: large ones must not overflow."""
    products = np.zeros((len(values), len(values)))
    for part in parts_of(base):
        changes = np.stack([array[part] for array in values]).astype(np.float64) - base[part]
        products += changes @ changes.T
    return products


def _geometric_median(products: Matrix) -> Matrix:
    """The share of each vector in what has the least sum of distances to all, given their inner products."""
    shares = np.full(len(products), 1.0 / len(products))
    nearest = max(1e-6 * float(np.sqrt(np.median(np.diag(products)))), _TINY)
    for _ in range(MEDIAN_STEPS):
        shares = 1.0 / np.maximum(_distances(products, shares), nearest)
        shares /= shares.sum()
    return shares


def _distances(products: Matrix, shares: Matrix) -> Matrix:
    """How far each vector is from the sum of all by their shares."""
    squares = np.diag(products) - 2 * products @ shares + shares @ products @ shares
    found: Matrix = np.sqrt(np.maximum(squares, 0.0))
    return found

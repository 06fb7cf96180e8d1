"""The mean of a slice to which strangers contribute beside trusted peers.

The trusted peers' weighted mean is the root, as the server's own update is in FLTrust (Cao, Fang, Liu and Gong, arXiv
2012.13995). A stranger's change counts by its cosine with the root, against the cosines that trusted changes have with
each other, and never with more than their median length. That bounds how far a slice is pulled and not where to, so
the pull of all strangers together is bounded once more: in each chunk of `CHUNK` values it is at most `LARGEST_PULL` of
the root's standard error, by which the trusted peers' mean is off by chance. docs/trust.md has the formulas and the
measurements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from spes_p2p.errors import LocalProtocolError
from spes_p2p.state.layout import Values
from spes_p2p.sync.reduce import parts_of, weighted_mean

CHUNK = 64
"""Values of which the strangers' pull is bounded together: about a row of a small matrix, so that harm finds no room in
one row of a large one."""
LARGEST_PULL = 0.25
"""Of the root's standard error in a chunk."""
ALONE_COSINE = 0.5
"""What a lone trusted peer's cosine with others like it is taken to be."""
ALONE_SPREAD = 0.5
"""A lone trusted peer's own deviation, as a share of its change: a guess, since nobody can measure it."""
LEAST_COSINE = 0.001
"""Of trusted changes, to compare with."""
_TINY = float(np.finfo(np.float32).tiny)
Array = NDArray[np.float64]


def trusted_mean(
    values: Sequence[Values], before: Values, tokens: Sequence[int], trusted: Sequence[bool], into: Values | None = None
) -> tuple[Values, tuple[float, ...]]:
    """The mean, and how much of each contributor counted: 1 for a trusted one, 0 to 1 for a stranger.

    All of `values` and `before` (the committed ones) are of one shape, those of trusted contributors finite. `tokens`
    are the weights. Where only trusted contributors count it is exactly their `weighted_mean`. `into`: where to put
    it; one of `values` will do, and is lost then. Raises LocalProtocolError where nobody is trusted.
    """
    roots = [at for at, is_trusted in enumerate(trusted) if is_trusted]
    if not roots:
        raise LocalProtocolError("a mean needs a trusted contributor")
    counted, scales = np.ones(len(values)), np.ones(len(values))
    weights = np.array(tokens, np.float64)
    if len(roots) < len(values):
        counted, scales = _agreement(_inner_products(values, before), weights, roots)
    counts = tuple(float(count) for count in counted)
    strangers = [at for at, count in enumerate(counts) if count and not trusted[at]]
    if not strangers:
        return weighted_mean([values[at] for at in roots], [tokens[at] for at in roots], into), counts
    heard = weights * counted
    of_roots = (heard[roots] / heard[roots].sum()).astype(np.float32)
    of_strangers = (scales[strangers] * heard[strangers] / heard[strangers].sum()).astype(np.float32)
    pulled = np.float32(heard[strangers].sum() / (heard[roots].sum() + heard[strangers].sum()))
    mean = np.empty_like(before) if into is None else into
    for part in parts_of(before):
        root_changes = _changes([values[at] for at in roots], before, part)
        root: Values = of_roots @ root_changes
        pull: Values = of_strangers @ _changes([values[at] for at in strangers], before, part)
        pull = pulled * (pull - root)
        _shorten(pull, _largest_pulls(root_changes, root, of_roots))
        mean[part] = before[part] + (root + pull)
    return mean, counts


def _agreement(products: Array, weights: Array, roots: list[int]) -> tuple[Array, Array]:
    """How much each contributor counts, and what shortens its change to the median length of trusted ones.

    `products` are the inner products of the changes.
    """
    squares = np.diag(products)
    lengths = np.maximum(np.sqrt(squares), _TINY)
    of_roots = weights[roots]
    to_root = products[:, roots] @ of_roots
    root_square = of_roots @ to_root[roots]
    usual = ALONE_COSINE
    if len(roots) > 1:
        own = of_roots * squares[roots]
        with_others = to_root[roots] - own
        others = np.sqrt(np.maximum(root_square - of_roots * (to_root[roots] + with_others), 0.0))
        usual = max(LEAST_COSINE, float(np.median(with_others / np.maximum(lengths[roots] * others, _TINY))))
    with np.errstate(invalid="ignore"):
        cosines = np.nan_to_num(to_root / np.maximum(lengths * np.sqrt(root_square), _TINY), posinf=0.0)
    counted: Array = np.clip(cosines / usual, 0.0, 1.0)
    counted[roots] = 1.0
    return counted, np.minimum(1.0, np.median(lengths[roots]) / lengths)


def _largest_pulls(root_changes: Values, root: Values, shares: Values) -> Values:
    """For each chunk: how far strangers may pull the root."""
    own_share = float(shares @ shares)
    if len(shares) == 1:
        spread = ALONE_SPREAD * _lengths(root)
    else:
        squares = sum(share * _lengths(change - root) ** 2 for share, change in zip(shares, root_changes, strict=True))
        spread = np.sqrt(squares / (1.0 - own_share))
    largest: Values = LARGEST_PULL * math.sqrt(own_share) * spread
    return largest


def _shorten(pull: Values, largest: Values) -> None:
    """Makes each chunk at most so long, in place."""
    kept = np.minimum(1.0, largest / np.maximum(_lengths(pull), _TINY))
    whole = len(pull) // CHUNK * CHUNK
    pull[:whole].reshape(-1, CHUNK)[:] *= kept[: whole // CHUNK, None]
    pull[whole:] *= kept[-1]


def _lengths(change: Values) -> Values:
    """Of chunks; the last one may be shorter."""
    whole = len(change) // CHUNK * CHUNK
    chunks, rest = change[:whole].reshape(-1, CHUNK), change[whole:]
    squares = np.einsum("kc,kc->k", chunks, chunks)
    return np.sqrt(np.append(squares, rest @ rest) if len(rest) else squares)


def _inner_products(values: Sequence[Values], before: Values) -> Array:
    """Of the changes, in float64: squares of large ones must not overflow."""
    products = np.zeros((len(values), len(values)))
    with np.errstate(invalid="ignore"):  # of a stranger's values, which need not be finite: it counts for nothing then
        for part in parts_of(before):
            changes = _changes(values, before, part).astype(np.float64)
            products += changes @ changes.T
    return products


def _changes(values: Sequence[Values], before: Values, part: slice) -> Values:
    changes = np.empty((len(values), len(before[part])), np.float32)
    for change, array in zip(changes, values, strict=True):
        np.subtract(array[part], before[part], out=change)
    return changes

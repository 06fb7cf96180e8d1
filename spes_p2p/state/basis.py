"""The subspace in which guests train a column, and the next one from what the column's last hand-out changed.

For each matrix [out, in] of a column a basis Q [in, r] with orthonormal columns. The first is noise; every later one
has, nearly, the leading right singular vectors of the change D: two power iterations with a QR each, from seeded noise.
So Q is a continuous function of D, and machines whose arithmetic differs in the last bits get nearly the same one. That
is enough: bits must be the same for what is committed, and that is what the owner hands out. Needs only numpy.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spes_p2p.ids import Hash
from spes_p2p.state.layout import Layout, Placed, Values

ITERATIONS = 2
FLOOR = 1e-6
"""So much noise is in each product: a change may have fewer directions than the basis."""


@dataclass(frozen=True)
class Basis:
    """Those of all matrices of a column, flat, one after the other; `mark` names the hand-out that they follow from."""

    mark: Hash
    values: Values


@dataclass(frozen=True)
class Coordinates:
    """What a guest trained in a column: [out, r] of each matrix, flat, in the basis named by `mark`."""

    mark: Hash
    values: Values


def first_basis(layout: Layout, column: int, mark: Hash) -> Basis:
    """Of a column that was never handed out."""
    found = [_orthonormal(_noise(placed, layout.guest_rank, mark)) for placed in layout.blocks[1 + column].tensors]
    return Basis(mark, _flat(found))


def next_basis(layout: Layout, column: int, mark: Hash, before: Values, after: Values) -> Basis:
    """Of a column that hand-out `mark` has changed; where it has not, or not to finite values, a new one of noise."""
    found = []
    for placed in layout.blocks[1 + column].tensors:
        part = slice(placed.offset, placed.offset + placed.tensor.size)
        change = np.subtract(after[part], before[part]).reshape(placed.tensor.shape)
        found.append(_leading(change, _noise(placed, layout.guest_rank, mark)))
    return Basis(mark, _flat(found))


def matrices(layout: Layout, column: int, values: Values) -> Iterator[tuple[Placed, NDArray[np.float32]]]:
    """Each matrix of a column with its basis [in, r]."""
    at = 0
    for placed in layout.blocks[1 + column].tensors:
        width = placed.tensor.shape[1]
        size = width * layout.guest_rank
        yield placed, values[at : at + size].reshape(width, layout.guest_rank)
        at += size


def basis_values(layout: Layout, column: int) -> int:
    """Values of all bases of a column."""
    return layout.guest_rank * sum(placed.tensor.shape[1] for placed in layout.blocks[1 + column].tensors)


def _leading(change: NDArray[np.float32], noise: NDArray[np.float32]) -> NDArray[np.float32]:
    size = float(np.abs(change).max()) if change.size else 0.0
    found = _orthonormal(noise)
    if not 0 < size < math.inf:
        return found
    scaled = np.divide(change, np.float32(size))  # tiny changes have squares that are nothing in fp32
    for _ in range(ITERATIONS):
        product = scaled.T @ (scaled @ found)
        found = _orthonormal(np.add(product, np.float32(FLOOR * np.abs(product).max()) * noise))
    return found


def _orthonormal(columns: NDArray[np.float32]) -> NDArray[np.float32]:
    """Q of the QR decomposition whose R has a positive diagonal: the only one, and so a continuous function."""
    q, r = np.linalg.qr(columns.astype(np.float64))
    signed: NDArray[np.float32] = (q * np.where(np.diagonal(r) < 0, -1.0, 1.0)).astype(np.float32)
    return signed


def _noise(placed: Placed, rank: int, mark: Hash) -> NDArray[np.float32]:
    """Uniform in (-1, 1), from raw integers of a counter: the same on all machines."""
    seed = hashlib.sha256(mark + placed.tensor.name.encode()).digest()[:16]
    raw = np.random.Philox(key=int.from_bytes(seed, "little")).random_raw(placed.tensor.shape[1] * rank)
    uniform = (raw >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1.0
    return uniform.astype(np.float32).reshape(placed.tensor.shape[1], rank)


def _flat(parts: list[NDArray[np.float32]]) -> Values:
    return np.concatenate([part.reshape(-1) for part in parts])

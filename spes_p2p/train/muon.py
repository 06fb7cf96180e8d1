"""Muon for the matrices of experts and attention, AdamW for everything else (`optimizer.name: muon`).

After Jordan et al., https://kellerjordan.github.io/posts/muon, and, for the size of a step and decay, Liu et al.,
arXiv 2502.16982. For each matrix W [m, n] with gradient G:

    M <- 0.95 M + G
    U <- orthogonalised (G + 0.95 M), by five Newton-Schulz iterations of a quintic polynomial
    W <- (1 - lr * weight_decay) W - lr * 0.2 * sqrt(max(m, n)) U

A matrix whose gradient is zero, such as those of an expert that no token went to, makes no step and keeps its M: made
orthogonal, what is left of M would be as large as ever, and in hundreds of steps take the expert where nobody wants it.

The factor makes a step about as large as one of AdamW, so that both take the same learning rate. Of state there is M
alone: 4 bytes a value instead of 8. The matrices of a step that have one shape are orthogonalised as one stack, in bf16
on CUDA: gate and up of an expert are, and those of attention in all layers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor

from spes_p2p.config.schema import OptimizerConfig
from spes_p2p.train.moment_store import MOMENTS, MOMENTUM, AdamW, Piece, Stored, unpacked

DECAY = 0.95
ITERATIONS = 5
COEFFICIENTS = 3.4445, -4.7750, 2.0315
STEP_SIZE = 0.2
STACK_VALUES = 2**24
"""Most values that are orthogonalised together: a few times as many are there while that is done."""


class Muon:
    """One kind of moments (see `moment_store.Kind`)."""

    def __init__(self, config: OptimizerConfig) -> None:
        self._config, self._adamw = config, AdamW(config)

    def fresh(self, values: Tensor, matrices: int = 0) -> Stored:
        if not matrices:
            return self._adamw.fresh(values)
        return {MOMENTUM: torch.zeros_like(values)}

    def stored(self, moments: Stored, matrices: int = 0) -> Stored:
        if not matrices or MOMENTUM in moments:
            return moments if MOMENTUM in moments else self._adamw.stored(moments)
        return {MOMENTUM: unpacked(moments)[MOMENTS[0]] / (1 - DECAY)}  # of a mean, the sum that it would be here

    def update(self, pieces: list[Piece], steps: int, lr: float) -> None:
        self._adamw.update([piece for piece in pieces if not piece.matrices], steps, lr)
        decay = 1 - lr * self._config.weight_decay
        by_shape: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for piece in pieces:
            if piece.matrices:
                gradient = piece.gradient.unflatten(0, (piece.matrices, -1))
                momentum = piece.moments[MOMENTUM].unflatten(0, (piece.matrices, -1))
                is_fed = torch.linalg.vector_norm(gradient, math.inf, dim=(1, 2), keepdim=True) > 0
                momentum.mul_(torch.where(is_fed, DECAY, 1.0)).add_(gradient)
                wanted = torch.addcmul(gradient, momentum, DECAY * is_fed)
                for values, matrix in zip(piece.values.chunk(piece.matrices), wanted):
                    by_shape[tuple(values.shape)].append((values, matrix))
        for shape, found in by_shape.items():
            size = lr * STEP_SIZE * math.sqrt(max(shape))
            for some in _stacks(found):
                steps_MRC = orthogonalised(torch.stack([matrix for _, matrix in some]))
                for (values, _), step in zip(some, steps_MRC):
                    values.mul_(decay).sub_(step.float(), alpha=size)


def orthogonalised(matrix_MRC: Tensor) -> Tensor:
    """A stack of matrices with their singular values made nearly one: between 0.7 and 1.2."""
    x = matrix_MRC / (torch.linalg.matrix_norm(matrix_MRC, keepdim=True) + 1e-7)
    x = x.bfloat16() if x.is_cuda else x
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if is_tall else x


def _stacks(found: list[tuple[Tensor, Tensor]]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    at_once = max(1, STACK_VALUES // found[0][1].numel())
    return (found[at : at + at_once] for at in range(0, len(found), at_once))

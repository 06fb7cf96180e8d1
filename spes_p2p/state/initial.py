"""The initial state of a run from a seed: the same bits on every machine, and any part of it alone.

Only the raw integers of the counter-based Philox4x64-10 generator (numpy, keyed and positioned explicitly), integer
arithmetic, and one exactly defined fp32 multiplication are used: no logarithm, no library's normal, nothing that
a compiler may round otherwise. This is protocol: the genesis manifest holds the root of what this makes.

A normal value i of tensor t (t counts through `Layout.tensors`, i through the tensor in row-major order), where
word(j, c, n) is 64-bit word n of what numpy's `Philox(key=(seed, 4 t + j), counter=c)` gives first:

    candidate         S = the sum of the twelve 16-bit integers in word(k, i // 4, i % 4), k = 0, 1, 2, less 6 * 65535
    second candidate  where |S| > 3 * 65536: the same from word(3, i, k), k = 0, 1, 2, clamped to +-3 * 65536
    value             fp32(S) * fp32(init_std / 65536); S is exact in fp32, the product is rounded once

S / 65536 has mean 0 and standard deviation 1 (to 1e-9): the Irwin-Hall distribution of twelve uniforms, whose
distribution function is nowhere further than 0.0024 from the normal's. Its kurtosis is 2.9 instead of 3; 0.20% lie
beyond 3 sigma (normal: 0.27%). After the cut 4e-6 of the values are exactly +-3 sigma, and the standard deviation is
0.990 of init_std (a cut normal's: 0.9866).
"""

from __future__ import annotations

import numpy as np
from numpy.random import Philox
from numpy.typing import NDArray

from spes_p2p.state.layout import Layout, StateTensor, Tile, Values
from spes_p2p.state.version import DTYPE

_CHUNK = 2**15  # values made at a time: fits the processor's cache
_SIGMA = 65536
_CUT = 3 * _SIGMA
_MEAN = 12 * 65535 // 2
_PAIRS = np.uint64(0x0000FFFF0000FFFF)
_LOW = np.uint64(0xFFFFFFFF)
_16, _32 = np.uint64(16), np.uint64(32)


class InitialState:
    """The initial values of a run: a block source, and a source of single tiles for `StateStore.create_initial`."""

    def __init__(self, layout: Layout, seed: int, init_std: float) -> None:
        self.layout = layout
        self.seed = seed
        self.init_std = init_std
        self._indices = {tensor.name: index for index, tensor in enumerate(layout.tensors)}

    def block(self, index: int) -> Values:
        """All values of a block, flat fp32; for large blocks rather call the object with one tile after the other."""
        return self._values(index, 0, self.layout.blocks[index].size)

    def __call__(self, tile: Tile) -> Values:
        """The values of one tile, flat fp32."""
        return self._values(tile.block, tile.start, tile.stop)

    def _values(self, block: int, start: int, stop: int) -> Values:
        values = np.empty(stop - start, DTYPE)
        for placed in self.layout.blocks[block].tensors:
            first, last = max(start, placed.offset), min(stop, placed.offset + placed.tensor.size)
            if first < last:
                self._fill(values[first - start : last - start], placed.tensor, first - placed.offset)
        return values

    def _fill(self, out: Values, tensor: StateTensor, offset: int) -> None:
        if tensor.init != "normal":
            out[:] = 1.0 if tensor.init == "ones" else 0.0
            return
        scale = np.float32(self.init_std / _SIGMA)
        for at in range(0, out.size, _CHUNK):
            part = out[at : at + _CHUNK]
            sums = cut_sums(self.seed, self._indices[tensor.name], offset + at, part.size)
            np.multiply(sums.astype(np.float32), scale, out=part)


def cut_sums(seed: int, tensor_index: int, start: int, count: int) -> NDArray[np.int32]:
    """The integers S of values [start, start + count) of a tensor: standard deviation 65536, cut at three of it."""
    words = [_philox(seed, 4 * tensor_index + k, start // 4) for k in range(3)]
    sums = _sums([generator.random_raw(start % 4 + count)[start % 4 :] for generator in words])
    beyond = np.flatnonzero(np.abs(sums) > _CUT)
    if beyond.size:
        second = _second_words(seed, tensor_index, start, beyond)
        sums[beyond] = np.clip(_sums(list(second)), -_CUT, _CUT)
    return sums


def _philox(seed: int, stream: int, block: int) -> Philox:
    return Philox(key=np.array([seed, stream], np.uint64), counter=block)


def _second_words(seed: int, tensor_index: int, start: int, places: NDArray[np.intp]) -> NDArray[np.uint64]:
    """Words 0, 1, 2 of the second candidates' blocks, shape [3, places]."""
    words = np.empty((len(places), 3), np.uint64)
    generator, at = _philox(seed, 4 * tensor_index + 3, start), 0
    for row, place in enumerate(places.tolist()):
        generator.advance(place - at)
        words[row] = generator.random_raw(3)
        at = place + 1
    return np.ascontiguousarray(words.T)


def _sums(words: list[NDArray[np.uint64]]) -> NDArray[np.int32]:
    """The twelve 16-bit integers of three words added up, less their mean; two 32-bit lanes hold the sums exactly."""
    lanes = np.zeros_like(words[0])
    for word in words:
        lanes += word & _PAIRS
        lanes += (word >> _16) & _PAIRS
    return ((lanes >> _32) + (lanes & _LOW)).astype(np.int32) - np.int32(_MEAN)

"""An independent account of rounds with lossy codecs: what was encoded, what is kept, and what must come out of it.

Written from docs/protocol.md alone; shares no code with the package. Codecs are loops over blocks on plain numbers;
`Ledger` follows every peer's residuals from round to round. All arithmetic is fp32 in the order that the protocol
gives, so results are compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float32]
Key = tuple[str, int]
"""(peer, tile id)"""


def bf16(values: Values) -> Values:
    """Rounded to the nearest bf16 number, ties to even."""
    bits = values.astype("<f4").view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16
    return rounded.astype(np.uint32).view(np.float32)


def scale_of(values: Values, largest: int) -> np.float32:
    """The least bf16 number that is not below the largest size over `largest`."""
    exact = np.abs(values).max() / np.float32(largest)
    near = bf16(np.array([exact], np.float32))
    if near[0] < exact:
        near = (near.view(np.uint32) + np.uint32(1 << 16)).view(np.float32)
    return np.float32(near[0])


def rounded(values: Values, largest: int) -> Values:
    """Each value as a whole number of scales, as far as `largest`."""
    scale = scale_of(values, largest)
    if scale == 0:
        return np.zeros_like(values)
    return np.clip(np.rint(values / scale), -largest, largest).astype(np.float32) * scale


def in_blocks(values: Values, size: int, through: Callable[[Values], Values]) -> Values:
    parts = [through(values[at : at + size]) for at in range(0, len(values), size)]
    return np.concatenate(parts)


def total(values: Values) -> np.float32:
    """Of a whole block, zeros at its end if it is shorter: halves are added until one value is left."""
    padded = np.zeros(128, np.float32)
    padded[: len(values)] = values
    while len(padded) > 1:
        padded = padded[: len(padded) // 2] + padded[len(padded) // 2 :]
    return np.float32(padded[0])


def three_levels(values: Values) -> Values:
    def mean_of(chosen: NDArray[np.bool_]) -> np.float32:
        return np.float32(total(np.where(chosen, sizes, 0)) / np.float32(np.count_nonzero(chosen) or 1))

    sizes = np.abs(values)
    first = sizes > np.float32(0.75) * mean_of(sizes > 0)
    chosen = sizes > mean_of(first) / np.float32(2)
    level = bf16(np.array([mean_of(chosen)], np.float32))[0]
    return np.where(chosen, np.sign(values) * level, np.float32(0)).astype(np.float32)


THROUGH: dict[str, Callable[[Values], Values]] = {
    "bf16": bf16,
    "int8": lambda values: in_blocks(values, 128, lambda block: rounded(block, 127)),
    "int4": lambda values: in_blocks(values, 32, lambda block: rounded(block, 7)),
    "ternary": lambda values: in_blocks(values, 128, three_levels),
}
"""What arrives of a change."""


def nesterov(mean: Values, before: Values, v: Values, lr: float, momentum: float) -> tuple[Values, Values]:
    """(new values, new momentum) of the outer optimizer."""
    d = mean - before
    v = v * np.float32(momentum) + d
    after = np.asarray(before + (v * np.float32(momentum) + d) * np.float32(lr), np.float32)
    return after, v


@dataclass
class Ledger:
    """The residuals of all peers. `tiles[id]` is (block, start, stop); `codecs[block]` the codec of a block."""

    tiles: Sequence[tuple[int, int, int]]
    codecs: Sequence[str]
    sent: dict[Key, Values] = field(default_factory=dict)
    handed: dict[Key, Values] = field(default_factory=dict)

    def round(self, parent: Any, child: Any, before: Mapping[int, Values], brought: Mapping[Any, Any]) -> list[Values]:
        """The blocks after manifest `child`, before its merge, from the blocks `before`.

        `parent` and `child` are manifests, `brought[peer][block]` the values that a peer brought into the round.
        """
        after = [np.array(before[block]) for block in range(len(self.codecs))]
        weights = {entry.peer: entry.tokens for entry in child.roster}
        for piece in child.slices:
            owners: Sequence[str] = parent.ownership[piece.block - 1] if piece.block else ()
            sole = tuple(owners) == (piece.reducer,)
            for tile_id in range(piece.first_tile, piece.first_tile + piece.tiles):
                block, start, stop = self.tiles[tile_id]
                part = slice(start, stop)
                old = before[block][part]
                values = [self._heard(peer, piece.reducer, tile_id, old, brought) for peer in piece.contributors]
                mean = self._mean(values, [weights[peer] for peer in piece.contributors])
                after[block][part] = self._handed_out(piece, tile_id, mean, old, sole)
                if len(owners) == 1 and not sole:  # what it was ahead was in what it brought
                    self.handed.pop((owners[0], tile_id), None)
        self._follow(parent.ownership, child.ownership)
        return after

    def forget(self, peer: str, slices: Sequence[Any]) -> None:
        """A peer ended with what these slices left."""
        for piece in slices:
            for tile_id in range(piece.first_tile, piece.first_tile + piece.tiles):
                if peer in piece.contributors:
                    self.sent.pop((peer, tile_id), None)
                if peer == piece.reducer:
                    self.handed.pop((peer, tile_id), None)

    def _follow(self, before: Sequence[Sequence[str]], after: Sequence[Sequence[str]]) -> None:
        """An owner's residuals end with its ownership; what its one owner was ahead is unsent work beside a second.

        Who reduces for the owners keeps what it handed out of their mean, whoever they are.
        """
        for tile_id, (block, _, _) in enumerate(self.tiles):
            if block == 0:
                continue
            old, new = tuple(before[block - 1]), tuple(after[block - 1])
            for kept in (self.sent, self.handed):
                helps = [] if kept is self.sent else [peer for peer, _ in kept if peer not in old]
                for peer in [peer for peer, at in kept if at == tile_id and peer not in (*new, *helps)]:
                    del kept[peer, tile_id]
            if len(old) == 1 and old[0] in new and new != old and (old[0], tile_id) in self.handed:
                ahead = self.handed.pop((old[0], tile_id))
                unsent = self.sent.get((old[0], tile_id))
                self.sent[old[0], tile_id] = ahead if unsent is None else ahead + unsent

    def _heard(self, peer: str, reducer: str, tile_id: int, before: Values, brought: Mapping[Any, Any]) -> Values:
        """A peer's values, as the reducer has them; its own are not rounded."""
        block, start, stop = self.tiles[tile_id]
        values = np.array(brought[peer][block][start:stop])
        if self.codecs[block] == "fp32":
            return values
        kept = self.sent.pop((peer, tile_id), np.zeros_like(values))
        if peer == reducer:
            return values + kept
        change = (values - before) + kept
        arrives = THROUGH[self.codecs[block]](change)
        self.sent[peer, tile_id] = change - arrives
        return arrives + before

    def _mean(self, values: Sequence[Values], weights: Sequence[int]) -> Values:
        if len(values) == 1:
            return values[0]
        mean = values[0] * np.float32(weights[0] / sum(weights))
        for value, weight in zip(values[1:], weights[1:], strict=True):
            mean = mean + value * np.float32(weight / sum(weights))
        return mean

    def _handed_out(self, piece: Any, tile_id: int, mean: Values, before: Values, sole: bool) -> Values:
        codec = self.codecs[piece.block]
        if codec == "fp32":
            return mean
        kept = self.handed.get((piece.reducer, tile_id))
        change = mean - before
        if kept is not None and not sole:
            change = change + kept
        arrives = THROUGH[codec](change)
        self.handed[piece.reducer, tile_id] = change - arrives
        return arrives + before

    def ahead(self, peer: str, block: int, committed: Values) -> Values:
        """What the one owner of a column trains on."""
        values = np.array(committed)
        for tile_id, (tile_block, start, stop) in enumerate(self.tiles):
            if tile_block == block and (peer, tile_id) in self.handed:
                values[start:stop] += self.handed[peer, tile_id]
        return values

"""The arithmetic of a slice: from what contributors send to the mean of those that are fit, as it is handed out.

Who reduces a slice, who makes it again and who checks a proof of fraud do the same here. Plain functions over values;
whom to ask, and where values lie, is decided elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from spes_p2p.consensus.manifest import Contribution, Slice
from spes_p2p.consensus.rules import RunRules
from spes_p2p.ids import Hash, PeerId
from spes_p2p.state.hashes import hash_tile
from spes_p2p.state.layout import Layout, Tile, Values
from spes_p2p.state.staging import TileData
from spes_p2p.state.version import DTYPE, bytes_of
from spes_p2p.sync.clipping import clipped_mean, opposed
from spes_p2p.sync.coding import changed_values, encoded_change
from spes_p2p.sync.reduce import LARGEST_ENCODED, screen, weighted_mean

Made = tuple[TileData, Values | None]
"""A tile to hand out, and what of the mean is not in there."""


def parts_of(tiles: Sequence[Tile]) -> list[slice]:
    """Where each of a slice's tiles lies among its values."""
    return [slice(tile.start - tiles[0].start, tile.stop - tiles[0].start) for tile in tiles]


def sent_values(layout: Layout, tiles: Sequence[Tile], data: memoryview, before: Values) -> Values:
    """The values that a contribution to a slice stands for; `before`: the committed ones."""
    codec = layout.codec_of(tiles[0].block)
    if codec == "fp32":
        return np.frombuffer(data, DTYPE)
    values, at = np.empty_like(before), 0
    for tile, part in zip(tiles, parts_of(tiles), strict=True):
        end = at + layout.wire_bytes(tile)
        values[part] = changed_values(codec, data[at:end], before[part])
        at = end
    return values


def unfit(
    rules: RunRules, layout: Layout, piece: Slice, roster: Mapping[PeerId, Contribution],
    found: Mapping[PeerId, Values], before: Values,
) -> dict[PeerId, str]:  # fmt: skip
    """Whose values stay out of the mean, each with the reason."""
    bounded = layout.codec_of(piece.block) != "fp32" or layout.has_momentum or rules.clips
    largest = LARGEST_ENCODED if bounded else math.inf
    rounds = rules.rounds_between(piece)
    alike, claimed = dict.fromkeys(roster, 1), {peer: entry.steps for peer, entry in roster.items()}
    if rules.clips:  # claims are not to be believed
        refused = screen(found, before, alike, largest)
    elif rounds == 1:
        refused = screen(found, before, claimed, largest)
    else:  # of a turn only the last round's steps are known: a fast peer's are many, a leaver's one
        by_claim = screen(found, before, claimed, largest, rounds)
        refused = {p: why for p, why in screen(found, before, alike, largest, rounds).items() if p in by_claim}
    if rules.clips:
        refused |= opposed({peer: own for peer, own in found.items() if peer not in refused}, before)
    return refused


def mean_of(
    rules: RunRules, values: Sequence[Values], before: Values, tokens: Sequence[int], into: Values | None = None
) -> Values:
    """As the run averages; see `clipped_mean` and `weighted_mean`."""
    if rules.clips:
        return clipped_mean(values, before, tokens, into)
    return weighted_mean(values, tokens, into)


def hand_out(
    layout: Layout, tiles: Sequence[Tile], mean: Values, before: Values, unsent: Callable[[int], Values | None]
) -> list[Made]:
    """The tiles of a mean; none where a change is too large for a scale. `unsent(tile id)` goes along with it."""
    codec, places = layout.codec_of(tiles[0].block), list(zip(tiles, parts_of(tiles), strict=True))
    if codec == "fp32":
        return [(mean[part], None) for _, part in places]
    made = [encoded_change(codec, mean[part], before[part], unsent(tile.id)) for tile, part in places]
    return [*made] if all(np.isfinite(left).all() for _, left in made) else []


def hashes_of(made: Iterable[Made]) -> tuple[Hash, ...]:
    """Of tiles, by the bytes that travel."""
    return tuple(hash_tile(bytes_of(data) if isinstance(data, np.ndarray) else data) for data, _ in made)

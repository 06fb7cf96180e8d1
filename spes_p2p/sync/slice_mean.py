"""The arithmetic of a slice: from what contributors send to the mean of those that are fit, as it is handed out.

Plain functions over values; whom to ask, and where values lie, is decided elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from spes_p2p.consensus.manifest import Contribution, Slice
from spes_p2p.consensus.rules import RunRules
from spes_p2p.ids import PeerId
from spes_p2p.state.layout import Layout, Tile, Values
from spes_p2p.state.staging import TileData
from spes_p2p.state.version import DTYPE
from spes_p2p.sync.coding import changed_values, encoded_change
from spes_p2p.sync.reduce import LARGEST_ENCODED, far_off, useless, weighted_mean
from spes_p2p.sync.trusted_mean import trusted_mean

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
    found: Mapping[PeerId, Values], before: Values, strangers: Collection[PeerId] = (),
) -> dict[PeerId, str]:  # fmt: skip
    """Whose values stay out of the mean, each with the reason.

    Of `strangers` only what no sum can take: how much the rest counts, the mean says, and they judge nobody.
    """
    bounded = layout.codec_of(piece.block) != "fp32" or layout.has_momentum or rules.has_strangers
    refused = useless(found, LARGEST_ENCODED if bounded else math.inf)
    compared = {peer: own for peer, own in found.items() if peer not in strangers and peer not in refused}
    rounds = rules.rounds_between(piece)
    alike, claimed = dict.fromkeys(roster, 1), {peer: entry.steps for peer, entry in roster.items()}
    if rounds == 1:
        return refused | far_off(compared, before, claimed)
    # of a turn only the last round's steps are known: a fast peer's are many, a leaver's one
    by_claim = far_off(compared, before, claimed, rounds)
    return refused | {p: why for p, why in far_off(compared, before, alike, rounds).items() if p in by_claim}


def mean_of(
    values: Sequence[Values], before: Values, tokens: Sequence[int], trusted: Sequence[bool], into: Values | None = None
) -> tuple[Values, tuple[float, ...]]:
    """The mean, and of each contributor how much of what it gave counted, from 0 to 1.

    All are trusted: see `weighted_mean`; else `trusted_mean`. `into`: where to put it; one of `values` will do, and is
    lost then.
    """
    if all(trusted):
        return weighted_mean(values, tokens, into), (1.0,) * len(values)
    return trusted_mean(values, before, tokens, trusted, into)


def hand_out(
    layout: Layout, tiles: Sequence[Tile], mean: Values, before: Values, unsent: Callable[[int], Values | None]
) -> list[Made]:
    """The tiles of a mean; none where a change is too large for a scale. `unsent(tile id)` goes along with it."""
    codec, places = layout.codec_of(tiles[0].block), list(zip(tiles, parts_of(tiles), strict=True))
    if codec == "fp32":
        return [(mean[part], None) for _, part in places]
    made = [encoded_change(codec, mean[part], before[part], unsent(tile.id)) for tile, part in places]
    return [*made] if all(np.isfinite(left).all() for _, left in made) else []

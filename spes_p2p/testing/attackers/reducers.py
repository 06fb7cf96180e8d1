"""Attacks on what comes out of a round: a reducer that hands out something else than the mean."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from spes_p2p.ids import PeerId
from spes_p2p.state.layout import Values
from spes_p2p.testing.attackers.attack import Attack, Scene

ALTERED_SHARE = 0.01


class AlteredTile(Attack):
    """Turns around the sign of all values in one of a hundred tiles that it reduces."""

    name = "altered-tile"
    overrides = ("sync.tile_values=512",)

    def reduced(self, tile_id: int, values: Values, rng: np.random.Generator) -> Values:
        return -values if rng.random() < ALTERED_SHARE else values


class NoisyTiles(Attack):
    """Hands out noise for all that it reduces, as large as the values themselves."""

    name = "noisy-tiles"

    def reduced(self, tile_id: int, values: Values, rng: np.random.Generator) -> Values:
        size = float(np.linalg.norm(values)) / np.sqrt(len(values))
        return values + np.float32(size) * rng.standard_normal(len(values), np.float32)


class NamesLost(Attack):
    """Says of all honest contributors that they were lost, and averages what liars have handed in."""

    name = "names-lost"

    def takes(self, peer: PeerId, liars: Collection[PeerId]) -> bool:
        return peer in liars

    def values(self, scene: Scene) -> Values:
        return scene.base - scene.change


class NotFiniteTiles(Attack):
    """Hands out NaN for all that it reduces."""

    name = "nan-tiles"

    def reduced(self, tile_id: int, values: Values, rng: np.random.Generator) -> Values:
        return np.full_like(values, np.nan)

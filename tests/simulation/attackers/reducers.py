"""Attacks on what comes out of a round: a reducer that hands out something else than the mean."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import numpy as np

from spes_p2p.consensus.audits import FAR
from spes_p2p.consensus.membership import FAILED, PASSED
from spes_p2p.ids import PeerId
from spes_p2p.state.layout import Values
from spes_p2p.state.staging import TileData
from spes_p2p.sync.candidate_state import CandidateState
from tests.simulation.attackers.attack import Attack, Scene
from tests.simulation.attackers.contributions import Idle

ALTERED_SHARE = 0.01
QUIET = np.float32(0.85 * FAR)
"""Times the change of the mean, which is 0.95 of that of a contributor."""


def altered(
    attack: Attack, candidate: CandidateState, first_tile: int, tiles: Iterable[TileData], rng: np.random.Generator
) -> Iterator[TileData]:
    """What a liar stages in place of consecutive tiles. Coded ones stay as they are."""
    committed = candidate._store.version(candidate._tip)
    for tile, values in zip(candidate._layout.tiles[first_tile:], tiles, strict=False):
        base = committed.block(tile.block)[tile.start : tile.stop]
        yield attack.reduced(values, base, rng) if isinstance(values, np.ndarray) else values


class AlteredTile(Attack):
    """Turns around the sign of all values in one of a hundred tiles that it reduces."""

    name = "altered-tile"
    overrides = ("sync.tile_values=512",)

    def reduced(self, values: Values, base: Values, rng: np.random.Generator) -> Values:
        return -values if rng.random() < ALTERED_SHARE else values


class NoisyTiles(Attack):
    """Hands out noise for all that it reduces, as large as the values themselves."""

    name = "noisy-tiles"

    def reduced(self, values: Values, base: Values, rng: np.random.Generator) -> Values:
        return values + noise(values, rng)


class QuietTiles(Attack):
    """Hands out noise for all that it reduces, and goes just less far with it than is doubted."""

    name = "quiet-tiles"

    def reduced(self, values: Values, base: Values, rng: np.random.Generator) -> Values:
        return values + QUIET * noise(values - base, rng)


def noise(values: Values, rng: np.random.Generator) -> Values:
    """Normal, as long as `values` are."""
    size = float(np.linalg.norm(values)) / np.sqrt(len(values))
    return np.float32(size) * rng.standard_normal(len(values), np.float32)


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

    def reduced(self, values: Values, base: Values, rng: np.random.Generator) -> Values:
        return np.full_like(values, np.nan)


class FailsHonest(Attack):
    """Trains honestly, and says of all honest work that it was not done."""

    name = "fails-honest"

    def finding(self, is_liars: bool, finding: str | None) -> str | None:
        return finding if is_liars else FAILED


class PassesLiars(Idle):
    """Trains nothing, claims what it may, says of liars' work that it was done, and of honest work that it was not."""

    name = "passes-liars"

    def finding(self, is_liars: bool, finding: str | None) -> str | None:
        return PASSED if is_liars else FAILED

"""Whether a link can follow the run at all: what it gets while rounds pass, against what these hand out.

Everybody must have what a round hands out before the next one ends. A newcomer whose link takes longer for that than
a round takes comes ever further behind, however long donors keep a state for it. That is measured while it fetches,
and said once it is certain. Pure: numbers and time come in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spes_p2p.errors import LinkTooSlow
from spes_p2p.state.layout import Layout
from spes_p2p.sync.core.messages import Manifest

LEAST_ROUNDS = 3
"""Rounds that must have passed in a fetch before it says anything."""
CERTAIN = 2
"""So many fetches one after the other must say the same."""


@dataclass(frozen=True)
class Lap:
    """Where one fetch began, or ended: seconds of our clock, bytes received so far, the newest round of the others."""

    at: float
    received: int
    round: int


class KeepingUp:
    """The fetches of one newcomer."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._slow = 0

    def lap(self, begin: Lap, end: Lap, rounds: Sequence[Manifest]) -> None:
        """A fetch is over. `rounds`: some of the newest, which say what one hands out. Raises LinkTooSlow."""
        passed, seconds = end.round - begin.round, end.at - begin.at
        if passed < LEAST_ROUNDS or not rounds or seconds <= 0:
            return
        needed = sum(self._handed_out(manifest) for manifest in rounds) / len(rounds)
        rate, a_round = (end.received - begin.received) / seconds, seconds / passed
        self._slow = self._slow + 1 if needed > rate * a_round else 0
        if self._slow >= CERTAIN:
            raise LinkTooSlow(
                f"this link is too slow for the run: it received {_mbit(rate)}, and a round hands out "
                f"{needed / 1e6:.3g} MB in {a_round:.3g} s, which takes {_mbit(needed / a_round)}",
                fix="use a faster link or raise --max-download; or ask the organiser for a run with longer rounds "
                "(sync.steps_per_round) or fewer bytes (sync.codec)",
            )

    def _handed_out(self, manifest: Manifest) -> int:
        tiles = self._layout.tiles
        return sum(self._layout.wire_bytes(tiles[tile_id]) for piece in manifest.slices for tile_id in piece.tile_ids)


def _mbit(bytes_per_second: float) -> str:
    return f"{bytes_per_second * 8 / 1e6:.3g} Mbit/s"

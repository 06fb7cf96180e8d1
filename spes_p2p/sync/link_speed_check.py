"""Whether a link can follow the run at all: what it gets while rounds pass, against what these hand out.

Everybody must have what a round hands out before the next one ends. A newcomer whose link takes longer for that than
a round takes comes ever further behind, however long donors keep a state for it. That is measured while it fetches,
and said once it is certain. Pure: numbers and time come in.
"""

from __future__ import annotations

from collections.abc import Sequence

from spes_p2p.consensus.manifest import Manifest
from spes_p2p.errors import LinkTooSlow
from spes_p2p.state.layout import Layout

LEAST_ROUNDS = 3
"""Rounds that must have passed in a fetch before it says anything."""
CERTAIN = 2
"""How many consecutive fetches must be too slow before LinkTooSlow is raised."""


class LinkSpeedCheck:
    """The fetches of one newcomer. Rounds are counted by certificates that were checked, not by what peers say."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._known: tuple[float, int] | None = None
        self._rate = 0.0
        self._slow = 0

    def fetched(self, received: int, seconds: float) -> None:
        """A fetch is over, whole or not: so many bytes came in that time."""
        self._rate = received / seconds if seconds > 0 else 0.0

    def headers(self, now: float, round: int, newest: Sequence[Manifest]) -> None:
        """The chain is known up to `round`; `newest` are some of its last manifests. Raises LinkTooSlow.

        What was fetched since the last time is held against the rounds that have passed since.
        """
        known, rate = self._known, self._rate
        self._known, self._rate = (now, round), 0.0
        if known is None or not rate or round - known[1] < LEAST_ROUNDS:
            return
        needed = sum(self._handed_out(manifest) for manifest in newest) / len(newest)
        a_round = (now - known[0]) / (round - known[1])
        self._slow = self._slow + 1 if needed > rate * a_round else 0
        if self._slow >= CERTAIN:
            raise LinkTooSlow(
                f"this link is too slow for the run: it received {_mbit(rate)}, but a round hands out "
                f"{needed / 1e6:.3g} MB every {a_round:.3g} s, which needs {_mbit(needed / a_round)}",
                fix="use a faster link or raise --max-download; or ask the organiser for a run with longer rounds "
                "(sync.steps_per_round) or fewer bytes (sync.codec)",
            )

    def _handed_out(self, manifest: Manifest) -> int:
        """Bytes that keeping up takes at least: what follows from them, outer momentum too, is computed here."""
        tiles = (self._layout.tiles[tile_id] for piece in manifest.slices for tile_id in piece.tile_ids)
        return sum(map(self._layout.wire_bytes, tiles))


def _mbit(bytes_per_second: float) -> str:
    return f"{bytes_per_second * 8 / 1e6:.3g} Mbit/s"

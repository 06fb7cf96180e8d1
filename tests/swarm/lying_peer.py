"""The program as a liar runs it: `spes-p2p`, but what it hands in is what the lie named in LIE makes of it.

It trains as honest peers do. A lie sees a tile of what it trained and of what the round began with.
"""

from __future__ import annotations

import os
import runpy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from spes_p2p.ids import Hash
from spes_p2p.quickstart.processes import PROGRAM
from spes_p2p.state.layout import Layout, Tile, Values
from spes_p2p.state.version import Version
from spes_p2p.sync.outgoing import Outgoing
from tests.simulation.strangers import HEAD, ROW

LIE = "SPES_P2P_TEST_LIE"


def turned_sign(layout: Layout, tile: Tile, trained: Values, before: Values) -> Values:
    """The opposite of what it trained."""
    return before - (trained - before)


def one_row(layout: Layout, tile: Tile, trained: Values, before: Values) -> Values:
    """What it trained, but for one row of the head, which it turns around."""
    block, offset, (_, width) = layout.locate(HEAD)
    places = np.arange(tile.start, tile.stop) - (offset + ROW * width)
    return np.where((places >= 0) & (places < width) & (tile.block == block), -before, trained)


LIES: Mapping[str, Callable[[Layout, Tile, Values, Values], Values]] = {"turned-sign": turned_sign, "one-row": one_row}


def lie(name: str) -> None:
    """From now on this process lies to all who ask it for values, with a codec other than fp32."""
    encoded = Outgoing._encoded

    def handed_in(self: Outgoing, committed: Version, parent: Hash, values: Values, tile: Tile) -> bytes:
        made = LIES[name](self._layout, tile, values, committed.sound_values(tile.id))
        return encoded(self, committed, parent, made, tile)

    outgoing: Any = Outgoing
    outgoing._encoded = handed_in


if __name__ == "__main__":
    lie(os.environ[LIE])
    runpy.run_module(PROGRAM, run_name="__main__", alter_sys=True)

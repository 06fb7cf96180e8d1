"""What is looked at before this peer builds a state, or votes for one: reductions made again, and columns tried."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from spes_p2p.consensus.audits import Audits
from spes_p2p.consensus.manifest import Slice
from spes_p2p.consensus.trials import Trials


class Checks(NamedTuple):
    """Both, for those who wait for them."""

    audits: Audits
    trials: Trials

    def are_pending(self, slices: Iterable[tuple[Slice, bytes]]) -> bool:
        """Whether these slices, given with the hashes of their tiles and all staged, are still to be looked at."""
        return self.audits.is_pending() or self.trials.are_pending(slices)

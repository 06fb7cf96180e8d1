"""Bytes of disk that a peer takes at its worst moment: docs/disk-and-memory.md has the same table in words.

S the state, V its values without outer momentum, T what the peer trains, E all experts, each with 4 bytes a value; K
checkpoints are kept:

    most   3 S + E + 2 T + 3 T (K + 1)   states of two rounds and of the next, experts before a merge, snapshots,
                                         checkpoints and one that is being saved
    least  3 S + E + 2 T                 without room for a checkpoint

With an outer optimizer 3 V more, what these rounds handed out; with overlap T more, what was trained ahead. A
checkpoint that no version of the state store shares files with any more takes S + 3 T. Leaves out the run's data, of
which `--max-data-disk` is the bound.
"""

from __future__ import annotations

from dataclasses import dataclass

from spes_p2p.config.schema import Config
from spes_p2p.planning.sizes import Sizes
from spes_p2p.planning.traffic import stored_bytes

VALUE_BYTES = 4
_CHECKPOINT = 3
"""Values and two moments."""


@dataclass(frozen=True)
class DiskNeed:
    """Bytes. Below `least` no round can be committed here."""

    least: int
    most: int

    @classmethod
    def of(cls, config: Config, owned: int) -> DiskNeed:
        sizes = Sizes.of(config.model)
        values, trained = VALUE_BYTES * sizes.total, VALUE_BYTES * sizes.trained(owned)
        merged = VALUE_BYTES * sizes.experts if config.sync.merge_alpha > 0 else 0
        handed_out = values if config.sync.outer != "none" else 0
        snapshots = (3 if config.sync.overlap else 2) * trained
        least = 3 * (stored_bytes(config) + handed_out) + merged + snapshots
        checkpoints = _CHECKPOINT * trained * (config.output.keep_checkpoints + 1)
        return cls(least, least + checkpoints)

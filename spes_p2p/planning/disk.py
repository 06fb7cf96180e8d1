"""Bytes of disk that a peer takes at its worst moment: docs/disk-and-memory.md has the same table in words.

S the state, V its values without outer momentum, T what the peer trains, E all experts, each with 4 bytes a value; W
what a round hands out, as it is encoded; K checkpoints are kept:

    most   3 S + E + 2 T + 3 T (K + 1)   states of two rounds and of the next, experts before a merge, snapshots,
                                         checkpoints and one that is being saved
    least  3 S + E + 2 T                 without room for a checkpoint

With overlap T more, what was trained ahead. With an outer optimizer or a lossy codec 3 W more, what these rounds handed
out (in fp32 without an outer optimizer the state's own files are that, but for what a merge changed: E for each of them
that merged). With a lossy codec 3 R more, rounding errors of two rounds and of the next: no two share a file, and each
file is a whole block, of which one tile may be used. R is

    what contributions left out   T; of columns with one owner nothing, where all have one
    what means left out           T; most has room for all columns that a peer may reduce for others: V

A checkpoint that no version of the state store shares files with any more takes S + 3 T.
Leaves out the run's data, of which `--max-data-disk` is the bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from spes_p2p.codecs.sizes import Codec, bytes_a_value
from spes_p2p.config.schema import Config
from spes_p2p.planning.sizes import Sizes
from spes_p2p.planning.traffic import stored_bytes

VALUE_BYTES = 4
_CHECKPOINT = 3
"""Values and two moments."""
_ROUNDS = 3
"""Whose states are here: two, and the next."""


@dataclass(frozen=True)
class DiskNeed:
    """Bytes. Below `least` there are rounds that cannot be committed here."""

    least: int
    most: int

    @classmethod
    def of(cls, config: Config, owned: int) -> DiskNeed:
        sizes = Sizes.of(config.model)
        trained = VALUE_BYTES * sizes.trained(owned)
        handed_out = _handed_out_bytes(config, sizes)
        held = _ROUNDS * (stored_bytes(config) + handed_out)
        held += _before_merge_bytes(config, sizes) + _snapshot_bytes(config, sizes, owned)
        least, most = (held + _ROUNDS * left for left in _left_out_bytes(config, sizes, owned))
        return cls(least, most + _CHECKPOINT * trained * (config.output.keep_checkpoints + 1))


def _is_lossy(config: Config, codec: Codec) -> bool:
    return config.sync.enabled and codec != "fp32"


def _handed_out_bytes(config: Config, sizes: Sizes) -> int:
    """All values as they travel; those that do in fp32 only where the state's own files are not that."""
    return sum(
        round(values * bytes_a_value(codec))
        for values, codec in ((sizes.shared, config.sync.codec), (sizes.experts, config.sync.expert_codec))
        if config.sync.outer != "none" or _is_lossy(config, codec)
    )


def _before_merge_bytes(config: Config, sizes: Sizes) -> int:
    """Experts before the merge: of the next round, and of each before it whose state has the files it handed out."""
    sync = config.sync
    if not sync.enabled or not sync.merge_alpha:
        return 0
    ramp = ((0, sync.steps_per_round),) if isinstance(sync.steps_per_round, int) else sync.steps_per_round
    steps = max(stage[1] for stage in ramp)
    keeps_files = sync.outer == "none" and not _is_lossy(config, sync.expert_codec)
    merged = min(_ROUNDS, math.ceil(_ROUNDS * steps / sync.merge_interval)) if keeps_files else 1
    return merged * VALUE_BYTES * sizes.experts


def _snapshot_bytes(config: Config, sizes: Sizes, owned: int) -> int:
    """Of what was trained, and for a moment of the one before."""
    count = 3 if config.sync.overlap else 2
    return count * VALUE_BYTES * sizes.trained(owned)


def _left_out_bytes(config: Config, sizes: Sizes, owned: int) -> tuple[int, int]:
    """What lossy codecs left out by the end of one round: with one owner a column, if all have one, and at most."""
    shared, column = (
        VALUE_BYTES * values * _is_lossy(config, codec)
        for values, codec in ((sizes.shared, config.sync.codec), (sizes.column, config.sync.expert_codec))
    )
    columns, are_sole = owned * column, config.swarm.target_replicas == 1
    reduced = columns if are_sole else sizes.num_experts * column  # others', where none of their owners can be dialled
    return 2 * shared + (1 if are_sole else 2) * columns, 2 * shared + columns + reduced

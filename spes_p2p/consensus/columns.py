"""Expert columns that rounds did not hand out: which are stale, which are lost with their owners, and how much work."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

from spes_p2p.consensus.manifest import Manifest


def stale_columns(expert_rounds: int, manifest: Manifest) -> tuple[int, ...]:
    """Columns that missed their turn: older than `sync.expert_rounds` rounds."""
    ages = enumerate(manifest.round - last for last in manifest.column_rounds)
    return tuple(column for column, age in ages if age >= expert_rounds)


def lost_columns(parent: Manifest, child: Manifest) -> tuple[int, ...]:
    """Columns that were not handed out in `child` and that not all owners still have."""
    pairs = enumerate(zip(parent.ownership, child.ownership, strict=True))
    lost = [column for column, (before, after) in pairs if not set(before) <= set(after)]
    return tuple(column for column in lost if child.column_rounds[column] < child.round)


def tokens_gone(before: Sequence[Manifest], child: Manifest, columns: Collection[int]) -> dict[int, int]:
    """By column, tokens that went into it after its last hand-out and are lost with the owners that do not keep it.

    `before` are the manifests up to the parent of `child`, oldest first, from the earliest of these hand-outs on.
    """
    gone: dict[int, int] = {}
    for column in columns:
        owners = set(before[-1].ownership[column]) - set(child.ownership[column])
        gone[column] = sum(
            entry.tokens
            for earlier, later in pairwise([*before, child])
            for entry in later.roster
            if later.round > child.column_rounds[column] and entry.peer in owners & set(earlier.ownership[column])
        )
    return {column: tokens for column, tokens in gone.items() if tokens}

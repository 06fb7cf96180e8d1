"""How much one contribution of a round counts for: in the means of slices, and in how far the global step moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median_low

from spes_p2p.consensus.manifest import Contribution

FEWEST = 3
"""Contributors of a slice that can be compared: of two that differ, nobody can say which one lies."""
MOST_OF_MEDIAN = 2
"""Where some may lie, nobody counts for more than this many times the median of a round."""


def weighed(roster: Sequence[Contribution], capped: bool) -> tuple[Contribution, ...]:
    """The roster with the tokens and steps that weigh: `capped` at twice the median, or as they were claimed.

    Claims are not proven: uncapped, one peer that claims much outweighs all others. What is credited stays as it is.
    """
    if not capped or not roster:
        return tuple(roster)
    most_tokens = MOST_OF_MEDIAN * median_low(entry.tokens for entry in roster)
    most_steps = MOST_OF_MEDIAN * median_low(entry.steps for entry in roster)
    return tuple(
        replace(entry, tokens=min(entry.tokens, most_tokens), steps=min(entry.steps, most_steps)) for entry in roster
    )


def next_step(step: int, roster: Sequence[Contribution], capped: bool = False) -> int:
    """The global step grows by the token-weighted mean of inner steps, rounded half up in integers (design 3.2)."""
    entries = weighed(roster, capped)
    moved = sum(entry.tokens * entry.steps for entry in entries)
    tokens = sum(entry.tokens for entry in entries)
    return step if tokens == 0 else step + (2 * moved + tokens) // (2 * tokens)

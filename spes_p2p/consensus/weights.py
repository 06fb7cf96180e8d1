"""How much one contribution of a round counts for: in the means of slices, and in how far the global step moves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median_low

from spes_p2p.consensus.manifest import Contribution
from spes_p2p.consensus.membership import Member, weightless

FEWEST = 3
"""Contributors of a slice that can be compared: of two that differ, nobody can say which one lies."""
MOST_OF_MEDIAN = 2
"""Where some may lie, nobody counts for more than this many times the median of a round."""


def weighed(roster: Sequence[Contribution], capped: bool, members: Iterable[Member] = ()) -> tuple[Contribution, ...]:
    """The roster with the tokens and steps that weigh: `capped` at twice the median, or as they were claimed.

    Claims are not proven: uncapped, one peer that claims much outweighs all others. What is credited stays as it is.
    Of `members`, those of the parent, some are on probation: what they bring weighs half, or nothing.
    """
    members = tuple(members)
    waiting = weightless(members)
    counting = [entry for entry in roster if entry.peer not in waiting]
    if not capped or not counting:
        return tuple(replace(entry, tokens=0) if entry.peer in waiting else entry for entry in roster)
    most_tokens = MOST_OF_MEDIAN * median_low(entry.tokens for entry in counting)
    most_steps = MOST_OF_MEDIAN * median_low(entry.steps for entry in counting)
    halved = {member.peer for member in members if member.probation} - waiting

    def tokens(entry: Contribution) -> int:
        if entry.peer in waiting:
            return 0
        most = min(entry.tokens, most_tokens)
        return max(1, most // 2) if entry.peer in halved else most

    return tuple(replace(entry, tokens=tokens(entry), steps=min(entry.steps, most_steps)) for entry in roster)


def next_step(step: int, roster: Sequence[Contribution], capped: bool = False, members: Iterable[Member] = ()) -> int:
    """The global step grows by the token-weighted mean of inner steps, rounded half up in integers (design 3.2)."""
    entries = weighed(roster, capped, members)
    moved = sum(entry.tokens * entry.steps for entry in entries)
    tokens = sum(entry.tokens for entry in entries)
    return step if tokens == 0 else step + (2 * moved + tokens) // (2 * tokens)

"""How much one contribution of a round counts for: in the means of slices, and in how far the global step moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median_low

from spes_p2p.consensus.manifest import Contribution
from spes_p2p.consensus.membership import EVERYBODY, Admission


def weighed(roster: Sequence[Contribution], admission: Admission = EVERYBODY) -> tuple[Contribution, ...]:
    """The roster with the tokens and steps that weigh: of strangers at most the (lower) median of the trusted.

    Claims are not proven. What is credited stays as it is.
    """
    trusted = [entry for entry in roster if admission.is_trusted(entry.peer)]
    if len(trusted) == len(roster):
        return tuple(roster)
    most_tokens = median_low(entry.tokens for entry in trusted) if trusted else 0
    most_steps = median_low(entry.steps for entry in trusted) if trusted else 0
    return tuple(
        entry
        if admission.is_trusted(entry.peer)
        else replace(entry, tokens=min(entry.tokens, most_tokens), steps=min(entry.steps, most_steps))
        for entry in roster
    )


def next_step(step: int, roster: Sequence[Contribution], admission: Admission = EVERYBODY) -> int:
    """The global step grows by the token-weighted mean of inner steps, rounded half up in integers (design 3.2)."""
    entries = weighed(roster, admission)
    moved = sum(entry.tokens * entry.steps for entry in entries)
    tokens = sum(entry.tokens for entry in entries)
    return step if tokens == 0 else step + (2 * moved + tokens) // (2 * tokens)

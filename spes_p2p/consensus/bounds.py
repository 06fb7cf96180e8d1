"""Bounds of the numbers and words that others tell of themselves. What a round makes of them stands elsewhere."""

from __future__ import annotations

from dataclasses import replace

from spes_p2p.consensus.membership import LINK_CLASSES
from spes_p2p.consensus.messages import Intent, Work

MAX_COUNT = 2**53
"""Of tokens, steps or sequences that a status tells of."""
MAX_STEP_SECONDS = 86_400.0
MAX_TRAINED_SECONDS = 366 * 86_400.0
MAX_UPLINK = 2**40
"""Bytes a second."""


def is_sane_work(work: Work) -> bool:
    """Whether every number is one that a peer can honestly tell."""
    counts = (work.tokens, work.steps, work.sequences, work.expected_tokens)
    return (
        0 <= min(counts) <= max(counts) < MAX_COUNT
        and 0 <= work.seconds <= MAX_TRAINED_SECONDS  # false for NaN
        and 0 <= work.ready_in_seconds <= MAX_STEP_SECONDS
    )


def is_sane_intent(intent: Intent, columns: int) -> bool:
    """Whether it claims no more than there is, and says nothing that cannot be."""
    named = [*intent.claims, *intent.releases]
    return (
        len(named) == len({*named})
        and all(0 <= column < columns for column in named)
        and intent.link_class in LINK_CLASSES
        and 0 <= intent.uplink_bytes_per_second <= MAX_UPLINK
    )


def told(work: Work) -> Work:
    """Our own work as we announce it, within bounds: after days of sleep, others must still accept our statuses."""
    if is_sane_work(work):
        return work
    seconds = min(max(work.seconds, 0.0), MAX_TRAINED_SECONDS)
    return replace(work, seconds=seconds, ready_in_seconds=min(max(work.ready_in_seconds, 0.0), MAX_STEP_SECONDS))

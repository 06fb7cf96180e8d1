"""The phase of a round as one peer sees it, as one word. Pure."""

from __future__ import annotations

from spes_p2p.consensus.state import RoundState
from spes_p2p.observe.live import EXCHANGING, READY, TRAINING, VOTING


def phase_of(current: RoundState) -> str:
    """Where a round stands, by what is known of it here."""
    if current.vote.heard.proposals:
        return VOTING
    if current.plan is not None:
        return EXCHANGING
    return READY if current.work.ready else TRAINING


def slices_done(current: RoundState) -> tuple[int, int]:
    """(slices that are here, slices of the plan)."""
    plan = current.plan
    if plan is None:
        return 0, 0
    return min(len(current.staged), len(plan.value.slices)), len(plan.value.slices)

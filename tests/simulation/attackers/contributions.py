"""Attacks on what goes into a round: values that were not trained, work that was not done, values left out."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from spes_p2p.consensus.messages import Work
from spes_p2p.ids import PeerId
from spes_p2p.state.layout import Values
from tests.simulation.attackers.attack import Attack


class NotFinite(Attack):
    """Hands in NaN."""

    name = "nan"

    def values(self, trained: Values, base: Values) -> Values:
        return np.full_like(base, np.nan)


class Idle(Attack):
    """Trains nothing, and claims as many tokens and steps as the rules let anybody."""

    name = "claimed-work"

    def values(self, trained: Values, base: Values) -> Values:
        return base

    def work(self, work: Work, most_steps: int) -> Work:
        each = max(1, work.steps)
        return replace(
            work,
            steps=most_steps,
            tokens=work.tokens * most_steps // each,
            sequences=work.sequences * most_steps // each,
        )


class ClaimedFlip(Idle):
    """Claims as much as it may, and hands in the opposite of what it trained."""

    name = "claimed-flip"

    def values(self, trained: Values, base: Values) -> Values:
        return base - (trained - base)


class NamesLost(Attack):
    """As a reducer, says of all honest contributors that they were lost, and averages what liars have handed in."""

    name = "names-lost"

    def takes(self, peer: PeerId, liars: Collection[PeerId]) -> bool:
        return peer in liars

    def values(self, trained: Values, base: Values) -> Values:
        return base - (trained - base)

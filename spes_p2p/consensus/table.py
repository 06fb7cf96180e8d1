"""The table of rules of a round: what is tried after each event, in which order, and in which situation.

After each event the rules are gone through from the top; one that fires changes the state, and they are gone through
again, until none fires. A rule is looked at only in a situation that has all that it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from spes_p2p.consensus.parts import Parts
from spes_p2p.consensus.state import State

OPEN = 1
"""Our round is not decided, as far as we know."""
VOTER = 2
"""We are an elector that can vote (see `Leadership.can_vote`)."""
LEADING = 4
"""We may act as leader of our ballot."""
PLANNED = 8
UNPLANNED = 16
"""There is no plan for this round yet."""
WRITABLE = 32
"""The disk takes what is staged."""
TICK = 64
"""Time passed: not tried when a message came."""


Try = Callable[[float], bool]
"""Tries a rule at a time; whether it fired."""


class Rule(NamedTuple):
    """`needs` is the sum of what the situation must have; `of` is the method of a part that tries the rule."""

    name: str
    needs: int
    of: Callable[[Parts], Try]


RULES = (
    Rule("adopt", WRITABLE, lambda parts: parts.following.adopt),
    Rule("follow", WRITABLE, lambda parts: parts.following.follow),
    Rule("vote", 0, lambda parts: parts.voting.vote),
    Rule("certify", OPEN, lambda parts: parts.voting.certify),
    Rule("verify", WRITABLE, lambda parts: parts.staging.verify),
    Rule("build", OPEN + VOTER + LEADING + PLANNED, lambda parts: parts.reducing.build),
    Rule("reduce", OPEN + PLANNED + WRITABLE, lambda parts: parts.reducing.reduce),
    Rule("fetch", WRITABLE, lambda parts: parts.staging.fetch),
    Rule("renew", TICK, lambda parts: parts.renewing.renew),
    Rule("refetch", TICK, lambda parts: parts.staging.refetch),
    Rule("plan", OPEN + VOTER + LEADING + UNPLANNED, lambda parts: parts.round_plan.plan),
    Rule("stop_training", 0, lambda parts: parts.round_plan.stop_training),
    Rule("close", OPEN + VOTER + LEADING + UNPLANNED, lambda parts: parts.round_plan.close),
)
RULE_NAMES = tuple(rule.name for rule in RULES)
"""The order in which rules are tried after each event."""


class Table:
    """The rules over the parts of one peer."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._by_situation: dict[int, tuple[tuple[str, Try], ...]] = {}

    def fitting(self, situation: int) -> tuple[tuple[str, Try], ...]:
        """The rules to be tried in a situation, by name, in their order."""
        found = self._by_situation.get(situation)
        if found is None:
            found = tuple((rule.name, rule.of(self._parts)) for rule in RULES if rule.needs & situation == rule.needs)
            self._by_situation[situation] = found
        return found


def situation_of(state: State, parts: Parts, now: float) -> int:
    """All of the above that is so now, but TICK."""
    situation = UNPLANNED if state.round.plan is None else PLANNED
    if state.round.decided is None:
        situation |= OPEN
    if state.own.intent.can_vote:
        situation |= WRITABLE
        if parts.leadership.can_vote():
            situation |= VOTER
            if parts.leadership.leading():
                situation |= LEADING
    return situation

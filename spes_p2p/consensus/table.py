"""The table of rules of a round: what is tried after each event, in which order, and in which situation.

After each event the rules are gone through from the top; one that fires changes the state, and they are gone through
again, until none fires. A rule is looked at only in a situation that has all that it needs. The rules themselves stand
in `reducing.py`, `voting.py` and `round.py`, as methods `_rule_<name>`.
"""

from __future__ import annotations

from typing import NamedTuple

OPEN = 1
"""Our round is not decided, as far as we know."""
VOTER = 2
"""We are an elector that can vote (see `CoreState._can_vote`)."""
LEADING = 4
"""We may act as leader: of ballot 0, of one that a majority promised, or of a degraded set."""
PLANNED = 8
UNPLANNED = 16
"""There is a plan for this round, or not yet."""
ALONE = 32
TOGETHER = 64
"""We are one of those who make a degraded child, or not."""
WRITABLE = 128
"""The disk takes what is staged."""
TICK = 256
"""Time passed: not tried when a message came."""


class Rule(NamedTuple):
    """`needs` is the sum of what the situation must have."""

    name: str
    needs: int


RULES = (
    Rule("adopt", WRITABLE),
    Rule("take", OPEN + WRITABLE),
    Rule("follow", WRITABLE),
    Rule("degraded_certify", OPEN + VOTER + LEADING + ALONE),
    Rule("certify", OPEN),
    Rule("promise", OPEN + VOTER),
    Rule("next_ballot", OPEN + VOTER + TOGETHER),
    Rule("accept", OPEN + VOTER + TOGETHER),
    Rule("degraded_vote", OPEN + VOTER + ALONE),
    Rule("verify", WRITABLE),
    Rule("propose", OPEN + VOTER + LEADING),
    Rule("build", OPEN + VOTER + LEADING + PLANNED),
    Rule("reduce", OPEN + PLANNED + WRITABLE),
    Rule("fetch", WRITABLE),
    Rule("refetch", TICK),
    Rule("plan", OPEN + VOTER + LEADING + UNPLANNED),
    Rule("stop_training", 0),
    Rule("close", OPEN + VOTER + LEADING + UNPLANNED),
)
RULE_NAMES = tuple(rule.name for rule in RULES)
"""The order in which rules are tried after each event."""

"""Since when no live quorum is heard, and whether a peer itself can vote: the guard of every degraded commit.

An elector lives for our tip if it was heard of late, said that it can vote, and stands on our tip or one before it:
who is behind is not lost. Who has just started or woken up asks first what became of the run (*asking*). Pure: who is
heard is worked out elsewhere, time comes in.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from spes_p2p.consensus.timing import NEVER, Moment, Pace
from spes_p2p.ids import PeerId

FAILED_DEADLINES = 10
"""Who fails for so many deadlines to get the tiles of a proposal, or to catch up, says that
it cannot vote, and votes if it can all the same."""


@dataclass
class Liveness:
    """`quorum_at`: when a live quorum of the tip's electors was heard last, or when we came to stand on the tip.

    `asking_since` is set while we ask, `answered` who has answered; `asked_at` is when that ended. `failing_since` is
    since when what must be staged could not be. `was_full`: the disk had no room, and since then none for a state was
    seen, nor has a vote or commit found any.
    """

    quorum_at: Moment
    asking_since: Moment | None = None
    asked_at: Moment = NEVER
    failing_since: Moment | None = None
    was_full: bool = False
    answered: set[PeerId] = field(default_factory=set)
    has_slept: bool = False
    """We ask after sleep: what comes, but for answers, may have waited here all the while."""
    hears_quorum: bool = False
    """Whether a live quorum was heard as of the last event."""
    is_told: bool = False
    """Whether people were told that none was heard for long, since one was heard last."""

    def enter(self, now: float) -> None:
        """We stand on another tip."""
        self.quorum_at = now
        self.failing_since = None
        self.was_full = False

    def ask(self, now: float, has_slept: bool = False) -> None:
        """Starts to ask what became of the run, after a start or sleep, when silence does not mean anything yet."""
        self.has_slept = has_slept
        self.quorum_at = self.asking_since = now
        self.asked_at = NEVER
        self.failing_since = None
        self.answered.clear()

    def heard_quorum(self, now: float) -> None:
        self.quorum_at, self.asked_at, self.is_told = now, NEVER, False

    def note(self, members: Collection[PeerId], pace: Pace, now: float) -> bool:
        """Ends the asking when all `members` but us have answered, or after a deadline; whether it has ended now."""
        since = self.asking_since
        if now - self.asked_at > pace.deadline_seconds(0):
            self.asked_at = NEVER
        if since is None or (now - since <= pace.deadline_seconds(0) and not self.answered.issuperset(members)):
            return False
        self.asking_since, self.asked_at, self.has_slept = None, now, False
        self.answered.clear()
        return True

    def failed(self, now: float) -> None:
        """What must be staged could not be."""
        self.failing_since = now if self.failing_since is None else self.failing_since

    def can_be_counted_on(self, pace: Pace, now: float) -> bool:
        """Whether others can count on our vote: we are done asking, and what must be staged can be fetched and kept."""
        since = self.failing_since
        is_failing = since is not None and now - since > FAILED_DEADLINES * pace.deadline_seconds(0)
        return self.asking_since is None and not is_failing and not self.was_full

    def may_make(self, pace: Pace, now: float) -> bool:
        """Whether no live quorum was heard throughout the last W of our own running time."""
        return self.asking_since is None and now - self.quorum_at >= pace.degraded_wait_seconds()

    def may_take(self, pace: Pace, now: float) -> bool:
        """The same for a child that others made; at once for who has just asked, and heard no live quorum."""
        return self.may_make(pace, now) or (self.asked_at > NEVER and self.quorum_at < self.asked_at)

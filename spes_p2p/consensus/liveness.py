"""Whether a peer itself can vote, and whether it hears a quorum. Pure: who is heard is worked out elsewhere.

An elector lives for our tip if it was heard of late, said that it can vote, and stands on our tip or lower: who is
behind is not lost. Who has just started or woken up asks first what became of the run (*asking*).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from spes_p2p.consensus.timing import Moment, Pace
from spes_p2p.ids import PeerId

FAILED_DEADLINES = 10
"""Who fails for so many deadlines to get the tiles of a proposal, or to catch up, says that
it cannot vote, and votes if it can all the same."""


@dataclass
class Liveness:
    """`asking_since` is set while we ask, `answered` who has answered. `failing_since` is since when what must be
    staged could not be. `was_full`: the disk had no room, and since then none for a state was seen, nor has a vote or
    commit found any.
    """

    asking_since: Moment | None = None
    failing_since: Moment | None = None
    was_full: bool = False
    answered: set[PeerId] = field(default_factory=set)
    has_slept: bool = False
    """We ask after sleep: what comes, but for answers, may have waited here all the while."""
    hears_quorum: bool = False
    """Whether a live quorum was heard as of the last event."""
    missed_since: Moment | None = None
    """Since when none is heard, and we wait for one."""
    is_told: bool = False
    """Whether people were told that none is heard, since one was heard last."""

    def enter(self) -> None:
        """We stand on another tip."""
        self.failing_since = None
        self.was_full = False

    def ask(self, now: float, has_slept: bool = False) -> None:
        """Starts to ask what became of the run, after a start or sleep, when silence does not mean anything yet."""
        self.has_slept = has_slept
        self.asking_since = now
        self.failing_since = self.missed_since = None
        self.answered.clear()

    def note(self, members: Collection[PeerId], pace: Pace, now: float) -> bool:
        """Ends the asking when all `members` but us have answered, or after a deadline; whether it has ended now."""
        since = self.asking_since
        if since is None or (now - since <= pace.deadline_seconds(0) and not self.answered.issuperset(members)):
            return False
        self.asking_since, self.has_slept = None, False
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

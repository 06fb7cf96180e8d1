"""What one peer keeps in mind: whom it heard, and everything about the round on top of its tip. No behaviour."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from spes_p2p.consensus.actions import Build
from spes_p2p.consensus.messages import (
    Acceptance,
    Commit,
    DegradedVote,
    Manifest,
    Plan,
    Proposal,
    Report,
    Signed,
    Slice,
    Status,
    Work,
)
from spes_p2p.consensus.rules import Outcome
from spes_p2p.ids import NO_HASH, Hash, PeerId

MAX_NEWCOMERS = 64
MOST_VOTES = 8
"""Votes of a kind, and proposals, that are kept of one elector in a round; beside those that somebody is bound to."""
MOST_PLANS = 16
"""Plans of one elector that are taken up in a round; a leader makes one in each of its lives."""
MOST_TURNS = 64
"""A ballot may be so many turns of all electors ahead: deadlines double up to a cap, so it takes days to get there."""
MAX_SEEDS = 16
HOPELESS = 8
"""A proposal that could not be staged in so many tries gives way to another."""
EMPTY_WORDS = 2
"""So often the tiles of a report may be asked for in vain; once is enough of a peer that this has happened with."""
MOST_REMEMBERED = 256
"""Heads of others of which we remember whether they belong to our history."""
Key = tuple[int, int]
"""(first tile, tiles) of a slice."""
Heard = tuple[PeerId, ...]
"""The electors of a degraded proposal; empty for an ordinary one."""


@dataclass
class Contact:
    """The newest that was heard of one peer, and when by our clock: at all, and from itself.

    `furthest` is what its incarnation said before that binds it to more than `signed` does; `is_old` where it last said
    itself what is older than `signed`. Both are told to a peer that may have forgotten them.
    """

    signed: Signed[Status]
    at: float
    direct_at: float
    furthest: Signed[Status] | None = None
    is_old: bool = False

    @property
    def status(self) -> Status:
        return self.signed.value


@dataclass
class Wanted:
    """A slice to be staged: the hashes of its tiles, joined, and who has them surely."""

    piece: Slice
    hashes: bytes
    first: PeerId


@dataclass
class RoundState:
    """Everything about the child of one manifest; forgotten when it is committed.

    `mine` are slices of the plan that we may have to reduce, `index_of` the places of all in it.
    `reports` are those that brought values; `voids` the words of reducers that had none. `seen` is when a reducer of
    the plan last showed progress. `moved` counts signs of bytes moving here, `in_vain` tries to stage a proposal,
    `empty_words` those to fetch what a reducer reported of a slice. `reachable_at` is when the state of `decided` could
    be had last. `following`: somebody is being caught up with; a certified child of ours is adopted meanwhile.
    `offered`: degraded children that others made, and that may not be taken as yet.
    `borrowed`: seconds that were waited for bytes that move at others, by their word, since anything came of it here.
    """

    tip: Manifest
    head: Hash
    order: tuple[PeerId, ...]
    started_at: float
    progress_at: float
    work: Work = field(default_factory=Work)
    ready_at: float | None = None
    close_asked: bool = False
    closing: int = -1
    closed_at: float | None = None
    view: int = 0
    prepare: int = -1
    asked: bool = False
    moved: int = 0
    borrowed: float = 0.0
    plan: Signed[Plan] | None = None
    plan_at: float = 0.0
    mine: tuple[int, ...] = ()
    index_of: dict[Key, int] = field(default_factory=dict)
    reports: dict[int, Signed[Report]] = field(default_factory=dict)
    voids: dict[int, dict[PeerId, Signed[Report]]] = field(default_factory=dict)
    seen: dict[PeerId, float] = field(default_factory=dict)
    reducing: set[int] = field(default_factory=set)
    fetching: dict[Key, bytes] = field(default_factory=dict)
    failed: set[Key] = field(default_factory=set)
    staged: dict[Key, bytes] = field(default_factory=dict)
    missing: dict[Key, Wanted] | None = None
    building: Build | None = None
    outcome: tuple[Build, Outcome] | None = None
    proposals: dict[tuple[Heard, int], Signed[Proposal]] = field(default_factory=dict)
    verifying: Hash = NO_HASH
    verified: set[Hash] = field(default_factory=set)
    unfit: dict[Hash, int] = field(default_factory=dict)
    in_vain: Counter[Hash] = field(default_factory=Counter)
    empty_words: Counter[tuple[int, PeerId]] = field(default_factory=Counter)
    verify_after: float = 0.0
    own_vote: Signed[Acceptance] | None = None
    own_degraded: Signed[DegradedVote] | None = None
    votes: dict[tuple[int, Hash], dict[PeerId, Signed[Acceptance]]] = field(default_factory=dict)
    degraded_votes: dict[tuple[Heard, Hash], dict[PeerId, Signed[DegradedVote]]] = field(default_factory=dict)
    decided: Commit | None = None
    offered: dict[Hash, Commit] = field(default_factory=dict)
    reachable_at: float = 0.0
    adopting: bool = False
    following: bool = False
    sent: dict[PeerId, set[object]] = field(default_factory=dict)
    plans_of: dict[PeerId, int] = field(default_factory=dict)

    def words(self) -> Iterator[tuple[int, Signed[Report]]]:
        """All reports of the plan's slices, those that brought no values too."""
        yield from self.reports.items()
        for index, voids in self.voids.items():
            for report in voids.values():
                yield index, report

"""What one peer keeps in mind: of itself, of others, and of the round on top of its tip. No behaviour.

All of it is here, in plain dataclasses: it can be copied, written down and compared. A field that holds a time is
annotated `Moment`, one that holds a duration `Seconds`; nothing else is a float.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from spes_p2p.consensus.actions import Action, Build, Notice
from spes_p2p.consensus.certificate import CheckSignature
from spes_p2p.consensus.content import Content
from spes_p2p.consensus.electorate import Electorate
from spes_p2p.consensus.heard_votes import HeardVotes
from spes_p2p.consensus.liveness import Liveness
from spes_p2p.consensus.manifest import Contribution, Manifest, Slice
from spes_p2p.consensus.membership import Admission, Roll, newest_roll
from spes_p2p.consensus.messages import (
    Commit,
    DecayOrder,
    Declaration,
    Intent,
    Plan,
    Report,
    Sealer,
    Signed,
    Status,
    Work,
)
from spes_p2p.consensus.rules import Outcome, RunRules
from spes_p2p.consensus.timing import Moment, Pace, Seconds
from spes_p2p.consensus.vote import Vote
from spes_p2p.consensus.vote_events import Step
from spes_p2p.consensus.vote_record import VoteRecord
from spes_p2p.ids import NO_HASH, Hash, PeerId

MAX_NEWCOMERS = 64
MOST_FORMER = 64
"""Peers that are no members any more for which there is room beside those."""
MOST_READY = 16
"""What one member may say in a round that it trained: each of its lives says it once or twice."""
MOST_PLANS = 16
"""Plans of one elector that are taken up in a round; a leader makes one in each of its lives."""
MOST_TURNS = 64
"""A ballot may be so many turns of all electors ahead: deadlines double up to a cap, so it takes days to get there."""
MAX_SEEDS = 16
HOPELESS = 8
"""A proposal that could not be staged in so many tries gives way to another."""
MAX_FAILED_FETCHES = 2
"""Failed fetches after which a report is dropped; one is enough for a peer whose report was dropped before."""
MOST_REMEMBERED = 256
"""Tips of others of which we remember that they do not go before ours."""
MAX_NOTICE = 300
"""Characters of what is told to a person."""
T = TypeVar("T")
Key = tuple[int, int]
"""(first tile, tiles) of a slice."""


@dataclass(frozen=True)
class Identity:
    """Who this peer is, in which run, and how it signs and checks signatures.

    `organiser` signs as the run's organiser, where its key is here.
    """

    me: PeerId
    rules: RunRules
    sealer: Sealer
    check_signature: CheckSignature
    organiser: Sealer | None = None


@dataclass
class Contact:
    """The newest that was heard of one peer, and when by our clock: at all, and from itself.

    `furthest` is what its incarnation said before that binds it to more than `signed` does; `is_old` where it last said
    itself what is older than `signed`. Both are told to a peer that may have forgotten them.
    """

    signed: Signed[Status]
    at: Moment
    direct_at: Moment
    furthest: Signed[Status] | None = None
    is_old: bool = False

    @property
    def status(self) -> Status:
        return self.signed.value


@dataclass
class Own:
    """This peer: which life of it, what it wants, and what it said last.

    `commit` is the certificate and manifest of the tip where known. `uplink_bytes_per_second` is measured, 0 while
    unknown. `has_news`: it is the author of something that all should hear at once. `last_broadcast`: a change of it
    makes this peer speak to all. `secret`: nobody else can know what this peer draws.
    `keeps_states`: without, it follows certificates only, and stands where others have the state.
    """

    incarnation: int
    intent: Intent
    commit: Commit | None = None
    life: int = 0
    sequence: int = 0
    uplink_bytes_per_second: int = 0
    status: Signed[Status] | None = None
    last_broadcast: object = None
    has_news: bool = False
    secret: bytes = b""
    keeps_states: bool = True


@dataclass
class Others:
    """What is known of other peers, over all rounds.

    `told_round` is the newest round by the word of the bootstrap node, which need not have its state. `decay` is the
    organiser's word on the learning rate, `roll` its newest on who may vote and who is banned. `reply_due`: who hears
    from us at once. `refused_dial`: whose host said that the process is gone. `kept_waiting`: whose running step a
    round waited for in vain, until a round counts their work, or, where nobody lies, they are READY;
    `moving_in_vain`: whose moving bytes it waited for, until a slice of theirs comes. `withholding_peers`: whose
    tiles were asked for in vain; of them one try is enough, until one of theirs comes. `asked`, `asked_last`,
    `asked_in_vain`: whom we asked to catch up with, when, and how often for nothing. `ahead_since` is when somebody
    was first seen on a higher manifest. `lighter`: tips of others that do not go before ours, though they say so.
    `short_since`, `counted_since`, `lacking`: see `Renewing`. `voted_twice`: electors of whom people were told so.
    `silences`: of strangers whose values a reducer waited for in vain, how often in a row, and the round from which on
    plans count them again.
    `votes_before`: what was heard of the vote on our tip, in runs whose electors may lie. `named`: for how many rounds
    each was a member, of those who are and who were lately.
    """

    contacts: dict[PeerId, Contact] = field(default_factory=dict)
    seeds: tuple[PeerId, ...] = ()
    told_round: int = 0
    decay: Signed[DecayOrder] | None = None
    roll: Signed[Roll] | None = None
    reply_due: set[PeerId] = field(default_factory=set)
    refused_dial: set[PeerId] = field(default_factory=set)
    kept_waiting: set[PeerId] = field(default_factory=set)
    moving_in_vain: set[PeerId] = field(default_factory=set)
    withholding_peers: set[PeerId] = field(default_factory=set)
    asked: dict[PeerId, Moment] = field(default_factory=dict)
    asked_last: PeerId | None = None
    asked_in_vain: Counter[PeerId] = field(default_factory=Counter)
    ahead_since: Moment | None = None
    lighter: dict[Hash, None] = field(default_factory=dict)
    short_since: Moment | None = None
    counted_since: Moment | None = None
    lacking: str = ""
    voted_twice: set[PeerId] = field(default_factory=set)
    silences: dict[PeerId, tuple[int, int]] = field(default_factory=dict)
    votes_before: HeardVotes | None = None
    named: dict[PeerId, int] = field(default_factory=dict)


@dataclass
class SliceToStage:
    """A slice to be staged: the hashes of its tiles, joined, and who has them surely."""

    piece: Slice
    hashes: bytes
    first: PeerId


@dataclass
class RoundState:
    """Everything about the child of one manifest; forgotten when it is committed.

    `mine` are slices of the plan that we may have to reduce, `index_of` the places of all in it.
    `reports` are those that brought values; `empty_reports` those of reducers that had none. `seen` is when a reducer
    of the plan last showed progress. `moved` counts signs of bytes moving here, `in_vain` tries to stage a proposal,
    `failed_fetches` those to fetch what a reducer reported of a slice.
    `following`: somebody is being caught up with; a certified child of ours is adopted meanwhile.
    `heavier` is what we are going over to, `heavier_at` when something of it came last.
    `ready` is what members said that they trained, by the roster entry that follows from it.
    `deadlines`: since when each of the vote's runs. `contents` are manifests that are voted on, by their hashes;
    `refused` those that do not follow from the tip, or name tiles that no mean gives.
    `closed_at`: when we as its leader closed it, else as `first_closed_at`: when we stopped, or closed it, first.
    `extended_wait_seconds`: what was waited for bytes that move at others, by their word, since anything came of it.
    `has_told_votes`: one other elector has had `votes_before` from us.
    """

    tip: Manifest
    tip_hash: Hash
    vote: Vote
    started_at: Moment
    progress_at: Moment
    work: Work = field(default_factory=Work)
    ready_at: Moment | None = None
    ready: dict[Contribution, Signed[Declaration]] = field(default_factory=dict)
    close_asked: bool = False
    closing: int = -1
    closed_at: Moment | None = None
    first_closed_at: Moment | None = None
    deadlines: dict[tuple[int, Step], Moment] = field(default_factory=dict)
    moved: int = 0
    extended_wait_seconds: Seconds = 0.0
    plan: Signed[Plan] | None = None
    plan_at: Moment = 0.0
    mine: tuple[int, ...] = ()
    index_of: dict[Key, int] = field(default_factory=dict)
    reports: dict[int, Signed[Report]] = field(default_factory=dict)
    empty_reports: dict[int, dict[PeerId, Signed[Report]]] = field(default_factory=dict)
    seen: dict[PeerId, Moment] = field(default_factory=dict)
    reducing: set[int] = field(default_factory=set)
    fetching: dict[Key, bytes] = field(default_factory=dict)
    failed: set[Key] = field(default_factory=set)
    staged: dict[Key, bytes] = field(default_factory=dict)
    building: Build | None = None
    failed_builds: int = 0
    outcome: tuple[Build, Outcome] | None = None
    contents: dict[Hash, Content] = field(default_factory=dict)
    refused: set[Hash] = field(default_factory=set)
    verifying: Hash = NO_HASH
    verified: set[Hash] = field(default_factory=set)
    unfit: dict[Hash, int] = field(default_factory=dict)
    in_vain: Counter[Hash] = field(default_factory=Counter)
    failed_fetches: Counter[tuple[int, PeerId]] = field(default_factory=Counter)
    verify_after: Moment = 0.0
    decided: Commit | None = None
    adopting: bool = False
    following: bool = False
    heavier: Manifest | None = None
    heavier_at: Moment = 0.0
    sent: dict[PeerId, set[object]] = field(default_factory=dict)
    plans_of: dict[PeerId, int] = field(default_factory=dict)
    has_told_votes: bool = False

    def verified_roots(self) -> frozenset[Hash]:
        """The roots of the states that are verified."""
        return frozenset(self.contents[name].manifest.state_root for name in self.verified if name in self.contents)

    @property
    def order(self) -> tuple[PeerId, ...]:
        """The electors as they lead."""
        return self.vote.heard.electorate.order

    def all_reports(self) -> Iterator[tuple[int, Signed[Report]]]:
        """All reports of the plan's slices, those that brought no values too."""
        yield from self.reports.items()
        for index, empty in self.empty_reports.items():
            for report in empty.values():
                yield index, report


@dataclass
class State:
    """All that one peer knows. `electors` vote on the child of the tip, each in one incarnation.

    `out` are the actions that the event at hand has led to so far.
    """

    identity: Identity
    pace: Pace
    own: Own
    others: Others
    round: RoundState
    liveness: Liveness
    next_heartbeat: Moment
    last_event: Moment
    electors: dict[PeerId, int] = field(default_factory=dict)
    out: list[Action] = field(default_factory=list)

    @property
    def me(self) -> PeerId:
        return self.identity.me

    @property
    def rules(self) -> RunRules:
        return self.identity.rules

    @property
    def tip(self) -> Manifest:
        """The newest manifest whose state is committed here."""
        return self.round.tip

    @property
    def tip_hash(self) -> Hash:
        return self.round.tip_hash

    @property
    def record(self) -> VoteRecord:
        """What we have bound ourselves to for the child of the tip."""
        return self.round.vote.record

    @property
    def electorate(self) -> Electorate:
        """Who votes on the child of the tip."""
        return self.round.vote.heard.electorate

    def admission(self) -> Admission:
        """Who may take part in the child of our tip and vote on what follows it, by the newest roll that we know."""
        known = self.others.roll
        roll = newest_roll(self.tip.roll, known.value if known is not None else None)
        return self.rules.admission(roll, self.tip.round + 1)

    def is_member(self, by: Manifest | None = None) -> bool:
        """Whether the tip, or another manifest, names this incarnation."""
        own, members = self.own.incarnation, (by or self.tip).members
        return any(m.peer == self.me and m.incarnation == own for m in members)

    def bound_manifests(self) -> list[Manifest]:
        """Those whose state we have signed for, or know to be decided."""
        contents, decided = self.round.contents, self.round.decided
        signed = [contents[name].manifest for name in sorted(self.record.pinned) if name in contents]
        return signed + ([decided.manifest] if decided is not None else [])

    def is_bound(self, root: Hash) -> bool:
        """Whether this state must stay here: see `bound_manifests`."""
        return any(manifest.state_root == root for manifest in self.bound_manifests())

    def is_elector(self) -> bool:
        return self.electors.get(self.me) == self.own.incarnation

    def note_progress(self, now: float) -> None:
        """Notes that the round has made progress here, which restarts the deadline."""
        if self.round.plan is not None:
            self.pace.observe_quiet(now - self.round.progress_at)
        self.round.progress_at = now
        self.round.extended_wait_seconds = 0.0

    def notify(self, kind: str, text: str, peer: PeerId | None = None) -> None:
        """Emits a Notice, with its text cleaned and shortened: it may quote other peers, and is shown on a terminal."""
        plain = "".join(sign if sign.isprintable() else "?" for sign in text[:MAX_NOTICE])
        self.out.append(Notice(kind, plain, peer))

"""Who takes part in a run and who leads: pure functions over the members that a manifest names.

A member is a peer in one incarnation: a peer that lost its voting record comes back as a new incarnation, which the
chain knows nothing of, and so as a newcomer. Electors are the members that were members of the parent already and, in a
run whose electors are vouched for, are named by the organiser's roll or by two thirds of the electors. Nothing here
measures time; who was heard is told from outside.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from spes_p2p.ids import NO_HASH, NOBODY, Hash, PeerId, sha256

LINK_PUBLIC = 0
"""Can be dialled from outside."""
LINK_PRIVATE = 1
"""Behind NAT: leads only when nobody better is there."""
LINK_CLASSES = (LINK_PUBLIC, LINK_PRIVATE)
LEAST_NEW = 4
MAX_MEMBERS = 1024
MAX_VOUCHED = 64
"""Places of members that strangers cannot take, too."""
MAX_ELECTORS = 31
"""Where electors are vouched for: each round takes votes of a third of them twice over, and all hear all."""
MAX_BANNED = 128
MAX_MANIFEST_BANS = 1024
"""Peers that manifests of a run ban: the list is in each."""
PROBATION = 3
"""Audits that a newcomer must pass until its work counts in full, and so many more for each that somebody fails."""
HALF = 1
"""With so many to pass yet it counts half, with more not at all."""
MOST_PROBATION = 6
"""Who would have to pass more is banned: a newcomer that has failed twice, anybody who has failed three times."""
PASSED, FAILED, WITHHELD = "passed", "failed", "withheld"
"""What auditors find of work: it was done, it was not, or it was not shown to them."""
FEWEST_AUDITORS = 3
"""Where fewer could audit somebody, nobody is audited: it would be the word of one or two."""


@dataclass(frozen=True, order=True)
class Member:
    """One peer of a run as a manifest names it."""

    peer: PeerId
    incarnation: int
    elector: bool
    link_class: int
    trains: bool = True
    """False: it reduces, holds and votes, and has neither data nor columns (`bootstrap --serve`)."""
    probation: int = 0
    """Audits of its work that it must pass yet, until that counts in full (see `weights`)."""
    waited: int = 0
    """Rounds on probation in which its work was counted, while nothing was found against it (see `standing`)."""


@dataclass(frozen=True)
class Roll:
    """What the organiser signs: whom it vouches for and whom it has banned, sorted. The highest `number` counts."""

    fingerprint: Hash
    number: int
    vouched: tuple[PeerId, ...] = ()
    banned: tuple[PeerId, ...] = ()

    def is_sane(self) -> bool:
        """Whether both lists are sorted, not too long, and name nobody twice."""
        both = sorted({*self.vouched, *self.banned})
        short_enough = len(self.vouched) <= MAX_VOUCHED and len(self.banned) <= MAX_BANNED
        in_order = [*self.vouched] == sorted(self.vouched) and [*self.banned] == sorted(self.banned)
        return self.number > 0 and short_enough and in_order and len(both) == len(self.vouched) + len(self.banned)


@dataclass(frozen=True)
class Admission:
    """Who may take part and who may vote, by the newest roll. `by_vouch` is false where every member may vote.

    `banned`: by a manifest (see `Manifest` and `still_banned`). `vouched`: by electors.
    `epoch`: what electors are drawn by where too many may vote.
    """

    roll: Roll | None = None
    by_vouch: bool = False
    organiser: PeerId = NOBODY
    banned: tuple[PeerId, ...] = ()
    vouched: tuple[PeerId, ...] = ()
    epoch: Hash = NO_HASH

    def may_vote(self, peer: PeerId) -> bool:
        return not self.by_vouch or self.is_trusted(peer)

    def is_trusted(self, peer: PeerId) -> bool:
        """Whether somebody vouches for it whose word counts, wherever who votes is asked."""
        by_roll = self.roll.vouched if self.roll is not None else ()
        return peer == self.organiser or peer in by_roll or peer in self.vouched

    def drawn(self, peers: Iterable[PeerId]) -> frozenset[PeerId]:
        """Of those who may vote the ones that do."""
        known = [*peers]
        few = not self.by_vouch or len(known) <= MAX_ELECTORS
        return frozenset(known if few else sorted(known, key=lambda peer: rank(self.epoch, peer))[:MAX_ELECTORS])

    def is_banned(self, peer: PeerId) -> bool:
        return peer in self.all_banned

    @property
    def all_banned(self) -> frozenset[PeerId]:
        """By the organiser and by manifests."""
        return frozenset(self.banned) | frozenset(self.roll.banned if self.roll is not None else ())


EVERYBODY = Admission()


def newest_roll(one: Roll | None, other: Roll | None) -> Roll | None:
    """Of two rolls the one with the higher number."""
    return max((roll for roll in (one, other) if roll is not None), key=lambda roll: roll.number, default=None)


def still_banned(banned: Iterable[PeerId], before: Roll | None, roll: Roll | None) -> tuple[PeerId, ...]:
    """Whom a child with `roll` bans of those that its parent, whose roll is `before`, has `banned`.

    The organiser lifts a ban by vouching anew. A vouch from before the ban lifts nothing: electors lie, too.
    """
    known = before.vouched if before is not None else ()
    lifted = {peer for peer in (roll.vouched if roll is not None else ()) if peer not in known}
    return tuple(peer for peer in banned if peer not in lifted)


def electors(members: Iterable[Member]) -> tuple[Member, ...]:
    """The members that vote on the child of the manifest that names them."""
    return tuple(member for member in members if member.elector)


def trainers(members: Iterable[Member]) -> tuple[Member, ...]:
    """The members that may own columns, hold leases and contribute values."""
    return tuple(member for member in members if member.trains)


def weightless(members: Iterable[Member]) -> frozenset[PeerId]:
    """Those who train and have too many audits to pass for their work to count.

    Nobody where fewer than `FEWEST_AUDITORS` would be left: who would let the others out?
    """
    training = trainers(members)
    waiting = {member.peer for member in training if member.probation > HALF}
    return frozenset(waiting if len(training) - len(waiting) >= FEWEST_AUDITORS else ())


def able_auditors(members: Iterable[Member]) -> tuple[PeerId, ...]:
    """Who may audit what others trained: electors whose own work counts."""
    members = tuple(members)
    waiting = weightless(members)
    return tuple(member.peer for member in trainers(electors(members)) if member.peer not in waiting)


def rank(parent: Hash, peer: PeerId) -> bytes:
    """hash(parent, peer): orders peers afresh in each round, so that leading is nobody's office."""
    return sha256(parent, peer.encode())


def leader_order(parent: Hash, members: Iterable[Member]) -> tuple[PeerId, ...]:
    """The electors in the order in which they lead ballots 0, 1, ...: by link class, then by `rank`."""
    chosen = sorted(electors(members), key=lambda member: (member.link_class, rank(parent, member.peer)))
    return tuple(member.peer for member in chosen)


def next_members(
    current: Iterable[Member],
    heard: Iterable[Member],
    newcomers: Iterable[Member],
    leavers: Collection[PeerId],
    admission: Admission = EVERYBODY,
    most: int = MAX_MEMBERS,
) -> tuple[Member, ...]:
    """Members of the child manifest: everyone heard, with newcomers, without leavers and who is banned, by peer id.

    Of newcomers the first in the order given are named, as many as `most_new` and `most` leave room for; the others
    wait for another round. Who is vouched for comes before strangers, and finds room that they cannot take. `heard` and
    `newcomers` carry what the peers announced of themselves; `with_votes` gives the votes.
    """
    gone = {member.peer for member in (*heard, *newcomers) if admission.is_banned(member.peer)} | set(leavers)
    staying = {member.peer: member for member in heard if member.peer not in gone}
    known = {member.peer for member in current}
    new = [member for member in newcomers if member.peer not in gone and member.peer not in staying]
    back = [member for member in new if member.peer in known]  # in another incarnation
    others = [member for member in new if member.peer not in known]
    vouched = [member for member in others if admission.by_vouch and admission.may_vote(member.peer)]
    strangers = [member for member in others if member not in vouched][: most_new(len(known))]
    kept_free = MAX_VOUCHED if admission.by_vouch else 0
    named = [*back, *vouched][: max(0, most - len(staying))]
    named += strangers[: max(0, most - kept_free - len(staying) - len(named))]
    taking_part = staying | {member.peer: member for member in named}
    return with_votes(current, tuple(member for _, member in sorted(taking_part.items())), admission)


def most_new(members: int) -> int:
    """How many peers a manifest may name that its parent, with so many members, does not.

    Identities cost nothing: who makes a thousand of them takes rounds to outnumber those who are here.
    """
    return max(LEAST_NEW, members)


def with_votes(
    current: Iterable[Member], chosen: Iterable[Member], admission: Admission = EVERYBODY
) -> tuple[Member, ...]:
    """`chosen` with the flags that follow from `current`, the members that the parent names.

    A peer that may vote does so next time if it is a member already, in the same incarnation. Where none would be left
    to vote (the last elector leaves and only newcomers stay), all who may do: the electors that go have signed it.
    Whether it trains stays the same for an incarnation. Nobody is on probation yet (see `standing`).
    """
    known = {(member.peer, member.incarnation): member.trains for member in current}
    rows = [
        (member, known.get((member.peer, member.incarnation)), admission.may_vote(member.peer)) for member in chosen
    ]
    none_left = all(trains is None for _, trains, votes in rows if votes)
    able = (member.peer for member, trains, votes in rows if votes and (none_left or trains is not None))
    voters = admission.drawn(able)
    return tuple(
        replace(
            member,
            elector=member.peer in voters,
            trains=member.trains if trains is None else trains,
            probation=0,
            waited=0,
        )
        for member, trains, _ in rows
    )

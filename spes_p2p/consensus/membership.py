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


@dataclass(frozen=True, order=True)
class Member:
    """One peer of a run as a manifest names it."""

    peer: PeerId
    incarnation: int
    elector: bool
    link_class: int
    trains: bool = True
    """False: it reduces, holds and votes, and has neither data nor columns (`bootstrap --serve`)."""


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
    """Who may take part and who is trusted, by the newest roll. Without `has_strangers` every member is.

    `epoch`: what electors are drawn by where more than `MAX_ELECTORS` are trusted.
    """

    roll: Roll | None = None
    has_strangers: bool = False
    organiser: PeerId = NOBODY
    epoch: Hash = NO_HASH

    def is_trusted(self, peer: PeerId) -> bool:
        """Whether it votes, leads and reduces when it is a member: the organiser vouches for it, or for everybody."""
        return not self.has_strangers or self.is_named(peer)

    def is_named(self, peer: PeerId) -> bool:
        """Whether the organiser vouches for it by name, or it is the organiser."""
        return peer == self.organiser or (self.roll is not None and peer in self.roll.vouched)

    def strangers_of(self, peers: Iterable[PeerId]) -> frozenset[PeerId]:
        """Those who are not trusted."""
        return frozenset(peer for peer in peers if not self.is_trusted(peer))

    def drawn(self, peers: Iterable[PeerId]) -> frozenset[PeerId]:
        """Of those who are trusted the ones that vote."""
        return frozenset(sorted(peers, key=lambda peer: rank(self.epoch, peer))[:MAX_ELECTORS])

    def is_banned(self, peer: PeerId) -> bool:
        return peer in self.banned

    @property
    def banned(self) -> tuple[PeerId, ...]:
        """By the organiser."""
        return self.roll.banned if self.roll is not None else ()


EVERYBODY = Admission()


def newest_roll(one: Roll | None, other: Roll | None) -> Roll | None:
    """Of two rolls the one with the higher number."""
    return max((roll for roll in (one, other) if roll is not None), key=lambda roll: roll.number, default=None)


def electors(members: Iterable[Member]) -> tuple[Member, ...]:
    """The members that vote on the child of the manifest that names them."""
    return tuple(member for member in members if member.elector)


def trainers(members: Iterable[Member]) -> tuple[Member, ...]:
    """The members that may own columns, hold leases and contribute values."""
    return tuple(member for member in members if member.trains)


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
    vouched = [member for member in others if admission.has_strangers and admission.is_trusted(member.peer)]
    strangers = [member for member in others if member not in vouched][: most_new(len(known))]
    kept_free = MAX_VOUCHED if admission.has_strangers else 0
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

    A trusted peer votes next time if it is a member already, in the same incarnation. Where none would be left
    to vote (the last elector leaves and only newcomers stay), all who may do: the electors that go have signed it.
    Whether it trains stays the same for an incarnation.
    """
    known = {(member.peer, member.incarnation): member.trains for member in current}
    rows = [
        (member, known.get((member.peer, member.incarnation)), admission.is_trusted(member.peer)) for member in chosen
    ]
    none_left = all(trains is None for _, trains, votes in rows if votes)
    able = (member.peer for member, trains, votes in rows if votes and (none_left or trains is not None))
    voters = admission.drawn(able)
    return tuple(
        replace(member, elector=member.peer in voters, trains=member.trains if trains is None else trains)
        for member, trains, _ in rows
    )

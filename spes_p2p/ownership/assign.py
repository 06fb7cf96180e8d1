"""The next ownership from the present one and what the members wish: one pure function, the same everywhere.

Order of business: owners that are gone or release a column lose it; who owns more than fits gives up the rest;
explicit claims are granted; columns below the target number of replicas find owners, one replica for every column
before a second for any; last, who owns much less than another takes columns over from it, so that a newcomer without a
claim gets its share. Nobody ever owns more than fits: a column for which nobody has room stays without owner and is
counted stale. What need not move stays where it is, since moving costs optimizer moments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from spes_p2p.ids import PeerId

_Gift = tuple[PeerId, int]
"""Who would give up its column, and the column that it would take instead."""
MOST_CLAIMANTS = 16
"""Owners of one column beyond which nobody is added for a claim alone: a crowd may claim everything."""
Ownership = tuple[tuple[PeerId, ...], ...]


def nobody(num_columns: int) -> Ownership:
    """The ownership before anybody came."""
    return ((),) * num_columns


def columns_of(ownership: Ownership, peer: PeerId) -> tuple[int, ...]:
    """The columns that `peer` owns, rising."""
    return tuple(column for column, owners in enumerate(ownership) if peer in owners)


def orphans(ownership: Ownership) -> tuple[int, ...]:
    """Columns that nobody owns."""
    return tuple(column for column, owners in enumerate(ownership) if not owners)


def sole_columns(ownership: Ownership, peer: PeerId) -> tuple[int, ...]:
    """The columns that `peer` owns alone, rising."""
    return tuple(column for column, owners in enumerate(ownership) if owners == (peer,))


@dataclass(frozen=True)
class OwnershipRequest:
    """What one member wants of ownership.

    `max_columns` is how many fit into its memory. `claims` are columns that it asks for by number (`--owned-experts`):
    it gets others only where nobody without claims has room, and gives them up first. `releases` are columns that it
    gives up.
    """

    max_columns: int
    claims: tuple[int, ...] = ()
    releases: tuple[int, ...] = ()


def assign(
    ownership: Ownership,
    wishes: Mapping[PeerId, OwnershipRequest],
    target_replicas: int,
    kept: Collection[int] = (),
    strangers: Collection[PeerId] = (),
) -> Ownership:
    """Ownership of the next round. `wishes` has one entry for each next member, and nobody else.

    No owner that stays loses one of the columns `kept`, whatever is wished or fits. `strangers` own nothing but beside
    others, as many of a column as it should have owners: more would bring little (see `sync.trusted_mean`).
    """
    trusted = _assigned(ownership, {p: wish for p, wish in wishes.items() if p not in strangers}, target_replicas, kept)
    if not strangers:
        return trusted
    alone = orphans(trusted)
    beside = {
        peer: replace(wish, releases=tuple(sorted({*wish.releases, *alone})))
        for peer, wish in wishes.items()
        if peer in strangers
    }
    added = _assigned(ownership, beside, target_replicas, set(kept) - set(alone))
    return tuple(tuple(sorted({*own, *more})) for own, more in zip(trusted, added, strict=True))


def _assigned(
    ownership: Ownership, wishes: Mapping[PeerId, OwnershipRequest], target_replicas: int, kept: Collection[int]
) -> Ownership:
    table = _Table(ownership, wishes, kept)
    table.shed()
    table.grant_claims()
    for replicas in range(1, min(target_replicas, len(wishes)) + 1):
        table.fill(replicas)
    table.balance()
    while table.relieve(target_replicas):
        table.balance()
    return tuple(tuple(sorted(owners)) for owners in table.owners)


class _Table:
    """Ownership in the making: `owners` by column, `held` by peer. All is tried in a fixed order."""

    def __init__(self, ownership: Ownership, wishes: Mapping[PeerId, OwnershipRequest], kept: Collection[int]) -> None:
        self.wishes = {peer: wishes[peer] for peer in sorted(wishes)}
        self.claims = {peer: frozenset(wish.claims) - frozenset(wish.releases) for peer, wish in self.wishes.items()}
        self.releases = {peer: frozenset(wish.releases) for peer, wish in self.wishes.items()}
        self.owners: list[set[PeerId]] = [set() for _ in ownership]
        self.held: dict[PeerId, set[int]] = {peer: set() for peer in self.wishes}
        for column, present in enumerate(ownership):
            for peer in present:
                if peer in self.wishes and (column in kept or column not in self.releases[peer]):
                    self._give(peer, column)
        self.kept = {peer: held & frozenset(kept) for peer, held in self.held.items()}

    def shed(self) -> None:
        """Makes peers that own more than fits give up the columns that are missed least, claimed ones last."""
        for peer in self.wishes:
            while self._room(peer) < 0 and (loose := self.held[peer] - self.kept[peer]):
                self._take(peer, self._least_missed(peer, self._unclaimed(peer) or loose))

    def grant_claims(self) -> None:
        """Adds claimants to the owners of their columns, up to `MOST_CLAIMANTS`.

        One without room gives up a column that it did not claim.
        """
        for peer, claims in self.claims.items():
            for column in sorted(claims - self.held[peer]):
                if not 0 <= column < len(self.owners) or len(self.owners[column]) >= MOST_CLAIMANTS:
                    continue
                if self._room(peer) <= 0 and self._unclaimed(peer):
                    self._take(peer, self._least_missed(peer, self._unclaimed(peer)))
                if self._room(peer) > 0:
                    self._give(peer, column)

    def fill(self, replicas: int) -> None:
        """Every column that has fewer owners than `replicas` gets one more, if there is any way to room for it."""
        for column, present in enumerate(self.owners):
            if len(present) < replicas:
                self._add_owner(column, replicas)

    def _add_owner(self, column: int, replicas: int) -> None:
        """The shortest chain of peers of which each takes a column and gives up another one to the next.

        It ends with a peer that has room, or one that can give up a column which has owners to spare. Mostly it is a
        chain of one; longer ones are what makes the number of covered columns the greatest possible (a maximum flow).
        """
        came_from: dict[int, _Gift] = {}
        queue, asked = deque([column]), set[PeerId]()
        while queue:
            wanted = queue.popleft()
            takers = [peer for peer in self._in_order() if peer not in asked and self._may_take(peer, wanted)]
            for peer in takers:
                spare = [given for given in self._unclaimed(peer) if len(self.owners[given]) > replicas]
                if self._room(peer) <= 0 and spare:
                    self._take(peer, self._least_missed(peer, spare))
                if self._room(peer) > 0:
                    self._hand_on(peer, wanted, came_from)
                    return
            for peer in takers:
                asked.add(peer)
                for given in sorted(self._unclaimed(peer)):
                    if given != column and given not in came_from:
                        came_from[given] = (peer, wanted)
                        queue.append(given)

    def _hand_on(self, peer: PeerId, column: int, came_from: Mapping[int, _Gift]) -> None:
        self._give(peer, column)
        while column in came_from:
            giver, wanted = came_from[column]
            self._take(giver, column)
            self._give(giver, wanted)
            column = wanted

    def relieve(self, target_replicas: int) -> bool:
        """Moves unclaimed columns from peers with claims to peers without that have room. Returns whether any moved."""
        extras = [(peer, column) for peer in self.wishes if self.claims[peer] for column in self._unclaimed(peer)]
        return sum(self._relieve(peer, column, target_replicas) for peer, column in sorted(extras)) > 0

    def _relieve(self, peer: PeerId, column: int, target_replicas: int) -> bool:
        takers = [
            other
            for other in self._in_order()
            if not self.claims[other] and self._room(other) > 0 and self._may_take(other, column)
        ]
        spare = len(self.owners[column]) > target_replicas
        if takers or spare:
            self._take(peer, column)
        if takers and not spare:
            self._give(takers[0], column)
        return bool(takers) or spare

    def balance(self) -> None:
        """Moves columns from the most to the least loaded member, both without claims, until they are within one."""
        while (move := self._next_move()) is not None:
            rich, poor, column = move
            self._take(rich, column)
            self._give(poor, column)

    def _next_move(self) -> tuple[PeerId, PeerId, int] | None:
        movable = [peer for peer in self._in_order() if not self.claims[peer]]
        by_load = sorted(movable, key=lambda peer: (-len(self.held[peer]), peer))
        for poor in movable:
            if self._room(poor) <= 0:
                continue
            for rich in by_load:
                if len(self.held[rich]) - len(self.held[poor]) < 2:
                    break
                loose = self.held[rich] - self.kept[rich]
                columns = [column for column in loose if self._may_take(poor, column)]
                if columns:
                    return rich, poor, max(columns)
        return None

    def _in_order(self) -> list[PeerId]:
        """Whom to ask first: who named no columns, then who owns least."""
        return sorted(self.wishes, key=lambda peer: (bool(self.claims[peer]), len(self.held[peer]), peer))

    def _room(self, peer: PeerId) -> int:
        return self.wishes[peer].max_columns - len(self.held[peer])

    def _unclaimed(self, peer: PeerId) -> set[int]:
        return self.held[peer] - self.claims[peer] - self.kept[peer]

    def _may_take(self, peer: PeerId, column: int) -> bool:
        return peer not in self.owners[column] and column not in self.releases[peer]

    def _least_missed(self, peer: PeerId, columns: set[int] | list[int]) -> int:
        """The column with most owners, the last of them."""
        return max(columns, key=lambda column: (len(self.owners[column]), column))

    def _give(self, peer: PeerId, column: int) -> None:
        self.owners[column].add(peer)
        self.held[peer].add(column)

    def _take(self, peer: PeerId, column: int) -> None:
        self.owners[column].discard(peer)
        self.held[peer].discard(column)

"""The next ownership from the present one and what the members wish: one pure function, the same everywhere.

Order of business: owners that are gone or release a column lose it; explicit claims are granted; columns below the
target number of replicas go to the members with most room; last, a member that owns much less than another takes
columns over from it, so that a newcomer without a claim gets its share. Budgets (how many columns fit) bind always
but for orphans when nobody has room: those stay without owner and are counted stale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spes_p2p.ids import PeerId
from spes_p2p.ownership.expert_map import Ownership


@dataclass(frozen=True)
class Wish:
    """What one member wants of ownership.

    `claims` are columns that it asks for by number (`--owned-experts`); without claims it takes what it is given, at
    most `max_columns`. `releases` are columns that it gives up.
    """

    max_columns: int
    claims: tuple[int, ...] = ()
    releases: tuple[int, ...] = ()


def assign(ownership: Ownership, wishes: Mapping[PeerId, Wish], target_replicas: int) -> Ownership:
    """Ownership of the next round. `wishes` has one entry for each next member, and nobody else."""
    owners = [
        {owner for owner in present if owner in wishes and column not in wishes[owner].releases}
        for column, present in enumerate(ownership)
    ]
    _grant_claims(owners, wishes)
    _fill(owners, wishes, target_replicas)
    _balance(owners, wishes, target_replicas)
    return tuple(tuple(sorted(present)) for present in owners)


def _load(owners: list[set[PeerId]], peer: PeerId) -> int:
    return sum(peer in present for present in owners)


def _room(owners: list[set[PeerId]], wishes: Mapping[PeerId, Wish], peer: PeerId) -> int:
    return wishes[peer].max_columns - _load(owners, peer)


def _grant_claims(owners: list[set[PeerId]], wishes: Mapping[PeerId, Wish]) -> None:
    for peer in sorted(wishes):
        for column in wishes[peer].claims:
            wanted = 0 <= column < len(owners) and column not in wishes[peer].releases and peer not in owners[column]
            if wanted and _room(owners, wishes, peer) > 0:
                owners[column].add(peer)


def _fill(owners: list[set[PeerId]], wishes: Mapping[PeerId, Wish], target_replicas: int) -> None:
    """One replica for every column before a second for any."""
    for replicas in range(1, target_replicas + 1):
        for column, present in enumerate(owners):
            if len(present) < replicas:
                takers = [
                    peer
                    for peer in sorted(wishes)
                    if peer not in present
                    and column not in wishes[peer].releases
                    and _room(owners, wishes, peer) > 0
                    and (not wishes[peer].claims or not present)
                ]
                if takers:
                    present.add(min(takers, key=lambda peer: (_load(owners, peer), peer)))


def _balance(owners: list[set[PeerId]], wishes: Mapping[PeerId, Wish], target_replicas: int) -> None:
    """Moves columns from the most to the least loaded member, both without claims, until they are within one."""
    movable = [peer for peer in sorted(wishes) if not wishes[peer].claims]
    while True:
        takers = [peer for peer in movable if _room(owners, wishes, peer) > 0]
        if not takers:
            return
        poor = min(takers, key=lambda peer: (_load(owners, peer), peer))
        rich = max(movable, key=lambda peer: (_load(owners, peer), peer))
        columns = [
            column
            for column, present in enumerate(owners)
            if rich in present and poor not in present and column not in wishes[poor].releases
        ]
        if _load(owners, rich) - _load(owners, poor) < 2 or not columns:
            return
        owners[columns[-1]].remove(rich)
        owners[columns[-1]].add(poor)

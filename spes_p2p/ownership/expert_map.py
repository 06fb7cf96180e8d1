"""Which peers own which expert columns. Ownership is a tuple over columns of sorted tuples of owners."""

from __future__ import annotations

from spes_p2p.ids import PeerId

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

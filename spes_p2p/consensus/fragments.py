"""Whose turn it is: which columns, and which part of the shared parameters, a round brings. Pure functions."""

from __future__ import annotations

from spes_p2p.ownership.assign import Ownership


def due_columns(ownership: Ownership, round: int, expert_rounds: int) -> frozenset[int]:
    """Columns whose turn it is in a round: each in every `expert_rounds`-th, about as many in one round as in another.

    Columns of the same owners take turns one after the other: no uplink carries a round alone. In between its owners'
    masters run ahead, and the others keep its last committed values.
    """
    in_turn = sorted(range(len(ownership)), key=lambda column: (ownership[column], column))
    return frozenset(column for place, column in enumerate(in_turn) if (place - round) % expert_rounds == 0)


def due_tiles(tiles: int, round: int, fragments: int) -> tuple[int, int]:
    """(first, number) of the shared tiles whose turn it is: one of `fragments` consecutive parts, nearly equal.

    In between each peer goes on from its own values of the others. After Streaming DiLoCo (arXiv 2501.18512).
    """
    part = round % fragments
    first = tiles * part // fragments
    return first, tiles * (part + 1) // fragments - first

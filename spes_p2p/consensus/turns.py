"""Whose turn it is: which columns, and which part of the shared parameters, a round brings. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass

from spes_p2p.ownership.assign import Ownership

Ranges = tuple[tuple[int, int], ...]
"""(first, number) of tiles that lie together, in their order; none is empty."""


@dataclass(frozen=True)
class Vocabulary:
    """The first `tiles` of the shared block, which hold nothing but embedding and head, are averaged in one of `rounds`
    rounds, the other shared tiles in each."""

    tiles: int = 0
    rounds: int = 1


AS_OFTEN = Vocabulary()
"""As the rest."""


def due_columns(ownership: Ownership, round: int, expert_rounds: int) -> frozenset[int]:
    """Columns whose turn it is in a round: each in every `expert_rounds`-th, about as many in one round as in another.

    Columns of the same owners take turns one after the other: no uplink carries a round alone. In between its owners'
    masters run ahead, and the others keep its last committed values.
    """
    in_turn = sorted(range(len(ownership)), key=lambda column: (ownership[column], column))
    return frozenset(column for place, column in enumerate(in_turn) if (place - round) % expert_rounds == 0)


def due_tiles(tiles: int, round: int, vocabulary: Vocabulary = AS_OFTEN) -> Ranges:
    """The shared tiles whose turn it is: one of `vocabulary.rounds` consecutive parts of the vocabulary, nearly equal,
    and all others.

    In between each peer goes on from its own values of the rest. After Streaming DiLoCo (arXiv 2501.18512).
    """
    seldom = min(tiles, vocabulary.tiles) if vocabulary.rounds > 1 else 0
    part = round % vocabulary.rounds
    first, end = seldom * part // vocabulary.rounds, seldom * (part + 1) // vocabulary.rounds
    return tuple((start, stop - start) for start, stop in ((first, end), (seldom, tiles)) if stop > start)

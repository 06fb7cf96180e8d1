"""What a contribution weighs: strangers no more than the trusted do."""

from __future__ import annotations

from spes_p2p.consensus.manifest import Contribution
from spes_p2p.consensus.membership import Admission, Roll
from spes_p2p.consensus.weights import next_step, weighed
from spes_p2p.ids import NO_HASH, PeerId

TRUSTED = Admission(Roll(NO_HASH, 1, (PeerId("a"), PeerId("b"))), has_strangers=True)


def roster(**tokens: int) -> list[Contribution]:
    """With as many steps as tokens."""
    return [Contribution(PeerId(name), count, count, 1) for name, count in sorted(tokens.items())]


def weights(entries: list[Contribution], admission: Admission) -> list[tuple[int, int]]:
    return [(entry.tokens, entry.steps) for entry in weighed(entries, admission)]


def test_strangers_weigh_at_most_the_lower_median_of_the_trusted() -> None:
    entries = roster(a=100, b=300, x=1000, y=50)
    assert weights(entries, TRUSTED) == [(100, 100), (300, 300), (100, 100), (50, 50)]
    assert weights(entries, Admission()) == [(100, 100), (300, 300), (1000, 1000), (50, 50)]


def test_strangers_alone_move_nothing() -> None:
    assert weights(roster(x=1000, y=50), TRUSTED) == [(0, 0), (0, 0)]
    assert next_step(7, roster(x=1000), TRUSTED) == 7
    assert next_step(7, roster(a=10, x=1000), TRUSTED) == 17

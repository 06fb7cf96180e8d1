"""Where histories meet: which one goes on, and what is lost with the others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spes_p2p.consensus.forks import ForkContext, ForkDecision, Line, best, choose, tokens_lost
from spes_p2p.consensus.manifest import Manifest, manifest_hash
from spes_p2p.consensus.membership import Member
from spes_p2p.consensus.messages import (
    DEGRADED,
    QUORUM,
    Certificate,
    Commit,
)
from spes_p2p.ids import Hash, PeerId, sha256
from tests.sync.chains import MadeRun

NAMES = tuple(PeerId(name) for name in "abcd")
MADE = MadeRun()


def root() -> Manifest:
    members = tuple(Member(name, 1, True, 0) for name in NAMES)
    return replace(MADE.genesis(sha256(b"state")).manifest, members=members)


def commit(parent: Manifest, tokens: int, kind: str = DEGRADED, ballot: int = -1) -> Commit:
    """A commit that brings `tokens`; its seals do not matter here."""
    manifest = replace(parent, round=parent.round + 1, parent=manifest_hash(parent), tokens=parent.tokens + tokens)
    heard = NAMES[:1] if kind == DEGRADED else ()
    return Commit(Certificate(manifest_hash(parent), kind, ballot, manifest_hash(manifest), heard, ()), manifest)


def line(parent: Manifest, *rounds: tuple[int, str]) -> Line:
    found: list[Commit] = []
    for tokens, kind in rounds:
        found.append(commit(found[-1].manifest if found else parent, tokens, kind))
    return tuple(found)


D, M = DEGRADED, QUORUM
F = 4
FREE = ForkContext(may_take=True, final_rounds=F)
HELD = replace(FREE, may_take=False)


def name(line: Line) -> Hash:
    return line[0].certificate.manifest


# ---------------------------------------------------------------- from our tip


def test_what_a_quorum_certified_is_always_taken() -> None:
    assert choose((), line(root(), (1, M), (1, D)), HELD) is ForkDecision.MOVE


def test_a_degraded_child_is_taken_only_where_no_live_quorum_was_heard() -> None:
    theirs = line(root(), (1, D), (900, M), (900, M))
    assert choose((), theirs, HELD) is ForkDecision.WAIT
    assert choose((), theirs, FREE) is ForkDecision.MOVE
    assert choose((), theirs, replace(HELD, chosen={name(theirs)})) is ForkDecision.MOVE


def test_who_keeps_to_another_child_stays_for_a_later_ballot_or_long_work() -> None:
    theirs = (commit(root(), 1, D, ballot=2),)
    other = sha256(b"kept")
    for ballot, way in ((1, ForkDecision.MOVE), (2, ForkDecision.MOVE), (3, ForkDecision.WAIT)):
        assert choose((), theirs, replace(FREE, polka_ballot=ballot, kept=other)) is way
    same = replace(FREE, polka_ballot=9, kept=name(theirs))
    assert choose((), theirs, same) is ForkDecision.MOVE
    stands = replace(FREE, polka_ballot=0, kept=other)
    assert choose((), line(root(), *(F * [(1, D)])), stands) is ForkDecision.WAIT
    assert choose((), line(root(), *((F + 1) * [(1, D)])), stands) is ForkDecision.MOVE


# ---------------------------------------------------------------- where two histories part


@pytest.mark.parametrize(
    ("winner", "loser"),
    [
        (((1, M),), ((50, D), (50, D))),  # what a majority has committed, whatever others did
        (((9, D),), ((3, D), (5, D))),  # most tokens
        (((3, D), (7, D)), ((9, D),)),
        (((3, D), (7, M)), ((9, D),)),  # a later majority of few counts as their tokens do
        ((*(F * [(1, D)]), (9, D)), ((8, D),)),
    ],
)
def test_a_majority_wins_then_most_tokens(
    winner: tuple[tuple[int, str], ...], loser: tuple[tuple[int, str], ...]
) -> None:
    one, other = line(root(), *winner), line(replace(root(), step=1), *loser)
    assert choose(other, one, HELD) is ForkDecision.MOVE
    assert choose(one, other, FREE) is ForkDecision.STAY
    assert best([other, one], F) == best([one, other], F) == one


def test_the_highest_acceptance_goes_before_tokens() -> None:
    """It may be what a majority committed, and only those who are gone knew."""
    bound, rich = (commit(root(), 1, D, ballot=0),), (commit(root(), 99, D),)
    assert choose(rich, bound, HELD) is ForkDecision.MOVE
    assert choose(bound, rich, FREE) is ForkDecision.STAY


def test_long_work_goes_before_an_acceptance() -> None:
    bound, long = (commit(root(), 1, D, ballot=0),), line(root(), *((F + 1) * [(1, D)]))
    assert choose(bound, long, HELD) is ForkDecision.MOVE
    assert choose(long, bound, FREE) is ForkDecision.STAY


def test_equal_tokens_are_told_apart_by_the_lowest_hash() -> None:
    one = commit(root(), 5)
    other = replace(one.manifest, step=7)
    lines = [(one,), (Commit(replace(one.certificate, manifest=manifest_hash(other)), other),)]
    chosen = best(lines, F)
    assert chosen == best(lines[::-1], F)
    assert manifest_hash(chosen[0].manifest) == min(manifest_hash(line[0].manifest) for line in lines)


def test_long_work_is_final_until_the_organiser_chooses() -> None:
    """Two that come back after a week, as the majority that they were, do not undo everybody: a person must choose."""
    week, back = line(root(), *((F + 1) * [(7, D)])), line(root(), (3, M))
    assert choose(week, back, FREE) is ForkDecision.PARTED
    assert choose(back, week, FREE) is ForkDecision.PARTED
    for chosen, other in ((week, back), (back, week)):
        told = replace(FREE, chosen={name(chosen)})
        assert choose(other, chosen, told) is ForkDecision.MOVE
        assert choose(chosen, other, told) is ForkDecision.STAY


def test_short_work_is_not_final() -> None:
    few, back = line(root(), *(F * [(7, D)])), line(root(), (3, M))
    assert choose(few, back, FREE) is ForkDecision.MOVE
    assert choose(back, few, FREE) is ForkDecision.STAY


def test_an_ancestor_gives_way_to_its_descendant() -> None:
    long = line(root(), (1, D), (1, D))
    assert best([long[:1], long, ()], F) == long
    assert best([()], F) == ()
    assert choose(long, (), FREE) is ForkDecision.STAY


def test_the_rule_goes_down_through_nested_forks() -> None:
    """Inside the part of the majority another fork is decided by itself."""
    trunk = commit(root(), 1, QUORUM)
    small = (trunk, commit(trunk.manifest, 1, QUORUM))
    large = (trunk, commit(trunk.manifest, 90, DEGRADED))
    outside = line(root(), (500, D))
    assert best([outside, large, small], F) == small


def test_what_is_lost_is_counted_in_tokens() -> None:
    assert tokens_lost(root(), line(root(), (3, D), (4, D))) == 7
    assert tokens_lost(root(), ()) == 0


def test_no_line_is_no_choice() -> None:
    with pytest.raises(ValueError, match="no line"):
        best([], F)

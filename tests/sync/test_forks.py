"""Where histories meet: which one goes on, and what is lost with the others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spes_p2p.ids import PeerId, sha256
from spes_p2p.swarm.membership import Member, rank
from spes_p2p.sync.core.forks import Line, best, has_majority, tokens_lost
from spes_p2p.sync.core.messages import DEGRADED, MAJORITY, Certificate, Commit, Manifest, manifest_hash
from tests.sync.chains import MadeRun

NAMES = tuple(PeerId(name) for name in "abcd")
MADE = MadeRun()


def root() -> Manifest:
    members = tuple(Member(name, 1, True, 0) for name in NAMES)
    return replace(MADE.genesis(sha256(b"state")).manifest, members=members)


def commit(parent: Manifest, tokens: int, kind: str = DEGRADED, heard: tuple[PeerId, ...] = NAMES[:1]) -> Commit:
    """A commit that brings `tokens`; its seals do not matter here."""
    manifest = replace(parent, round=parent.round + 1, parent=manifest_hash(parent), tokens=parent.tokens + tokens)
    heard = heard if kind == DEGRADED else ()
    return Commit(Certificate(manifest_hash(parent), kind, 0, manifest_hash(manifest), heard, ()), manifest)


def line(parent: Manifest, *rounds: tuple[int, str]) -> Line:
    found: list[Commit] = []
    for tokens, kind in rounds:
        found.append(commit(found[-1].manifest if found else parent, tokens, kind))
    return tuple(found)


D, M = DEGRADED, MAJORITY


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("winner", "loser"),
    [
        (((1, M),), ((50, D), (50, D))),  # what a majority has committed, whatever others did
        (((9, D),), ((3, D), (5, D))),  # most tokens
        (((3, D), (7, D)), ((9, D),)),
        (((3, D), (7, M)), ((9, D),)),  # a later majority of few counts as their tokens do
    ],
)
def test_a_majority_wins_then_most_tokens(
    winner: tuple[tuple[int, str], ...], loser: tuple[tuple[int, str], ...], turned: bool
) -> None:
    lines = [line(root(), *winner), line(root(), *loser)]
    assert best(root(), lines[::-1] if turned else lines) == lines[0]


def test_equal_tokens_are_told_apart_by_the_lowest_hash() -> None:
    one, other = (commit(root(), 5, heard=(name,)) for name in NAMES[:2])
    one = replace(one, manifest=replace(one.manifest, step=7))
    lines = [(one,), (other,)]
    chosen = best(root(), lines)
    assert chosen == best(root(), lines[::-1])
    assert manifest_hash(chosen[0].manifest) == min(manifest_hash(c.manifest) for c in (one, other))


def test_an_ancestor_gives_way_to_its_descendant() -> None:
    long = line(root(), (1, D), (1, D))
    assert best(root(), [long[:1], long, ()]) == long
    assert best(root(), [()]) == ()


def test_the_rule_goes_down_through_nested_forks() -> None:
    """Inside the part of the majority another fork is decided by itself."""
    trunk = commit(root(), 1, MAJORITY)
    small = (trunk, commit(trunk.manifest, 1, MAJORITY))
    large = (trunk, commit(trunk.manifest, 90, DEGRADED))
    outside = line(root(), (500, D))
    assert best(root(), [outside, large, small]) == small


def test_half_of_the_electors_with_the_first_of_all_speaks_for_the_majority() -> None:
    parent = root()
    order: list[PeerId] = sorted(NAMES, key=lambda peer: rank(manifest_hash(parent), peer))
    weighty, other = tuple(sorted(order[:2])), tuple(sorted(order[2:]))
    heavy, light = commit(parent, 1, heard=weighty), commit(parent, 99, heard=other)
    assert has_majority(parent, heavy)
    assert not has_majority(parent, light)
    assert best(parent, [(light,), (heavy,)]) == (heavy,)


def test_what_is_lost_is_counted_in_tokens() -> None:
    assert tokens_lost(root(), line(root(), (3, D), (4, D))) == 7
    assert tokens_lost(root(), ()) == 0


def test_no_line_is_no_choice() -> None:
    with pytest.raises(ValueError, match="no line"):
        best(root(), [])

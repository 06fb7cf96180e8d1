"""Where chains meet: which of several histories of one run goes on. Pure, the same choice at everybody.

A majority certificate wins over degraded ones; else most tokens, else the lowest hash. Whoever stood on another line
takes the winner's state, and what it loses is told in tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from spes_p2p.ids import Hash
from spes_p2p.swarm.membership import electors, is_weighty_half
from spes_p2p.sync.core.messages import MAJORITY, Commit, Manifest, manifest_hash

Line = tuple[Commit, ...]
"""Commits on top of a common manifest, oldest first."""


def best(common: Manifest, lines: Sequence[Line]) -> Line:
    """The line to follow, of lines that all begin on top of `common` (design section 4, `best`).

    An empty line stands for `common` itself. Raises ValueError without any line.
    """
    if not lines:
        raise ValueError("no line to choose from")
    tips = _without_ancestors(lines)
    if len(tips) == 1:
        return tips[0]
    groups: dict[Hash, list[Line]] = {}
    for line in tips:
        groups.setdefault(manifest_hash(line[0].manifest), []).append(line)
    sure = {name: group for name, group in groups.items() if any(has_majority(common, line[0]) for line in group)}
    chosen = [_best_of(group) for group in (sure or groups).values()]
    return max(chosen, key=lambda line: (line[-1].manifest.tokens, _lowest_first(line)))


def has_majority(parent: Manifest, child: Commit) -> bool:
    """Whether the child's certificate speaks for a majority of the parent's electors, or for the weighty half."""
    if child.certificate.kind == MAJORITY:
        return True
    everybody = [member.peer for member in electors(parent.members)]
    return is_weighty_half(manifest_hash(parent), child.certificate.heard, everybody)


def tokens_lost(common: Manifest, left: Line) -> int:
    """Tokens that were committed on a line that is left."""
    return left[-1].manifest.tokens - common.tokens if left else 0


def _best_of(group: list[Line]) -> Line:
    """The best of lines that share their first commit."""
    first = group[0][0]
    return (first, *best(first.manifest, [line[1:] for line in group]))


def _without_ancestors(lines: Sequence[Line]) -> list[Line]:
    """Each tip once, and none that another line goes through."""
    names = {tuple(manifest_hash(commit.manifest) for commit in line): line for line in lines}
    return [
        line for name, line in names.items() if not any(other != name and other[: len(name)] == name for other in names)
    ]


def _lowest_first(line: Line) -> bytes:
    """Sorts the lowest hash highest."""
    return bytes(255 - byte for byte in manifest_hash(line[-1].manifest))

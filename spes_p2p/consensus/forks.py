"""Decides which of two diverging histories a peer follows. Pure, and the same for all peers that know the same.

One rule guards all of it: a live quorum is never overruled. So a child without a quorum's certificate (a degraded one)
is accepted only if no live quorum of its parent's electors was heard for long, which `liveness` measures. The history
that is left is lost, so a long one is final: only an explicit choice ends it (design section 4).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum

from spes_p2p.consensus.manifest import Manifest, manifest_hash
from spes_p2p.consensus.messages import QUORUM, Commit
from spes_p2p.ids import NO_HASH, Hash, short

Line = tuple[Commit, ...]
"""Commits on top of a common manifest, oldest first; an empty one stands for that manifest itself."""


class ForkDecision(Enum):
    """What a peer does about a history that is not its own."""

    MOVE = "move"
    """Go over to it."""
    STAY = "stay"
    """Ours is the one to follow; who stands on the other comes over."""
    WAIT = "wait"
    """It may be taken later: a quorum of our tip's electors lives, or lived until a while ago."""
    PARTED = "parted"
    """The better history is not ours, but ours is final: both train on until somebody chooses."""


@dataclass(frozen=True)
class ForkContext:
    """What a peer brings to the choice beside the two lines.

    `may_take`: no live quorum of our tip's electors was heard for long enough. `kept` is the child of our tip that has
    the newest polka that we know, of ballot `polka_ballot`. `chosen` are children that the organiser has
    signed a choice of.
    """

    may_take: bool
    final_rounds: int
    polka_ballot: int = -1
    kept: Hash = NO_HASH
    chosen: Collection[Hash] = ()


def choose(ours: Line, theirs: Line, context: ForkContext) -> ForkDecision:
    """Whether to leave `ours` for `theirs`, which both begin on top of one common manifest."""
    if not theirs:
        return ForkDecision.STAY
    if not ours:
        return _forward(theirs, context)
    if better(theirs, ours, context):
        return ForkDecision.PARTED if is_final(ours, theirs, context) else ForkDecision.MOVE
    return ForkDecision.PARTED if is_final(theirs, ours, context) else ForkDecision.STAY


def better(one: Line, other: Line, context: ForkContext) -> bool:
    """Whether `one` goes before `other`: both are not empty, and neither goes on from the other."""
    return _merit(one, other, context) > _merit(other, one, context)


def is_final(ours: Line, theirs: Line, context: ForkContext) -> bool:
    """Whether who stands on `ours` stays whatever `theirs` has: it is long, has more work, and nobody chose."""
    chosen = _is_chosen(ours, context) or _is_chosen(theirs, context)
    return len(ours) > context.final_rounds and not chosen and _tokens(theirs) < _tokens(ours)


def best(lines: Sequence[Line], final_rounds: int) -> Line:
    """The best of several lines on top of one manifest. Raises ValueError if there are none."""
    if not lines:
        raise ValueError("no line to choose from")
    found = lines[0]
    for line in lines[1:]:
        shared = _shared(found, line)
        ours, theirs = found[shared:], line[shared:]
        if theirs and (not ours or better(theirs, ours, ForkContext(True, final_rounds))):
            found = line
    return found


def has_quorum(commit: Commit) -> bool:
    """Whether the certificate speaks for a quorum of the parent's electors."""
    return commit.certificate.kind == QUORUM


def tokens_lost(common: Manifest, left: Line) -> int:
    """Tokens that were committed on a line that is left."""
    return left[-1].manifest.tokens - common.tokens if left else 0


def parted_text(common: Manifest, ours: Line, theirs: Line) -> str:
    """What a person should know where neither history gives way."""
    mine, other = (f"{tokens_lost(common, line):,} tokens in {len(line)} rounds" for line in (ours, theirs))
    one, two = (short(line[0].certificate.manifest) for line in (ours, theirs))
    return (
        f"the run has split since round {common.round}: {mine} here ({one}) and {other} elsewhere ({two}). To "
        "follow one is to lose the other. Both continue until the organiser chooses (spes-p2p run "
        f"choose); to switch this peer alone: spes-p2p join --follow {two}"
    )


def _forward(theirs: Line, context: ForkContext) -> ForkDecision:
    """Theirs goes on from our tip."""
    child = theirs[0]
    if has_quorum(child) or _is_chosen(theirs, context):
        return ForkDecision.MOVE
    if not context.may_take:
        return ForkDecision.WAIT
    stands_by_another = context.polka_ballot >= 0 and context.kept != child.certificate.manifest
    if stands_by_another and context.polka_ballot > child.certificate.ballot:
        return ForkDecision.MOVE if len(theirs) > context.final_rounds else ForkDecision.WAIT
    return ForkDecision.MOVE


def _merit(line: Line, other: Line, context: ForkContext) -> tuple[bool, bool, bool, int, int, bytes]:
    """What is compared, the first that differs decides."""
    no_quorum = not has_quorum(line[0]) and not has_quorum(other[0])
    is_long = no_quorum and len(line) > context.final_rounds and _tokens(line) > _tokens(other)
    ballot = -1 if has_quorum(line[0]) else line[0].certificate.ballot
    lowest_first = bytes(255 - byte for byte in manifest_hash(line[-1].manifest))
    return _is_chosen(line, context), has_quorum(line[0]), is_long, ballot, _tokens(line), lowest_first


def _is_chosen(line: Line, context: ForkContext) -> bool:
    return line[0].certificate.manifest in context.chosen


def _tokens(line: Line) -> int:
    return line[-1].manifest.tokens


def _shared(one: Line, other: Line) -> int:
    """How many commits both begin with."""
    pairs = zip(one, other, strict=False)
    different = (at for at, (a, b) in enumerate(pairs) if a.certificate.manifest != b.certificate.manifest)
    return next(different, min(len(one), len(other)))

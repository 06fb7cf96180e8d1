"""Carries a peer's work over to another history: work that went into a round without a quorum, and later work.

The winning history has another child of the same parent. To that child our work is like any work that a round left out:
it is carried over, with what was trained since on top. Its data is leased by the parent, and the winning child leaves
the lease to members that it has heard, which is checked here. If the histories split earlier, the state that the work
began from is gone, and all of the work is lost.
"""

from __future__ import annotations

from dataclasses import dataclass

from spes_p2p.consensus.manifest import Contribution, Manifest
from spes_p2p.data.leases import Ranges, joined, take
from spes_p2p.ids import PeerId
from spes_p2p.ownership.expert_map import columns_of
from spes_p2p.train.stages import Uncounted


@dataclass(frozen=True)
class Parting:
    """What `me` has brought into a child of `parent` that has no quorum, while that child is the newest.

    `owned`: the columns that were trained; `counted`: what the child counted of us.
    """

    me: PeerId
    parent: Manifest
    owned: tuple[int, ...]
    counted: Contribution | None


@dataclass(frozen=True)
class CarryOver:
    """From a parting to `child` of its parent, which has won."""

    parting: Parting
    child: Manifest

    @property
    def counted(self) -> Contribution | None:
        """What the winning child counts of the same work that ours counted, since we may have handed it in to both."""
        return next((entry for entry in self.child.roster if entry.peer == self.parting.me), None)

    def uncounted(self, work: Uncounted) -> Uncounted:
        """Of what was trained since the parting, `work` after our child included, what the winner does not count."""
        ours, theirs = self.parting.counted, self.counted
        had = work + Uncounted(ours.tokens, ours.steps) if ours is not None else work
        if theirs is None:
            return had
        return Uncounted(max(0, had.tokens - theirs.tokens), max(0, had.steps - theirs.steps))

    def left(self, used: Ranges) -> Ranges:
        """Positions trained on since the parting, `used` after our child, that the winner does not count."""
        ours, theirs = self.parting.counted, self.counted
        lease = self.parting.parent.leases.of(self.parting.me)
        undone = take(lease, ours.sequences)[0] if ours is not None else ()
        return take(joined((*undone, *used)), theirs.sequences if theirs is not None else 0)[1]

    def blocks(self, newest: Manifest) -> tuple[int, ...]:
        """What was trained when the histories parted, and is ours to train by `newest`."""
        owned = columns_of(newest.ownership, self.parting.me)
        return (0, *(1 + column for column in self.parting.owned if column in owned))

    @property
    def taken(self) -> frozenset[int]:
        """Tiles of our work that went into the winner."""
        return tiles_taken(self.child, self.parting.me)


def tiles_taken(manifest: Manifest | None, peer: PeerId) -> frozenset[int]:
    """Tiles of a peer that went into a round; none where it is not known."""
    slices = manifest.slices if manifest is not None else ()
    return frozenset(tile_id for piece in slices if peer in piece.contributors for tile_id in piece.tile_ids)


def outcome_texts(own: int, kept: int, carry_over: CarryOver | None) -> list[str]:
    """For a person: what became of the tokens that this peer had trained since the histories parted."""
    counted = carry_over.counted.tokens if carry_over is not None and carry_over.counted is not None else 0
    texts = []
    if kept:
        texts.append(f"{kept:,} of this peer's own tokens are kept for the next round to count")
    if (lost := own - kept - counted) > 0:
        texts.append(f"{lost:,} of this peer's own tokens are lost with the old history")
    return texts

"""Work that goes over to another history with its peer: what it brought into a round without a quorum, and since.

The other history has another child of the same parent, and to that child the work is what any work is that a round left
out: it is carried (`Carried`), with what was trained since on top. Its data is the lease that the parent dealt, which
the other child leaves to a member that it has heard; whoever trains looks whether it did. Where the histories parted
earlier, the state that the work was begun on is not here any more, and all of it is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from spes_p2p.consensus.messages import DEGRADED, Contribution, Manifest
from spes_p2p.data.leases import Ranges, joined, take
from spes_p2p.ids import PeerId
from spes_p2p.ownership.expert_map import columns_of
from spes_p2p.state.layout import BlockSource, Values
from spes_p2p.sync.chain import Chain
from spes_p2p.sync.driver import Applied
from spes_p2p.sync.inputs import Carried, RunAhead


@dataclass(frozen=True)
class Parting:
    """What `me` has brought into a child of `parent` that has no quorum, while that child is the newest.

    `work` is what training went on from on top of it; `counted` what it counted of us.
    """

    me: PeerId
    parent: Manifest
    owned: tuple[int, ...]
    work: Carried
    counted: Contribution | None

    @classmethod
    def after(
        cls, event: Applied, me: PeerId, parent: Manifest, owned: tuple[int, ...], work: Carried
    ) -> Parting | None:
        """That of a commit which another history may undo; None of any other."""
        can_be_undone = event.commit.certificate.kind == DEGRADED and event.commit.manifest.parent == work.parent
        is_known = event.handed_in or event.counted is None  # else it counted an earlier life
        return cls(me, parent, owned, work, event.counted) if can_be_undone and is_known else None

    def way(self, chain: Chain) -> Way | None:
        """Where to go now that `chain` is that of another history; None where the two parted earlier."""
        child = chain.child_of(self.parent)
        return None if child is None else Way(self, child)


@dataclass(frozen=True)
class Way:
    """From a parting to `child`, which has won."""

    parting: Parting
    child: Manifest

    @property
    def counted(self) -> Contribution | None:
        """What the child counts of the very work that ours did: who was cut off may have handed it in before."""
        return next((entry for entry in self.child.roster if entry.peer == self.parting.me), None)

    def uncounted(self, tokens: int, steps: int) -> tuple[int, int]:
        """Of what was trained since the parting, these tokens and steps included, what the child does not count."""
        ours, theirs = self.parting.counted, self.counted
        had = (tokens + ours.tokens, steps + ours.steps) if ours is not None else (tokens, steps)
        return (max(0, had[0] - theirs.tokens), max(0, had[1] - theirs.steps)) if theirs is not None else had

    @property
    def undone(self) -> Ranges:
        """Positions of our lease that our child had counted."""
        ours = self.parting.counted
        return take(self.parting.parent.leases.of(self.parting.me), ours.sequences)[0] if ours is not None else ()

    def left(self, used: Ranges) -> Ranges:
        """Positions trained on since the parting, `used` on top of our child, that the other does not count."""
        return take(joined((*self.undone, *used)), self.sequences)[1]

    @property
    def sequences(self) -> int:
        return self.counted.sequences if self.counted is not None else 0

    def blocks(self, newest: Manifest) -> tuple[int, ...]:
        """What was trained when the histories parted, and is ours to train by `newest`."""
        owned = columns_of(newest.ownership, self.parting.me)
        return (0, *(1 + column for column in self.parting.owned if column in owned))

    def values(
        self, newest: Manifest, masters: BlockSource, trained: Callable[[int], Values], trains: Collection[int]
    ) -> RunAhead:
        """What training goes on from: `masters`, those of `newest`, with the work.

        `trained(block)` gives the values that stand now, for the blocks of columns `trains` and the shared one.
        """
        me, work, blocks = self.parting.me, self.parting.work, self.blocks(newest)
        taken = {tile_id for piece in self.child.slices if me in piece.contributors for tile_id in piece.tile_ids}
        ahead = [block for block in blocks if block == 0 or block - 1 in trains]
        return RunAhead(work.onto(masters, work.tiles_of(blocks) - taken), trained, work, ahead)


def told(own: int, kept: int, way: Way | None) -> list[str]:
    """For a person: what became of the tokens that this peer had trained since the histories parted."""
    counted = way.counted.tokens if way is not None and way.counted is not None else 0
    texts = []
    if kept:
        texts.append(f"{kept:,} tokens of this peer's own are kept, for the next round to count")
    if (lost := own - kept - counted) > 0:
        texts.append(f"{lost:,} tokens of this peer's own are lost with it")
    return texts

"""A peer's own work: what it has trained that no round has counted, and where in its data that is.

Also what becomes of it where another history wins. Leaves out what is done about it, which `machine` decides.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from spes_p2p.consensus.manifest import Contribution, Manifest
from spes_p2p.data.leases import Ranges, count, joined, take
from spes_p2p.ids import PeerId
from spes_p2p.ownership.assign import columns_of
from spes_p2p.train.stages import Place, Restored, Say, StepMade, TrainingRules, Uncounted


class OwnWork:
    """Grows with every step, and is gone when a round counts it or its data is given to others."""

    def __init__(self, rules: TrainingRules) -> None:
        self._rules = rules
        self.uncounted = Uncounted()
        """Without what was trained ahead."""
        self.lead = Uncounted()
        """What was trained since the snapshot of a round that is still being synced."""
        self.steps = 0
        """Of this round, those made ahead of it included."""
        self.place = Place()

    def next_positions(self) -> Ranges | None:
        """The positions of the next batch in the order of the data; None where the lease ends before it."""
        ahead = take(take(self.place.ranges, self.place.consumed)[1], self._rules.batch_sequences)[0]
        return None if self._rules.leased and count(ahead) < self._rules.batch_sequences else ahead

    def begin(self, manifest: Manifest, restored: Restored | None) -> None:
        """Nothing is done yet on top of `manifest`, but what a checkpoint held."""
        start = restored or Restored(Place(self._lease_by(manifest)), Uncounted(), 0)
        self.place, self.uncounted, self.steps = start.place, start.work, start.own_steps

    def add(self, event: StepMade, is_ahead: bool) -> None:
        if self._rules.leased:
            self.place = replace(self.place, consumed=self.place.consumed + event.sequences)
        made = Uncounted() if event.skipped else Uncounted(event.tokens, 1)
        if is_ahead:
            self.lead += made
        else:
            self.uncounted += made
            self.steps += made.steps

    def take_lead(self) -> int:
        """What was trained ahead is work of the round that begins: its steps."""
        steps = self.lead.steps
        self.uncounted += self.lead
        self.lead = Uncounted()
        return steps

    def note_counted(self, counted: Contribution | None) -> Ranges:
        """What a round counted is no longer uncounted; the positions trained on that it did not count."""
        if counted is not None:
            self.uncounted = Uncounted()
        return self.place.ahead_of(counted.sequences if counted is not None else 0)

    def find_place(self, newest: Manifest, left: Ranges) -> bool:
        """Goes on in the new lease; False where that does not begin with what was trained and not counted."""
        ranges = self._lease_by(newest)
        is_ours = joined(take(ranges, count(left))[0]) == joined(left)
        self.place = Place(ranges, count(left) if is_ours else 0)
        return is_ours

    def bring_over(self, way: CarryOver, newest: Manifest) -> bool:
        """Whether the data of the work is still ours; the work that the winner does not count is uncounted then."""
        if not self.find_place(newest, way.left(self.place.ahead_of(0))):
            return False
        self.uncounted = way.uncounted(self.uncounted)
        return True

    def lose(self, why: str) -> list[Say]:
        """None of it counts any more; what to say of that."""
        lost, self.uncounted = self.uncounted.tokens, Uncounted()
        return [Say(f"{lost:,} tokens of yours do not count: {why}")] if lost else []

    def _lease_by(self, manifest: Manifest) -> Ranges:
        return manifest.leases.of(self._rules.me) if self._rules.leased else ()


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
    """A peer's work that goes over to another history, from a parting to the `child` of its parent that has won.

    To that child our work is like any work that a round left out: it is carried over, with what was trained since on
    top. Its data is leased by the parent, and the winning child leaves the lease to members that it has heard, which is
    checked here. If the histories split earlier, the state that the work began from is gone, and all of it is lost.
    """

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
        return self.child.tile_ids_of(self.parting.me)


def outcome(own: int, kept: int, carry_over: CarryOver | None) -> list[Say]:
    """What became of the tokens that this peer had trained since the histories parted."""
    counted = carry_over.counted.tokens if carry_over is not None and carry_over.counted is not None else 0
    said = []
    if kept:
        said.append(Say(f"{kept:,} of this peer's own tokens are kept for the next round to count"))
    if (lost := own - kept - counted) > 0:
        said.append(Say(f"{lost:,} of this peer's own tokens are lost with the old history"))
    return said

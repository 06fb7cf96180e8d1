"""A peer's own work: what it has trained that no round has counted, and where in its data that is.

Leaves out what is done about it, which `machine` decides.
"""

from __future__ import annotations

from dataclasses import replace

from spes_p2p.consensus.manifest import Contribution, Manifest
from spes_p2p.data.leases import Ranges, count, joined, take
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

    def lose(self, why: str) -> list[Say]:
        """None of it counts any more; what to say of that."""
        lost, self.uncounted = self.uncounted.tokens, Uncounted()
        return [Say(f"{lost:,} tokens of yours do not count: {why}")] if lost else []

    def _lease_by(self, manifest: Manifest) -> Ranges:
        return manifest.leases.of(self._rules.me) if self._rules.leased else ()

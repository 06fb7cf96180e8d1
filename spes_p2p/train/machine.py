"""What a peer's training loop decides: what to train on, when to hand in, what a commit counted, and what is carried.

A pure state machine: events in, actions out, no tensor, thread or clock. The loop of a real peer (`peer/training.py`)
and that of a peer in memory (`testing/pretend_peer.py`) both run it, and only carry out what it says. It leaves out
why training pauses, when a model is evaluated, and how optimizer moments travel.

A round of it: TRAINING until the steps are made or the round closes, HANDED_IN until the commit comes, or AHEAD where
training goes on meanwhile (`sync.overlap`); then TRAINING again, on the new state and whatever was not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from spes_p2p.consensus.manifest import Contribution, Manifest
from spes_p2p.consensus.messages import Work
from spes_p2p.data.leases import Ranges, count, joined, take
from spes_p2p.ids import PeerId
from spes_p2p.ownership.assign import columns_of
from spes_p2p.state.layout import Layout
from spes_p2p.train.stages import (
    Action,
    Begin,
    CloseTurn,
    Committed,
    Depart,
    Event,
    GoAhead,
    GoOver,
    Leave,
    Load,
    Place,
    Rebase,
    Restored,
    RoundEnded,
    Say,
    SayReady,
    Stage,
    StandAside,
    StartAhead,
    StepMade,
    Switched,
    TakeSnapshot,
    TrainingRules,
    Turn,
    Uncounted,
    UseLease,
)

GIVEN_AWAY = "they came too late, and that part of the data was given to others"

TRANSITIONS: Mapping[tuple[Stage, type], frozenset[Stage]] = {
    (Stage.OUTSIDE, Begin): frozenset({Stage.OUTSIDE, Stage.TRAINING}),
    (Stage.OUTSIDE, Committed): frozenset({Stage.OUTSIDE, Stage.TRAINING}),
    (Stage.TRAINING, StepMade): frozenset({Stage.TRAINING}),
    (Stage.TRAINING, RoundEnded): frozenset({Stage.HANDED_IN}),
    (Stage.TRAINING, Committed): frozenset({Stage.OUTSIDE, Stage.TRAINING}),
    (Stage.HANDED_IN, RoundEnded): frozenset({Stage.HANDED_IN}),
    (Stage.HANDED_IN, GoAhead): frozenset({Stage.HANDED_IN, Stage.AHEAD}),
    (Stage.HANDED_IN, Leave): frozenset({Stage.LEAVING}),
    (Stage.HANDED_IN, Committed): frozenset({Stage.OUTSIDE, Stage.TRAINING}),
    (Stage.AHEAD, RoundEnded): frozenset({Stage.AHEAD}),
    (Stage.AHEAD, GoAhead): frozenset({Stage.AHEAD}),
    (Stage.AHEAD, StepMade): frozenset({Stage.AHEAD}),
    (Stage.AHEAD, Leave): frozenset({Stage.LEAVING}),
    (Stage.AHEAD, Committed): frozenset({Stage.OUTSIDE, Stage.TRAINING}),
    (Stage.LEAVING, RoundEnded): frozenset({Stage.LEAVING}),
    (Stage.LEAVING, Committed): frozenset({Stage.LEAVING, Stage.TRAINING, Stage.LEFT}),
    **{(stage, Switched): frozenset({Stage.OUTSIDE, Stage.TRAINING}) for stage in Stage if stage is not Stage.LEFT},
}
"""Which stages an event may lead to. Any other event in a stage is a fault of the caller: LookupError."""


class TrainerMachine:
    """One peer's training over all rounds. `handle` takes an event and returns what to do, in that order.

    More than 20 methods, since each event has a handler and all of them change the one state below.
    """

    def __init__(self, rules: TrainingRules, layout: Layout) -> None:
        self._rules = rules
        self._layout = layout
        self.stage = Stage.OUTSIDE
        self.turn: Turn | None = None
        """The round that is trained or handed in; None outside."""
        self.work = Uncounted()
        """Without what was trained ahead."""
        self.lead = Uncounted()
        """What was trained since the snapshot of a round that is still being synced."""
        self.own_steps = 0
        """Steps of this round, those made ahead of it included."""
        self.place = Place()
        self.newest = -1
        """The newest round that training has heard of."""
        self.carries = False
        """Whether what is trained on has own changes that the newest round did not count."""
        self.parting: Parting | None = None
        """What the newest commit was made of, where another history may undo it."""

    def handle(self, event: Event) -> list[Action]:
        """Raises LookupError for an event that makes no sense in this stage (see TRANSITIONS)."""
        allowed = TRANSITIONS.get((self.stage, type(event)))
        if allowed is None:
            raise LookupError(f"{type(event).__name__} while {self.stage.value}")
        match event:
            case Begin():
                actions = self._begin(event)
            case StepMade():
                actions = self._step_made(event)
            case RoundEnded():
                actions = self._hand_in()
            case GoAhead():
                actions = self._go_ahead()
            case Leave():
                actions, self.stage = [], Stage.LEAVING
            case Committed():
                actions = self._committed(event)
            case Switched():
                actions = self._switched(event)
        assert self.stage in allowed
        return actions

    @property
    def steps_left(self) -> int:
        """Inner steps to make now: of this round, or ahead of it."""
        full = 0 if self.turn is None else self.turn.manifest.steps_per_round
        if self.stage is Stage.AHEAD:
            return min(self._rules.overlap_steps or full, full) - self.lead.steps
        return max(0, full - self.own_steps) if self.stage is Stage.TRAINING else 0  # the round ahead may be shorter

    @property
    def needs_a_step(self) -> bool:
        """Whether one more step is needed before leaving: columns are handed out only with work that a round counts."""
        is_training = self.stage is Stage.TRAINING
        return is_training and self._rules.takes_turns and not self.work.tokens

    def next_positions(self) -> Ranges | None:
        """The positions of the next batch in the order of the data; None where the lease ends before it."""
        ahead = take(take(self.place.ranges, self.place.consumed)[1], self._rules.batch_sequences)[0]
        return None if self._rules.leased and count(ahead) < self._rules.batch_sequences else ahead

    def report(self, ready: bool, seconds: float, step_seconds: float) -> Work:
        """What the run is told of this round: `seconds` of training so far, `step_seconds` for a step that runs."""
        steps = 0 if self.turn is None else self.turn.manifest.steps_per_round
        return Work(
            ready=ready,
            tokens=self.work.tokens,
            steps=self.work.steps,
            sequences=self.place.consumed,
            seconds=seconds,
            ready_in_seconds=0.0 if ready else step_seconds,
            expected_tokens=steps * self._rules.batch_sequences * self._rules.sequence_tokens,
        )

    # ---- handlers

    def _begin(self, event: Begin) -> list[Action]:
        self.newest = event.manifest.round
        return self._enter(event.manifest, event.restored) if event.is_member else []

    def _step_made(self, event: StepMade) -> list[Action]:
        if self._rules.leased:
            self.place = replace(self.place, consumed=self.place.consumed + event.sequences)
        made = Uncounted() if event.skipped else Uncounted(event.tokens, 1)
        if self.stage is Stage.AHEAD:
            self.lead += made
        else:
            self.work += made
            self.own_steps += made.steps
        return []

    def _hand_in(self) -> list[Action]:
        """Once a round."""
        if self.stage is not Stage.TRAINING:
            return []
        self.stage = Stage.HANDED_IN
        return [TakeSnapshot(self._present_turn), SayReady(self._present_turn)]

    def _go_ahead(self) -> list[Action]:
        if self.stage is Stage.AHEAD or not self._rules.overlaps:
            return []
        self.stage = Stage.AHEAD
        return [StartAhead()]

    def _committed(self, event: Committed) -> list[Action]:
        self.newest = event.newest.round
        if self.stage is Stage.LEAVING and not event.is_member:
            return self._go(event)
        actions, uncounted = self._not_taken(event)
        if self.turn is not None:
            actions.append(CloseTurn(self.turn, event.newest))
        left = self._note_counted(event.counted)
        lead = self._take_lead()
        if not event.is_member:
            return actions + self._lose("the run no longer names this peer") + self._stand_aside(event.newest)
        parting = self._parting_after(event)
        if self.turn is None or not self._find_place(event.newest, left):
            return actions + self._lose(GIVEN_AWAY) + self._enter(event.newest, None)
        owned = columns_of(event.newest.ownership, self._rules.me)
        blocks = self.turn.blocks_within(owned)
        tiles = self._layout.tile_ids_in(blocks) & uncounted  # a column of another owner now is the same for all
        self.carries, self.own_steps = bool(tiles), lead
        load = self._load(event.newest, Rebase(tiles, blocks if lead else ()))
        load = replace(load, left_out=self._guests_left_out(event))
        self.parting = parting
        return [*actions, UseLease(self.place), load]

    def _guests_left_out(self, event: Committed) -> frozenset[int]:
        """Columns in which no round took in this peer's guest work, though a later one may have handed them out."""
        columns = frozenset(range(self._layout.num_columns))
        if event.counted is None:
            return columns
        return columns - {piece.block - 1 for piece in event.child.slices} if event.child is not None else frozenset()

    def _parting_after(self, event: Committed) -> Parting | None:
        """The parting, if the newest commit counts our work and another history may undo it; else None."""
        turn = self.turn
        is_known = event.had_snapshot or event.counted is None  # else it counted an earlier life
        if turn is None or not (event.is_degraded and is_known and event.newest.parent == turn.tip_hash):
            return None
        return Parting(self._rules.me, turn.manifest, turn.owned, event.counted)

    def _not_taken(self, event: Committed) -> tuple[list[Action], frozenset[int]]:
        """The tiles that were trained and did not go in, of a snapshot that is taken now where there was none."""
        turn = self.turn
        if turn is None or event.had_snapshot or (event.counted is not None and not self._rules.takes_turns):
            return [], event.uncounted
        own = self._layout.tile_ids_in(turn.blocks)
        if event.counted is not None and event.child is not None:
            own -= event.child.tile_ids_of(self._rules.me)
        return [TakeSnapshot(turn)] if self.stage is Stage.TRAINING else [], own

    def _go(self, event: Committed) -> list[Action]:
        left = self._note_counted(event.counted)
        turn, lost = self._present_turn, []
        if not self._find_place(event.newest, left):
            lost = self._lose(GIVEN_AWAY)
            self.place = Place(event.newest.leases.of(self._rules.me))
        self.stage = Stage.LEFT
        owned = columns_of(event.newest.ownership, self._rules.me) or turn.owned
        has_more = self._rules.takes_turns or self.work.tokens > 0
        rebase = Rebase(self._layout.tile_ids_in(turn.blocks_within(owned)) & event.uncounted) if has_more else None
        return [*lost, UseLease(self.place), Depart(owned, event.newest, rebase)]

    def _switched(self, event: Switched) -> list[Action]:
        """This peer's work goes over to the history that won, where its data is still this peer's."""
        turn, newest, actions = self.turn, event.newest, list[Action]()
        self.newest = newest.round
        parting, steps = self.parting, newest.steps_per_round if self.lead.steps else self.own_steps
        if event.at_once:  # what came of the turn, and that it is undone, is heard of in one moment
            parting = None if turn is None else Parting(self._rules.me, turn.manifest, turn.owned, None)
            steps = self.lead.steps
            actions += [TakeSnapshot(turn)] if turn is not None and self.stage is Stage.TRAINING else []
        self._take_lead()
        own = event.own_tokens + self.work.tokens
        way = None if parting is None or event.child is None else CarryOver(parting, event.child)
        kept = way is not None and event.is_member and self._bring_over(way, newest)
        actions += [Say(text) for text in outcome_texts(own, self.work.tokens if kept else 0, way)]
        if way is None or turn is None or not kept:
            return actions + (self._enter(newest, None) if event.is_member else self._stand_aside(newest))
        blocks = way.blocks(newest)
        ahead = tuple(block for block in blocks if block in turn.blocks)
        go_over = GoOver(self._layout.tile_ids_in(blocks) - way.taken, blocks, ahead, event.at_once)
        self.carries, self.own_steps = True, min(steps, newest.steps_per_round)
        return [*actions, UseLease(self.place), self._load(newest, go_over)]

    def _bring_over(self, way: CarryOver, newest: Manifest) -> bool:
        """Whether the data of the work is still ours; the work that the winner does not count is uncounted then."""
        if not self._find_place(newest, way.left(self.place.ahead_of(0))):
            return False
        self.work = way.uncounted(self.work)
        return True

    # ---- parts of them

    @property
    def _present_turn(self) -> Turn:
        assert self.turn is not None
        return self.turn

    def _enter(self, manifest: Manifest, restored: Restored | None) -> list[Action]:
        """Begins a round on the state as it is, with nothing of one's own in it but what a checkpoint held."""
        leased = manifest.leases.of(self._rules.me) if self._rules.leased else ()
        start = restored or Restored(Place(leased), Uncounted(), 0)
        self.place, self.work, self.own_steps = start.place, start.work, start.own_steps
        self.carries = False
        load = self._load(manifest, None)
        return [replace(load, restored=True)] if restored is not None else [UseLease(self.place), load]

    def _load(self, manifest: Manifest, rebase: Rebase | GoOver | None) -> Load:
        self.stage = Stage.TRAINING
        self.turn = Turn(manifest, columns_of(manifest.ownership, self._rules.me))
        self.parting = None
        return Load(self.turn, rebase, self.own_steps)

    def _stand_aside(self, newest: Manifest) -> list[Action]:
        self.stage, self.turn, self.carries = Stage.OUTSIDE, None, False
        self.work, self.parting = Uncounted(), None
        return [StandAside(newest)]

    def _note_counted(self, counted: Contribution | None) -> Ranges:
        """What a round counted is no longer uncounted; the positions trained on that it did not count."""
        if counted is not None:
            self.work = Uncounted()
        return self.place.ahead_of(counted.sequences if counted is not None else 0)

    def _take_lead(self) -> int:
        """What was trained ahead is work of the round that begins: its steps."""
        steps = self.lead.steps
        self.work += self.lead
        self.lead = Uncounted()
        return steps

    def _find_place(self, newest: Manifest, left: Ranges) -> bool:
        """Goes on in the new lease; False where that does not begin with what was trained and not counted."""
        ranges = newest.leases.of(self._rules.me) if self._rules.leased else ()
        if joined(take(ranges, count(left))[0]) != joined(left):
            return False
        self.place = Place(ranges, count(left))
        return True

    def _lose(self, why: str) -> list[Action]:
        lost, self.work = self.work.tokens, Uncounted()
        return [Say(f"{lost:,} tokens of yours do not count: {why}")] if lost else []


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


def outcome_texts(own: int, kept: int, carry_over: CarryOver | None) -> list[str]:
    """For a person: what became of the tokens that this peer had trained since the histories parted."""
    counted = carry_over.counted.tokens if carry_over is not None and carry_over.counted is not None else 0
    texts = []
    if kept:
        texts.append(f"{kept:,} of this peer's own tokens are kept for the next round to count")
    if (lost := own - kept - counted) > 0:
        texts.append(f"{lost:,} of this peer's own tokens are lost with the old history")
    return texts

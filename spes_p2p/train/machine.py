"""What a peer's training loop decides: what to train on, when to hand in, what a commit counted, and what is carried.

A pure state machine: events in, actions out, no tensor, thread or clock. The loop of a real peer (`peer/training.py`)
and that of a peer in memory (`tests/simulation/`) both run it, and only carry out what it says. It leaves out
why training pauses, and when a model is evaluated.

A round of it: TRAINING until the steps are made or the round closes, HANDED_IN until the commit comes, or AHEAD where
training goes on meanwhile (`sync.overlap`); then TRAINING again, on the new state and whatever was not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from spes_p2p.consensus.manifest import Manifest
from spes_p2p.consensus.messages import Work
from spes_p2p.ownership.assign import columns_of
from spes_p2p.state.layout import Layout
from spes_p2p.train.own_work import OwnWork
from spes_p2p.train.stages import (
    Action,
    Begin,
    CloseTurn,
    Committed,
    Depart,
    Event,
    GoAhead,
    Leave,
    Load,
    Rebase,
    Restored,
    RoundEnded,
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

LEFT_BEHIND = "this peer has gone over to a history that counts more"
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
    """One peer's training over all rounds. `handle` takes an event and returns what to do, in that order."""

    def __init__(self, rules: TrainingRules, layout: Layout) -> None:
        self._rules = rules
        self._layout = layout
        self.stage = Stage.OUTSIDE
        self.turn: Turn | None = None
        """The round that is trained or handed in; None outside."""
        self.own = OwnWork(rules)
        self.newest = -1
        """The newest round that training has heard of."""
        self.carries = False
        """Whether what is trained on has own changes that the newest round did not count."""

    def handle(self, event: Event) -> list[Action]:
        """Raises LookupError for an event that makes no sense in this stage (see TRANSITIONS)."""
        allowed = TRANSITIONS.get((self.stage, type(event)))
        if allowed is None:
            raise LookupError(f"{type(event).__name__} while {self.stage.value}")
        actions = list[Action]()
        match event:
            case Begin(manifest, is_member, restored):
                self.newest = manifest.round
                actions = self._enter(manifest, restored) if is_member else []
            case StepMade():
                self.own.add(event, is_ahead=self.stage is Stage.AHEAD)
            case RoundEnded() if self.stage is Stage.TRAINING:  # once a round
                assert self.turn is not None
                self.stage, actions = Stage.HANDED_IN, [TakeSnapshot(self.turn), SayReady(self.turn)]
            case GoAhead() if self._rules.overlaps and self.stage is not Stage.AHEAD:
                self.stage, actions = Stage.AHEAD, [StartAhead()]
            case Leave():
                self.stage = Stage.LEAVING
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
            return full - self.own.lead.steps
        return max(0, full - self.own.steps) if self.stage is Stage.TRAINING else 0  # the round ahead may be shorter

    @property
    def needs_a_step(self) -> bool:
        """Whether one more step is needed before leaving: columns are handed out only with work that a round counts."""
        is_training = self.stage is Stage.TRAINING
        return is_training and self._rules.takes_turns and not self.own.uncounted.tokens

    def report(self, ready: bool, seconds: float, step_seconds: float) -> Work:
        """What the run is told of this round: `seconds` of training so far, `step_seconds` for a step that runs."""
        steps = 0 if self.turn is None else self.turn.manifest.steps_per_round
        return Work(
            ready=ready,
            tokens=self.own.uncounted.tokens,
            steps=self.own.uncounted.steps,
            sequences=self.own.place.consumed,
            seconds=seconds,
            ready_in_seconds=0.0 if ready else step_seconds,
            expected_tokens=steps * self._rules.batch_sequences * self._rules.sequence_tokens,
        )

    # ---- handlers

    def _committed(self, event: Committed) -> list[Action]:
        self.newest = event.newest.round
        if self.stage is Stage.LEAVING and not event.is_member:
            return self._go(event)
        actions, uncounted = self._not_taken(event)
        if self.turn is not None:
            actions.append(CloseTurn())
        left = self.own.note_counted(event.counted)
        lead = self.own.take_lead()
        if not event.is_member:
            return actions + self.own.lose("the run no longer names this peer") + self._stand_aside(event.newest)
        if self.turn is None or not self.own.find_place(event.newest, left):
            return actions + self.own.lose(GIVEN_AWAY) + self._enter(event.newest, None)
        owned = columns_of(event.newest.ownership, self._rules.me)
        blocks = self.turn.blocks_within(owned)
        tiles = self._layout.tile_ids_in(blocks) & uncounted  # a column of another owner now is the same for all
        made = min(self.own.steps + lead, event.newest.steps_per_round) if event.is_renewal else lead
        self.carries, self.own.steps = bool(tiles), made
        load = self._load(event.newest, Rebase(tiles, blocks if lead else ()))
        return [*actions, UseLease(self.own.place), load]

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
        left, turn = self.own.note_counted(event.counted), self.turn
        assert turn is not None
        lost = [] if self.own.find_place(event.newest, left) else self.own.lose(GIVEN_AWAY)
        self.stage = Stage.LEFT
        owned = columns_of(event.newest.ownership, self._rules.me) or turn.owned
        has_more = self._rules.takes_turns or self.own.uncounted.tokens > 0
        rebase = Rebase(self._layout.tile_ids_in(turn.blocks_within(owned)) & event.uncounted) if has_more else None
        return [*lost, UseLease(self.own.place), Depart(owned, event.newest, rebase)]

    def _switched(self, event: Switched) -> list[Action]:
        """This peer starts on another history as who catches up: with nothing of its own but its moments."""
        self.newest = event.newest.round
        self.own.take_lead()
        self.own.uncounted += Uncounted(event.own_tokens, 0)
        said = self.own.lose(LEFT_BEHIND)
        return said + (self._enter(event.newest, None) if event.is_member else self._stand_aside(event.newest))

    # ---- parts of them

    def _enter(self, manifest: Manifest, restored: Restored | None) -> list[Action]:
        """Begins a round on the state as it is, with nothing of one's own in it but what a checkpoint held."""
        self.own.begin(manifest, restored)
        self.carries = False
        load = self._load(manifest, None)
        return [replace(load, restored=True)] if restored is not None else [UseLease(self.own.place), load]

    def _load(self, manifest: Manifest, rebase: Rebase | None) -> Load:
        self.stage = Stage.TRAINING
        self.turn = Turn(manifest, columns_of(manifest.ownership, self._rules.me))
        return Load(self.turn, rebase, self.own.steps)

    def _stand_aside(self, newest: Manifest) -> list[Action]:
        self.stage, self.turn, self.carries = Stage.OUTSIDE, None, False
        self.own.uncounted = Uncounted()
        return [StandAside(newest)]

"""What the trainer's machine decides, by the manifests of a made-up run of peer a."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spes_p2p.consensus.manifest import Contribution, Manifest
from spes_p2p.consensus.rules import Outcome, child_manifest, renewed_manifest
from spes_p2p.data.leases import Leases, count
from spes_p2p.ids import PeerId, sha256
from spes_p2p.ownership.assign import OwnershipRequest
from spes_p2p.train.machine import GIVEN_AWAY, LEFT_BEHIND, TRANSITIONS, TrainerMachine
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
from tests.sync.chains import A, MadeRun
from tests.sync.swarm_cases import small_config

RUN = MadeRun()
GENESIS = RUN.genesis(sha256(b"state 0")).manifest
BATCH, SEQUENCE = RUN.config.optimizer.batch_sequences, RUN.config.data.sequence_length
TOKENS = BATCH * SEQUENCE
RULES = TrainingRules(A, BATCH, SEQUENCE)
EVENTS = (Begin, StepMade, RoundEnded, GoAhead, Leave, Committed, Switched)


def started(rules: TrainingRules = RULES) -> TrainerMachine:
    machine = TrainerMachine(rules, RUN.layout)
    assert [type(action) for action in machine.handle(Begin(GENESIS, True))] == [UseLease, Load]
    return machine


def turn_of(machine: TrainerMachine) -> Turn:
    assert machine.turn is not None
    return machine.turn


def train(machine: TrainerMachine, steps: int) -> None:
    for _ in range(steps):
        assert machine.handle(StepMade(TOKENS, BATCH)) == []


def after(parent: Manifest, counted: Contribution | None) -> Manifest:
    """The child that counts this much of peer a."""
    roster = () if counted is None else (counted,)
    slices = RUN.slices(parent) if counted is not None else ()
    outcome = Outcome(roster, slices, sha256(b"wire"), sha256(b"state"), None)
    return child_manifest(RUN.rules, parent, outcome, parent.members, {A: OwnershipRequest(RUN.layout.num_columns)})


def commit(machine: TrainerMachine, counted: Contribution | None, **other: object) -> list[Action]:
    """A round is decided; nothing of the snapshot went in where nothing was counted."""
    lost = frozenset(tile.id for tile in RUN.layout.tiles) if counted is None else frozenset[int]()
    newest = after(turn_of(machine).manifest, counted)
    event = Committed(newest, True, counted, machine.stage is not Stage.TRAINING, lost, newest)
    return machine.handle(replace(event, **other))  # type: ignore[arg-type]


def contribution(machine: TrainerMachine) -> Contribution:
    work = machine.report(True, 1.0, 0.0)
    return Contribution(A, work.tokens, work.steps, work.sequences)


@pytest.mark.parametrize("stage", Stage)
@pytest.mark.parametrize("event", EVENTS)
def test_what_is_not_in_the_table_is_refused(stage: Stage, event: type) -> None:
    machine = started()
    machine.stage = stage
    events: dict[type, Event] = {
        Begin: Begin(GENESIS, True), StepMade: StepMade(TOKENS, BATCH), RoundEnded: RoundEnded(), GoAhead: GoAhead(),
        Leave: Leave(), Committed: Committed(GENESIS, True, None, True, frozenset()),
        Switched: Switched(GENESIS, True, 0),
    }  # fmt: skip
    if (stage, event) in TRANSITIONS:
        machine.handle(events[event])
        assert machine.stage in TRANSITIONS[stage, event]
    else:
        with pytest.raises(LookupError, match=stage.value):
            machine.handle(events[event])


def test_a_round_that_counts_the_work_ends_without_anything_to_carry() -> None:
    machine = started()
    train(machine, 2)
    assert machine.report(False, 1.0, 0.5).tokens == 2 * TOKENS  # who still trains says how far it is
    turn = turn_of(machine)
    assert machine.handle(RoundEnded()) == [TakeSnapshot(turn), SayReady(turn)]
    assert machine.handle(RoundEnded()) == []
    assert machine.handle(GoAhead()) == []  # without overlap
    close, lease, load = commit(machine, contribution(machine))
    assert close == CloseTurn()
    assert isinstance(load, Load)
    assert load.rebase == Rebase(frozenset())
    assert lease == UseLease(Place(load.turn.manifest.leases.of(A), 0))
    assert (machine.own.uncounted, machine.carries, machine.stage) == (Uncounted(), False, Stage.TRAINING)


def test_what_a_round_left_out_is_carried_and_counted_once() -> None:
    machine = started()
    train(machine, 2)
    machine.handle(RoundEnded())
    *_, lease, load = commit(machine, None)
    assert isinstance(load, Load)
    assert load.rebase == Rebase(frozenset(tile.id for tile in RUN.layout.tiles))
    assert lease == UseLease(Place(load.turn.manifest.leases.of(A), 2 * BATCH))
    assert (machine.carries, machine.own.steps) == (True, 0)
    train(machine, 1)
    machine.handle(RoundEnded())
    entry = contribution(machine)
    assert entry == Contribution(A, 3 * TOKENS, 3, 3 * BATCH)
    commit(machine, entry)
    assert (machine.own.uncounted, machine.carries) == (Uncounted(), False)


def test_what_is_decided_while_a_peer_trains_is_carried_from_a_snapshot_of_that_moment() -> None:
    machine = started()
    train(machine, 1)
    turn = turn_of(machine)
    snapshot, _, _, load = commit(machine, None)
    assert snapshot == TakeSnapshot(turn)
    assert isinstance(load, Load)
    assert load.rebase is not None
    assert load.rebase.tiles


def test_a_skipped_step_uses_data_and_counts_for_nothing() -> None:
    machine = started()
    machine.handle(StepMade(TOKENS, BATCH, skipped=True))
    assert (machine.own.uncounted, machine.own.steps, machine.own.place.consumed) == (Uncounted(), 0, BATCH)


@pytest.mark.parametrize("leaves", [False, True])
def test_work_whose_data_was_leased_to_others_is_lost_and_said(leaves: bool) -> None:
    machine = started()
    train(machine, 1)
    machine.handle(RoundEnded())
    if leaves:
        machine.handle(Leave())
    newest = after(turn_of(machine).manifest, None)
    size = count(newest.leases.of(A))
    newest = replace(newest, leases=Leases(9 * size, (), ((A, ((8 * size, 9 * size),)),)))
    *_, lost, lease, last = commit(machine, None, newest=newest, is_member=not leaves)
    assert lost == Say(f"{TOKENS:,} tokens of yours do not count: {GIVEN_AWAY}")
    assert lease == UseLease(Place(((8 * size, 9 * size),), 0))
    assert isinstance(last, Depart if leaves else Load)
    assert (last.rebase, machine.own.uncounted) == (None, Uncounted())


def test_without_leases_there_is_no_place_and_work_is_carried_all_the_same() -> None:
    machine = started(replace(RULES, leased=False))
    train(machine, 2)
    assert machine.own.place == Place()
    machine.handle(RoundEnded())
    *_, lease, load = commit(machine, None)
    assert isinstance(load, Load)
    assert load.rebase is not None
    assert (lease, machine.own.uncounted) == (UseLease(Place()), Uncounted(2 * TOKENS, 2))


def test_with_turns_what_had_none_in_a_round_that_counted_an_earlier_life_is_carried() -> None:
    machine = started(replace(RULES, takes_turns=True))
    train(machine, 1)
    entry = contribution(machine)
    child = after(GENESIS, entry)
    child = replace(child, slices=tuple(piece for piece in child.slices if piece.block != 2))
    *_, load = commit(machine, entry, child=child, had_snapshot=False)
    assert isinstance(load, Load)
    assert load.rebase == Rebase(frozenset(RUN.layout.tile_ids_of(2)))


def test_steps_made_ahead_belong_to_the_next_round() -> None:
    machine = started(replace(RULES, overlaps=True))
    train(machine, 2)
    machine.handle(RoundEnded())
    ready = contribution(machine)
    assert machine.handle(GoAhead()) == [StartAhead()]
    assert machine.handle(GoAhead()) == []
    assert machine.steps_left == 10
    train(machine, 2)
    assert (machine.steps_left, machine.own.uncounted.tokens) == (8, 2 * TOKENS)
    *_, lease, load = commit(machine, ready)
    assert isinstance(load, Load)
    assert load.rebase == Rebase(frozenset(), load.turn.blocks)
    assert load.own_steps == machine.own.steps == 2
    assert (machine.own.uncounted, lease) == (Uncounted(2 * TOKENS, 2), UseLease(machine.own.place))
    assert (machine.own.place.consumed, machine.own.lead) == (2 * BATCH, Uncounted())


def test_nothing_is_left_of_a_round_that_is_shorter_than_what_was_made_ahead_of_it() -> None:
    machine = started(replace(RULES, overlaps=True))
    train(machine, 2)
    machine.handle(RoundEnded())
    ready = contribution(machine)
    machine.handle(GoAhead())
    train(machine, 3)
    commit(machine, ready, newest=replace(after(GENESIS, ready), steps_per_round=1))
    assert (machine.own.steps, machine.steps_left) == (3, 0)


def test_who_is_not_named_any_more_stands_aside_until_it_is() -> None:
    machine = started()
    train(machine, 1)
    actions = commit(machine, None, is_member=False)
    assert isinstance(actions[-1], StandAside)
    assert any(isinstance(action, Say) for action in actions)
    assert machine.steps_left == 0
    load = machine.handle(Committed(GENESIS, True, None, False, frozenset()))[-1]
    assert isinstance(load, Load)
    assert load.rebase is None


def test_another_history_is_begun_as_it_is() -> None:
    machine = started()
    train(machine, 2)
    said, lease, load = machine.handle(Switched(after(GENESIS, None), True, 5))
    assert said == Say(f"{2 * TOKENS + 5:,} tokens of yours do not count: {LEFT_BEHIND}")
    assert isinstance(lease, UseLease)
    assert isinstance(load, Load)
    assert (load.rebase, machine.own.uncounted) == (None, Uncounted())


def test_another_history_that_does_not_name_this_peer_leaves_nothing_of_its_work() -> None:
    machine = started()
    train(machine, 2)
    said, aside = machine.handle(Switched(after(GENESIS, None), False, 0))
    assert said == Say(f"{2 * TOKENS:,} tokens of yours do not count: {LEFT_BEHIND}")
    assert isinstance(aside, StandAside)
    assert (machine.own.uncounted, machine.turn) == (Uncounted(), None)


@pytest.mark.parametrize("is_renewal", [True, False])
def test_work_crosses_a_renewal_whole_and_the_round_is_not_trained_again(is_renewal: bool) -> None:
    machine = started()
    train(machine, 2)
    machine.handle(RoundEnded())
    turn = turn_of(machine)
    renewed = renewed_manifest(RUN.rules, turn.manifest, [A])
    *_, load = commit(machine, None, newest=renewed, child=renewed, is_renewal=is_renewal)
    assert isinstance(load, Load)
    assert load.rebase == Rebase(frozenset(tile.id for tile in RUN.layout.tiles))
    assert machine.own.uncounted == Uncounted(2 * TOKENS, 2)
    assert load.own_steps == machine.own.steps == (2 if is_renewal else 0)


def test_a_checkpoint_is_gone_on_from_in_the_middle_of_its_round() -> None:
    machine = TrainerMachine(RULES, RUN.layout)
    place = Place(GENESIS.leases.of(A), BATCH)
    (load,) = machine.handle(Begin(GENESIS, True, Restored(place, Uncounted(TOKENS, 1), 1)))
    assert isinstance(load, Load)
    assert load.restored
    assert machine.newest == GENESIS.round
    assert machine.steps_left == GENESIS.steps_per_round - 1
    train(machine, 1)
    assert contribution(machine) == Contribution(A, 2 * TOKENS, 2, 2 * BATCH)


@pytest.mark.parametrize("counted", [True, False])
def test_a_leaver_goes_when_nobody_counts_on_it_with_what_was_not_counted(counted: bool) -> None:
    machine = started()
    train(machine, 1)
    machine.handle(RoundEnded())
    machine.handle(Leave())
    depart = commit(machine, contribution(machine) if counted else None, is_member=False)[-1]
    assert isinstance(depart, Depart)
    assert (depart.rebase is None) == counted
    assert (machine.stage, machine.own.uncounted.tokens) == (Stage.LEFT, 0 if counted else TOKENS)


def test_the_last_to_leave_keep_what_they_own_by_the_manifest_that_is_saved() -> None:
    """It names them still, and gives them the columns of those who have gone: a later life begins with these."""
    other, columns = PeerId("b"), range(RUN.layout.num_columns)
    machine = TrainerMachine(RULES, RUN.layout)
    machine.handle(Begin(replace(GENESIS, ownership=tuple((A,) if c < 2 else (other,) for c in columns)), True))
    train(machine, 1)
    machine.handle(RoundEnded())
    machine.handle(Leave())
    newest = replace(GENESIS, round=1, ownership=tuple((A,) if c else (other,) for c in columns))
    depart = commit(machine, None, newest=newest, is_member=False)[-1]
    assert isinstance(depart, Depart)
    assert depart.owned == tuple(columns)[1:]
    assert depart.rebase is not None
    assert {RUN.layout.tiles[tile].block for tile in depart.rebase.tiles} == {0, 2}, "what was trained and is ours"


def test_a_leaver_whose_work_a_round_left_out_hands_it_in_again() -> None:
    """The round was planned before it handed in: others close the next one at once for who is ready and leaves."""
    machine = started()
    train(machine, 1)
    machine.handle(RoundEnded())
    machine.handle(Leave())
    commit(machine, None)
    assert (machine.stage, machine.own.uncounted.tokens) == (Stage.TRAINING, TOKENS)
    machine.handle(RoundEnded())
    machine.handle(Leave())
    assert isinstance(commit(machine, contribution(machine), is_member=False)[-1], Depart)


@pytest.mark.parametrize("turns", ["sync.expert_rounds=2", "sync.vocabulary_rounds=2", ""])
def test_what_a_round_leaves_out_takes_turns(turns: str) -> None:
    config = small_config(*filter(None, (turns,)))
    assert TrainingRules.of(config, A, leased=True).takes_turns == bool(turns)


def test_with_turns_a_leaver_that_is_still_named_hands_in_again() -> None:
    machine = started(replace(RULES, takes_turns=True))
    train(machine, 1)
    machine.handle(RoundEnded())
    machine.handle(Leave())
    commit(machine, contribution(machine))
    assert (machine.stage, machine.needs_a_step) == (Stage.TRAINING, True)

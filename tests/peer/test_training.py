"""The loop over rounds of one peer, with real training, disk and gate, and commits that the test makes up."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from spes_p2p.checkpoint.save import save_checkpoint
from spes_p2p.consensus.manifest import Contribution, Decay, Manifest, manifest_hash
from spes_p2p.consensus.messages import (
    Work,
)
from spes_p2p.consensus.rules import Outcome, child_manifest
from spes_p2p.data.feed import PieceDataset
from spes_p2p.data.loader import AnyDataset, LeasedLoader, held_out_batches, need_held_out, open_dataset
from spes_p2p.data.trees import FolderPieces
from spes_p2p.ids import PeerId, sha256
from spes_p2p.interop.hf import vocabulary_tiles
from spes_p2p.observe.events import Eval, Event, ExpertLoad, Note, Step, Warning
from spes_p2p.ownership.assign import OwnershipRequest
from spes_p2p.peer import departure, training
from spes_p2p.peer.departure import Departure
from spes_p2p.peer.pausing import PauseSwitch
from spes_p2p.peer.presence import Progress
from spes_p2p.peer.resume import Resumed, SavedLead, TrainingSetup
from spes_p2p.peer.run import _begin
from spes_p2p.peer.training import PAUSE_GRACE_SECONDS, LoopOptions, StepLimits, TrainingLoop, ValuesAhead
from spes_p2p.state.layout import Values
from spes_p2p.state.version import Version
from spes_p2p.sync.inputs import Inputs
from spes_p2p.sync.residuals import Residuals
from spes_p2p.sync.surroundings import Applied
from spes_p2p.sync.trainer_bridge import TrainerBridge
from spes_p2p.train.machine import LEFT_BEHIND
from spes_p2p.train.schedule import learning_rate
from spes_p2p.train.stages import Stage, Uncounted
from spes_p2p.train.trainer import Trainer
from tests.data.piece_makers import hand_over, make_feed
from tests.peer.test_resume import config_with_data
from tests.sync.chains import A, MadeRun

torch.set_num_threads(1)
STEPS = 3
MERGED = 0.25
"""What a commit of these tests adds to every value, so that it can be told from what this peer trained."""


@pytest.fixture(autouse=True)
def nobody_answers_a_leaver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of these peers leave a swarm that the test does not play on: they need not wait long for a last commit."""
    for module in (training, departure):
        monkeypatch.setattr(module, "LEAVE_SECONDS", 1.0)


class Story:
    """A peer in a run that the test decides. `at_step[n]` is called after the n-th inner step."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        steady = (f"sync.steps_per_round={STEPS}", "eval.every_rounds=0")
        config = config_with_data(folder, *steady, *overrides)
        self.config = config
        self.run = MadeRun(config)
        self.commits = self.run.chain(5)
        self.store = self.run.store(folder / "state")
        self.inputs = Inputs(folder / "inputs", self.run.layout)
        self.residuals = Residuals(folder / "residuals", self.run.layout)
        self._chain = SimpleNamespace(
            parent_of=lambda manifest: self.commits[manifest.round - 1].manifest,
            child_of=lambda manifest: self.commits[manifest.round + 1].manifest,
        )
        self.trainer = Trainer(config, self.run.layout, torch.device("cpu"))
        self.gate = TrainerBridge()
        self.pause = PauseSwitch()
        self.at_step: dict[int, Callable[[], None]] = {}
        self.ready: list[Work] = []
        self.on_ready: Callable[[Work], None] = lambda work: self.commit(counted=True)
        self.saved: list[tuple[Manifest, Version, Uncounted, bool, int]] = []
        self.saved_ahead: ValuesAhead = lambda manifest: None
        self.others: list[Any] = []
        self.lost_round: int | None = None
        self.limits: list[int] = []
        self.said: list[str] = []
        self.notes: list[str] = []
        self.loads: list[tuple[int, int, int]] = []
        """Round and tokens of each, and how often READY was said before it."""
        self.evaluated: list[int] = []
        self.left = False
        self.steps = 0
        self.logged: list[Step] = []
        self.round = 0
        state = SimpleNamespace(round=SimpleNamespace(close_asked=False))
        driver: Any = SimpleNamespace(core=SimpleNamespace(tip_hash=self.head, tip=self.manifest, state=state))
        driver.progressed = lambda work: self._on_ready(work) if work.ready else None
        self.driver = driver
        loop: Any = SimpleNamespace(call_soon_threadsafe=lambda work: work())
        self.gate.attach(driver, loop)
        self.connection = self._connection()
        self.learn_from(open_dataset(config))

    def learn_from(self, dataset: AnyDataset, last_round: int | None = None) -> None:
        """Makes the loop."""
        self.dataset, self.loader = dataset, LeasedLoader(dataset, self.config)
        learning = TrainingSetup(self.config, self.trainer, self.loader, dataset)
        options = LoopOptions(None, last_round, self.pause, lambda manifest: self.saved_ahead(manifest))
        self.loop = TrainingLoop(self.connection, learning, self._emit, self._save, options)

    @property
    def manifest(self) -> Manifest:
        return self.commits[self.round].manifest

    @property
    def head(self) -> Any:
        return manifest_hash(self.manifest)

    def _connection(self) -> Any:
        return SimpleNamespace(
            gate=self.gate, peer_id=A, layout=self.run.layout, driver=self.driver, is_member=lambda by=None: True,
            disk=SimpleNamespace(
                store=self.store, inputs=self.inputs, residuals=self.residuals, chain=self._chain,
            ),
            others=lambda: self.others,
            lost_round=lambda: self.lost_round, last_round=None, are_others_behind=lambda round: False,
            presence=SimpleNamespace(progress=Progress()),
            wishes=SimpleNamespace(leave=self._leave, limit_columns=self._limit),
        )  # fmt: skip

    def _limit(self, fit: int) -> bool:
        self.limits.append(fit)
        return len(self.limits) == 1

    def _leave(self) -> None:
        self.left = True

    def _on_ready(self, work: Work) -> None:
        self.ready.append(work)
        self.on_ready(work)

    def _emit(self, event: Event) -> None:
        if isinstance(event, Warning):
            self.said.append(event.message)
        if isinstance(event, Note):
            self.notes.append(event.message)
        if isinstance(event, ExpertLoad):
            self.loads.append((event.round, event.tokens, len(self.ready)))
        if isinstance(event, Eval):
            self.evaluated.append(event.tokens)
        if isinstance(event, Step):
            self.steps += 1
            self.logged.append(event)
            self.at_step.get(self.steps, lambda: None)()

    def _save(self, manifest: Manifest, version: Version, uncounted: Uncounted, final: bool = False) -> None:
        kept = Uncounted(uncounted.tokens, uncounted.steps)
        self.saved.append((manifest, version, kept, final, self.trainer.round_steps))

    def commit(self, counted: bool, columns: bool = True, vocabulary: bool = True, kind: str | None = None) -> None:
        """The round is decided: everything moves by MERGED, from what was handed in or from the old state.

        `columns`, `vocabulary`: whether it is their turn to be handed out. `kind`: of the certificate.
        """
        handed_in = self.inputs.snapshot.parent == self.head
        base, layout = self.store.version(self.round), self.run.layout
        staging = self.store.stage(self.round + 1, self.round)
        late = {tile.id for tile in layout.tiles if tile.block and not columns}
        late |= set() if vocabulary else set(range(vocabulary_tiles(layout)))
        for tile in layout.tiles:
            took = counted and tile.block in self.inputs.snapshot.blocks and tile.id not in late
            source = self.inputs.snapshot if took else base
            staging.write_state(tile.id, source.block(tile.block)[tile.start : tile.stop] + np.float32(MERGED))
        staging.finish()
        staging.publish()
        previous = self.manifest
        if not counted:
            empty = Outcome((), (), sha256(b"wire"), sha256(b"state"), None)
            wishes = {A: OwnershipRequest(layout.num_columns)}
            child = child_manifest(self.run.rules, previous, empty, previous.members, wishes)
            self.commits[self.round + 1] = self.run.certified(child)
        self.round += 1
        self.driver.core.tip_hash, self.driver.core.tip = self.head, self.manifest
        entry = self.manifest.roster[0] if counted else None
        missed = (tile.id for tile in layout.tiles if not counted or tile.id in late)
        lost = frozenset(missed) if handed_in else frozenset[int]()
        commit = self.commits[self.round]
        certificate = replace(commit.certificate, kind=kind or commit.certificate.kind)
        self.gate.applied(
            Applied(
                replace(commit, certificate=certificate),
                previous,
                entry,
                handed_in,
                lost,
                False,
                {},
                0,
                0,
                1.0,
                frozenset(),
            )
        )

    def counts(self, work: Work) -> None:
        """The next round that counts us will have counted this."""
        roster = (Contribution(A, work.tokens, work.steps, work.sequences),)
        parent, layout = self.manifest, self.run.layout
        outcome = Outcome(roster, self.run.slices(parent), sha256(b"wire"), sha256(b"counted"), None)
        child = child_manifest(
            self.run.rules, parent, outcome, parent.members, {A: OwnershipRequest(layout.num_columns)}
        )
        self.commits[self.round + 1] = self.run.certified(child)

    def switch(self, counted: bool = False) -> None:
        """Another history wins: round 1 is another one, with all values moved by twice MERGED from the beginning's.

        `counted`: it counts of this peer what our round 1 did.
        """
        base, layout, previous = self.store.version(0), self.run.layout, self.manifest
        staging = self.store.stage(1, 0)
        for tile in layout.tiles:
            staging.write_state(tile.id, base.block(tile.block)[tile.start : tile.stop] + np.float32(2 * MERGED))
        staging.finish()
        staging.publish()
        genesis = self.commits[0].manifest
        own, slices = self.commits[1].manifest.roster, self.commits[1].manifest.slices
        outcome = Outcome((), (), sha256(b"wire"), sha256(b"another"), None)
        if counted:
            outcome = replace(outcome, roster=own, slices=slices)
        child = child_manifest(
            self.run.rules, genesis, outcome, genesis.members, {A: OwnershipRequest(layout.num_columns)}
        )
        self.commits[1], self.round = self.run.certified(child), 1
        self.driver.core.tip_hash, self.driver.core.tip = self.head, self.manifest
        event = Applied(self.commits[1], previous, None, False, frozenset(), True, {}, 0, 0, 1.0, frozenset())
        tokens = sum(entry.tokens for entry in own) if previous.round else 0
        self.gate.applied(replace(event, switched=True, lost_tokens=tokens, own_tokens=tokens))

    def play(self) -> None:
        self.loop.begin(self.manifest)
        self.loop.run()
        Departure(self.loop).run()

    def values(self) -> Values:
        return self.trainer.contribution(0)


@dataclass
class Start:
    """Values to begin with."""

    version: Version

    def block(self, index: int) -> Values:
        return self.version.block(index)


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(tmp_path)


def test_counted_work_is_in_the_state_that_the_next_round_starts_from(story: Story) -> None:
    story.at_step[2 * STEPS] = story.gate.stop
    story.others = [SimpleNamespace(round=0, peer=PeerId("b"), intent=SimpleNamespace(leaving=False))]
    story.play()
    assert [(work.ready, work.steps, work.tokens) for work in story.ready] == [(True, STEPS, STEPS * 4 * 16)] * 2
    assert [manifest.round for manifest, *_ in story.saved] == [0, 1, 2]
    assert all(uncounted == Uncounted() for _, _, uncounted, _, _ in story.saved)
    assert story.loads == [(1, STEPS * 4 * 16, 0), (2, STEPS * 4 * 16, 1)]  # before the round can be over


def test_steps_are_logged_across_rounds_with_the_tokens_since_the_event_before(tmp_path: Path) -> None:
    """Also where a round is shorter than the pause between two events; the rest when the peer ends."""
    story = Story(tmp_path, "output.log_every_steps=4")

    def on_ready(work: Work) -> None:
        if len(story.ready) == 3:
            story.gate.stop()
        story.commit(counted=True)

    story.on_ready = on_ready
    story.play()
    assert [event.tokens // (4 * 16) for event in story.logged] == [4, 4, 1]
    assert sum(event.tokens for event in story.logged) == sum(work.tokens for work in story.ready)


def test_a_step_that_a_leaver_makes_is_logged(tmp_path: Path) -> None:
    story = Story(tmp_path, "output.log_every_steps=4", "sync.expert_rounds=3")
    story.others = [SimpleNamespace(round=0, peer=PeerId("b"), intent=SimpleNamespace(leaving=False))]
    story.gate.stop()
    story.play()
    assert [work.steps for work in story.ready][:1] == [1]
    assert story.logged[0].tokens == 4 * 16


def test_a_step_that_is_skipped_is_a_warning_and_no_event(story: Story) -> None:
    train_step, weight = story.trainer.train_step_unless, story.trainer.learner.model.norm.weight.detach()
    calls = iter(range(100))

    def poisoned_once(*given: Any) -> Any:
        good, is_second = weight.clone(), next(calls) == 1
        if is_second:
            weight[0] = torch.inf
        result = train_step(*given)
        if is_second:
            weight.copy_(good)
        return result

    story.trainer.train_step_unless = poisoned_once  # type: ignore[method-assign,assignment]
    story.at_step[STEPS] = story.gate.stop
    story.play()
    assert len(story.logged) == STEPS
    assert all(np.isfinite((event.loss, event.grad_norm)).all() for event in story.logged)
    assert sum("was skipped" in text for text in story.said) == 1
    assert story.connection.presence.progress.tokens == STEPS * 4 * 16


def test_the_learning_rate_falls_from_the_manifest_on_that_says_so(story: Story) -> None:
    rates: list[float] = []
    train_step, commits = story.trainer.train_step_unless, story.commits

    def note(*given: Any) -> Any:
        result = train_step(*given)
        rates.append(result.lr if result is not None else 0.0)
        return result

    decay = Decay(commits[2].manifest.step, 2 * STEPS)
    commits[2] = replace(commits[2], manifest=replace(commits[2].manifest, decay=decay))
    story.trainer.train_step_unless = note  # type: ignore[method-assign,assignment]
    story.at_step[3 * STEPS] = story.gate.stop
    story.play()
    made = [(commits[number // STEPS].manifest, 1 + number % STEPS) for number in range(3 * STEPS)]
    assert rates == [learning_rate(story.config, at.step + own, at.decay) for at, own in made]
    assert rates[-1] < learning_rate(story.config, commits[2].manifest.step + STEPS)


def test_the_values_to_begin_with_are_not_kept(story: Story) -> None:
    start = Start(story.store.version(0))
    kept = weakref.ref(start)
    story.loop.begin(story.manifest, values_ahead=partial(values_of, start))
    del start
    assert kept() is None


def values_of(start: Start, manifest: Manifest) -> Start:
    return start


def test_who_comes_back_begins_with_what_it_is_ahead_once_it_is_a_member(story: Story) -> None:
    """The others have let it go: it is in with the next round that they commit."""
    start, asked = Start(story.store.version(0)), list[int]()
    is_in = False

    def values_ahead(manifest: Manifest) -> Start:
        asked.append(manifest.round)
        return start

    story.connection.is_member = lambda by=None: is_in
    story.loop.begin(story.manifest, values_ahead=values_ahead)
    assert asked == []
    is_in = True
    story.commit(counted=False)
    story.loop.take(story.gate.wait(0.0))
    assert asked == [1]
    np.testing.assert_array_equal(story.values(), start.block(0))
    assert not np.array_equal(story.values(), story.store.version(1).block(0))
    story.commit(counted=False)
    story.loop.take(story.gate.wait(0.0))
    assert asked == [1], "later rounds know what it is ahead"


def test_a_commit_that_names_a_peer_while_it_starts_is_waited_for(story: Story) -> None:
    """It would begin without columns on a state that does not name it, and give its lead away."""
    asked = list[int]()

    def values_ahead(manifest: Manifest) -> Start:
        asked.append(manifest.round)
        return Start(story.store.version(0))

    story.connection.is_member = lambda by=None: by is None or by.round > 1
    story.loop.begin(story.manifest, values_ahead=values_ahead)
    for turn_round in (None, 2):
        assert story.loop.machine.turn is None
        assert story.saved == []
        story.commit(counted=False)
        story.loop.take(story.gate.wait(0.0))
        turn = story.loop.machine.turn
        assert (turn.manifest.round if turn is not None else None) == turn_round
    assert asked == [2]


@pytest.mark.parametrize("why", ["let go", "other history"])
def test_who_has_nothing_to_carry_begins_with_what_its_checkpoint_is_ahead(story: Story, why: str) -> None:
    """As after a restart: what was counted in tokens and has had no turn is on its disk alone."""
    start, asked, is_in = Start(story.store.version(0)), list[int](), True

    def saved_ahead(manifest: Manifest) -> Start:
        asked.append(manifest.round)
        return start

    def go_on() -> None:
        story.loop.take(story.gate.wait(0.0))

    story.saved_ahead = saved_ahead
    story.connection.is_member = lambda by=None: is_in
    story.loop.begin(story.manifest)
    story.loop.hand_in()
    go_on()
    story.commit(counted=False)
    go_on()
    assert asked == [], "memory has all of it"
    if why == "let go":
        is_in = False
        story.commit(counted=False)
        go_on()
        assert asked == []
        is_in = True
        story.commit(counted=False)
    else:
        story.switch()
    go_on()
    assert asked == [story.round]
    np.testing.assert_array_equal(story.values(), start.block(0))


def saved_lead_of(story: Story, folder: Path) -> SavedLead:
    """By real checkpoints, which the loop saves from now on."""
    run, disk = story.run, story.connection.disk

    def save(manifest: Manifest, version: Version, uncounted: Uncounted, final: bool = False) -> None:
        private = {
            "round": manifest.round, "manifest": manifest_hash(manifest), "uncounted": {"tokens": 0, "steps": 0},
            "trainer": story.trainer.private_state(), "loader": story.loader.state_dict(),
        }  # fmt: skip
        save_checkpoint(
            folder / "checkpoints", version, manifest.step, private, {"fingerprint": run.info.fingerprint.hex()}, 2
        )

    learning = TrainingSetup(story.config, story.trainer, story.loader, story.dataset)
    disk.chain.find = lambda round: story.commits[round]
    disk.chain.has = lambda head, round: manifest_hash(story.commits[round].manifest) == head
    story.loop.save = save
    return SavedLead(folder / "checkpoints", folder / "state", run.info, A, run.layout, disk, learning)


def test_who_was_let_go_and_is_named_again_is_ahead_as_before(tmp_path: Path) -> None:
    """With real checkpoints: what was counted and has had no turn goes on, what was trained since does not."""
    story = Story(tmp_path, "sync.vocabulary_rounds=3", "sync.tile_values=128")
    loop, is_in = story.loop, True

    def go_on() -> Values:
        loop.take(story.gate.wait(0.0))
        return story.values()

    story.saved_ahead = saved_lead_of(story, tmp_path)
    story.connection.is_member = lambda by=None: is_in
    story.on_ready = lambda work: story.commit(counted=True, vocabulary=False)
    loop.begin(story.manifest)
    loop._train()
    ahead = go_on() - story.store.version(1).block(0)
    loop._run_steps(1, lambda: False, lambda share: False)
    is_in = False
    story.commit(counted=False)
    go_on()
    assert story.loop.machine.stage is Stage.OUTSIDE
    is_in = True
    story.commit(counted=False)
    np.testing.assert_allclose(go_on(), story.store.version(3).block(0) + ahead, atol=1e-6)
    last = story.run.layout.tiles[vocabulary_tiles(story.run.layout) - 1]
    assert np.abs(ahead[: last.stop]).max() > 1e-4
    assert not ahead[last.stop :].any()


def test_who_comes_back_before_a_round_has_ended_and_is_named_again_is_ahead_as_before(tmp_path: Path) -> None:
    """Its checkpoint is of the very tip, by which it is no member any more."""
    story = Story(tmp_path, "sync.vocabulary_rounds=3", "sync.tile_values=128")
    lead, is_in = saved_lead_of(story, tmp_path), True
    story.connection.is_member = lambda by=None: is_in
    story.on_ready = lambda work: story.commit(counted=True, vocabulary=False)
    story.loop.begin(story.manifest)
    story.loop._train()
    story.loop.take(story.gate.wait(0.0))
    ahead = story.values() - story.store.version(1).block(0)
    story.learn_from(story.dataset)
    is_in = False
    resumed = Resumed.load(lead.folder, lead.info, story.run.layout, story._emit)
    assert resumed is not None
    _begin(story.loop, resumed, story.commits[1], A, lead.learning, lead)
    assert story.loop.machine.stage is Stage.OUTSIDE
    is_in = True
    story.commit(counted=False)
    story.loop.take(story.gate.wait(0.0))
    assert np.abs(ahead).max() > 1e-4
    np.testing.assert_allclose(story.values(), story.store.version(2).block(0) + ahead, atol=1e-6)


def test_a_paused_peer_hands_in_what_it_has_and_then_follows_without_work(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{StepLimits.__module__}.PAUSE_GRACE_SECONDS", 0.0)

    def on_ready(work: Work) -> None:
        if len(story.ready) == 3:
            story.pause.toggle()
        story.commit(counted=work.tokens > 0)

    story.on_ready, story.at_step = on_ready, {2: story.pause.toggle, 2 + STEPS: story.gate.stop}
    story.others = [SimpleNamespace(round=0, peer=PeerId("b"), intent=SimpleNamespace(leaving=False))]
    story.play()
    assert [(work.ready, work.steps) for work in story.ready] == [(True, 2), (True, 0), (True, 0), (True, STEPS)]
    assert [manifest.round for manifest, _, _, final, _ in story.saved if not final] == [0, 3]


def test_only_the_beginning_of_a_pause_is_waited_out(story: Story) -> None:
    story.pause.toggle()
    story.pause.since -= PAUSE_GRACE_SECONDS
    story.pause.wait = lambda seconds: pytest.fail("waited")  # type: ignore[method-assign]
    story.on_ready = lambda work: story.gate.stop() if story.round == 2 else story.commit(counted=False)
    story.play()
    assert [work.steps for work in story.ready] == [0, 0, 0]


def test_a_paused_peer_whose_columns_others_have_keeps_nothing_on_the_device(story: Story) -> None:
    story.connection.peer_id = PeerId("b")
    story.learn_from(story.dataset)
    story.pause.toggle()
    story.pause.since -= PAUSE_GRACE_SECONDS
    parked: list[bool] = []

    def on_ready(work: Work) -> None:
        parked.append(story.trainer.parked is not None)
        story.gate.stop() if story.round == 3 else story.commit(counted=False)

    story.on_ready = on_ready
    story.play()
    assert parked == [True] * 4
    assert np.array_equal(story.trainer.contribution(0), story.store.version(3).block(0))


def test_a_paused_peer_stays_ahead_in_what_has_had_no_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others take over its columns; embedding and head wait for their turn, and it for the end of the pause."""
    monkeypatch.setattr(f"{StepLimits.__module__}.PAUSE_GRACE_SECONDS", 0.0)
    story = Story(tmp_path, "sync.vocabulary_rounds=3", "sync.tile_values=64")
    layout = story.run.layout
    vocabulary = slice(0, layout.tiles[vocabulary_tiles(layout)].start)
    for round in range(2, 5):
        manifest = replace(story.commits[round].manifest, ownership=((PeerId("b"),),) * layout.num_columns)
        story.commits[round] = replace(story.commits[round], manifest=manifest)
    parked: list[bool] = []
    ahead: list[Values] = []

    def on_ready(work: Work) -> None:
        parked.append(story.trainer.parked is not None)
        ahead.append((story.inputs.snapshot.block(0) - story.store.version(story.round).block(0))[vocabulary])
        if story.round == 0:
            story.pause.toggle()
        if story.round == 4:
            story.gate.stop()
        else:
            story.commit(counted=True, vocabulary=False)

    story.on_ready = on_ready
    story.play()
    assert parked == [False, False, False, True, True]
    before = ahead[1]
    assert np.abs(before).max() > 0
    for later in (*ahead[2:], story.values()[vocabulary] - story.store.version(4).block(0)[vocabulary]):
        np.testing.assert_allclose(later, before, atol=1e-6)


def test_a_pause_of_a_moment_costs_nothing_of_the_round(story: Story) -> None:
    waited: list[float] = []

    def resume(seconds: float) -> None:
        waited.append(seconds)
        story.pause.toggle()

    story.pause.wait = resume  # type: ignore[method-assign]
    story.at_step = {1: story.pause.toggle, 2 * STEPS: story.gate.stop}
    story.others = [SimpleNamespace(round=0, peer=PeerId("b"), intent=SimpleNamespace(leaving=False))]
    story.play()
    assert [work.steps for work in story.ready] == [STEPS, STEPS]
    assert len(waited) == 1 < PAUSE_GRACE_SECONDS


def test_alone_and_paused_a_peer_keeps_its_place_when_it_leaves(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{StepLimits.__module__}.PAUSE_GRACE_SECONDS", 0.0)
    story.pause.toggle()
    story.on_ready = lambda work: story.gate.stop()
    story.play()
    manifest, _, uncounted, final, _ = story.saved[-1]
    assert (manifest.round, uncounted, final, story.left) == (0, Uncounted(), True, False)


def test_with_turns_a_paused_peer_trains_a_step_so_that_its_columns_are_handed_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{StepLimits.__module__}.PAUSE_GRACE_SECONDS", 0.0)
    story = Story(tmp_path, "sync.expert_rounds=3")
    story.pause.toggle()
    story.at_step[2] = story.gate.stop
    story.others = [SimpleNamespace(round=0, peer=PeerId("b"), intent=SimpleNamespace(leaving=False))]
    story.play()
    assert [work.steps for work in story.ready][:2] == [1, 1]


def test_what_a_decided_round_did_not_wait_for_is_carried_into_the_next(story: Story) -> None:
    trained: list[Values] = []
    started: list[Values] = []
    adopt = story.trainer.adopt

    def decided_without_us() -> None:
        trained.append(story.values())
        story.commit(counted=False)

    def note_start(*given: Any, **named: Any) -> None:
        adopt(*given, **named)
        started.append(story.values())

    story.trainer.adopt = note_start  # type: ignore[method-assign]
    story.at_step = {2: decided_without_us, 3: story.gate.stop}
    story.play()
    assert story.ready == []  # READY for the decided round would be taken for one of the next
    old, new = story.store.version(0).block(0), story.store.version(1).block(0)
    np.testing.assert_array_equal(started[1], new + (trained[0] - old))
    assert (story.saved[1][0].round, story.saved[1][2]) == (1, Uncounted(tokens=2 * 4 * 16, steps=2))


def test_alone_a_peer_stops_where_it_is_and_hands_in_nothing(story: Story) -> None:
    story.at_step[2] = story.gate.stop
    story.play()
    assert story.ready == []
    assert not story.left
    manifest, version, uncounted, final, round_steps = story.saved[-1]
    assert (manifest.round, version.round, final, round_steps) == (0, 0, True, 2)
    assert uncounted == Uncounted(tokens=2 * 4 * 16, steps=2)


def test_with_others_a_leaver_hands_in_and_keeps_moments_as_new_as_the_state(story: Story) -> None:
    story.others = [SimpleNamespace(round=0, peer=PeerId("b"), intent=SimpleNamespace(leaving=False))]
    story.at_step[2] = story.gate.stop
    story.play()
    assert story.left
    assert [work.steps for work in story.ready] == [2]
    manifest, version, uncounted, final, round_steps = story.saved[-1]
    assert (manifest.round, version.round, uncounted, final, round_steps) == (1, 1, Uncounted(), True, 0)


def test_who_has_nothing_to_hand_in_and_nobody_to_tell_does_not_wait_for_a_round(story: Story) -> None:
    """One that left a moment ago still counts as alive, but no round would come of it."""
    story.others = [SimpleNamespace(round=1, peer=PeerId("gone"), intent=SimpleNamespace(leaving=True))]

    def stop_then(work: Work) -> None:
        story.commit(counted=True)
        story.gate.stop()

    story.on_ready = stop_then
    story.play()
    assert (len(story.ready), story.left) == (1, False)
    assert (story.saved[-1][0].round, story.saved[-1][2], story.saved[-1][3]) == (1, Uncounted(), True)


def test_a_leaver_whose_work_a_round_left_out_hands_it_in_again(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    """The round that ran was planned before it handed in."""
    story.others = [SimpleNamespace(round=0, peer=PeerId("b"), intent=SimpleNamespace(leaving=False))]
    answers = iter((False, True, True))
    monkeypatch.setattr(Departure, "_nobody_counts_on_us", lambda self, newest: next(answers))

    def leave_out_the_first(work: Work) -> None:
        story.counts(work)
        story.commit(counted=len(story.ready) > 1)

    story.on_ready = leave_out_the_first
    story.at_step[2] = story.gate.stop
    story.play()
    assert [work.steps for work in story.ready] == [2, 2]
    assert (story.saved[-1][0].round, story.saved[-1][2]) == (2, Uncounted())
    assert story.said == []


def test_a_leaver_that_another_history_does_not_name_just_goes(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Departure, "_nobody_counts_on_us", lambda self, newest: True)
    story.others = [SimpleNamespace(round=0, peer=PeerId("b"), intent=SimpleNamespace(leaving=False))]
    story.at_step[2] = story.gate.stop
    story.on_ready = lambda work: story.switch()
    story.play()
    assert story.left
    assert story.loop.machine.stage is Stage.OUTSIDE
    assert story.said == [f"{2 * 64} tokens of yours do not count: {LEFT_BEHIND}"]


def test_a_leaver_stays_until_one_of_the_others_has_the_newest_state(story: Story) -> None:
    story.others = [SimpleNamespace(round=0, peer=PeerId("b"), intent=SimpleNamespace(leaving=False))]
    story.at_step[2] = story.gate.stop
    rounds, answers = list[int](), [True, True, False]

    def are_behind(round: int) -> bool:
        rounds.append(round)
        return answers[len(rounds) - 1]

    story.connection.are_others_behind = are_behind
    story.play()
    assert rounds == [1, 1, 1]


def test_work_that_no_round_counted_stays_in_the_values_of_the_last_to_leave(tmp_path: Path) -> None:
    """A later life hands its tokens in: what they were trained into must be there."""
    story = Story(tmp_path)
    story.others = [SimpleNamespace(round=0, peer=PeerId("b"), intent=SimpleNamespace(leaving=True))]
    story.on_ready = lambda work: story.commit(counted=False)
    story.at_step[2] = story.gate.stop
    story.play()
    assert (story.saved[-1][0].round, story.saved[-1][2]) == (1, Uncounted(tokens=2 * 4 * 16, steps=2))
    for block in (0, 1):
        old, new = story.store.version(0).block(block), story.store.version(1).block(block)
        trained = story.inputs.snapshot.block(block)
        assert np.abs(trained - old).max() > 0
        np.testing.assert_array_equal(story.trainer.contribution(block), new + (trained - old))


def test_the_last_to_leave_keeps_its_place_in_the_data(story: Story) -> None:
    """The lease is that of the newest manifest, and what a round has counted is not claimed again."""
    story.others = [SimpleNamespace(round=0, peer=PeerId("b"), intent=SimpleNamespace(leaving=True))]
    story.at_step[2] = story.gate.stop
    story.play()
    newest = story.saved[-1][0]
    assert newest.round == 1
    assert story.loader.state_dict()["ranges"] == [list(span) for span in newest.leases.of(A)]


def test_the_last_to_leave_keeps_what_its_columns_are_ahead(tmp_path: Path) -> None:
    """Nobody takes them over: a later life goes on from there."""
    story = Story(tmp_path, "sync.expert_rounds=3")
    story.others = [SimpleNamespace(round=0, peer=PeerId("b"), intent=SimpleNamespace(leaving=True))]
    story.on_ready = lambda work: story.commit(counted=True, columns=False)
    story.at_step[2] = story.gate.stop
    story.play()
    old, new = story.store.version(0), story.store.version(1)
    trained = story.inputs.snapshot.block(1)
    assert np.abs(trained - old.block(1)).max() > 0
    np.testing.assert_array_equal(story.trainer.contribution(1), new.block(1) + (trained - old.block(1)))
    np.testing.assert_array_equal(story.values(), new.block(0))


def test_with_turns_a_leaver_trains_a_step_so_that_its_columns_are_handed_out(tmp_path: Path) -> None:
    story = Story(tmp_path, "sync.expert_rounds=3")
    story.others = [SimpleNamespace(round=0, peer=PeerId("b"), intent=SimpleNamespace(leaving=False))]

    def stop_after_the_first(work: Work) -> None:
        story.commit(counted=True, columns=False)
        if len(story.ready) == 1:
            story.gate.stop()

    story.on_ready = stop_after_the_first
    story.play()
    assert [work.steps for work in story.ready] == [STEPS, 1]


def test_with_turns_a_leaver_that_is_still_named_hands_in_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its wish came after the round was planned: its columns go out with the next one, all that was trained in them."""
    story = Story(tmp_path, "sync.expert_rounds=3")
    story.others = [SimpleNamespace(round=0, peer=PeerId("b"), intent=SimpleNamespace(leaving=False))]
    answers = iter((False, True, True))
    monkeypatch.setattr(Departure, "_nobody_counts_on_us", lambda self, newest: next(answers))
    brought: list[Values] = []

    def note(work: Work) -> None:
        brought.append(np.array(story.inputs.snapshot.block(1)))
        story.commit(counted=True, columns=len(brought) > 1)

    story.on_ready = note
    story.at_step[2] = story.gate.stop
    story.play()
    assert [work.steps for work in story.ready] == [2, 1]
    first = brought[0] - story.store.version(0).block(1)
    both = brought[1] - story.store.version(1).block(1)
    assert np.abs(first).max() > 0
    assert np.dot(first, both) > 0.5 * np.dot(first, first)
    assert story.saved[-1][:1] == (story.commits[2].manifest,)


def test_a_round_that_counts_an_earlier_life_leaves_what_columns_are_ahead(tmp_path: Path) -> None:
    """After a restart what the checkpoint had of columns that were not handed out goes on; the rest is in the state."""
    story = Story(tmp_path, "sync.expert_rounds=3")
    manifest = replace(
        story.commits[1].manifest, slices=tuple(p for p in story.commits[1].manifest.slices if not p.block)
    )
    story.commits[1] = story.run.certified(manifest)
    trained: list[tuple[Values, Values]] = []
    started: list[tuple[Values, Values]] = []

    def decided_without_us() -> None:
        trained.append((story.values(), story.trainer.contribution(1)))
        story.commit(counted=True, columns=False)

    adopt = story.trainer.adopt

    def note_start(*given: Any, **named: Any) -> None:
        adopt(*given, **named)
        started.append((story.values(), story.trainer.contribution(1)))

    story.trainer.adopt = note_start  # type: ignore[method-assign]
    story.at_step = {2: decided_without_us, 3: story.gate.stop}
    story.play()
    old, new = story.store.version(0), story.store.version(1)
    np.testing.assert_array_equal(started[1][0], new.block(0))
    np.testing.assert_array_equal(started[1][1], new.block(1) + (trained[0][1] - old.block(1)))


@pytest.mark.parametrize(
    ("turns", "late", "block"),
    [(("sync.expert_rounds=3",), "columns", 1), (("sync.vocabulary_rounds=3", "sync.tile_values=64"), "vocabulary", 0)],
    ids=["columns", "vocabulary"],
)
def test_with_turns_it_is_the_committed_model_that_is_evaluated(
    tmp_path: Path, turns: tuple[str, ...], late: str, block: int
) -> None:
    """What its own values are ahead nobody else has; training goes on from there."""
    story = Story(tmp_path, *turns, "eval.every_rounds=1")
    seen: list[Values] = []
    started: list[Values] = []

    def evaluate(batches: object) -> float:
        seen.append(story.trainer.contribution(block))
        return 1.0

    story.trainer.evaluate = evaluate  # type: ignore[method-assign]
    story.on_ready = lambda work: story.commit(counted=True, columns=late != "columns", vocabulary=late != "vocabulary")

    def stop() -> None:
        started.append(story.inputs.snapshot.block(block))
        story.gate.stop()

    story.at_step[STEPS + 1] = stop
    story.play()
    old, new = story.store.version(0), story.store.version(1)
    np.testing.assert_array_equal(seen[0], old.block(block))
    np.testing.assert_array_equal(seen[1], new.block(block))
    ahead = started[0] - old.block(block)
    assert np.abs(ahead).max() > 0
    assert np.abs(story.trainer.contribution(block) - (new.block(block) + ahead)).max() < 0.05


@pytest.mark.parametrize("columns", [True, False])
def test_who_goes_on_with_changes_that_a_round_did_not_count_does_not_evaluate_it(
    tmp_path: Path, columns: bool
) -> None:
    """Its model is not the committed one: part of its work was lost on the way to a reducer."""
    story = Story(tmp_path, "eval.every_rounds=1")
    evaluated: list[int] = []

    def evaluate(batches: object) -> float:
        evaluated.append(story.round)
        return 1.0

    story.trainer.evaluate = evaluate  # type: ignore[method-assign]
    story.on_ready = lambda work: story.commit(counted=True, columns=columns)
    story.at_step[STEPS + 1] = story.gate.stop
    story.play()
    assert evaluated == ([0, 1] if columns else [0])


def test_without_exchange_a_peer_evaluates_its_own_model(tmp_path: Path) -> None:
    """The state of the run is the initial one for ever, whatever the codec."""
    story = Story(tmp_path, "eval.every_rounds=1", "sync.enabled=false", "sync.codec=int8")
    seen: list[Values] = []

    def evaluate(batches: object) -> float:
        seen.append(story.trainer.contribution(1))
        return 1.0

    story.trainer.evaluate = evaluate  # type: ignore[method-assign]
    story.on_ready = lambda work: story.commit(counted=False)
    story.at_step[STEPS + 1] = story.gate.stop
    story.play()
    assert len(seen) == 2
    assert np.abs(seen[1] - story.store.version(1).block(1)).max() > 0


def test_a_peer_asks_for_no_more_columns_than_its_memory_has_proved_to_hold(story: Story) -> None:
    story.trainer.learner.columns_that_fit = lambda: 2  # type: ignore[method-assign]
    story.at_step[2 * STEPS] = story.gate.stop
    story.play()
    assert story.limits == [2, 2]
    assert [text for text in story.said if "memory for only 2 expert columns" in text] == story.said[:1]


def test_another_history_takes_the_place_of_what_was_trained_on_ours(story: Story) -> None:
    """Counted or not, it is gone where our round had a quorum; training begins afresh on the other's state."""
    story.at_step[STEPS + 1] = story.switch
    story.on_ready = lambda work: story.commit(counted=True) if len(story.ready) == 1 else story.gate.stop()
    started: list[float] = []
    story.at_step[STEPS + 2] = lambda: started.append(float(np.mean(story.values() - story.store.version(0).block(0))))
    story.play()
    assert story.said[-1].startswith(f"{8 * 16 + 64:,} tokens of yours do not count")
    manifest, _, uncounted, _, _ = story.saved[-1]
    assert (manifest, uncounted) == (story.commits[1].manifest, Uncounted())
    assert story.ready[-1].steps == STEPS
    assert story.ready[-1].sequences == story.ready[0].sequences
    assert started[0] == pytest.approx(2 * MERGED, abs=0.1)


def test_who_waits_is_told_for_what(story: Story) -> None:
    story.loop._explain_waiting()
    assert "is on hold until one comes back" in story.said[-1]
    story.others = [A]
    story.loop._explain_waiting()
    story.loop._explain_waiting()
    assert story.notes == ["this peer is in; it trains from the end of the running round on"]
    story.lost_round = 7
    story.loop._explain_waiting()
    story.loop._explain_waiting()
    assert "has the state of round 7" in story.said[-1]
    assert "goes on when a peer that has it is back" in story.said[-1]
    assert len(story.said) == 2


# ---- overlap ----


class Overlapping:
    """A story in which each round is synced for `late` inner steps; what training went on from, and what it brought."""

    def __init__(self, folder: Path, late: int, *overrides: str, counted: bool = True) -> None:
        self.story = Story(folder, "sync.overlap=true", *overrides)
        self.story.others = [SimpleNamespace(round=0, peer=PeerId("b"), intent=SimpleNamespace(leaving=False))]
        self.late, self.counted = late, counted
        self.now: list[dict[int, Values]] = []
        self.started: list[dict[int, Values]] = []
        self.brought: list[dict[int, Values]] = []
        self.story.on_ready = self._ready
        self._adopt = self.story.trainer.adopt
        self.story.trainer.adopt = self._note_start  # type: ignore[method-assign]

    def _values(self) -> dict[int, Values]:
        return {block: self.story.trainer.contribution(block) for block in self.story.inputs.snapshot.blocks}

    def _ready(self, work: Work) -> None:
        inputs = self.story.inputs
        self.brought.append({block: np.array(inputs.snapshot.block(block)) for block in inputs.snapshot.blocks})
        self.story.at_step[self.story.steps + self.late] = self._decide

    def _decide(self) -> None:
        self.now.append(self._values())
        self.story.commit(self.counted)

    def _note_start(self, *given: Any, **named: Any) -> None:
        self._adopt(*given, **named)
        self.started.append({0: self.story.values(), 1: self.story.trainer.contribution(1)})

    def committed(self, round: int, block: int) -> Values:
        return self.story.store.version(round).block(block)


@pytest.mark.parametrize("block", [0, 1])
def test_training_goes_on_while_a_round_is_synced(tmp_path: Path, block: int) -> None:
    told = Overlapping(tmp_path, late=2)
    told.story.at_step[2 * STEPS + 1] = told.story.gate.stop  # two of the second round's steps were made ahead
    told.story.play()
    ahead = told.now[0][block] - told.brought[0][block]
    assert np.abs(ahead).max() > 0
    np.testing.assert_array_equal(told.started[1][block], told.committed(1, block) + ahead)
    assert [(work.steps, work.tokens) for work in told.story.ready[:2]] == [(STEPS, STEPS * 64)] * 2
    counted = told.story.commits[1].manifest.roster[0].sequences
    assert [work.sequences for work in told.story.ready[:2]] == [STEPS * 4, 2 * STEPS * 4 - counted]
    assert told.story.saved[1][2:] == (Uncounted(tokens=2 * 64, steps=2), False, 2)


def test_no_more_steps_are_made_ahead_than_a_round_has(tmp_path: Path) -> None:
    story = Story(tmp_path, "sync.overlap=true")
    story.on_ready = lambda work: None
    wait = story.gate.wait
    made: list[int] = []

    def commit_when_it_waits(*given: Any, **named: Any) -> Any:
        if story.ready and story.round == 0:
            made.append(story.steps)
            story.commit(counted=True)
        elif story.round:
            story.gate.stop()
        return wait(*given, **named)

    story.gate.wait = commit_when_it_waits  # type: ignore[method-assign]
    story.play()
    assert made == [2 * STEPS]
    assert [work.steps for work in story.ready] == [STEPS, STEPS]
    assert story.saved[1][2] == Uncounted(tokens=STEPS * 64, steps=STEPS)


def test_what_a_round_did_not_count_and_what_came_after_it_go_on_together(tmp_path: Path) -> None:
    told = Overlapping(tmp_path, late=1, counted=False)
    told.story.at_step[STEPS + 2] = told.story.gate.stop
    told.story.play()
    trained = told.brought[0][0] - told.committed(0, 0)
    ahead = told.now[0][0] - told.brought[0][0]
    np.testing.assert_array_equal(told.started[1][0], (told.committed(1, 0) + trained) + ahead)
    assert told.story.saved[1][2] == Uncounted(tokens=(STEPS + 1) * 64, steps=STEPS + 1)


def test_steps_ahead_have_the_learning_rate_of_the_round_that_they_belong_to(tmp_path: Path) -> None:
    told = Overlapping(tmp_path, late=2)
    rates: list[float] = []
    train_step = told.story.trainer.train_step_unless

    def note(*given: Any) -> Any:
        result = train_step(*given)
        rates.extend([result.lr] if result is not None else [])
        return result

    told.story.trainer.train_step_unless = note  # type: ignore[method-assign,assignment]
    told.story.at_step[2 * STEPS] = told.story.gate.stop
    told.story.play()
    config = told.story.trainer.learner.config
    assert rates[: STEPS + 2] == [learning_rate(config, step) for step in range(1, STEPS + 3)]


def test_the_committed_model_is_evaluated_though_training_went_on(tmp_path: Path) -> None:
    told = Overlapping(tmp_path, 2, "eval.every_rounds=1")
    seen: list[Values] = []

    def evaluate(batches: object) -> float:
        seen.append(told.story.values())
        return 1.0

    told.story.trainer.evaluate = evaluate  # type: ignore[method-assign]
    told.story.at_step[2 * STEPS] = told.story.gate.stop
    told.story.play()
    np.testing.assert_array_equal(seen[1], told.committed(1, 0))
    ahead = told.now[0][0] - told.brought[0][0]
    starts = [started[0] for started in told.started]
    assert any(np.array_equal(start, told.committed(1, 0) + ahead) for start in starts)


def test_who_leaves_hands_in_what_it_trained_ahead(tmp_path: Path) -> None:
    told = Overlapping(tmp_path, late=2)
    stop = told.story.gate.stop

    def decide_and_stop() -> None:
        told.story.on_ready = lambda work: told.story.commit(counted=True)
        Overlapping._decide(told)
        stop()

    told._decide = decide_and_stop  # type: ignore[method-assign]
    told.story.play()
    assert [work.steps for work in told.story.ready] == [STEPS, 2]
    assert told.story.left


def test_the_last_round_is_not_run_beyond(tmp_path: Path) -> None:
    story = Story(tmp_path, "sync.overlap=true")
    story.learn_from(story.dataset, last_round=1)
    story.play()
    assert story.steps == STEPS
    assert not story.left


@pytest.mark.parametrize(("round", "expected_tokens"), [(2, 0), (1, 99)])
def test_who_stops_while_others_go_on_leaves_as_always(story: Story, round: int, expected_tokens: int) -> None:
    work = Work(expected_tokens=expected_tokens)
    story.others = [SimpleNamespace(round=round, peer=PeerId("b"), work=work, intent=SimpleNamespace(leaving=False))]
    story.learn_from(story.dataset, last_round=1)
    story.play()
    assert story.steps == STEPS
    assert story.left


def test_where_the_organiser_ends_the_run_nobody_is_told_of_leaving(story: Story) -> None:
    story.others = [SimpleNamespace(round=1, work=Work(expected_tokens=99), intent=SimpleNamespace(leaving=False))]
    story.connection.last_round = 1
    story.play()
    assert not story.left


# ---- data of other peers ----


def without_data(story: Story, folder: Path, sequences: int) -> Callable[[], int]:
    """Takes the peer's data away; what this gives hands over what it misses."""
    config = story.config
    pieces = FolderPieces.open(open_dataset(config), folder / "own", story.said.append, piece_bytes=64)
    feed, _ = make_feed(folder / "cache", pieces)
    dataset = PieceDataset(feed)
    need_held_out(dataset, config, sequences)
    story.learn_from(dataset)
    feed.changed = lambda: None
    return lambda: hand_over(pieces, feed)


def feed_of(story: Story) -> Any:
    return story.dataset.feed  # type: ignore[union-attr]


def test_data_that_comes_in_time_changes_nothing(story: Story, tmp_path: Path) -> None:
    bring = without_data(story, tmp_path, 4)
    feed_of(story).changed = bring
    story.on_ready = lambda work: story.gate.stop()
    story.play()
    assert story.steps == STEPS
    assert story.ready[0].tokens > 0


def test_a_round_that_closes_ends_the_wait_for_data(story: Story, tmp_path: Path) -> None:
    without_data(story, tmp_path, 4)
    feed_of(story).changed = story.gate.close_training
    story.on_ready = lambda work: story.gate.stop()
    story.play()
    assert story.steps == 0
    assert [(work.tokens, work.sequences) for work in story.ready] == [(0, 0)]


def test_who_waits_for_data_can_be_stopped(story: Story, tmp_path: Path) -> None:
    without_data(story, tmp_path, 4)
    feed_of(story).changed = story.gate.stop
    story.play()
    assert story.steps == 0


def test_without_the_held_out_data_there_is_no_evaluation_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spes_p2p.peer.evaluator.WAIT_SECONDS", 0.0)
    story = Story(tmp_path, "eval.every_rounds=1", "data.held_out_fraction=0.2")
    bring = without_data(story, tmp_path, 4)
    story.on_ready = lambda work: story.gate.stop()
    waits = iter([lambda: None])
    feed_of(story).changed = lambda: next(waits, bring)()
    story.play()
    assert any("round 0 was not evaluated" in text for text in story.said)
    assert story.steps == STEPS


def micro_story(folder: Path) -> Story:
    """With four micro-batches a step."""
    return Story(folder, "optimizer.micro_batch_sequences=1")


def in_step(story: Story, calls: dict[tuple[int, int], Callable[[], None]]) -> None:
    """Calls `calls[steps done, micro-batches of the running step done]` while the next micro-batch computes, once."""
    forward, done = story.trainer.learner.model.forward, [0]

    def counting(*given: Any, **named: Any) -> Any:
        calls.pop((story.steps, done[0] % 4), lambda: None)()
        done[0] += torch.is_grad_enabled()
        return forward(*given, **named)

    story.trainer.learner.model.forward = counting  # type: ignore[method-assign]


def test_who_is_asked_to_stop_gives_the_running_step_up(tmp_path: Path) -> None:
    story = micro_story(tmp_path)
    in_step(story, {(1, 2): story.gate.stop})
    story.play()
    _, _, uncounted, final, round_steps = story.saved[-1]
    assert (uncounted, final, round_steps) == (Uncounted(tokens=4 * 16, steps=1), True, 1)
    assert story.loader.consumed == 4


@pytest.mark.parametrize(("done", "steps"), [(0, 1), (1, 2)])
def test_at_the_close_of_a_round_half_a_step_is_waited_for_at_most(tmp_path: Path, done: int, steps: int) -> None:
    story = micro_story(tmp_path)
    in_step(story, {(1, done): story.gate.close_training})
    story.at_step[5] = story.gate.stop
    story.play()
    assert story.ready[0].steps == steps


def test_who_has_nothing_else_to_hand_in_makes_its_step_though_the_round_closes(tmp_path: Path) -> None:
    """Else a peer whose step takes longer than the others' round would never get anywhere."""
    story = micro_story(tmp_path)
    in_step(story, {(0, 1): story.gate.close_training})
    story.at_step[3] = story.gate.stop
    story.play()
    assert (story.ready[0].steps, story.ready[0].tokens) == (1, 4 * 16)


def test_the_first_report_of_a_round_says_how_long_a_step_took_in_the_one_before(story: Story) -> None:
    told: list[Work] = []
    progressed = story.driver.progressed

    def heard(work: Work) -> None:
        told.append(work)
        progressed(work)

    story.driver.progressed = heard
    story.at_step[STEPS + 1] = story.gate.stop
    story.play()
    beginnings = [work.ready_in_seconds for work in told if not work.ready and work.steps == 0 and work.seconds == 0]
    assert beginnings[0] == 0.0 < beginnings[1]


def test_an_evaluation_says_how_many_tokens_there_were(tmp_path: Path) -> None:
    """Also where less is held out than it may take."""
    story = Story(tmp_path, "eval.every_rounds=1", "eval.sequences=10000", "data.held_out_fraction=0.2")
    story.at_step[1] = story.gate.stop
    story.play()
    held_out = held_out_batches(open_dataset(story.config), story.config, 10000)
    assert story.evaluated[0] == sum(batch.tokens.size for batch in held_out) > 0


def test_held_out_data_is_read_in_micro_batches_that_fit_by_now(tmp_path: Path) -> None:
    story = Story(
        tmp_path, "eval.every_rounds=1", "eval.sequences=4", "data.held_out_fraction=0.2",
        "optimizer.micro_batch_sequences=4", "model.activation_checkpointing=full",
    )  # fmt: skip
    sizes: list[int] = []

    def evaluate(batches: Any) -> float:
        sizes.extend(len(batch.tokens) for batch in batches)
        return 1.0

    story.trainer.evaluate = evaluate  # type: ignore[method-assign]
    assert story.trainer.learner.use_less_memory() == "optimizer.micro_batch_sequences=2"
    story.at_step[1] = story.gate.stop
    story.play()
    assert sizes[:2] == [2, 2]

"""A peer's own training state on its way to disk and back."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch

from spes_p2p.checkpoint.load import load_latest
from spes_p2p.config.schema import Config
from spes_p2p.consensus.manifest import Manifest, Slice, manifest_hash
from spes_p2p.consensus.messages import (
    Commit,
)
from spes_p2p.consensus.turns import due_tiles
from spes_p2p.data.loader import LeasedLoader, LocalLoader, open_dataset
from spes_p2p.errors import CheckpointError, StorageFull
from spes_p2p.ids import NO_HASH, PeerId, sha256
from spes_p2p.observe.events import Event, Warning
from spes_p2p.ownership.assign import Ownership
from spes_p2p.peer import resume
from spes_p2p.peer.resume import Resumed, SavedLead, Saver, TrainingSetup
from spes_p2p.peer.run import _restore
from spes_p2p.state.layout import BlockSource, Values
from spes_p2p.sync.chain import Chain
from spes_p2p.sync.inputs import Inputs, RebasedState
from spes_p2p.sync.node import vocabulary_of
from spes_p2p.sync.residuals import Residuals
from spes_p2p.sync.surroundings import Disk
from spes_p2p.train.stages import Uncounted
from spes_p2p.train.trainer import Trainer
from tests.sync.chains import A, B, MadeRun
from tests.sync.swarm_cases import small_config

torch.set_num_threads(1)
OWNED = (0, 2)


def config_with_data(folder: Path, *overrides: str) -> Config:
    tokens = np.arange(4000, dtype=np.uint16) * 7 % 32
    (folder / "tokens.bin").write_bytes(tokens.tobytes())
    (folder / "paths.txt").write_text("tokens.bin\n")
    data = f"data.path={folder / 'paths.txt'}"
    return small_config(data, "data.sequence_length=16", "optimizer.batch_sequences=4", *overrides, peers=1)


class Life:
    """One life of a peer's trainer, loader and saver over the same folder."""

    def __init__(self, folder: Path, *overrides: str, local: bool = False) -> None:
        self.config = config_with_data(folder, *overrides)
        self.run = MadeRun(self.config)
        dataset = self.dataset = open_dataset(self.config)
        self.loader: LeasedLoader | LocalLoader
        self.loader = LocalLoader(dataset, self.config, PeerId("a")) if local else LeasedLoader(dataset, self.config)
        self.trainer = Trainer(self.config, self.run.layout, torch.device("cpu"))
        self.checkpoints = folder / "checkpoints"
        self.events: list[Event] = []
        self.store = self.run.store(folder / f"store-{len(list(folder.iterdir()))}")
        self.root = self.store.version(0).root
        self.commits = [self.run.genesis(self.root)]
        for _ in range(3):
            manifest = self.run.child(self.commits[-1].manifest, self.root, sha256(b"wire"))
            self.commits.append(self.run.certified(manifest))
        self.ours: Sequence[Commit] = self.commits
        self.saver = Saver(
            self.checkpoints, self.run.info, TrainingSetup(self.config, self.trainer, self.loader, self.dataset),
            lambda manifest: next((commit for commit in self.ours if commit.manifest == manifest), None),
            self.events.append,
        )  # fmt: skip

    def begin(self) -> None:
        self.trainer.adopt(OWNED, self.run.initial, 0)
        self.loader.load_state_dict({"ranges": [[0, 200]], "offset": 0, "position": 0})

    def train(self, steps: int) -> list[float]:
        return [self.trainer.train_step(self.loader.next_batch(4)).loss for _ in range(steps)]

    def save(self, round: int, final: bool = False) -> None:
        self.saver(self.commits[round].manifest, self.store.version(0), Uncounted(64, 1), final)

    def load(self) -> Resumed | None:
        return Resumed.load(self.checkpoints, self.run.info, self.run.layout, self.events.append)

    def warnings(self) -> list[str]:
        return [event.message for event in self.events if isinstance(event, Warning)]


def test_in_the_middle_of_a_round_it_goes_on_bit_for_bit(tmp_path: Path) -> None:
    first = Life(tmp_path)
    first.begin()
    first.train(3)
    first.save(1)
    second = Life(tmp_path)
    resumed = second.load()
    assert resumed is not None
    assert resumed.restore(second.trainer, second.loader)
    assert (resumed.manifest, resumed.uncounted) == (first.commits[1].certificate.manifest, Uncounted(64, 1))
    assert (second.trainer.round_steps, second.trainer.learner.owned) == (3, OWNED)
    assert second.train(4) == first.train(4)


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_checkpoint_is_gone_on_from_where_it_trains_what_the_tip_gives(tmp_path: Path, is_ours: bool) -> None:
    """Else each round would ask for a column that nobody trains here."""
    first = Life(tmp_path)
    first.begin()
    first.train(3)
    first.save(1)
    second, tip = Life(tmp_path), first.commits[1]
    columns = OWNED if is_ours else (*OWNED, len(tip.manifest.ownership) - 1)
    ownership = tuple((A,) if column in columns else () for column in range(len(tip.manifest.ownership)))
    tip = replace(tip, manifest=replace(tip.manifest, ownership=ownership))
    learning = TrainingSetup(second.config, second.trainer, second.loader, second.dataset)
    assert (_restore(second.load(), tip, A, learning) is not None) == is_ours


def test_what_was_restored_is_not_kept(tmp_path: Path) -> None:
    """Neither the values and moments in memory, nor the maps of a checkpoint that may be removed."""
    first = Life(tmp_path)
    first.begin()
    first.train(1)
    first.save(1)
    second = Life(tmp_path)
    resumed = second.load()
    assert resumed is not None
    tensors = resumed._private["trainer"]["groups"][0]["tensors"]
    saved = weakref.ref(next(iter(tensors.values()))["value"])
    del tensors
    assert saved() is not None
    resumed.restore(second.trainer, second.loader)
    assert saved() is None
    assert str(first.checkpoints) in Path("/proc/self/maps").read_text()
    del resumed
    assert str(first.checkpoints) not in Path("/proc/self/maps").read_text()


def test_where_the_data_comes_from_elsewhere_only_the_trainer_is_restored(tmp_path: Path) -> None:
    first = Life(tmp_path)
    first.begin()
    first.train(2)
    first.save(1)
    second = Life(tmp_path, local=True)
    resumed = second.load()
    assert resumed is not None
    assert not resumed.restore(second.trainer, second.loader)
    assert second.trainer.round_steps == 2
    assert second.loader.state_dict() == {"position": 0}


def test_saved_as_often_as_the_config_says_and_always_at_the_end(tmp_path: Path) -> None:
    life = Life(tmp_path, "output.checkpoint_every_rounds=2")
    life.begin()
    life.save(1)
    assert not life.checkpoints.exists()
    life.save(1, final=True)
    life.save(2)
    assert len(list(life.checkpoints.iterdir())) == 2


def damage(folder: Path) -> None:
    tensors = folder / "private.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1])


def test_a_damaged_newest_checkpoint_is_passed_over_with_both_names(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.begin()
    life.save(1)
    life.save(2)
    older, newest = sorted(life.checkpoints.iterdir())
    damage(newest)
    resumed = life.load()
    assert resumed is not None
    assert resumed.round == 1
    (warning,) = life.warnings()
    assert newest.name in warning
    assert f"continuing from {older.name}" in warning


def test_without_any_whole_checkpoint_the_committed_state_has_to_do(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.begin()
    assert life.load() is None
    life.save(1)
    (only,) = life.checkpoints.iterdir()
    damage(only)
    assert life.load() is None
    assert all("with fresh optimizer moments" in warning for warning in life.warnings())
    assert only.name in life.warnings()[1]


def test_checkpoints_of_another_run_are_refused(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.begin()
    life.save(1)
    other = replace(life.run.info, run_id="other")
    with pytest.raises(CheckpointError, match=f"not {other.fingerprint.hex()[:16]}") as caught:
        Resumed.load(life.checkpoints, other, life.run.layout, life.events.append)
    assert "another --output" in caught.value.fix


def test_a_full_disk_pauses_saving_with_one_warning_until_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life(tmp_path)
    life.begin()
    real = resume.save_checkpoint

    def full(*arguments: object, **named: object) -> Path:
        raise StorageFull("no space left for step-00000001", fix="free some space on that disk")

    monkeypatch.setattr(resume, "save_checkpoint", full)
    life.save(1)
    life.save(2)
    assert len(life.warnings()) == 1
    assert "checkpoints are paused, but training continues: no space left" in life.warnings()[0]
    monkeypatch.setattr(resume, "save_checkpoint", real)
    life.save(3)
    assert life.warnings()[1:] == ["there is disk space again: checkpoints are saved"]
    assert [folder.name for folder in life.checkpoints.iterdir()] == ["step-00000003"]


class Tip:
    """The disk of a later round of the run of a Life, which was saved at round 1."""

    def __init__(
        self, life: Life, folder: Path, *handed_out: Sequence[int], left: Sequence[float] = (),
        ownership: Sequence[Ownership] = (),
    ) -> None:  # fmt: skip
        """`handed_out`: the tiles of each round from 2 on, all of which this peer reduces.

        `left`: by what rounding leaves it ahead in tiles of columns that rounds from 1 on hand out. `ownership`: from
        round 2 on.
        """
        self._left, self._layout = left, life.run.layout
        self.chain = Chain(folder / "chain")
        self.chain.append(life.commits[0])
        self.residuals = Residuals(folder / "residuals", self._layout)
        self.residuals.open(self.chain, 0, A)
        self.manifest = life.commits[0].manifest
        self._follow(life.commits[1].manifest)
        for number, tiles in enumerate(handed_out):
            owners = ownership[number] if number < len(ownership) else self.manifest.ownership
            self._follow(self._child(tiles, owners))
        self.inputs = Inputs(folder / "inputs", self._layout)
        self.store = life.store
        if handed_out:
            self.store.create_initial(lambda tile: life.run.initial(tile) + np.float32(0.25), self.manifest.round)

    def _child(self, tiles: Sequence[int], ownership: Ownership) -> Manifest:
        before = self.manifest
        slices = tuple(Slice(self._layout.tiles[tile].block, tile, 1, A, (A,)) for tile in tiles)
        fresh = {piece.block - 1 for piece in slices}
        since = enumerate(before.column_rounds)
        rounds = tuple(before.round + 1 if column in fresh else last for column, last in since)
        return replace(
            before, round=before.round + 1, parent=manifest_hash(before), slices=slices, column_rounds=rounds,
            ownership=ownership,
        )  # fmt: skip

    def _follow(self, child: Manifest) -> None:
        left = self._left[child.round - 1] if child.round <= len(self._left) else 0.0
        for tile in (tile for piece in child.slices for tile in piece.tile_ids):
            if left and self._layout.tiles[tile].block:
                values = np.full(self._layout.tiles[tile].size, left, np.float32)
                self.residuals.stage(child.parent, "handed", tile, values)
        self.residuals.settle(child, manifest_hash(child), lambda tile: NO_HASH)
        certificate = replace(self.chain.commit(0).certificate, parent=child.parent, manifest=manifest_hash(child))
        self.chain.append(Commit(certificate, child))
        self.manifest = child


@dataclass
class Shifted:
    """Values of columns are ahead by this."""

    values: BlockSource
    ahead: float

    def block(self, index: int) -> Values:
        return self.values.block(index) + np.float32(self.ahead if index else 0)


def saved_life(folder: Path, *overrides: str, uncounted_tokens: int = 0, ahead: float = 0.0) -> Life:
    """One that has trained on top of round 1, whose values it was ahead of, and has saved."""
    life = Life(folder, *overrides)
    life.begin()
    life.trainer.adopt(OWNED, Shifted(life.run.initial, ahead), 0)
    life.train(2)
    life.saver(life.commits[1].manifest, life.store.version(0), Uncounted(uncounted_tokens))
    return life


def values_ahead(tip: Tip, folder: Path, *overrides: str, overlap: bool = False) -> RebasedState | None:
    """Of a later life that begins at `tip`."""
    later, disk = Life(folder, *overrides), cast(Disk, tip)
    sync = later.config.sync.model_copy(update={"overlap": overlap})
    resumed = later.load()
    assert resumed is not None
    resumed.restore(later.trainer, later.loader)
    return resumed.values_ahead(tip.manifest, A, later.run.layout, disk, later.trainer, sync)


def test_what_a_checkpoint_has_of_columns_that_were_not_handed_out_since_goes_on(tmp_path: Path) -> None:
    """Rounds of an owner's work are on its disk alone between two hand-outs."""
    turns = "sync.expert_rounds=4"
    life = saved_life(tmp_path, turns)
    trained = life.trainer.contribution(1)
    tip = Tip(life, tmp_path, life.run.layout.tile_ids_of(3), ())
    carried = values_ahead(tip, tmp_path, turns)
    assert carried is not None
    new, old = tip.store.version(3), life.store.version(0)
    assert np.array_equal(carried.block(1), new.block(1) + (trained - old.block(1)))
    for block in (0, 2, 3):  # not a column, not owned then, and handed out since
        assert np.array_equal(carried.block(block), new.block(block))


def test_a_column_that_was_handed_out_since_is_ahead_by_what_rounding_left(tmp_path: Path) -> None:
    """Only its owner has that, and sends it never again. A column that was not handed out is ahead by it once."""
    turns = "sync.expert_rounds=4", "sync.expert_codec=int8"
    life = saved_life(tmp_path, *turns, ahead=0.5)
    trained = life.trainer.contribution(1)
    tip = Tip(life, tmp_path, life.run.layout.tile_ids_of(3), (), left=(0.5, 0.125))
    carried = values_ahead(tip, tmp_path, *turns)
    assert carried is not None
    new, old = tip.store.version(3), life.store.version(0)
    np.testing.assert_allclose(carried.block(1), new.block(1) + (trained - old.block(1)), atol=1e-6)
    np.testing.assert_allclose(carried.block(2), new.block(2) + 0.5)  # it was not trained here
    np.testing.assert_allclose(carried.block(3), new.block(3) + 0.125)
    assert np.array_equal(carried.block(0), new.block(0))


def test_a_column_that_had_another_owner_too_begins_with_what_was_committed(tmp_path: Path) -> None:
    """What its one owner was ahead is unsent work from then on, and must not be in its values as well."""
    turns = "sync.expert_rounds=4", "sync.expert_codec=int8"
    life = saved_life(tmp_path, *turns, ahead=0.5)
    alone = life.commits[1].manifest.ownership
    tip = Tip(life, tmp_path, (), (), left=(0.5,), ownership=(((A, B), *alone[1:]), alone))
    carried = values_ahead(tip, tmp_path, *turns)
    assert carried is not None
    new = tip.store.version(3)
    assert np.array_equal(carried.block(1), new.block(1))
    unsent = tip.residuals.unsent(life.run.layout.tile_ids_of(1)[0])
    assert unsent is not None
    assert unsent.min() == unsent.max() == 0.5
    assert float(np.abs(carried.block(3) - new.block(3)).min()) > 0.4


def test_uncounted_work_or_that_of_another_history_does_not(tmp_path: Path) -> None:
    turns = "sync.expert_rounds=4"
    life = saved_life(tmp_path, turns, uncounted_tokens=7)
    tip = Tip(life, tmp_path, (), ())
    assert values_ahead(tip, tmp_path, turns) is None
    assert values_ahead(tip, tmp_path, turns, overlap=True) is not None, "or each checkpoint would have nothing"
    stranger = replace(life.commits[2].manifest, step=7)
    life.ours = [*life.commits, replace(life.commits[2], manifest=stranger)]
    life.saver(stranger, life.store.version(0), Uncounted())
    assert values_ahead(tip, tmp_path, turns) is None


def test_of_the_shared_values_the_parts_that_have_not_had_their_turn_go_on(tmp_path: Path) -> None:
    """Rounds that brought nothing have taken nobody's turn."""
    turns = "sync.vocabulary_rounds=3", "sync.tile_values=128"
    life = saved_life(tmp_path, *turns)
    trained = life.trainer.contribution(0)
    tiles, sync = life.run.layout.tiles_of(0), life.config.sync
    due = due_tiles(len(tiles), 2, vocabulary_of(life.run.layout, sync))
    handed_out = [tile for first, number in due for tile in range(first, first + number)]
    tip = Tip(life, tmp_path, handed_out, (), (), ())
    carried = values_ahead(tip, tmp_path, *turns)
    assert carried is not None
    new, old = tip.store.version(5).block(0), life.store.version(0).block(0)
    expected = new + (trained - old)
    assert 0 < len(handed_out) < len(tiles)
    for tile in handed_out:
        done = slice(tiles[tile].start, tiles[tile].stop)
        expected[done] = new[done]
    assert np.array_equal(carried.block(0), expected)


def steps_of_moments(life: Life) -> int:
    """Of an owned column."""
    return next(group.steps for group in life.trainer.learner.optimizer.groups if group.column == OWNED[0])


def test_a_running_peer_goes_back_to_what_its_checkpoint_is_ahead(tmp_path: Path) -> None:
    """What it trained since does not count."""
    turns = "sync.vocabulary_rounds=3", "sync.tile_values=128"
    life = saved_life(tmp_path, *turns)
    trained, steps = life.trainer.contribution(0), steps_of_moments(life)
    life.train(2)
    tip, learning = Tip(life, tmp_path, ()), TrainingSetup(life.config, life.trainer, life.loader, life.dataset)
    lead = SavedLead(life.checkpoints, tmp_path, life.run.info, A, life.run.layout, cast(Disk, tip), learning)
    carried = lead(tip.manifest)
    assert carried is not None
    new, old = tip.store.version(2).block(0), life.store.version(0).block(0)
    assert np.array_equal(carried.block(0), new + (trained - old))
    assert steps_of_moments(life) == steps
    assert not life.events


def test_a_running_peer_without_a_lead_on_its_disk_stays_as_it_is(tmp_path: Path) -> None:
    turns = "sync.vocabulary_rounds=3", "sync.tile_values=128"
    life = saved_life(tmp_path, *turns, uncounted_tokens=7)
    life.train(2)
    steps, tip = steps_of_moments(life), Tip(life, tmp_path, ())
    learning = TrainingSetup(life.config, life.trainer, life.loader, life.dataset)
    for folder in (life.checkpoints, tmp_path / "none"):
        lead = SavedLead(folder, tmp_path, life.run.info, A, life.run.layout, cast(Disk, tip), learning)
        assert lead(tip.manifest) is None
    assert steps_of_moments(life) == steps
    assert not life.events


def test_nothing_is_saved_of_a_history_that_has_just_lost(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.begin()
    life.ours = life.commits[:2]  # another one, with fewer rounds, has taken its place
    life.save(2, final=True)
    assert not life.checkpoints.exists()
    life.ours = life.commits
    life.commits[3] = life.run.certified(life.run.child(life.commits[2].manifest, sha256(b"theirs"), sha256(b"wire")))
    life.save(3, final=True)  # the state on disk is not the one of this commit
    assert not life.checkpoints.exists()
    assert not life.events
    life.save(2)
    assert load_latest(life.checkpoints)[0].private()["round"] == 2


def test_another_history_that_wins_while_a_checkpoint_is_saved_is_not_in_it(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.begin()

    def wins(manifest: Manifest) -> Commit | None:
        """What is asked first of all finds our history, and then the other takes its place."""
        if not life.ours:
            return None
        version = life.store.version(0)
        staging = life.store.stage(0, None, "theirs", version)
        staging.write_state(0, bytes(4 * version.layout.tiles[0].size))
        staging.finish()
        staging.publish()
        life.ours = ()
        return life.commits[1]

    life.saver._commit_of = wins
    life.save(1, final=True)
    assert not life.ours
    assert not list(life.checkpoints.iterdir())
    assert not life.events

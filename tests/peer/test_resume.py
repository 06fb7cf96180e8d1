"""A peer's own training state on its way to disk and back."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spes_p2p.checkpoint.load import load_latest
from spes_p2p.config.schema import Config
from spes_p2p.consensus.fragments import due_tiles
from spes_p2p.consensus.manifest import Manifest
from spes_p2p.consensus.membership import FEWEST_AUDITORS, PROBATION
from spes_p2p.consensus.messages import (
    Commit,
)
from spes_p2p.data.loader import LeasedLoader, LocalLoader, open_dataset
from spes_p2p.errors import CheckpointError, StorageFull
from spes_p2p.ids import PeerId, sha256
from spes_p2p.observe.events import Event, Warning
from spes_p2p.peer import resume
from spes_p2p.peer.resume import Resumed, Saver, TrainingSetup
from spes_p2p.peer.run import _restore
from spes_p2p.sync.chain import Chain
from spes_p2p.sync.inputs import Inputs
from spes_p2p.sync.node import vocabulary_of
from spes_p2p.train.stages import Uncounted
from spes_p2p.train.trainer import Trainer
from tests.sync.chains import A, MadeRun
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
    assert (second.trainer.round_steps, second.trainer.owned) == (3, OWNED)
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
    """A later round of the run of a Life, on a disk."""

    def __init__(self, life: Life, folder: Path, round: int, handed_out: tuple[int, ...]) -> None:
        self.chain = Chain(folder / "chain")
        for commit in life.commits:
            self.chain.append(commit)
        self.manifest = replace(life.commits[round].manifest, column_rounds=handed_out)
        self.inputs = Inputs(folder / "inputs", life.run.layout)
        self.store = life.store
        self.store.create_initial(lambda tile: life.run.initial(tile) + np.float32(0.25), round)


def test_what_a_checkpoint_has_of_columns_that_were_not_handed_out_since_goes_on(tmp_path: Path) -> None:
    """Rounds of an owner's work are on its disk alone between two hand-outs."""
    life = Life(tmp_path, "sync.expert_rounds=4")
    life.begin()
    life.train(2)
    life.saver(life.commits[1].manifest, life.store.version(0), Uncounted())
    trained = {column: life.trainer.contribution(1 + column) for column in OWNED}
    tip = Tip(life, tmp_path, 3, (1, 1, 2, 1))
    later = Life(tmp_path, "sync.expert_rounds=4")
    resumed = Resumed.load(tmp_path / "checkpoints", life.run.info, life.run.layout, life.events.append)
    assert resumed is not None
    resumed.restore(later.trainer, later.loader)
    carried = resumed.values_ahead(tip.manifest, A, life.run.layout, tip, later.trainer, life.config.sync)  # type: ignore[arg-type]
    assert carried is not None
    new, old = tip.store.version(3), life.store.version(0)
    assert np.array_equal(carried.block(1), new.block(1) + (trained[0] - old.block(1)))
    for block in (0, 2, 3):  # not a column, not owned then, and handed out since
        assert np.array_equal(carried.block(block), new.block(block))


def test_uncounted_work_or_that_of_another_history_does_not(tmp_path: Path) -> None:
    life = Life(tmp_path, "sync.expert_rounds=4")
    life.begin()
    life.train(2)
    life.saver(life.commits[1].manifest, life.store.version(0), Uncounted(tokens=7, steps=1))
    tip = Tip(life, tmp_path, 3, (1, 1, 1, 1))

    def ahead(overlap: bool = False) -> object:
        resumed = Resumed.load(tmp_path / "checkpoints", life.run.info, life.run.layout, life.events.append)
        assert resumed is not None
        sync = life.config.sync.model_copy(update={"overlap": overlap})
        return resumed.values_ahead(tip.manifest, A, life.run.layout, tip, life.trainer, sync)  # type: ignore[arg-type]

    assert ahead() is None
    assert ahead(overlap=True) is not None, "or each checkpoint would have nothing"
    known = tip.manifest
    others = [replace(known.members[0], peer=PeerId(f"voter {n}")) for n in range(FEWEST_AUDITORS)]
    tip.manifest = replace(known, members=(replace(known.members[0], peer=A, probation=PROBATION), *others))
    assert ahead(overlap=True) is None, "who is on probation begins with what was committed"
    tip.manifest = known
    stranger = replace(life.commits[2].manifest, step=7)
    life.saver(stranger, life.store.version(0), Uncounted())
    assert ahead() is None


@pytest.mark.parametrize("turns", [("sync.fragments=3", "sync.steps_per_round=6"), ("sync.vocabulary_rounds=3",)])
def test_of_the_shared_values_the_parts_that_have_not_had_their_turn_go_on(
    tmp_path: Path, turns: tuple[str, ...]
) -> None:
    fragments = (*turns, "sync.tile_values=128")
    life = Life(tmp_path, *fragments)
    life.begin()
    life.train(2)
    life.saver(life.commits[1].manifest, life.store.version(0), Uncounted())
    trained = life.trainer.contribution(0)
    tip = Tip(life, tmp_path, 2, (1, 1, 1, 1))
    later = Life(tmp_path, *fragments)
    resumed = Resumed.load(tmp_path / "checkpoints", life.run.info, life.run.layout, life.events.append)
    assert resumed is not None
    resumed.restore(later.trainer, later.loader)
    disk: Any = tip
    carried = resumed.values_ahead(tip.manifest, A, life.run.layout, disk, later.trainer, life.config.sync)
    assert carried is not None
    new, old = tip.store.version(2).block(0), life.store.version(0).block(0)
    tiles = life.run.layout.tiles_of(0)
    expected = new + (trained - old)
    sync = life.config.sync
    due = due_tiles(len(tiles), 2, sync.fragments, vocabulary_of(life.run.layout, sync))
    assert 0 < sum(number for _, number in due) < len(tiles)
    for first, number in due:
        done = slice(tiles[first].start, tiles[first + number - 1].stop)
        expected[done] = new[done]
    assert np.array_equal(carried.block(0), expected)


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

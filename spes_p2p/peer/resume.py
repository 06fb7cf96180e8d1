"""A peer's private training state on its way to disk and back: what must be there beside the committed state."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spes_p2p.checkpoint.load import Checkpoint, load_latest
from spes_p2p.checkpoint.save import save_checkpoint
from spes_p2p.config.schema import Config, SyncConfig
from spes_p2p.consensus.manifest import Manifest, manifest_hash
from spes_p2p.consensus.messages import Commit
from spes_p2p.data.loader import AnyDataset, LeasedLoader, LocalLoader
from spes_p2p.errors import CheckpointError, StateError, StorageFull
from spes_p2p.ids import Hash, PeerId
from spes_p2p.observe.events import Event, Warning
from spes_p2p.ownership.assign import columns_of
from spes_p2p.state.layout import Layout
from spes_p2p.state.version import Version
from spes_p2p.sync.chain import Chain
from spes_p2p.sync.genesis import RunInfo
from spes_p2p.sync.inputs import RebasedState
from spes_p2p.sync.node import vocabulary_of
from spes_p2p.sync.outgoing import TrainingBase
from spes_p2p.sync.surroundings import Disk
from spes_p2p.train.stages import Uncounted
from spes_p2p.train.trainer import Trainer
from spes_p2p.wire import pack


@dataclass(frozen=True)
class TrainingSetup:
    """A peer's trainer, and what it learns from. Made once the peer knows its run."""

    config: Config
    trainer: Trainer
    loader: LeasedLoader | LocalLoader
    dataset: AnyDataset


@dataclass(eq=False)
class Saver:
    """Saves a checkpoint after a commit, as often as the config says. A full disk pauses saving, with one warning."""

    _folder: Path
    _info: RunInfo
    _learning: TrainingSetup
    _commit_of: Callable[[Manifest], Commit | None]
    """The commit of a manifest, None where another history of the run won meanwhile."""
    _emit: Callable[[Event], None]

    def __post_init__(self) -> None:
        self._config = self._learning.config
        self._paused = False

    def __call__(self, manifest: Manifest, version: Version, uncounted: Uncounted, final: bool = False) -> None:
        """Saves the committed state of `manifest` with the current training state, if one is due or `final` is set."""
        if manifest.round % self._config.output.checkpoint_every_rounds and not final:
            return
        commit = self._commit_of(manifest)
        if commit is None or version.root != manifest.state_root:
            return  # another history won in this moment; training is about to hear of it
        private = {
            "round": manifest.round,
            "manifest": manifest_hash(manifest),
            "commit": pack(commit),
            "trainer": self._learning.trainer.private_state(),
            "loader": self._learning.loader.state_dict(),
            "uncounted": {"tokens": uncounted.tokens, "steps": uncounted.steps},
        }
        run = {
            "run_id": self._info.run_id,
            "fingerprint": self._info.fingerprint.hex(),
            "config": self._info.config,
            "tokens": manifest.tokens,
            "tokenizer": self._learning.dataset.tokenizer,  # who exports needs both
            "eos_id": self._learning.dataset.eos_id,
        }
        keep = self._config.output.keep_checkpoints
        try:
            save_checkpoint(self._folder, version, manifest.step, private, run, keep)
        except StorageFull as error:
            if not self._paused:
                self._emit(Warning(f"checkpoints are paused, but training continues: {error} ({error.fix})"))
            self._paused = True
            return
        except StateError:
            if self._commit_of(manifest) is not None:
                raise
            return  # another history won meanwhile
        if self._paused:
            self._emit(Warning("there is disk space again: checkpoints are saved"))
        self._paused = False


class Resumed:
    """What the newest whole checkpoint says. `load` fails where it belongs to another run."""

    def __init__(self, checkpoint: Checkpoint, layout: Layout) -> None:
        private: dict[str, Any] = checkpoint.private()
        self.round: int = private["round"]
        self.manifest = Hash(private["manifest"])
        self.uncounted = Uncounted(**private["uncounted"])
        self._private = private
        self._owned = tuple(private["trainer"]["owned"])
        self._version = checkpoint.version(layout)
        self._step = checkpoint.step

    @classmethod
    def load(
        cls, folder: Path, info: RunInfo, layout: Layout, emit: Callable[[Event], None], store: Path | None = None
    ) -> Resumed | None:
        """None, with a warning, where no checkpoint can be used: then the committed state is all there is.

        `store`: the state store that the peer uses, and so checks itself. Raises CheckpointError for a checkpoint of
        another run.
        """
        try:
            checkpoint, warnings = load_latest(folder, store)
        except CheckpointError as error:
            emit(Warning(f"{error}; training continues from the committed state, with fresh optimizer moments"))
            return None
        for text in warnings:
            emit(Warning(text))
        found = checkpoint.run.get("fingerprint")
        if found != info.fingerprint.hex():
            raise CheckpointError(
                f"{folder} holds checkpoints of run {checkpoint.run.get('run_id')!r} with fingerprint "
                f"{str(found)[:16]}, not {info.fingerprint.hex()[:16]}",
                fix="choose another --output, or join that run",
            )
        return cls(checkpoint, layout)

    def restore(self, trainer: Trainer, loader: LeasedLoader | LocalLoader) -> bool:
        """Brings trainer and loader to where they were when the checkpoint was saved.

        False where the data now comes from elsewhere than then (leases, or the peer's own), so that the loader is not
        touched. To be called once: the training state, three times what is trained, is not kept.
        """
        place = self._restore(trainer)["loader"]
        if place.keys() != loader.state_dict().keys():
            return False
        loader.load_state_dict(place)
        return True

    def _restore(self, trainer: Trainer) -> dict[str, Any]:
        """Brings the trainer to where it was; gives all private state away."""
        private, self._private = self._private, {}
        trainer.adopt(self._owned, self._version, self._step)
        trainer.load_private_state(private["trainer"])
        return private

    def values_ahead(
        self, tip: Manifest, me: PeerId, layout: Layout, disk: Disk, trainer: Trainer, sync: SyncConfig
    ) -> RebasedState | None:
        """The state of `tip` plus the checkpoint's lead in what no round has handed out since.

        It is read from the trainer, which is restored for that unless `restore` has done it.

        None where nothing is ahead, if the checkpoint belongs to another
        history, or if it holds work that no round counted and whose data was leased to others. With overlap every
        checkpoint holds such work and is used all the same: repeating a few steps of data is a smaller loss than
        dropping the rest.
        """
        if not sync.takes_turns or (self.uncounted.tokens and not sync.overlap):
            return None
        if self.round > tip.round or not disk.chain.has(self.manifest, self.round):
            return None
        takes_parts = vocabulary_of(layout, sync).rounds > 1
        columns = (column for column in columns_of(tip.ownership, me) if column in self._owned)
        blocks = (*([0] if takes_parts else []), *(1 + column for column in columns))
        tiles = self._not_handed_out(tip, me, layout, disk.chain, blocks)
        if not tiles:
            return None
        if self._private:
            self._restore(trainer)
        disk.inputs.take(self.manifest, blocks, trainer.contribution)
        # what rounding left of tiles that were not handed out since is what it was then, and in the trainer's values
        ahead = disk.residuals.ahead(manifest_hash(tip))
        new = TrainingBase(layout, disk.store.version(tip.round), ahead)
        old = TrainingBase(layout, self._version, ahead)
        return RebasedState(layout, new, old, disk.inputs.snapshot, tiles, self._version.is_sound)

    def _not_handed_out(
        self, tip: Manifest, me: PeerId, layout: Layout, chain: Chain, blocks: Collection[int]
    ) -> frozenset[int]:
        """Tiles of these blocks that no round after the checkpoint's, up to `tip`, has handed out.

        Without a column that this peer owned alone and not alone: what rounding had left of it has become unsent work.
        """
        tiles = set(layout.tile_ids_in(blocks))
        was_alone: dict[int, bool] = {}
        for round in range(self.round, tip.round + 1):
            commit = chain.find(round)
            if commit is None or not tiles:
                return frozenset()  # another history won in this moment, or nothing is left
            for piece in commit.manifest.slices if round > self.round else ():
                tiles.difference_update(piece.tile_ids)
            for column in {block - 1 for block in blocks if block}:
                owners = commit.manifest.ownership[column]
                if me in owners and was_alone.setdefault(column, owners == (me,)) != (owners == (me,)):
                    tiles.difference_update(layout.tile_ids_of(1 + column))
        return frozenset(tiles)


@dataclass(frozen=True)
class SavedLead:
    """What a peer is ahead by a checkpoint: at its start, and when it begins a round anew while it runs."""

    folder: Path
    """Of the checkpoints."""
    store: Path
    info: RunInfo
    me: PeerId
    layout: Layout
    disk: Disk
    learning: TrainingSetup

    def __call__(self, tip: Manifest) -> RebasedState | None:
        """By the newest whole checkpoint, to which the trainer goes back if there is any; see `Resumed.values_ahead`.

        What is damaged is said at the next start.
        """
        if not self.learning.config.sync.takes_turns:
            return None
        resumed = Resumed.load(self.folder, self.info, self.layout, lambda event: None, self.store)
        return None if resumed is None else self.of(resumed, tip)

    def of(self, resumed: Resumed, tip: Manifest) -> RebasedState | None:
        """By this checkpoint."""
        learning = self.learning
        return resumed.values_ahead(tip, self.me, self.layout, self.disk, learning.trainer, learning.config.sync)

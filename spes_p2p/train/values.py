"""The values that one peer trains on: the committed state, and what of its own work no round has counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from spes_p2p.consensus.manifest import Manifest, manifest_hash
from spes_p2p.state.layout import BlockSource, Layout, Values
from spes_p2p.state.store import StateStore
from spes_p2p.state.version import Version
from spes_p2p.sync.inputs import Inputs, OverlapRebase, RebasedState
from spes_p2p.sync.outgoing import TrainingBase
from spes_p2p.sync.residuals import Residuals
from spes_p2p.train.stages import Rebase, Turn


@dataclass(eq=False)
class TrainedValues:
    """What the actions of the trainer's machine mean for tensors. `trained(block)`: the values as they are now."""

    _layout: Layout
    _store: StateStore
    _inputs: Inputs
    _residuals: Residuals
    _trained: Callable[[int], Values]

    def __post_init__(self) -> None:
        self._base: Version | None = None
        self._masters: TrainingBase | None = None

    @property
    def base(self) -> Version:
        """The committed state that is trained on."""
        assert self._base is not None
        return self._base

    def masters(self, manifest: Manifest) -> TrainingBase:
        """The values to train on after `manifest`, if it counted all earlier work of this peer."""
        ahead = self._residuals.ahead(manifest_hash(manifest))
        return TrainingBase(self._layout, self._store.version(manifest.round), ahead)

    def begin(self, turn: Turn) -> TrainingBase:
        """A turn on top of its manifest: what it starts from, without work of its own."""
        self._base = self._store.version(turn.manifest.round)
        self._masters = self.masters(turn.manifest)
        return self._masters

    def end(self) -> None:
        """Nothing is trained any more."""
        self._base = self._masters = None

    def snapshot(self, turn: Turn) -> None:
        """Keeps what was trained in a turn, to be handed in."""
        self._inputs.take(turn.tip_hash, turn.blocks, self._trained)

    def rebased(self, newest: Manifest, rebase: Rebase, is_read_late: bool = False) -> BlockSource:
        """What to train on after `newest`; to be asked for before `begin` of the turn on top of it.

        `is_read_late`: the trained values change before it is read.
        """
        work = self._carried(self.masters(newest), rebase.tiles)
        if not rebase.ahead:
            return work
        ahead = OverlapRebase(work, self._trained, self._inputs.snapshot, rebase.ahead)
        return self._inputs.freeze(ahead, rebase.ahead) if is_read_late else ahead

    def _carried(self, new: BlockSource, tiles: frozenset[int]) -> RebasedState:
        """What was handed in on top of the present base, carried on to `new` in these tiles."""
        return RebasedState(self._layout, new, self._masters, self._inputs.snapshot, tiles, self.base.is_sound)

"""Builds the state of the next round on disk: takes reduced and fetched slices, gives a new state with its root.

A state that this peer has signed for stays whole and durable until a commit takes its place: what is staged after that
goes to a second area beside it. `open` decides where to and is called on the loop's thread, before anything is written;
the long methods run in a thread, one at a time, under `lock`. Votes, messages and the network are others' business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from spes_p2p.consensus.content import Content
from spes_p2p.consensus.manifest import Merge, Slice
from spes_p2p.errors import LocalProtocolError, RemoteProtocolError
from spes_p2p.ids import HASH_BYTES, Hash, short
from spes_p2p.state.hashes import split_hashes
from spes_p2p.state.layout import Layout
from spes_p2p.state.staging import Staging, TileData
from spes_p2p.state.store import StateStore
from spes_p2p.state.version import Version
from spes_p2p.sync.coding import stage_tile
from spes_p2p.sync.merge import check_neighbours, merge_columns, nearest_experts
from spes_p2p.sync.outer import Nesterov

NamedTile = tuple[int, TileData, Hash]
"""(tile id, its values or bytes, its hash)"""
_LABELS = ("", "beside")
FETCHED = "fetched"
"""The label of a state that is fetched whole, by hash, beside the round's own stagings."""
OTHER = "other"
"""The label of one of another history: we go on with ours while it comes, be its round ours or an earlier one."""


@dataclass(eq=False)
class CandidateState:
    """The stagings of the round that is being made. `is_bound(root)`: whether this peer has signed for that state."""

    _store: StateStore
    _layout: Layout
    _merge_top_k: int
    _is_bound: Callable[[Hash], bool]
    _outer: Nesterov | None = None
    """The step that a round makes of what it hands out."""

    def __post_init__(self) -> None:
        self.lock = asyncio.Lock()
        """Held by who writes here, or publishes what is here."""
        self._tip = -1
        self._work: Staging | None = None
        self._kept: Staging | None = None
        self._has_state = False

    def enter(self, tip_round: int) -> None:
        """Moves on to a newly committed state. Older stagings are left to the store to remove."""
        self._tip, self._work, self._kept, self._has_state = tip_round, None, None, False

    @property
    def round(self) -> int:
        """The round whose state is being made."""
        return self._tip + 1

    def recover(self) -> None:
        """After a restart or a full disk: what is not finished is gone, what this peer has signed for is here."""
        self._keep_what_binds()
        if self._work is not None:
            self._work.discard()
            self._work, self._has_state = None, False
        for label in _LABELS:
            staging = self._store.staged(self._tip + 1, label)
            if staging is not None and staging.finished is not None and self._is_bound(staging.finished.root):
                self._kept = staging

    def open(self) -> None:
        """Makes ready for writing: a state that was made, but not signed for, is undone."""
        self._keep_what_binds()
        if self._work is None:
            taken = self._kept is not None and self._kept is self._store.staged(self._tip + 1, _LABELS[0])
            self._work = self._store.stage(self._tip + 1, self._tip, _LABELS[taken])
        elif self._has_state:
            self._work.reopen(keep_state=False)
        self._has_state = False

    def finished(self, root: Hash) -> Version | None:
        """The staged state with this root, whole and on disk."""
        staging = self._finished(root)
        return staging.finished if staging else None

    def publish(self, root: Hash) -> Version:
        """Makes the staged state the committed one."""
        staging = self._finished(root)
        if staging is None:
            raise LocalProtocolError(f"state {short(root)} of round {self._tip + 1} is not staged")
        return staging.publish()

    def write(self, first_tile: int, tiles: Iterable[TileData]) -> tuple[Hash, ...]:
        """Stages consecutive wire tiles; their hashes."""
        staging = self._opened()
        return tuple(stage_tile(staging, self._outer, first_tile + at, tile) for at, tile in enumerate(tiles))

    def add(self, tiles: Iterable[NamedTile]) -> None:
        """Stages wire tiles that came from elsewhere. Raises UnfitTile for one that is not finite."""
        staging = self._opened()
        for tile_id, data, tile_hash in tiles:
            stage_tile(staging, self._outer, tile_id, data, tile_hash, is_foreign=True)

    def gather(self, slices: Sequence[Slice], joined: Sequence[bytes]) -> dict[int, Hash]:
        """Stages these wire tiles from anywhere on this disk, and no others. Returns those that are not here, by id."""
        wanted = wire_tiles(slices, joined)
        staging = self._opened()
        tile_ids = range(self._layout.num_model_tiles)
        staging.forget(tile_id for tile_id in tile_ids if staging.wire_hash(tile_id) != wanted.get(tile_id))
        missing: dict[int, Hash] = {}
        for tile_id, tile_hash in wanted.items():
            if not staging.has_wire(tile_id):
                here = self._store.find(tile_hash)
                if here is None:
                    missing[tile_id] = tile_hash
                else:
                    stage_tile(staging, self._outer, tile_id, here, tile_hash)
        return missing

    def build(self, alpha: float) -> tuple[Hash, Merge | None]:
        """The root of the new state from what was gathered; with `alpha` it is merged with neighbours chosen here."""
        neighbours = nearest_experts(self._layout, self._opened(), self._merge_top_k) if alpha else None
        merge = Merge(alpha, neighbours) if neighbours is not None else None
        return self.compute(merge), merge

    def compute(self, merge: Merge | None) -> Hash:
        """The root of the new state from what was gathered, by our own arithmetic, whole and on disk."""
        staging = self._opened()
        self._has_state = True
        if merge is not None:
            merge_columns(self._layout, staging, merge.neighbours, merge.alpha, staging.write_state)
        return self._layout.root_of(staging.finish())

    def check(self, content: Content) -> None:
        """Raises RemoteProtocolError where its parts do not fit each other or the grid."""
        manifest = content.manifest
        wire_tiles(manifest.slices, content.wire_hashes)
        if manifest.merge is not None:
            try:
                check_neighbours(self._layout, manifest.merge.neighbours)
            except LocalProtocolError as error:
                raise RemoteProtocolError(str(error)) from error

    def repair(self, theirs: Sequence[Hash]) -> tuple[int, ...]:
        """Tiles in which the state just computed differs from `theirs`.

        Once they are put in (`mend`) it is computed again, without the merge that is in there.
        """
        staging = self._opened()
        if staging.finished is None:
            raise LocalProtocolError(f"the state of round {self._tip + 1} was not computed", fix="call compute() first")
        pairs = enumerate(zip(staging.finished.tile_hashes, theirs, strict=True))
        differ = tuple(tile_id for tile_id, (own, other) in pairs if own != other)
        staging.reopen(keep_state=True)
        return differ

    def mend(self, tiles: Iterable[NamedTile]) -> None:
        """Puts in state tiles that another peer computed."""
        for tile in tiles:
            self._opened().write_state(*tile)

    def _finished(self, root: Hash) -> Staging | None:
        stagings = (self._kept, self._work)
        return next((s for s in stagings if s is not None and s.finished is not None and s.finished.root == root), None)

    def _opened(self) -> Staging:
        if self._work is None:
            raise LocalProtocolError(f"nothing of round {self._tip + 1} is being staged", fix="call open() first")
        return self._work

    def _keep_what_binds(self) -> None:
        """At most one state binds: a later acceptance stands for the earlier ones."""
        if self._work is not None and self._work.finished is not None and self._is_bound(self._work.finished.root):
            self._kept, self._work, self._has_state = self._work, None, False


def wire_tiles(slices: Sequence[Slice], joined: Sequence[bytes]) -> dict[int, Hash]:
    """The wire hash of each tile, by id. Raises RemoteProtocolError where hashes and slices do not fit."""
    found: dict[int, Hash] = {}
    if len(slices) != len(joined):
        raise RemoteProtocolError(f"hashes of {len(joined)} slices for {len(slices)}")
    for piece, part in zip(slices, joined, strict=True):
        if len(part) != piece.tiles * HASH_BYTES:
            raise RemoteProtocolError(f"{len(part)} bytes of hashes for the {piece.tiles} tiles of slice {piece.key}")
        found.update(zip(piece.tile_ids, split_hashes(part), strict=True))
    return found


def staged_state(store: StateStore, round: int, root: Hash) -> Staging | None:
    """The finished staging with this root."""
    for label in (*_LABELS, FETCHED, OTHER):
        staging = store.staged(round, label)
        if staging is not None and staging.finished is not None and staging.finished.root == root:
            return staging
    return None


def whole_state(store: StateStore, round: int, root: Hash) -> Version | None:
    """The state with this root, committed or staged."""
    if round in store.rounds() and store.version(round).root == root:
        return store.version(round)
    staging = staged_state(store, round, root)
    return staging.finished if staging else None

"""A small state with all kinds of blocks, and a disk that is full, for the tests of store, checkpoints and merge."""

from __future__ import annotations

import resource
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from spes_p2p.ids import Hash
from spes_p2p.state.initial import InitialState
from spes_p2p.state.layout import Layout, StateTensor, Values
from spes_p2p.state.store import Staging, StateStore


def small_tensors(columns: int = 3, layers: int = 2) -> list[StateTensor]:
    tensors = [StateTensor("embed", (7, 3), None, "normal"), StateTensor("norm", (3,), None, "ones")]
    for column in range(columns):
        for layer in range(layers):
            for matrix, shape in (("gate", (4, 3)), ("up", (4, 3)), ("down", (3, 4))):
                name = f"model.layers.{layer}.mlp.experts.{column}.{matrix}_proj.weight"
                tensors.append(StateTensor(name, shape, column, "normal"))
    return tensors


def small_layout(columns: int = 3, tile_values: int = 8) -> Layout:
    return Layout(small_tensors(columns), tile_values)


def small_store(directory: Path, layout: Layout | None = None) -> StateStore:
    """A store with round 0."""
    layout = layout or small_layout()
    store = StateStore(directory, layout)
    store.create_initial(InitialState(layout, seed=1, init_std=0.02))
    return store


def new_values(layout: Layout, round: int) -> list[Values]:
    """The blocks that a test round hands out."""
    rng = np.random.default_rng(round)
    return [rng.standard_normal(block.size).astype(np.float32) for block in layout.blocks]


def stage_round(store: StateStore, round: int, blocks: Iterable[int], label: str = "") -> Staging:
    """Stages the test round's values of whole blocks on top of round - 1."""
    staging = store.stage(round, round - 1, label)
    values = new_values(store.layout, round)
    for block in blocks:
        for tile in store.layout.tiles_of(block):
            staging.write_tile(tile.id, values[block][tile.start : tile.stop])
    return staging


def commit_round(store: StateStore, round: int, blocks: Iterable[int]) -> tuple[Hash, ...]:
    staging = stage_round(store, round, blocks)
    hashes = staging.finish()
    staging.publish()
    return hashes


@contextmanager
def file_size_limit(limit_bytes: int) -> Iterator[None]:
    """No file may grow beyond this: the kernel refuses as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def all_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}

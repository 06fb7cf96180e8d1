"""Snapshots of trained values, and what a peer goes on from when a round did not count all of them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from spes_p2p.errors import LocalProtocolError
from spes_p2p.ids import sha256
from spes_p2p.state.layout import Layout, Values
from spes_p2p.sync.inputs import Inputs, RebasedState
from tests.state.small import file_size_limit, new_values, small_layout

P, Q = sha256(b"p"), sha256(b"q")


class Blocks:
    def __init__(self, layout: Layout, seed: int) -> None:
        self.values = new_values(layout, seed)

    def block(self, index: int) -> Values:
        return self.values[index]


def taken(folder: Path, blocks: tuple[int, ...] = (0, 2)) -> tuple[Layout, Inputs, Blocks]:
    layout, source = small_layout(), Blocks(small_layout(), 1)
    inputs = Inputs(folder / "inputs", layout)
    inputs.take(P, blocks, source.block)
    return layout, inputs, source


def test_values_of_consecutive_tiles(tmp_path: Path) -> None:
    layout, inputs, source = taken(tmp_path)
    first = layout.tile_ids_of(2)[0]
    assert np.array_equal(inputs.values(P, first, 2), source.block(2)[:16])  # type: ignore[arg-type]
    assert (inputs.snapshot.parent, inputs.snapshot.blocks) == (P, (0, 2))


@pytest.mark.parametrize(("first", "count"), [(-1, 1), (0, 0), (0, -1), (0, 99), (2**70, 1), (0, 5)])
def test_what_is_not_there_is_none(tmp_path: Path, first: int, count: int) -> None:
    layout, inputs, _ = taken(tmp_path)
    assert len(layout.tile_ids_of(0)) < 5  # five tiles span two blocks
    assert inputs.values(P, first, count) is None


def test_other_parents_and_other_blocks_are_not_there(tmp_path: Path) -> None:
    layout, inputs, _ = taken(tmp_path)
    assert inputs.values(Q, 0, 1) is None
    assert inputs.values(P, layout.tile_ids_of(1)[0], 1) is None


def test_the_next_snapshot_leaves_maps_of_the_last_as_they_were(tmp_path: Path) -> None:
    """A slow stream may still send what it began; the file under it must not shrink or change."""
    layout, inputs, source = taken(tmp_path)
    served = inputs.values(P, 0, 1)
    for seed in (2, 3, 4):
        inputs.take(Q, (0,), Blocks(layout, seed).block)
    assert served is not None
    assert np.array_equal(served, source.block(0)[:8])
    assert inputs.values(P, 0, 1) is None
    assert len(list((tmp_path / "inputs").iterdir())) == 1


def test_what_is_trained_on_is_kept_again_before_the_next_snapshot(tmp_path: Path) -> None:
    """A round made alone, and then one of the others instead: the second may read what the first has kept."""
    layout, inputs, source = taken(tmp_path)
    first = inputs.freeze(source, (0, 2))
    again = inputs.freeze(first, (0, 2))
    source.values = new_values(layout, 2)
    for frozen in (first, again):
        assert np.array_equal(frozen.block(2), Blocks(layout, 1).block(2))
    inputs.take(Q, (0,), source.block)
    assert len(list((tmp_path / "inputs").iterdir())) == 1
    assert np.array_equal(again.block(2), Blocks(layout, 1).block(2))


def test_a_full_disk_leaves_the_snapshot_in_memory(tmp_path: Path) -> None:
    layout = small_layout()
    inputs, source = Inputs(tmp_path / "inputs", layout), Blocks(layout, 1)
    with file_size_limit(8):
        inputs.take(P, (0, 1), source.block)
    assert np.array_equal(inputs.snapshot.block(0), source.block(0))
    assert not inputs.snapshot.block(0).flags.writeable  # what may be written to is spent for means
    assert not any(path.is_file() for path in (tmp_path / "inputs").rglob("*"))


def test_a_disk_without_room_for_a_folder_leaves_it_there_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = small_layout()
    inputs, source = Inputs(tmp_path / "inputs", layout), Blocks(layout, 1)

    def full(path: Path, mode: int = 0o777) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "mkdir", full)
    inputs.take(P, (0, 1), source.block)
    assert np.array_equal(inputs.snapshot.block(1), source.block(1))
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_values_that_do_not_fit_their_block_are_refused(tmp_path: Path) -> None:
    _, inputs, _ = taken(tmp_path)
    with pytest.raises(LocalProtocolError, match="block 0 has"):
        inputs.take(Q, (0,), lambda block: np.zeros(3, np.float32))


def test_a_restart_begins_without_a_snapshot(tmp_path: Path) -> None:
    layout, _, _ = taken(tmp_path)
    again = Inputs(tmp_path / "inputs", layout)
    assert again.snapshot.blocks == ()
    assert not list((tmp_path / "inputs").iterdir())


def test_uncounted_tiles_are_carried_and_others_are_new(tmp_path: Path) -> None:
    layout, inputs, trained = taken(tmp_path)
    new, old = Blocks(layout, 2), Blocks(layout, 3)
    first, second = layout.tiles_of(0)[:2]
    carried = RebasedState(layout, new, old, inputs.snapshot, frozenset({first.id}))
    values = carried.block(0)
    one, other = slice(first.start, first.stop), slice(second.start, second.stop)
    assert np.array_equal(values[one], new.block(0)[one] + (trained.block(0)[one] - old.block(0)[one]))
    assert np.array_equal(values[other], new.block(0)[other])
    assert np.array_equal(carried.block(2), new.block(2))
    assert np.array_equal(carried.block(1), new.block(1))  # not trained here


def test_poison_is_never_carried(tmp_path: Path) -> None:
    layout = small_layout()
    trained, new, old = Blocks(layout, 1), Blocks(layout, 2), Blocks(layout, 3)
    trained.values[0][3] = np.nan
    inputs = Inputs(tmp_path / "inputs", layout)
    inputs.take(P, (0,), trained.block)
    every = frozenset(layout.tile_ids_of(0))
    values = RebasedState(layout, new, old, inputs.snapshot, every).block(0)
    assert np.array_equal(values[:8], new.block(0)[:8])
    assert np.array_equal(values[8:], new.block(0)[8:] + (trained.block(0)[8:] - old.block(0)[8:]))

"""Where the new state is made: exactly the tiles that are wanted, and what was signed for stays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from spes_p2p.consensus.manifest import Merge, Slice
from spes_p2p.errors import LocalProtocolError, RemoteProtocolError, StorageFull
from spes_p2p.ids import Hash, PeerId, sha256
from spes_p2p.state.hashes import hash_tile
from spes_p2p.state.layout import Values
from spes_p2p.sync.candidate_state import CandidateState, staged_state, whole_state, wire_tiles
from spes_p2p.sync.coding import UnfitTile
from spes_p2p.sync.merge import nearest_experts
from tests.state.small import file_size_limit, new_values, small_layout, small_store
from tests.state.test_mending import flip

A = PeerId("a")
LAYOUT = small_layout()


def piece(block: int) -> Slice:
    ids = LAYOUT.tile_ids_of(block)
    return Slice(block, ids[0], len(ids), A, (A,))


def tiles(values: Values, block: int) -> list[Values]:
    return [values[tile.start : tile.stop] for tile in LAYOUT.tiles_of(block)]


class Made:
    """A bench on top of round 0. `bound` are the roots that the peer has signed for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bound: set[Hash] = set()
        self.store = small_store(folder, LAYOUT)
        self.bench = self._candidate()

    def _candidate(self) -> CandidateState:
        bench = CandidateState(self.store, LAYOUT, 2, self.bound.__contains__)
        bench.enter(0)
        return bench

    def restart(self) -> None:
        self.store.close()
        self.store = type(self.store)(self.folder, LAYOUT)
        self.bench = self._candidate()
        self.bench.recover()

    def write(self, seed: int, *blocks: int) -> tuple[list[Slice], list[bytes]]:
        """Stages blocks of a seed; the slices and their hashes."""
        values, slices, joined = new_values(LAYOUT, seed), [], []
        for block in blocks:
            self.bench.open()
            hashes = self.bench.write(piece(block).first_tile, tiles(values[block], block))
            slices.append(piece(block))
            joined.append(b"".join(hashes))
        return slices, joined

    def state(self, root: Hash) -> list[Values]:
        version = self.bench.finished(root)
        assert version is not None
        version.verify()
        return [np.array(version.block(at)) for at in range(len(LAYOUT.blocks))]


def test_the_new_state_has_what_was_gathered_and_the_old_values_elsewhere(tmp_path: Path) -> None:
    made = Made(tmp_path)
    slices, joined = made.write(1, 0, 2)
    assert made.bench.gather(slices[:1], joined[:1]) == {}
    root, merge = made.bench.build(0.0)
    assert merge is None
    state = made.state(root)
    assert np.array_equal(state[0], new_values(LAYOUT, 1)[0])
    for block in (1, 2, 3):
        assert np.array_equal(state[block], made.store.version(0).block(block))
    made.bench.publish(root)
    assert made.store.version(1).root == root


def test_what_is_missing_is_named_and_can_be_added(tmp_path: Path) -> None:
    made = Made(tmp_path)
    slices, joined = made.write(1, 0)
    values = new_values(LAYOUT, 1)[2]
    hashes = [hash_tile(tile.tobytes()) for tile in tiles(values, 2)]
    missing = made.bench.gather([*slices, piece(2)], [*joined, b"".join(hashes)])
    assert missing == dict(zip(piece(2).tile_ids, hashes, strict=True))
    made.bench.add((tile_id, tile.tobytes(), missing[tile_id]) for tile_id, tile in zip(missing, tiles(values, 2)))
    assert np.array_equal(made.state(made.bench.compute(None))[2], values)


def test_whole_values_from_elsewhere_replace_a_damaged_tile(tmp_path: Path) -> None:
    made = Made(tmp_path)
    made.bench.gather(*made.write(1, 0, 1, 3))
    values = new_values(LAYOUT, 1)[2]
    first = piece(2).first_tile
    flip(made.store.version(0), first)
    made.bench.add((first + at, tile.tobytes(), hash_tile(tile.tobytes())) for at, tile in enumerate(tiles(values, 2)))
    assert np.array_equal(made.state(made.bench.compute(None))[2], values)


def test_what_is_not_finite_is_not_added(tmp_path: Path) -> None:
    made = Made(tmp_path)
    made.bench.gather(*made.write(1, 0))
    first = LAYOUT.tile_ids_of(2)[0]
    values = np.full(LAYOUT.tiles[first].size, np.nan, np.float32)
    with pytest.raises(UnfitTile, match=f"tile {first} was handed out with values that are not finite"):
        made.bench.add([(first, values.tobytes(), hash_tile(values.tobytes()))])


def test_tiles_are_found_on_this_disk_by_their_hash(tmp_path: Path) -> None:
    """What a proposal brings back was forgotten here, but lies in another area."""
    made = Made(tmp_path)
    slices, joined = made.write(1, 0, 2)
    made.bench.gather(slices, joined)
    first = made.bench.compute(None)
    made.bound.add(first)
    made.bench.open()
    assert made.bench.gather(slices[1:], joined[1:]) == {}
    second = made.bench.compute(None)
    assert np.array_equal(made.state(second)[2], made.state(first)[2])
    assert not np.array_equal(made.state(second)[0], made.state(first)[0])


def test_a_merge_is_built_and_computed_to_the_same_bits(tmp_path: Path) -> None:
    alpha = float(np.float32(0.3))
    leader, other = Made(tmp_path / "leader"), Made(tmp_path / "other")
    roots = []
    for made in (leader, other):
        slices, joined = made.write(1, 0, 1, 2, 3)
        made.bench.gather(slices, joined)
    root, merge = leader.bench.build(alpha)
    assert merge == Merge(alpha, nearest_experts(LAYOUT, _Blocks(new_values(LAYOUT, 1)), 2))
    roots = [root, other.bench.compute(merge)]
    assert roots[0] == roots[1]
    assert not np.array_equal(leader.state(root)[1], new_values(LAYOUT, 1)[1])


class _Blocks:
    def __init__(self, values: list[Values]) -> None:
        self.block = values.__getitem__


def test_what_was_signed_for_stays_whatever_is_written_after(tmp_path: Path) -> None:
    made = Made(tmp_path)
    made.bench.gather(*made.write(1, 0))
    first = made.bench.compute(None)
    made.bound.add(first)
    before = made.state(first)
    for seed in (2, 3, 4):
        made.bench.gather(*made.write(seed, 0))
        made.bench.compute(None)
        assert all(np.array_equal(a, b) for a, b in zip(made.state(first), before, strict=True))
    made.restart()
    assert all(np.array_equal(a, b) for a, b in zip(made.state(first), before, strict=True))
    made.bench.publish(first)
    assert made.store.version(1).root == first


def test_a_later_signature_takes_the_place_of_an_earlier_one(tmp_path: Path) -> None:
    made = Made(tmp_path)
    roots = []
    for seed in range(1, 5):
        made.bench.gather(*made.write(seed, 0))
        roots.append(made.bench.compute(None))
        made.bound.clear()
        made.bound.add(roots[-1])
    made.bench.open()
    assert made.bench.finished(roots[-1]) is not None
    assert made.bench.finished(roots[0]) is None
    assert len(list(tmp_path.glob("staging-*"))) == 2


def test_what_was_not_signed_for_is_undone_by_the_next_write(tmp_path: Path) -> None:
    made = Made(tmp_path)
    made.bench.gather(*made.write(1, 0))
    root = made.bench.compute(None)
    made.bench.open()
    assert made.bench.finished(root) is None
    made.restart()
    assert made.bench.finished(root) is None


def test_differing_tiles_are_repaired(tmp_path: Path) -> None:
    made, exact = Made(tmp_path / "made"), Made(tmp_path / "exact")
    for one in (made, exact):
        one.bench.gather(*one.write(1, 0, 1))
    root = exact.bench.compute(None)
    theirs = exact.bench.finished(root)
    assert theirs is not None
    first = LAYOUT.tile_ids_of(1)[0]
    made.bench.add([(first, bytes(4 * LAYOUT.tiles[first].size), sha256(b"?"))])  # other arithmetic
    assert made.bench.compute(None) != root
    differ = made.bench.repair(theirs.tile_hashes)
    assert differ == (first,)
    made.bench.mend((at, bytes(theirs.tile(at)), theirs.tile_hashes[at]) for at in differ)
    assert made.bench.compute(None) == root
    assert np.array_equal(made.state(root)[1], exact.state(root)[1])


def test_a_full_disk_takes_the_work_but_not_what_was_signed_for(tmp_path: Path) -> None:
    made = Made(tmp_path)
    made.bench.gather(*made.write(1, 0))
    root = made.bench.compute(None)
    made.bound.add(root)
    with file_size_limit(10), pytest.raises(StorageFull):
        made.write(2, 0)
    made.bench.recover()
    assert len(made.state(root)) == 4
    made.bench.gather(*made.write(2, 0))
    assert made.bench.compute(None) != root
    assert len(made.state(root)) == 4


def test_nothing_is_written_before_the_bench_is_opened(tmp_path: Path) -> None:
    with pytest.raises(LocalProtocolError, match="nothing of round 1 is being staged") as caught:
        Made(tmp_path).bench.write(0, [])
    assert "open" in caught.value.fix


def test_only_what_is_staged_can_be_published(tmp_path: Path) -> None:
    with pytest.raises(LocalProtocolError, match="of round 1 is not staged"):
        Made(tmp_path).bench.publish(sha256(b"?"))


@pytest.mark.parametrize(
    ("slices", "joined", "complaint"),
    [
        ([piece(0)], [], "hashes of 0 slices for 1"),
        ([piece(0)], [b"x" * 31], "31 bytes of hashes"),
        ([piece(0)], [b"x" * 32 * 99], "bytes of hashes for the"),
    ],
)
def test_hashes_that_do_not_fit_their_slices(slices: list[Slice], joined: list[bytes], complaint: str) -> None:
    with pytest.raises(RemoteProtocolError, match=complaint):
        wire_tiles(slices, joined)


def test_finding_whole_states(tmp_path: Path) -> None:
    made = Made(tmp_path)
    made.bench.gather(*made.write(1, 0))
    root = made.bench.compute(None)
    initial = made.store.version(0).root
    assert whole_state(made.store, 0, initial) is not None
    assert whole_state(made.store, 1, root) is not None
    assert whole_state(made.store, 1, initial) is None
    assert whole_state(made.store, 0, root) is None
    assert staged_state(made.store, 1, root) is not None
    made.bench.publish(root)
    assert staged_state(made.store, 1, root) is None
    assert whole_state(made.store, 1, root) is not None

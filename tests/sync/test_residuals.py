"""What lossy codecs left unsent, on disk: nothing of it is lost or sent twice, whatever breaks off."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spes_p2p.consensus.manifest import Manifest, Slice, manifest_hash
from spes_p2p.consensus.messages import Commit
from spes_p2p.errors import StorageFull
from spes_p2p.ids import Hash, PeerId, sha256
from spes_p2p.ownership.assign import Ownership
from spes_p2p.state.layout import Values
from spes_p2p.sync import residuals as module
from spes_p2p.sync.chain import Chain
from spes_p2p.sync.residuals import Kind, Residuals
from tests.sync.chains import A, B, MadeRun
from tests.sync.swarm_cases import small_config

ALONE: Ownership = ((A,), (A,), (B,), (B,))
MARK = sha256(b"handed out")


class Story:
    """The residuals of peer a, and the chain that it follows."""

    def __init__(self, folder: Path, ownership: Ownership = ALONE) -> None:
        self.run = MadeRun(small_config("sync.codec=int8", peers=1))
        self.layout = self.run.layout
        self.folder = folder / "residuals"
        self.chain = Chain(folder / "chain")
        self.template = self.run.genesis(sha256(b"state"))
        self.ownership = ownership
        self.append(self.made(0, Hash(bytes(32)), (), ownership))
        self.residuals = self.opened()

    def opened(self, round: int | None = None) -> Residuals:
        """As after a start at `round`, by default the newest."""
        residuals = Residuals(self.folder, self.layout)
        residuals.open(self.chain, self.chain.length - 1 if round is None else round, A)
        return residuals

    def made(self, round: int, parent: Hash, slices: Iterable[Slice], ownership: Ownership) -> Manifest:
        return replace(self.template.manifest, round=round, parent=parent, slices=tuple(slices), ownership=ownership)

    def append(self, manifest: Manifest) -> None:
        certificate = replace(self.template.certificate, parent=manifest.parent, manifest=manifest_hash(manifest))
        self.chain.append(Commit(certificate, manifest))

    def child(self, *slices: Slice, ownership: Ownership | None = None) -> Manifest:
        """The next manifest; it is not on the chain yet."""
        newest = self.chain.commit(self.chain.length - 1).manifest
        self.ownership = ownership or self.ownership
        return self.made(newest.round + 1, manifest_hash(newest), slices, self.ownership)

    def follow(self, *slices: Slice, ownership: Ownership | None = None) -> Manifest:
        """One more round, settled and committed."""
        child = self.child(*slices, ownership=ownership)
        self.settle(child)
        self.append(child)
        return child

    def settle(self, child: Manifest) -> None:
        self.residuals.settle(child, manifest_hash(child), lambda tile_id: MARK)

    def slice(self, block: int, reducer: PeerId, *contributors: PeerId) -> Slice:
        """A whole block as one slice."""
        tiles = self.layout.tile_ids_of(block)
        return Slice(block, tiles.start, len(tiles), reducer, contributors or (reducer,))

    def tile(self, block: int) -> int:
        return self.layout.tile_ids_of(block)[0]

    def values(self, block: int, value: float) -> Values:
        return np.full(self.layout.tiles[self.tile(block)].size, value, np.float32)

    def stage(self, kind: Kind, block: int, value: float) -> None:
        head = manifest_hash(self.chain.commit(self.chain.length - 1).manifest)
        self.residuals.stage(head, kind, self.tile(block), self.values(block, value), MARK)

    def kept(self, block: int, residuals: Residuals | None = None) -> tuple[float | None, float | None, float | None]:
        """(unsent, unsent_of_mean, ahead) of a block's first tile."""
        from_ = residuals or self.residuals
        tile, head = self.tile(block), from_._head
        found = from_.unsent(tile), from_.unsent_of_mean(tile), from_.ahead(head)(tile)
        return tuple(None if values is None else float(values[0]) for values in found)  # type: ignore[return-value]


NOTHING = (None, None, None)


def test_a_contributor_keeps_what_it_could_not_say_and_a_reducer_what_it_could_not_hand_out(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.stage("sent", 0, 1)
    story.follow(story.slice(0, B, A, B))
    assert story.kept(0) == (1, None, None)
    story.stage("sent", 0, 2)
    story.stage("handed", 0, 3)
    story.follow(story.slice(0, A, A, B))
    assert story.kept(0) == (None, 3, None)  # its own values went in as they are
    assert story.kept(0, story.opened()) == (None, 3, None)
    story.follow(story.slice(0, B, B))
    assert story.kept(0) == (None, 3, None)  # another hands the tile out: what is left waits for our next mean


def test_what_a_round_did_not_take_stays_unsent(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.stage("sent", 0, 1)
    story.follow(story.slice(0, B, A, B))
    story.stage("sent", 0, 2)
    story.follow(story.slice(0, B, B))
    assert story.kept(0) == (1, None, None)
    story.follow(story.slice(0, A, B))  # it reduced, and left its own values out
    assert story.kept(0)[0] == 1


def test_settling_again_changes_nothing(tmp_path: Path) -> None:
    """The commit that should have followed may have found no room."""
    story = Story(tmp_path)
    story.stage("handed", 1, 1)
    child = story.child(story.slice(1, A))
    story.settle(child)
    story.settle(child)
    assert story.kept(1) == (None, None, 1)
    story.append(child)
    assert story.kept(1, story.opened()) == (None, None, 1)


def test_a_crash_between_settling_and_the_commit(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.stage("handed", 1, 1)
    story.follow(story.slice(1, A))
    story.stage("handed", 1, 2)
    child = story.child(story.slice(1, A))
    story.settle(child)
    story.residuals = story.opened()
    assert story.kept(1) == (None, None, 1)
    story.settle(child)
    assert story.kept(1) == (None, None, 2)


def test_another_commit_than_the_one_that_was_settled_for(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.stage("handed", 1, 1)
    story.follow(story.slice(1, A))
    story.settle(story.child(story.slice(1, A)))
    story.follow()
    assert story.kept(1) == (None, None, 1)


@pytest.mark.parametrize("where", ["write_whole", "publish_folder"])
def test_a_settling_that_finds_no_room_is_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    story = Story(tmp_path)
    story.stage("handed", 1, 1)
    story.stage("sent", 0, 2)
    story.follow(story.slice(0, B, A, B), story.slice(1, A))
    story.stage("sent", 0, 3)
    child = story.child(story.slice(0, B, A, B))

    def full(*args: Any) -> None:
        raise StorageFull("no room")

    with monkeypatch.context() as patch:
        patch.setattr(module, where, full)
        for _ in range(2):
            with pytest.raises(StorageFull):
                story.settle(child)
            story.stage("handed", 2, 4)  # a reducer asks again meanwhile
    story.settle(child)
    assert story.kept(0) == (3, None, None)
    assert story.kept(1) == (None, None, 1)
    assert story.kept(2) == NOTHING


def test_on_a_full_disk_what_is_left_waits_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story(tmp_path)

    def full(self: Any, *args: Any) -> None:
        raise StorageFull("no room")

    with monkeypatch.context() as patch:
        patch.setattr(module.TileArea, "write", full)
        story.stage("sent", 0, 1)
        child = story.child(story.slice(0, B, A, B))
        with pytest.raises(StorageFull):
            story.settle(child)
    story.settle(child)
    assert story.kept(0) == (1, None, None)


def test_what_a_reducer_left_out_waits_while_others_hand_the_tile_out(tmp_path: Path) -> None:
    """Who reduces what follows from measured uplinks, and changes with them."""
    story = Story(tmp_path)
    story.stage("handed", 0, 1)
    story.follow(story.slice(0, A, A, B))
    for _ in range(3):
        story.follow(story.slice(0, B, A, B))
        assert story.kept(0) == (None, 1, None)
        assert story.kept(0, story.opened()) == (None, 1, None)
    story.stage("handed", 0, 0.25)
    story.follow(story.slice(0, A, A, B))
    assert story.kept(0) == (None, 0.25, None)


def test_a_sole_owner_is_ahead_no_more_where_another_hands_its_column_out(tmp_path: Path) -> None:
    """What it had contributed was its own value, with all that it was ahead."""
    story = Story(tmp_path)
    story.stage("handed", 1, 1)
    story.follow(story.slice(1, A))
    assert story.kept(1) == (None, None, 1)
    story.stage("sent", 1, 0.5)
    story.follow(story.slice(1, B, A))
    assert story.kept(1) == (0.5, None, None)


def test_what_a_reducer_left_out_is_not_handed_out_twice(tmp_path: Path) -> None:
    """Its mean had it, though what that one left out is not here: a crash came between."""
    story = Story(tmp_path)
    story.stage("handed", 0, 1)
    story.follow(story.slice(0, A, A, B))
    story.follow(story.slice(0, A, A, B))
    assert story.kept(0) == NOTHING
    story.stage("handed", 0, 1)
    story.follow(story.slice(0, A, A, B))
    first = story.child(story.slice(0, B, A, B))
    story.append(first)
    later = story.child(story.slice(0, A, A, B))
    story.append(later)
    story.residuals.settle(first, manifest_hash(later), lambda tile_id: MARK, [later])
    assert story.kept(0) == NOTHING


def test_who_missed_rounds_keeps_what_it_did_not_hand_out_since(tmp_path: Path) -> None:
    story = Story(tmp_path)
    for block in (0, 1, 2):
        story.stage("handed", block, 1)
    first = story.child(story.slice(0, A, A, B), story.slice(1, A), story.slice(2, A))
    story.append(first)
    later = [story.child(story.slice(0, B, B)), story.child()]
    story.append(later[0])
    later[1] = story.child(ownership=((A,), (B,), (B,), (B,)))
    story.append(later[1])
    story.residuals.settle(first, manifest_hash(later[1]), lambda tile_id: MARK, later)
    assert story.kept(0) == (None, 1, None)
    assert story.kept(1) == (None, None, 1)
    assert story.kept(2) == NOTHING  # no longer its column


def test_what_an_earlier_life_has_sent_is_not_sent_again_from_an_older_copy_of_the_disk(tmp_path: Path) -> None:
    """The block had its turn in a later round than the first that the copy lacks, and that round counts us."""
    story = Story(tmp_path)
    story.stage("sent", 0, 1)
    story.follow(story.slice(0, B, A, B))
    assert story.kept(0) == (1, None, None)
    story.append(story.child())
    story.append(story.child(story.slice(0, B, A, B)))
    assert story.kept(0, story.opened()) == NOTHING


def test_a_column_that_got_a_second_owner_and_was_handed_out_without_us_is_left_to_be_sent(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.stage("handed", 1, 1)
    story.follow(story.slice(1, A))
    assert story.kept(1) == (None, None, 1)
    first = story.child(ownership=((A, B), (A,), (B,), (B,)))
    story.append(first)
    later = story.child(story.slice(1, B, B))
    story.append(later)
    story.residuals.settle(first, manifest_hash(later), lambda tile_id: MARK, [later])
    assert story.kept(1) == (1, None, None)


def test_a_restart_ends_a_catching_up_that_broke_off(tmp_path: Path) -> None:
    """The state may be ahead of the residuals: the newest set of the chain is brought forward."""
    story = Story(tmp_path)
    for block in (0, 1):
        story.stage("handed", block, 1)
    story.follow(story.slice(0, A, A, B), story.slice(1, A))
    story.append(story.child())
    story.append(story.child(story.slice(0, B, B)))
    again = story.opened()
    assert story.kept(0, again) == (None, 1, None)
    assert story.kept(1, again) == (None, None, 1)
    assert again._head == manifest_hash(story.chain.commit(3).manifest)
    assert story.kept(1, story.opened(3)) == (None, None, 1)


def test_a_column_that_passes_on_takes_its_residuals_along(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.stage("handed", 1, 1)
    story.follow(story.slice(1, A))
    story.follow(ownership=((B,), (A,), (B,), (B,)))
    assert story.kept(1) == NOTHING
    story.follow(ownership=ALONE)
    assert story.kept(1) == NOTHING


def test_a_helper_keeps_what_it_left_out_until_it_hands_the_column_out_again(tmp_path: Path) -> None:
    """It owns nothing of it: rounds without the column, other owners, and what they hand out, change nothing."""
    third = PeerId("c")
    both: Ownership = ((B, third), (A,), (B,), (B,))
    story = Story(tmp_path, both)
    story.stage("handed", 1, 1)
    story.follow(story.slice(1, A, B, third))
    for ownership in (both, both, ((B,), (A,), (B,), (B,))):
        story.follow(ownership=ownership)
        assert story.kept(1) == (None, 1, None)
        assert story.kept(1, story.opened()) == (None, 1, None)
    story.follow(story.slice(1, B))
    assert story.kept(1) == (None, 1, None)
    story.stage("handed", 1, 0.5)
    story.follow(story.slice(1, A, B))
    assert story.kept(1) == (None, 0.5, None)


def test_a_helper_that_missed_rounds_keeps_what_it_left_out(tmp_path: Path) -> None:
    third = PeerId("c")
    story = Story(tmp_path, ((B, third), (B, third), (B,), (B,)))
    for block in (1, 2):
        story.stage("handed", block, 1)
    first = story.child(*(story.slice(block, A, B, third) for block in (1, 2)))
    story.append(first)
    later = []
    for slices in ((), (story.slice(2, B, B, third),), ()):
        later.append(story.child(*slices))
        story.append(later[-1])
    story.residuals.settle(first, manifest_hash(later[-1]), lambda tile_id: MARK, later)
    assert story.kept(1) == (None, 1, None)
    assert story.kept(2) == (None, 1, None)


def test_what_a_sole_owner_is_ahead_is_its_unsent_work_beside_a_second_owner(tmp_path: Path) -> None:
    """Whoever hands the column out: it travels with the owner's next contribution, once."""
    story = Story(tmp_path)
    story.stage("handed", 1, 1)
    story.follow(story.slice(1, A))
    both: Ownership = ((A, B), (A,), (B,), (B,))
    story.follow(ownership=both)
    assert story.kept(1) == (1, None, None)
    story.stage("sent", 1, 0.5)
    story.follow(story.slice(1, B, A, B))
    assert story.kept(1) == (0.5, None, None)


def test_what_a_reducer_kept_of_a_mean_is_its_own_when_it_stays_as_the_one_owner(tmp_path: Path) -> None:
    story = Story(tmp_path, ((A, B), (A,), (B,), (B,)))
    story.stage("handed", 1, 1)
    story.follow(story.slice(1, A, A, B))
    assert story.kept(1) == (None, 1, None)
    story.follow(ownership=ALONE)
    assert story.kept(1) == (None, None, 1)


def test_nothing_is_ahead_of_another_manifest_and_maps_outlive_their_set(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.stage("handed", 1, 1)
    head = manifest_hash(story.follow(story.slice(1, A)))
    ahead = story.residuals.ahead(head)
    for value in (2, 3):
        story.stage("handed", 1, value)
        story.follow(story.slice(1, A))
    values = ahead(story.tile(1))
    assert values is not None
    assert values[0] == 1
    assert story.residuals.ahead(head)(story.tile(1)) is None


@pytest.mark.parametrize("damage", ["index", "file", "length"])
def test_a_set_that_cannot_be_read_is_said_and_done_without(tmp_path: Path, damage: str) -> None:
    story = Story(tmp_path)
    story.stage("handed", 1, 1)
    story.follow(story.slice(1, A))
    (index,), (block,) = story.folder.glob("*/index"), story.folder.glob("*/handed/*")
    if damage == "index":
        index.write_bytes(index.read_bytes()[:-1])
    elif damage == "file":
        block.unlink()
    else:
        block.write_bytes(b"short")
    again = story.opened()
    assert story.kept(1, again) == NOTHING
    assert len(again.problems) == 1
    assert "the kept rounding errors are lost" in again.problems[0]


def test_another_history_leaves_nothing(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.stage("handed", 1, 1)
    story.follow(story.slice(1, A))
    tip = story.chain.commit(1).manifest
    story.residuals.clear(tip)
    assert story.kept(1) == NOTHING
    story.follow()
    assert story.kept(1) == NOTHING


def test_without_lossy_codecs_nothing_is_written(tmp_path: Path) -> None:
    run = MadeRun()
    chain = Chain(tmp_path / "chain")
    chain.append(run.genesis(sha256(b"state")))
    residuals = Residuals(tmp_path / "residuals", run.layout)
    residuals.open(chain, 0, A)
    child = replace(run.genesis(sha256(b"state")).manifest, round=1)
    residuals.settle(child, manifest_hash(child), lambda tile_id: MARK)
    residuals.clear(child)
    assert not (tmp_path / "residuals").exists()

"""Who gets whose optimizer moments: between real trainers, over manifests that the test makes up."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from spes_p2p.consensus.manifest import Manifest, manifest_hash
from spes_p2p.consensus.membership import Member
from spes_p2p.exchange.moments import MomentStore
from spes_p2p.ids import Hash, PeerId
from spes_p2p.observe.events import Columns, Event, Warning
from spes_p2p.ownership.assign import Ownership
from spes_p2p.peer.connection import Connection
from spes_p2p.peer.handover import HandOver, former_owners
from spes_p2p.state.moments import NO_MOMENTS, Moments
from tests.sync.chains import MadeRun
from tests.train.small import batch_of, initial, small_config, small_layout, trainer_of

CONFIG = small_config()
LAYOUT = small_layout(CONFIG)
GENESIS = MadeRun().chain(1)[0].manifest
ANNA, BEA, CARL = PeerId("anna"), PeerId("bea"), PeerId("carl")
COLUMNS = CONFIG.model.num_experts
MOMENTS = Moments(3, np.ones(2, np.float32), np.ones(2, np.float32))


def manifest(parent: Manifest, members: tuple[PeerId, ...], **owners: tuple[int, ...]) -> Manifest:
    """The child of `parent` by which these members own these columns."""
    ownership: Ownership = tuple(
        tuple(PeerId(peer) for peer in sorted(owners) if column in owners[peer]) for column in range(COLUMNS)
    )
    named = tuple(Member(peer, 1, True, 0) for peer in members)
    return replace(parent, round=parent.round + 1, parent=manifest_hash(parent), members=named, ownership=ownership)


FIRST = manifest(GENESIS, (ANNA, BEA, CARL), anna=(0, 1), bea=(2, 3), carl=(3,))


def test_moments_are_fetched_also_on_a_machine_that_has_slept() -> None:
    """The network's clock has gone on meanwhile, and the time by which an answer must be there is not by that one."""

    async def answer(holder: PeerId, head: Hash, column: int) -> Moments:
        return MOMENTS

    slept = SimpleNamespace(now=lambda: time.monotonic() + 600.0)
    connection: Any = SimpleNamespace(_node=SimpleNamespace(clock=slept), _moments_of=answer, _await=asyncio.run)
    assert Connection.fetch_moments(connection, BEA, manifest_hash(FIRST), 0, time.monotonic() + 60.0) is MOMENTS


class Side:
    """One peer with a trained model."""

    def __init__(self, folder: Path, me: PeerId, owned: tuple[int, ...], sides: dict[PeerId, Side]) -> None:
        sides[me] = self
        self.sides = sides
        self.chain = {0: GENESIS, 1: FIRST}
        self.shelf = MomentStore(folder / me, LAYOUT)
        self.trainer = trainer_of(CONFIG, owned)
        for seed in range(3):
            self.trainer.train_step(batch_of(seed))
        self.said: list[Event] = []
        self.asked: list[tuple[PeerId, int]] = []
        self.slow: list[PeerId] = []
        self.statuses: list[Any] = []
        connection: Any = SimpleNamespace(
            peer_id=me,
            disk=SimpleNamespace(
                moments=self.shelf, chain=SimpleNamespace(parent_of=lambda child: self.chain.get(child.round - 1))
            ),
            fetch_moments=self._fetch,
            others=lambda: self.statuses,
            gate=SimpleNamespace(wait=lambda until, heed_stop: self.statuses.clear()),
        )
        self.hand_over = HandOver(connection, CONFIG, self.trainer, self.said.append)

    def _fetch(self, holder: PeerId, head: Hash, column: int, until: float) -> Moments | None:
        self.asked.append((holder, column))
        ids = LAYOUT.tile_ids_of(1 + column)
        found = self.sides[holder].shelf.serve(head, ids[0], len(ids)) if holder in self.sides else None
        if holder in self.slow:
            self.slow.remove(holder)
            return None
        if found is None or not found[0].steps:
            return NO_MOMENTS
        return Moments(found[0].steps, *np.frombuffer(found[1], np.float32).reshape(2, -1))

    def adopt(self, newest: Manifest, *owned: int) -> None:
        """As at the start of a round."""
        new = set(owned) - set(self.trainer.rank.owned)
        self.trainer.adopt(owned, initial(CONFIG), 3)
        self.hand_over.take(newest, new)


@pytest.fixture
def sides(tmp_path: Path) -> dict[PeerId, Side]:
    found: dict[PeerId, Side] = {}
    for me, owned in ((ANNA, (0, 1)), (BEA, (2, 3)), (CARL, (3,))):
        Side(tmp_path, me, owned, found)
    return found


def test_a_column_that_moves_takes_its_moments_along(sides: dict[PeerId, Side]) -> None:
    anna, bea = sides[ANNA], sides[BEA]
    second = manifest(FIRST, (ANNA, BEA, CARL), anna=(0, 1, 2), bea=(3,), carl=(3,))
    had = bea.trainer.moments(2)
    bea.hand_over.offer(FIRST, second)
    bea.adopt(second, 3)
    anna.adopt(second, 0, 1, 2)
    assert np.array_equal(anna.trainer.moments(2).square, had.square)
    assert anna.trainer.moments(2).steps == 3
    assert anna.said == [Columns(2, (2,), ())]
    assert bea.said == []


def test_a_column_whose_owner_is_gone_begins_afresh_and_it_is_said(sides: dict[PeerId, Side]) -> None:
    anna = sides[ANNA]
    del sides[BEA]
    second = manifest(FIRST, (ANNA, CARL), anna=(0, 1, 2), carl=(3,))
    anna.adopt(second, 0, 1, 2)
    assert anna.trainer.moments(2).steps == 0
    assert anna.said == [Columns(2, (2,), (2,))]
    anna.trainer.train_step(batch_of(9))
    assert anna.trainer.moments(2).steps == 1


def test_who_gets_a_column_back_that_nobody_had_meanwhile_goes_on_with_its_moments(
    sides: dict[PeerId, Side],
) -> None:
    bea = sides[BEA]
    had = bea.trainer.moments(2)
    second = manifest(FIRST, (ANNA, BEA, CARL), anna=(0, 1), carl=(3,))
    third = manifest(second, (ANNA, BEA, CARL), anna=(0, 1), carl=(3,))
    fourth = manifest(third, (ANNA, BEA, CARL), anna=(0, 1), bea=(2,), carl=(3,))
    bea.chain |= {2: second, 3: third}
    bea.hand_over.offer(FIRST, second)
    bea.adopt(second)
    bea.hand_over.offer(second, third)
    bea.hand_over.offer(third, fourth)
    bea.adopt(fourth, 2)
    assert bea.said == [Columns(4, (2,), ())]
    assert np.array_equal(bea.trainer.moments(2).square, had.square)
    assert bea.trainer.moments(2).steps == 3


def test_moments_of_an_older_version_of_a_column_are_not_gone_on_with(sides: dict[PeerId, Side]) -> None:
    bea = sides[BEA]
    second = manifest(FIRST, (ANNA, BEA, CARL), anna=(0, 1), carl=(3,))
    third = manifest(second, (ANNA, BEA, CARL), anna=(0, 1), bea=(2,), carl=(3,))
    bea.chain[2] = second
    bea.hand_over.offer(FIRST, second)
    bea.adopt(second)
    bea.adopt(replace(third, column_rounds=(3,) * COLUMNS), 2)
    assert bea.said == [Columns(3, (2,), (2,))]


def test_moments_of_a_column_that_others_have_taken_up_are_kept_no_longer(sides: dict[PeerId, Side]) -> None:
    bea = sides[BEA]
    second = manifest(FIRST, (ANNA, BEA, CARL), anna=(0, 1), carl=(3,))
    third = manifest(second, (ANNA, BEA, CARL), anna=(0, 1, 2), carl=(3,))
    fourth = manifest(third, (BEA, CARL), carl=(3,))
    fifth = manifest(fourth, (BEA, CARL), bea=(2,), carl=(3,))
    bea.chain |= {2: second, 3: third, 4: fourth}
    bea.hand_over.offer(FIRST, second)
    bea.adopt(second)
    for before, after in ((second, third), (third, fourth), (fourth, fifth)):
        bea.hand_over.offer(before, after)
    bea.adopt(fifth, 2)
    assert bea.said == [Columns(5, (2,), (2,))]


def test_a_replica_is_asked_before_who_leaves(sides: dict[PeerId, Side]) -> None:
    anna = sides[ANNA]
    second = manifest(FIRST, (ANNA, CARL), anna=(0, 1, 2, 3), carl=(3,))
    assert former_owners(FIRST.ownership, second, 3, ANNA) == (CARL, BEA)
    sides[CARL].hand_over.offer(FIRST, second)
    sides[BEA].hand_over.offer_all(FIRST)
    anna.adopt(second, 0, 1, 2, 3)
    assert anna.asked == [(BEA, 2), (CARL, 3)]
    assert anna.said == [Columns(2, (2, 3), ())]


def test_a_leaver_serves_also_on_top_of_rounds_that_it_waited_for(sides: dict[PeerId, Side]) -> None:
    anna, bea = sides[ANNA], sides[BEA]
    bea.hand_over.offer_all(FIRST)
    second = manifest(FIRST, (ANNA, BEA, CARL), anna=(0, 1), bea=(2, 3), carl=(3,))
    third = manifest(second, (ANNA, CARL), anna=(0, 1, 2), carl=(3,))
    commits: Any = [SimpleNamespace(commit=SimpleNamespace(manifest=made)) for made in (second, third)]
    bea.hand_over.renew_offers(commits)
    anna.chain[2] = second
    anna.adopt(third, 0, 1, 2)
    assert anna.said == [Columns(3, (2,), ())]


def test_moments_that_no_training_gives_are_refused_and_another_owner_is_asked(sides: dict[PeerId, Side]) -> None:
    anna, bea = sides[ANNA], sides[BEA]
    second = manifest(FIRST, (ANNA, BEA), anna=(0, 1, 3), bea=(2, 3))
    true = bea.trainer.moments(3)
    bea.shelf.offer(manifest_hash(FIRST), [(3, replace(true, square=-true.square))])
    sides[CARL].hand_over.offer_all(FIRST)
    anna.adopt(second, 0, 1, 3)
    assert anna.asked == [(BEA, 3), (CARL, 3)]
    warning, columns = anna.said
    assert isinstance(warning, Warning)
    assert "negative mean of squares" in warning.message
    assert columns == Columns(2, (3,), ())


def test_who_has_not_come_to_it_yet_is_asked_again(sides: dict[PeerId, Side]) -> None:
    anna, bea = sides[ANNA], sides[BEA]
    second = manifest(FIRST, (ANNA, BEA, CARL), anna=(0, 1, 2, 3), bea=(2,), carl=(3,))
    bea.hand_over.offer(FIRST, second)
    sides[CARL].hand_over.offer(FIRST, second)
    anna.slow = [BEA, BEA]
    anna.adopt(second, 0, 1, 2, 3)
    assert anna.asked == [(BEA, 2), (CARL, 3), (BEA, 2), (BEA, 2)]  # the other column is not kept waiting
    assert anna.said == [Columns(2, (2, 3), ())]


def test_nothing_is_kept_where_nobody_would_ask(sides: dict[PeerId, Side]) -> None:
    bea = sides[BEA]
    second = manifest(FIRST, (ANNA, BEA, CARL), anna=(0, 1), bea=(2, 3), carl=(3,))
    late = manifest(second, (ANNA, BEA, CARL), anna=(0, 1, 2), bea=(3,), carl=(3,))
    for trained_on, newest in ((FIRST, second), (FIRST, late)):
        bea.hand_over.offer(trained_on, newest)
        assert bea.shelf.serve(newest.parent, LAYOUT.tile_ids_of(3)[0], 1) is None


def status(peer: PeerId, round: int, leaving: bool = False) -> Any:
    return SimpleNamespace(peer=peer, round=round, intent=SimpleNamespace(leaving=leaving))


@pytest.mark.parametrize(
    ("told", "waits"),
    [
        (status(ANNA, 2), True),
        (status(ANNA, 1), True),
        (status(ANNA, 3), False),
        (status(ANNA, 2, leaving=True), False),
        (status(CARL, 2), False),  # no heir
    ],
)
def test_a_leaver_waits_for_heirs_that_may_still_ask(sides: dict[PeerId, Side], told: Any, waits: bool) -> None:
    bea = sides[BEA]
    second = manifest(FIRST, (ANNA, CARL), anna=(0, 1, 2), carl=(3,))
    looks: list[float] = []

    def look(until: float, heed_stop: bool) -> None:
        looks.append(until)
        if len(looks) == 3:
            bea.shelf.note_taken(manifest_hash(FIRST), 2, ANNA)
        else:
            bea.shelf.note_taken(manifest_hash(FIRST), 2, CARL)  # no heir

    bea.hand_over._connection.gate.wait = look  # type: ignore[method-assign, assignment]
    bea.statuses = [told]
    bea.hand_over.offer_all(FIRST)
    bea.hand_over.wait_until_taken(second, time.monotonic() + 60.0)
    assert len(looks) == 3 * waits
    bea.statuses = [status(ANNA, 2)]
    bea.hand_over.wait_until_taken(manifest(FIRST, (ANNA, CARL), anna=(0, 1), carl=(3,)), time.monotonic() + 60.0)
    assert len(looks) == 3 * waits  # column 3 stays with Carl, and nobody takes column 2


def test_nobody_is_asked_where_another_history_has_just_won(sides: dict[PeerId, Side]) -> None:
    anna, bea = sides[ANNA], sides[BEA]
    second = manifest(FIRST, (ANNA, CARL), anna=(0, 1, 2), carl=(3,))
    bea.hand_over.offer_all(FIRST)
    del anna.chain[1], bea.chain[1]
    anna.adopt(second, 0, 1, 2)
    assert not anna.asked
    assert anna.said == [Columns(2, (2,), (2,))]
    bea.statuses = [status(ANNA, 2)]
    bea.hand_over.wait_until_taken(second, time.monotonic() + 60.0)
    assert bea.statuses, "it waited for heirs"

"""What drivers decide, where it needs no tensor: the parts that the real driver and every simulated peer run alike."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from spes_p2p.consensus import actions as do
from spes_p2p.consensus import events as on
from spes_p2p.consensus.machine import Consensus
from spes_p2p.consensus.manifest import manifest_hash
from spes_p2p.consensus.messages import Commit
from spes_p2p.consensus.state import Key
from spes_p2p.consensus.vote_record import VoteRecord
from spes_p2p.errors import StorageFull
from spes_p2p.sync.dispatcher import RETRY_HEARTBEATS, Dispatcher
from tests.simulation.sim import Weather, World
from tests.simulation.small_peer import Local, SmallSurroundings, small_step
from tests.simulation.small_world import SmallWorld
from tests.simulation.symbol_driver import SymbolDriver


def asked_for(kind: type[do.Action]) -> tuple[SmallWorld, Local, int]:
    """A peer of a small world whose `Consensus` has asked for such work, and which piece of its work that is."""
    world, chance = SmallWorld(), random.Random(1)
    world.quick = False
    state = world.start(0)
    while True:
        for local in world.locals_of(state):
            for at, work in enumerate(local.todo):
                if isinstance(work, kind):
                    mine: Local = world.snapshots.clone(local)
                    return world, mine, at
        state = world.start(0) if world.is_over(state) else chance.choice(world.successors(state, ()))[1]


def core_of(local: Local) -> Consensus:
    assert local.core is not None
    return local.core


def finish(world: SmallWorld, local: Local, at: int) -> None:
    """The work ends, and nobody gives anything for it."""
    small_step(world.table.setting, world.snapshots, local, lambda: 0, ("work", at))


def disk_was_full(local: Local) -> None:
    """All work that was asked for is asked for again."""
    core = core_of(local)
    core.handle(on.DiskFull(local.disk.record or VoteRecord(core.tip_hash)), 0.0)
    core.handle(on.DiskHasRoom(), 0.0)


def lose_all(local: Local) -> None:
    """Nothing that was staged is on its disk any more."""
    local.disk.staged.clear()
    local.disk.finished.clear()


def test_a_verification_that_nobody_waits_for_is_nobodys_failure() -> None:
    """It would be held against the proposal that is verified by then."""
    world, local, at = asked_for(do.Verify)
    disk_was_full(local)
    lose_all(local)
    finish(world, local, at)
    assert not core_of(local).state.round.unfit


def test_a_verification_that_fails_is_told() -> None:
    world, local, at = asked_for(do.Verify)
    lose_all(local)
    finish(world, local, at)
    assert core_of(local).state.round.unfit


def test_a_build_that_nobody_waits_for_takes_no_slice_away() -> None:
    world, local, at = asked_for(do.Build)
    core = core_of(local)
    disk_was_full(local)
    assert core.state.round.plan is not None
    staged: dict[Key, bytes] = {piece.key: b"staged again" for piece in core.state.round.plan.value.slices}
    core.state.round.staged = dict(staged)
    lose_all(local)
    finish(world, local, at)
    assert core.state.round.staged == staged


def long_run(until: Callable[[World], bool], seconds: float = 400.0) -> World:
    world = World(5, 3, columns=2, replicas=1, weather=Weather())
    while not until(world):
        assert world.step()
        assert world.now < seconds
    return world


def test_a_simulated_peer_does_not_know_when_its_disk_has_room_again() -> None:
    """It tries again after a while, as a real one does, finds the disk full once more, and takes part in the end."""
    world = long_run(lambda world: all(peer.disk.tip.round >= 1 for peer in world.up()))
    peer = world.up()[0]
    peer.fill_disk(2.5 * RETRY_HEARTBEATS)
    tried = list[bool]()
    real = Dispatcher.disk_is_full

    def full(self: Dispatcher, error: StorageFull) -> None:
        tried.append(self.core is peer.core)
        real(self, error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Dispatcher, "disk_is_full", full)
        round = world.newest().round
        while peer.is_full or peer.disk.tip.round < round + 3:
            assert world.step()
    assert sum(tried) >= 2


def test_a_commit_is_judged_when_it_is_decided_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the simulations, where it may never come to the disk of who has decided for it."""
    world, local, _ = asked_for(do.Adopt)
    core, taken = core_of(local), list[Commit]()
    around = SmallSurroundings(world.table.setting, world.snapshots, local, lambda: 0)
    monkeypatch.setattr(around.judge, "saw_taken", lambda peer, child, guard: taken.append(child))
    decided, core.state.round.decided = core.state.round.decided, None
    driver = SymbolDriver(core, local.disk, around)
    core.state.round.decided = decided
    for one in (driver, driver, SymbolDriver(core, local.disk, around)):
        one.dispatcher.carry_out(())
    assert taken == [decided]
    assert decided is not None
    assert manifest_hash(decided.manifest) in around.judge.known

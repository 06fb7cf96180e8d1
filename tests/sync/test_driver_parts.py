"""What drivers decide, where it needs no tensor: the parts that the real driver and every simulated peer run alike."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from spes_p2p.consensus import actions as do
from spes_p2p.consensus import events as on
from spes_p2p.consensus.machine import Consensus
from spes_p2p.consensus.state import Key
from spes_p2p.consensus.vote_record import VoteRecord
from spes_p2p.errors import StorageFull
from spes_p2p.sync.dispatcher import RETRY_HEARTBEATS, Dispatcher
from tests.simulation.sim import Weather, World
from tests.simulation.sim_peer import SimPeer
from tests.simulation.sim_process import SimProcess


def asked_for(kind: type[do.Work]) -> tuple[SimPeer, do.Work]:
    """A peer whose `Consensus` has just asked for such work, and nobody else is up any more."""
    asked: list[tuple[SimPeer, do.Work]] = []
    real = SimProcess.begin_work

    def noted(self: SimProcess, action: do.Work) -> None:
        if isinstance(action, kind):
            asked.append((self._peer, action))
        real(self, action)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimProcess, "begin_work", noted)
        long_run(lambda world: bool(asked))
    peer, work = asked[0]
    for other in peer.world.up():
        if other is not peer:
            other.crash()
    return peer, work


def core_of(peer: SimPeer) -> Consensus:
    assert peer.core is not None
    return peer.core


def finish(peer: SimPeer, work: do.Work) -> None:
    """The work ends, and nobody gives anything for it."""
    assert peer.process is not None
    driver = peer.process.driver
    under_way = driver.work(work)
    while driver.go_on(under_way) is not None:
        pass


def disk_was_full(peer: SimPeer) -> None:
    """All work that was asked for is asked for again."""
    core = core_of(peer)
    core.handle(on.DiskFull(peer.disk.record or VoteRecord(core.tip_hash)), 0.0)
    core.handle(on.DiskHasRoom(), 0.0)


def lose_all(peer: SimPeer) -> None:
    """Nothing that was staged is on its disk any more."""
    peer.disk.staged.clear()
    peer.disk.finished.clear()


def test_a_verification_that_nobody_waits_for_is_nobodys_failure() -> None:
    """It would be held against the proposal that is verified by then."""
    peer, work = asked_for(do.Verify)
    disk_was_full(peer)
    lose_all(peer)
    finish(peer, work)
    assert not core_of(peer).state.round.unfit


def test_a_verification_that_fails_is_told() -> None:
    peer, work = asked_for(do.Verify)
    lose_all(peer)
    finish(peer, work)
    assert core_of(peer).state.round.unfit


def test_a_build_that_nobody_waits_for_takes_no_slice_away() -> None:
    peer, work = asked_for(do.Build)
    core = core_of(peer)
    disk_was_full(peer)
    assert core.state.round.plan is not None
    staged: dict[Key, bytes] = {piece.key: b"staged again" for piece in core.state.round.plan.value.slices}
    core.state.round.staged = dict(staged)
    lose_all(peer)
    finish(peer, work)
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

"""A live majority is never overruled: scenes on the simulator, of a minority that goes on alone and is heard again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from spes_p2p.consensus.manifest import Manifest
from spes_p2p.consensus.membership import electors
from spes_p2p.consensus.messages import (
    DEGRADED,
    QUORUM,
    Commit,
)
from spes_p2p.ids import PeerId
from tests.simulation import sim_process
from tests.simulation.sim import Weather, World
from tests.simulation.sim_peer import SimPeer

DAY_SECONDS = 86_400.0
LONG_ROUND_SCALE = 90.0
"""A round takes a minute to five."""


def swarm(seed: int, peers: int = 5, scale: float = LONG_ROUND_SCALE) -> World:
    return World(seed, peers, columns=2, replicas=1, weather=Weather(), step_seconds=scale)


def play(world: World, until: Callable[[], bool], seconds: float) -> None:
    """Runs the world until something holds; fails where it does not within so many virtual seconds."""
    end = world.now + seconds
    while not until():
        assert world.step()
        assert world.now < end, f"nothing came of it in {seconds} s"


def pause(world: World, seconds: float) -> None:
    end = world.now + seconds
    play(world, lambda: world.now >= end, seconds + DAY_SECONDS)


def cut_off_until_it_commits(world: World) -> tuple[SimPeer, list[SimPeer], Commit]:
    """One is cut off and goes on alone. Gives it, the others, and its commit."""
    play(world, lambda: all(peer.disk.tip.round >= 1 for peer in world.up()), 2000.0)
    alone, *others = world.up()
    for peer in world.up():  # the majority is in the middle of a long round meanwhile
        peer.step_seconds = 200.0
    world.network.partition({alone.name: 1})
    before = alone.disk.tip.round
    play(world, lambda: alone.disk.tip.round > before, 4000.0)
    commit = alone.disk.chain[-1]
    assert commit.certificate.kind == DEGRADED
    return alone, others, commit


def rounds_of(peers: list[SimPeer]) -> set[int]:
    return {peer.disk.tip.round for peer in peers}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(3, 7))
def test_one_that_was_cut_off_is_heard_for_a_moment_and_dies(seed: int) -> None:
    """The others lose no round."""
    world = swarm(seed)
    alone, others, commit = cut_off_until_it_commits(world)
    stood = max(rounds_of(others))
    world.network.heal()
    pause(world, 1.4)
    alone.restart_plan = None
    alone.is_gone_for_good = True
    alone.crash()
    longest = max(peer.round_seconds for peer in others)
    play(world, lambda: min(rounds_of(others)) >= stood + 2, 4 * longest + 100.0)
    for peer in others:
        line = peer.disk.chain
        assert all(one.certificate.kind == QUORUM for one in line)
        assert commit.certificate.manifest not in {one.certificate.manifest for one in line}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(3, 7))
def test_one_that_was_cut_off_and_stays_goes_over_to_the_others(seed: int) -> None:
    """They commit their own child with the work that was under way; it follows, and is a member again."""
    world = swarm(seed)
    alone, others, commit = cut_off_until_it_commits(world)
    parent: Manifest = others[0].disk.tip
    world.network.heal()
    longest = max(peer.round_seconds for peer in world.up())
    play(world, lambda: all(peer.disk.tip.round > parent.round + 1 for peer in world.up()), 6 * longest + 100.0)
    play(world, world.is_one_history, 2 * longest + 100.0)
    line = others[0].disk.chain
    child = line[parent.round]
    assert child.certificate.kind == QUORUM
    assert {entry.peer for entry in child.manifest.roster} <= {peer.name for peer in others}
    assert world.result.switches == 1
    assert commit.certificate.manifest not in {one.certificate.manifest for one in line}
    assert PeerId(alone.name) in {member.peer for member in line[-1].manifest.members}


def test_two_friends_that_were_apart_for_a_night_go_on_with_the_one_that_did_more() -> None:
    world = swarm(1, peers=2, scale=5.0)
    play(world, lambda: all(peer.disk.tip.round >= 1 for peer in world.up()), 200.0)
    one, other = world.up()
    world.network.partition({one.name: 1})
    pause(world, 300.0)
    assert one.disk.chain[-1] != other.disk.chain[-1]
    tokens = max(one.disk.tip.tokens, other.disk.tip.tokens)
    world.network.heal()
    play(world, lambda: world.is_one_history() and one.disk.tip.tokens > tokens, 300.0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(4))
def test_words_that_waited_while_a_machine_slept_are_no_sign_of_life(seed: int) -> None:
    """Of three, one sleeps, one dies and one goes on alone. Who wakes takes its round without a second wait."""
    world = swarm(seed, peers=3, scale=5.0)
    play(world, lambda: all(peer.disk.tip.round >= 1 for peer in world.up()), 400.0)
    sleeper, dying, alone = world.up()
    assert alone.core is not None
    wait = alone.core.state.pace.degraded_wait_seconds()
    sleeper.sleep(3 * wait)
    pause(world, 5.0)
    dying.restart_plan = None
    dying.is_gone_for_good = True
    dying.crash()
    pause(world, sleeper.asleep_until - world.now)
    assert any(commit.certificate.kind == DEGRADED for commit in alone.disk.chain)
    play(world, lambda: sleeper.disk.tip.round >= alone.disk.tip.round - 1, wait / 2)


@pytest.fixture
def slow_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """One in ten minutes, so that a week is short."""
    monkeypatch.setattr(sim_process, "HEARTBEAT_SECONDS", 600.0)


def come_home(peers: list[SimPeer]) -> None:
    for peer in peers:
        peer.start()


@pytest.mark.usefixtures("slow_heartbeats")
@pytest.mark.parametrize("chosen", ["one", "two"])
def test_two_that_come_back_after_a_week_undo_nobody(chosen: str) -> None:
    """They are a majority of those who were there, and commit a round: it is for a person to choose."""
    world = swarm(2, peers=3, scale=1800.0)
    play(world, lambda: all(len(electors(peer.disk.tip.members)) == 3 for peer in world.up()), 10 * DAY_SECONDS)
    play(world, lambda: len({peer.disk.tip.round for peer in world.up()}) == 1, DAY_SECONDS)
    one, *two = world.up()
    for peer in two:
        peer.crash()
    stood = one.disk.tip.round
    pause(world, 7 * DAY_SECONDS)
    assert one.disk.tip.round > stood + world.rules.final_rounds
    world.network.partition({one.name: 1})
    come_home(two)
    play(world, lambda: min(rounds_of(two)) > stood, 2 * DAY_SECONDS)
    world.network.heal()
    week, back = one.disk.tip, two[0].disk.tip
    pause(world, DAY_SECONDS)
    assert world.result.switches == 0
    assert one.disk.tip.round > week.round  # both train on
    assert min(rounds_of(two)) > back.round
    assert one.parted
    assert two[0].parted
    common = one.disk.shared_with(two[0].disk)
    side = one if chosen == "one" else two[0]
    child = side.disk.chain[common].certificate.manifest
    world.choose(child)
    play(world, lambda: world.is_one_history() and all(peer.disk.chain[common:] for peer in world.up()), DAY_SECONDS)
    assert {peer.disk.chain[common].certificate.manifest for peer in world.up()} == {child}
    pause(world, 60.0)
    assert world.result.switches == (2 if chosen == "one" else 1)

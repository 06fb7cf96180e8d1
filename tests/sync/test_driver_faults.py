"""Faults of peers and links under real drivers: nobody is held up for longer than the protocol says, all stay equal."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from spes_p2p.consensus.manifest import manifest_hash
from spes_p2p.consensus.membership import leader_order
from spes_p2p.consensus.messages import (
    QUORUM,
    RENEWAL,
)
from spes_p2p.ids import PeerId
from spes_p2p.swarm.memory_links import LinkShape
from spes_p2p.sync.surroundings import Applied
from tests.simulation.memory_swarm import MemorySwarm, PretendPeer
from tests.sync.swarm_cases import Recorder, check_agreement, check_leases, commits, in_swarm, small_config

ROUND_SECONDS = 1.4
"""What a round takes on these links when nothing happens."""


def peer(swarm: MemorySwarm, name: str) -> PretendPeer:
    return swarm.peers[PeerId(name)]


def bound_seconds(swarm: MemorySwarm) -> float:
    """Section 4: a leader is given up after its deadline, the next ballot has twice the time; then a round follows."""
    return 3 * max(life.driver.core.state.pace.deadline_seconds(0) for life in swarm.up) + 2 * ROUND_SECONDS


def leaders(swarm: MemorySwarm) -> tuple[PeerId, ...]:
    """Who leads the newest round, and who after them."""
    tip = max((life.driver.core.tip for life in swarm.up), key=lambda tip: tip.round)
    return leader_order(manifest_hash(tip), tip.members)


async def one_more_round(swarm: MemorySwarm) -> float:
    """Seconds until all that are up have a newer round than anybody had."""
    began, newest = swarm.clock.now(), max(life.round for life in swarm.up)
    await swarm.until_round(newest + 1)
    return swarm.clock.now() - began


@pytest.mark.parametrize(
    "moment", [0, 6, 10, *(pytest.param(at, marks=pytest.mark.thorough) for at in (1, 2, 3, 4, 5, 7, 8, 9, 11))]
)
def test_a_killed_peer_stalls_nobody_for_long(folder: Path, moment: int) -> None:
    """Killed anywhere in a round (the phases after training are short, so they are looked at closely)."""

    async def play(swarm: MemorySwarm) -> None:
        recorder = Recorder(swarm)
        await swarm.start(["a", "b", "c", "d"])
        await swarm.until_round(2)
        await asyncio.sleep(0.5 if moment == 0 else 0.98 + 0.025 * moment)
        await peer(swarm, "abcd"[moment % 4]).kill(silent=moment % 3 == 0)
        assert await one_more_round(swarm) < bound_seconds(swarm)
        await asyncio.sleep(2 * swarm.up[0].driver.core.state.pace.suspect_seconds)
        await one_more_round(swarm)
        assert len(commits(swarm)[-1].manifest.members) == 3
        assert all(commit.certificate.kind == QUORUM for commit in commits(swarm)[1:])
        recorder.check(commits(swarm))
        check_agreement(swarm)
        check_leases(swarm)

    in_swarm(folder, play, small_config(peers=4), seed=moment)


@pytest.mark.parametrize("moment", [0.5, 1.05, 1.1, 1.15, 1.2])
def test_the_leader_is_killed(folder: Path, moment: float) -> None:
    async def play(swarm: MemorySwarm) -> None:
        recorder = Recorder(swarm)
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(2)
        leader = leaders(swarm)[0]
        await asyncio.sleep(moment)
        await swarm.peers[leader].kill()
        assert await one_more_round(swarm) < bound_seconds(swarm)
        await swarm.until_round(swarm.up[0].round + 2)
        recorder.check(commits(swarm))
        check_agreement(swarm)
        check_leases(swarm)

    in_swarm(folder, play)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("disk", ["kept", "lost"])
@pytest.mark.parametrize("moment", [0.5, 1.08, 1.16])
def test_a_killed_peer_comes_back(folder: Path, disk: str, moment: float) -> None:
    async def play(swarm: MemorySwarm) -> None:
        recorder = Recorder(swarm)
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(2)
        await asyncio.sleep(moment)
        before = peer(swarm, "b").driver.core.state.own.incarnation
        await peer(swarm, "b").kill()
        if disk == "lost":
            swarm.lose_disk("b")
        await asyncio.sleep(0.3)
        await swarm.add("b")
        assert (peer(swarm, "b").driver.core.state.own.incarnation == before) == (disk == "kept")
        await swarm.until_round(8)
        last = commits(swarm)[-1].manifest
        assert any(entry.peer == "b" for entry in last.roster)
        assert all(member.elector for member in last.members)
        recorder.check(commits(swarm))
        check_agreement(swarm)
        check_leases(swarm)

    in_swarm(folder, play)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("moment", [0.5, 1.04, 1.08, 1.12, 1.16, 1.2])
def test_all_are_killed_and_come_back(folder: Path, moment: float) -> None:
    """A power cut: what was committed stays, and the run goes on from there by majority."""

    async def play(swarm: MemorySwarm) -> None:
        recorder = Recorder(swarm)
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(2)
        await asyncio.sleep(moment)
        newest = max(life.round for life in swarm.up)
        for life in swarm.up:
            await life.kill()
        await asyncio.gather(*(swarm.add(name) for name in "abc"))
        await swarm.until_round(newest + 3)
        assert all(commit.certificate.kind == QUORUM for commit in commits(swarm)[1:])
        recorder.check(commits(swarm))
        check_agreement(swarm)
        check_leases(swarm)

    in_swarm(folder, play)


@pytest.mark.parametrize("seed", range(3))
def test_messages_are_lost_and_doubled(folder: Path, seed: int) -> None:
    async def play(swarm: MemorySwarm) -> None:
        recorder = Recorder(swarm)
        swarm.network.set_link(None, None, LinkShape((0.005, 0.3), loss=0.1, duplication=0.1))
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(6)
        recorder.check(commits(swarm))
        check_agreement(swarm)
        check_leases(swarm)

    in_swarm(folder, play, seed=seed, max_virtual_seconds=200)


def test_streams_are_cut_and_resumed(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        recorder = Recorder(swarm)
        await swarm.start(["a", "b", "c"])
        for name in "abc":
            swarm.network.cut_stream(name, after_bytes=300, times=40)
        await swarm.until_round(5)
        assert all(len(commit.manifest.roster) == 3 for commit in commits(swarm)[2:])
        recorder.check(commits(swarm))
        check_agreement(swarm)

    in_swarm(folder, play)


def test_a_minority_apart_commits_nothing_by_majority_and_heals(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        recorder = Recorder(swarm)
        await swarm.start(["a", "b", "c", "d", "e"])
        await swarm.until_round(2)
        await asyncio.sleep(0.4)
        apart = peer(swarm, "e")
        swarm.network.partition(["e"])
        stood = apart.round
        await swarm.until_round(stood + 4, "abcd")
        assert apart.round == stood
        assert apart.chain.length == stood + 1
        swarm.network.heal()
        await swarm.until_round(peer(swarm, "a").round + 3)
        assert any(entry.peer == "e" for entry in commits(swarm)[-1].manifest.roster)
        recorder.check(commits(swarm))
        check_agreement(swarm)
        check_leases(swarm)

    in_swarm(folder, play, small_config(peers=5))


@pytest.mark.parametrize("silent", [True, False])
def test_a_majority_that_is_gone_is_waited_for(folder: Path, silent: bool) -> None:
    """Whether hosts refuse or answer nothing says little: a router reboots."""

    async def play(swarm: MemorySwarm) -> None:
        recorder = Recorder(swarm)
        await swarm.start(["a", "b", "c", "d"])
        await swarm.until_round(2)
        await asyncio.sleep(0.5)
        stood = max(life.round for life in swarm.up)
        for name in "bcd":
            await peer(swarm, name).kill(silent=silent)
        await asyncio.sleep(0.9 * swarm.rules.renew_after_seconds)
        assert peer(swarm, "a").round <= stood
        await swarm.until_round(stood + 1)
        chain = commits(swarm)
        assert chain[stood + 1].certificate.kind == RENEWAL
        await swarm.until_round(stood + 3)
        assert commits(swarm)[-1].certificate.kind == QUORUM
        recorder.check(commits(swarm))
        check_leases(swarm)

    in_swarm(folder, play, small_config(peers=4))


def check_carried(recorder: Recorder, life: PretendPeer, event: Applied) -> None:
    """theta <- new + (theta - old) for the tiles that the round did not count, the new values elsewhere."""
    layout, round = recorder.swarm.layout, event.commit.manifest.round
    trained, started = life.handed_in[round - 1].values, life.handed_in[round].started
    for tile in (layout.tiles[tile_id] for block in trained for tile_id in layout.tile_ids_of(block)):
        part = slice(tile.start, tile.stop)
        new, old = (recorder.blocks[at][tile.block][part] for at in (round, round - 1))
        expected = new + (trained[tile.block][part] - old) if tile.id in event.uncounted else new
        if tile.block in started:
            assert np.array_equal(started[tile.block][part], expected), tile


def test_a_peer_that_was_not_heard_is_counted_once_later(folder: Path) -> None:
    """It hears the others, and goes on from what they commit with its own work on top. (4 of 5 are enough to close.)

    Rounds are short enough for it to be a member still, and long enough for it to be back before the next one closes.
    """

    steps = 15

    async def play(swarm: MemorySwarm) -> None:
        recorder = Recorder(swarm)
        await swarm.start("abcde")
        await swarm.until_round(2)
        await asyncio.sleep(0.2)
        mute = swarm.peers[leaders(swarm)[-1]]
        stood = mute.round
        swarm.network.set_link(mute.name, None, LinkShape(loss=1.0))
        await swarm.until_round(stood + 1, set("abcde") - {mute.name})
        swarm.network.set_link(mute.name, None, LinkShape())
        await swarm.until_round(stood + 4)
        missed = next(event for event in mute.applied_events if event.previous.round == stood)
        assert missed.counted is None
        assert missed.uncounted == {t.id for t in swarm.layout.tiles if t.block in mute.handed_in[stood].values}
        later = next(
            entry for c in commits(swarm)[stood + 2 :] for entry in c.manifest.roster if entry.peer == mute.name
        )
        assert later.steps > steps
        check_carried(recorder, mute, missed)
        recorder.check(commits(swarm))
        check_leases(swarm)

    in_swarm(folder, play, small_config(f"sync.steps_per_round={steps}", peers=5))


def test_what_reducers_could_not_get_is_carried_slice_by_slice(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        recorder = Recorder(swarm)
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(2)
        life, stood = peer(swarm, "c"), peer(swarm, "c").round
        serving = life.driver.answers.serving.inputs
        life.driver.answers.serving.inputs = lambda parent, first, tiles: None
        await swarm.until_round(stood + 1)
        life.driver.answers.serving.inputs = serving
        await swarm.until_round(stood + 3)
        event = next(event for event in life.applied_events if event.previous.round == stood)
        assert event.counted is not None
        mine = {t.id for t in swarm.layout.tiles if t.block in life.handed_in[stood].values}
        assert set() < event.uncounted < mine
        check_carried(recorder, life, event)
        recorder.check(commits(swarm))
        check_leases(swarm)

    in_swarm(folder, play)

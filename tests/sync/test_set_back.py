"""A disk that was brought back from a copy and a clock that was set back, under real drivers: others remember."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from pathlib import Path

import pytest

from spes_p2p.ids import PeerId
from tests.simulation.memory_swarm import MemorySwarm, PretendPeer, PretendWork
from tests.sync.swarm_cases import check_agreement, check_leases, counts, in_swarm, until


@pytest.mark.parametrize("rounds", [0, 3])
def test_a_disk_from_a_copy_does_not_vote_for_what_it_has_forgotten(folder: Path, rounds: int) -> None:
    """It comes back as a newcomer, says so, and takes part again."""

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start("abc")
        await swarm.until_round(2)
        await swarm.peers[PeerId("c")].kill()
        copy = shutil.copytree(folder / "c", folder / "copy")
        before = (await swarm.add("c")).votes.incarnation
        stood = swarm.peers[PeerId("c")].round

        def has_voted() -> bool:
            """As somebody else has heard."""
            contact = swarm.peers[PeerId("a")].driver.core.state.others.contacts[PeerId("c")]
            return contact.status.round >= stood + rounds and contact.status.ballots.prevoted >= 0

        await until(has_voted)
        await swarm.peers[PeerId("c")].kill()
        shutil.rmtree(folder / "c")
        shutil.move(copy, folder / "c")
        back = await swarm.add("c")
        await until(lambda: back.votes.incarnation > before)
        assert back.driver.core.state.own.incarnation == back.votes.incarnation
        assert any(notice.kind == "votes" for notice in back.notices)
        await until(counts(swarm, "c"))
        check_agreement(swarm)
        check_leases(swarm)

    in_swarm(folder, play)


def test_an_identity_that_two_machines_use_holds_nobody_up_and_both_are_told(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start("abc")
        await swarm.until_round(2)
        first = swarm.peers[PeerId("c")]
        swarm.network.twin("c")
        second = PretendPeer(swarm, PeerId("c"), folder / "elsewhere", PretendWork(), first.intent)
        await second.start()
        await swarm.until_round(8, "ab")
        for life in (first, second):
            told = {notice.text for notice in life.notices if notice.kind == "votes"}
            assert any("its identity.key is in use on another machine" in text for text in told)
            life.net.stop()
            await life.kill()
            assert life.failures == []
        check_agreement(swarm)
        check_leases(swarm)

    in_swarm(folder, play)


@pytest.mark.parametrize("lost_disk", [False, True])
def test_a_clock_that_was_set_back_is_no_reason_not_to_be_heard(folder: Path, lost_disk: bool) -> None:
    """In the middle of a long round, not when a commit has dropped it."""

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start("abc", PretendWork(step_seconds=3.0))
        await swarm.until_round(2)
        await asyncio.sleep(1.0)
        await swarm.peers[PeerId("c")].kill()
        swarm.clock_behind_seconds = 3600.0
        if lost_disk:
            swarm.lose_disk("c")
            swarm._incarnations = itertools.count(-1000)
        await swarm.add("c", PretendWork(step_seconds=3.0))
        heard_by = swarm.peers[PeerId("a")].driver.core.state.others.contacts
        incarnation = swarm.peers[PeerId("c")].votes.incarnation
        await until(
            lambda: heard_by[PeerId("c")].status.life == swarm.peers[PeerId("c")].driver.core.state.own.life, 5.0
        )
        assert (swarm.peers[PeerId("c")].votes.incarnation > incarnation) is lost_disk
        await until(counts(swarm, "c"), 200.0)
        check_agreement(swarm)

    in_swarm(folder, play)

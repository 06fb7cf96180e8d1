"""A disk that was brought back from a copy and a clock that was set back, under real drivers: others remember."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from spes_p2p.ids import PeerId
from spes_p2p.testing.memory_swarm import MemorySwarm
from tests.sync.swarm_cases import check_agreement, check_leases, commits, counts, in_swarm, until


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
        await until(lambda: swarm.peers[PeerId("c")].driver.core.record.accepted is not None)
        await swarm.until_round(stood + rounds)
        await until(lambda: swarm.peers[PeerId("c")].driver.core.record.accepted is not None)
        await swarm.peers[PeerId("c")].kill()
        shutil.rmtree(folder / "c")
        shutil.move(copy, folder / "c")
        back = await swarm.add("c")
        await until(lambda: back.votes.incarnation > before)
        assert back.driver.core.incarnation == back.votes.incarnation
        assert any(notice.kind == "votes" for notice in back.notices)
        await until(counts(swarm, "c"))
        check_agreement(swarm)
        check_leases(swarm)

    in_swarm(folder, play)


@pytest.mark.parametrize("lost_disk", [False, True])
def test_a_clock_that_was_set_back_is_no_reason_not_to_be_heard(folder: Path, lost_disk: bool) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start("abc")
        await swarm.until_round(3)
        await swarm.peers[PeerId("c")].kill()
        swarm.clock_behind_seconds = 3600.0
        if lost_disk:
            swarm.lose_disk("c")
            swarm._incarnations = iter(range(1, 1000))  # type: ignore[assignment]
        stood = len(commits(swarm))
        await swarm.add("c")
        await until(counts(swarm, "c"), 20.0)
        if not lost_disk:  # it was a member all the time
            assert all("c" in {m.peer for m in commit.manifest.members} for commit in commits(swarm)[stood:])
        check_agreement(swarm)

    in_swarm(folder, play)

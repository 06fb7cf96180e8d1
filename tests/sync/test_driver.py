"""Whole rounds of real drivers on an in-memory network: exact, agreed, and with members that come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from spes_p2p import failpoints
from spes_p2p.consensus.messages import Intent
from spes_p2p.data.leases import count
from spes_p2p.ids import PeerId
from spes_p2p.ownership.assign import columns_of
from spes_p2p.state.layout import Values
from spes_p2p.swarm.memory_links import LinkShape
from spes_p2p.sync import tensor_work
from spes_p2p.sync.tasks import Tasks
from tests.simulation.memory_swarm import MemorySwarm, PretendPeer, PretendWork
from tests.sync.swarm_cases import Recorder, check_agreement, check_leases, commits, in_swarm, small_config

T = TypeVar("T")
MERGES = ("sync.merge_interval=5", "sync.merge_alpha=0.3", "sync.merge_decay_steps=35", "sync.merge_top_k=2")


def peer(swarm: MemorySwarm, name: str) -> PretendPeer:
    return swarm.peers[PeerId(name)]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("leased", [True, False])
def test_every_round_is_what_the_oracle_computes(folder: Path, replicas: int, leased: bool) -> None:
    """Merges in rounds 1 to 3 and none after, owners apart or doubled, peers of unequal speed."""
    config = small_config(*MERGES, f"swarm.target_replicas={replicas}", "swarm.experts_per_peer=3")

    async def play(swarm: MemorySwarm) -> None:
        recorder = Recorder(swarm)
        await swarm.start_organiser()
        await asyncio.gather(
            *(swarm.add(name, PretendWork(seconds)) for name, seconds in (("a", 0.1), ("b", 0.13), ("c", 0.6)))
        )
        await swarm.until_round(5)
        chain = commits(swarm)
        recorder.check(chain)
        check_agreement(swarm)
        assert [commit.manifest.merge is not None for commit in chain[1:4]] == [True] * 3
        assert chain[-1].manifest.merge is None
        assert {len(owners) for owners in chain[1].manifest.ownership} == {replicas}
        assert len({entry.steps for commit in chain[1:] for entry in commit.manifest.roster}) > 1
        if leased:
            check_leases(swarm)

    in_swarm(folder, play, config, leased=leased)


def test_the_same_seed_gives_the_same_run(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> tuple[bytes, float]:
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(3)
        return check_agreement(swarm)[3], swarm.clock.now()

    assert in_swarm(folder / "1", play, seed=5) == in_swarm(folder / "2", play, seed=5)


def test_the_first_slices_of_a_peer_alone_go_out_before_its_last_ones_are_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_way, most, made = 0, 0, 0
    at_once = Tasks.in_thread

    async def later(self: Tasks, work: Callable[[], T]) -> T:
        """A thread that others can overtake."""
        await asyncio.sleep(0.001)
        return await at_once(self, work)

    def listener(step: str, facts: Mapping[str, Any]) -> None:
        nonlocal under_way, most, made
        if step == failpoints.COLLECTED:
            under_way, made = under_way + 1, made + 1
            most = max(most, under_way)
        elif step == failpoints.STAGED:
            under_way -= 1

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a"])
        monkeypatch.setattr(Tasks, "in_thread", later)
        before = failpoints.listen(listener)
        await swarm.until_round(3)
        failpoints.listen(before)

    in_swarm(folder, play, small_config("sync.codec=int8", peers=1))
    assert under_way == 0
    assert made >= 2 * 5, "a slice for each block"
    assert most == tensor_work.ALONE_AT_ONCE


def test_one_peer_alone_is_a_run(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        recorder = Recorder(swarm)
        await swarm.start(["a"])
        await swarm.until_round(3)
        recorder.check(commits(swarm))
        assert commits(swarm)[3].manifest.step == 30

    in_swarm(folder, play, small_config("swarm.experts_per_peer=4", peers=1))


def test_a_late_joiner_catches_up_is_named_and_trains(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        recorder = Recorder(swarm)
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(3)
        late = await swarm.add("late")
        await swarm.until_round(8)
        chain = commits(swarm)
        named = next(c.manifest.round for c in chain if any(m.peer == "late" for m in c.manifest.members))
        assert 4 <= named <= 6
        assert late.applied_events[0].caught_up
        assert columns_of(chain[-1].manifest.ownership, late.name)
        assert any(entry.peer == "late" for entry in chain[-1].manifest.roster)
        recorder.check(chain)
        check_agreement(swarm)
        check_leases(swarm)

    in_swarm(folder, play)


def test_a_claim_is_granted_to_a_newcomer(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(1)
        await swarm.add("late", intent=Intent(joining=True, max_columns=1, claims=(2,)))
        await swarm.until_round(6)
        assert columns_of(commits(swarm)[-1].manifest.ownership, peer(swarm, "late").name) == (2,)

    in_swarm(folder, play)


@pytest.mark.parametrize("moment", [0.3, 1.02, 1.3])
def test_a_leaver_is_gone_in_time_and_its_last_work_counted(folder: Path, moment: float) -> None:
    async def play(swarm: MemorySwarm) -> None:
        recorder = Recorder(swarm)
        await swarm.start(["a", "b", "c", "d"])
        await swarm.until_round(2)
        await asyncio.sleep(moment)
        leaver, began = peer(swarm, "b"), swarm.clock.now()
        await leaver.leave()
        assert swarm.clock.now() - began < 10
        await swarm.until_round(6)
        chain = commits(swarm)
        without = next(c.manifest for c in chain[1:] if all(m.peer != "b" for m in c.manifest.members))
        assert any(entry.peer == "b" for entry in without.roster)
        assert all("b" not in owners for owners in without.ownership)
        recorder.check(chain)
        check_agreement(swarm)
        check_leases(swarm)

    in_swarm(folder, play, small_config(peers=4))


def test_all_but_one_leave_and_the_run_goes_on(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(2)
        await asyncio.gather(peer(swarm, "a").leave(), peer(swarm, "b").leave())
        await swarm.until_round(swarm.up[0].round + 3)
        assert [member.peer for member in commits(swarm)[-1].manifest.members] == ["c"]
        check_leases(swarm)

    in_swarm(folder, play)


def test_the_organiser_is_not_needed_once_the_run_has_begun(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(1)
        await swarm.kill_organiser()
        late = await swarm.add("late")
        await swarm.until_round(6)
        assert any(entry.peer == "late" for entry in commits(swarm, "late")[-1].manifest.roster)
        assert late.driver.core.state.is_member()
        assert not late.driver.core.state.is_member(commits(swarm, "late")[0].manifest)
        check_agreement(swarm)
        await swarm.start_organiser()

    in_swarm(folder, play)


def test_a_slow_peer_delays_nobody_and_its_work_counts(folder: Path) -> None:
    """Ten times slower than the others: rounds take no longer, and what it did in each is counted."""

    async def play(swarm: MemorySwarm) -> None:
        recorder = Recorder(swarm)
        await swarm.start_organiser()
        work = {"a": 0.1, "b": 0.1, "c": 0.1, "slow": 1.0}
        await asyncio.gather(*(swarm.add(name, PretendWork(seconds)) for name, seconds in work.items()))
        await swarm.until_round(2)
        began = swarm.clock.now()
        await swarm.until_round(6)
        assert swarm.clock.now() - began < 4 * 3.5
        chain = commits(swarm)
        assert any(e.peer == "slow" and e.steps < 10 for c in chain for e in c.manifest.roster)
        recorder.check(chain)
        check_leases(swarm)

    in_swarm(folder, play, small_config(peers=4))


def test_leases_over_joins_kills_and_leaves(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c", "d"])
        await swarm.until_round(2)
        await peer(swarm, "d").kill()
        await swarm.add("e")
        await swarm.until_round(swarm.up[0].round + 3)
        await peer(swarm, "a").leave()
        await swarm.add("d")
        await swarm.until_round(swarm.up[0].round + 4)
        assert check_leases(swarm) > 1000
        last = commits(swarm)[-1].manifest
        assert {peer for peer, _ in last.leases.held} == {"b", "c", "d", "e"}
        assert all(count(ranges) for _, ranges in last.leases.held)
        check_agreement(swarm)

    in_swarm(folder, play, small_config(peers=4))


def test_a_slow_link_only_makes_rounds_longer(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        recorder = Recorder(swarm)
        swarm.network.set_link("c", None, LinkShape((0.2, 0.4), bytes_per_second=20_000))
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(4)
        assert all(len(commit.manifest.roster) == 3 for commit in commits(swarm)[2:])
        recorder.check(commits(swarm))
        check_agreement(swarm)

    in_swarm(folder, play)


def test_values_travel_exactly(folder: Path) -> None:
    """A lone owner's column is exactly its values, subnormal and huge ones too."""
    special = np.array([1e-40, -0.0, 3.4e38, -3e-45], np.float32)

    def alter(round: int, block: int, values: Values) -> Values:
        return np.concatenate([special, values[4:]]) if block > 0 else values

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"], PretendWork(alter=alter))
        await swarm.until_round(2)
        for block in range(1, 5):
            got = swarm.up[0].store.version(2).block(block)[:4]
            assert got.tobytes() == special.tobytes()

    in_swarm(folder, play, small_config("sync.merge_alpha=0"))


def test_contributions_take_a_bounded_part_of_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices wait for room; where there is too little for any they are reduced one by one."""
    most: dict[int, int] = {}

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        while max(life.round for life in swarm.up) < 3:
            held = sum(life.driver._work._held_bytes for life in swarm.up)
            most[limit] = max(most.get(limit, 0), held)
            await asyncio.sleep(0.001)
        await swarm.until_round(3)
        check_agreement(swarm)

    for limit in (1, 2**30):
        monkeypatch.setattr(tensor_work, "HELD_BYTES", limit)
        in_swarm(folder / str(limit), play, small_config("sync.slice_tiles=1"))
    assert 0 < most[1] < most[2**30]

"""A bootstrap node that serves: a member that reduces, holds and votes, and never counts as one that trains."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from pathlib import Path
from typing import Any

import pytest

from spes_p2p.consensus.manifest import Manifest
from spes_p2p.consensus.membership import LINK_PRIVATE, trainers
from spes_p2p.consensus.messages import (
    Intent,
)
from spes_p2p.data.leases import count
from spes_p2p.ids import PeerId
from spes_p2p.state.layout import Layout
from spes_p2p.sync.inputs import Inputs
from tests.simulation.memory_swarm import ORGANISER, MemorySwarm
from tests.sync.swarm_cases import (
    Recorder,
    check_agreement,
    check_leases,
    commits,
    counts,
    in_swarm,
    small_config,
    until,
)

HOMES = ("a", "b")
SERVED = small_config(peers=2)


async def start(swarm: MemorySwarm, hidden: bool = True) -> None:
    """Two peers, behind NAT each its own, and the bootstrap node, which serves."""
    if hidden:
        swarm.network.hide(*HOMES)
    await swarm.start_organiser()
    link = LINK_PRIVATE if hidden else 0
    wish = Intent(joining=True, max_columns=swarm.config.swarm.experts_per_peer, link_class=link)
    await asyncio.gather(*(swarm.add(name, intent=wish) for name in HOMES))


def check_never_trains(manifest: Manifest) -> None:
    """Nothing of a manifest counts the bootstrap node among those who train."""
    assert [m.peer for m in manifest.members if not m.trains] == [ORGANISER]
    assert ORGANISER not in {entry.peer for entry in manifest.roster}
    assert ORGANISER not in {owner for owners in manifest.ownership for owner in owners}
    assert ORGANISER not in dict(manifest.leases.held)


def server_round(swarm: MemorySwarm) -> int:
    assert swarm.seat.driver is not None
    return swarm.seat.driver.core.tip.round


def check_server(swarm: MemorySwarm) -> None:
    """What is on its disk has, hashed afresh, the roots that the chain says; the initial state is still there."""
    store, chain = swarm._organiser_store, swarm.organiser.chain
    assert store.rounds()[0] == 0
    for round in store.rounds():
        store.version(round).verify()
        assert store.version(round).root == chain.commit(round).manifest.state_root


@pytest.mark.sampled(2)
@pytest.mark.parametrize("codec", ["fp32", "int8"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_two_homes_train_with_nobody_but_the_bootstrap_node(folder: Path, replicas: int, codec: str) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await start(swarm)
        recorder = Recorder(swarm) if codec == "fp32" else None
        await swarm.until_round(8)
        found = commits(swarm)
        for commit in found[2:]:
            assert {entry.peer for entry in commit.manifest.roster} == set(HOMES)
            check_never_trains(commit.manifest)
            for piece in commit.manifest.slices:
                assert piece.reducer == ORGANISER or piece.contributors == (piece.reducer,), piece
        if recorder is not None:
            recorder.check(found)
        assert server_round(swarm) >= 7
        assert not [notice for life in swarm.up for notice in life.notices]
        check_agreement(swarm)
        check_leases(swarm)
        check_server(swarm)

    wanted = (
        f"sync.codec={codec}",
        f"swarm.target_replicas={replicas}",
        f"swarm.experts_per_peer={2 if replicas == 1 else 4}",
    )
    in_swarm(folder, play, small_config(*wanted, peers=2), serve=True)


def test_the_run_begins_when_enough_peers_have_come_that_train(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start_organiser()
        first = asyncio.create_task(swarm.add("a"))
        await asyncio.sleep(5.0)
        assert swarm.organiser.chain.length == 0
        await asyncio.gather(first, swarm.add("b"))
        genesis = swarm.organiser.chain.commit(0).manifest
        assert [m.peer for m in trainers(genesis.members)] == list(HOMES)
        assert all(m.elector for m in genesis.members)
        check_never_trains(genesis)
        assert all(count(spans) > 0 for _, spans in genesis.leases.held)

    in_swarm(folder, play, SERVED, serve=True)


def test_it_takes_its_share_of_what_peers_that_can_be_dialled_reduce(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await start(swarm, hidden=False)
        await swarm.until_round(5)
        for commit in commits(swarm)[2:]:
            shared = [piece for piece in commit.manifest.slices if piece.block == 0]
            assert {piece.reducer for piece in shared} == {ORGANISER, *HOMES}
        check_agreement(swarm)

    in_swarm(folder, play, SERVED, serve=True)


@pytest.mark.parametrize("hidden", [True, False])
def test_it_dies_in_a_round_and_comes_back(folder: Path, hidden: bool) -> None:
    """Who is behind NAT reaches nobody meanwhile; the others go on. Afterwards it serves again, as itself."""

    async def play(swarm: MemorySwarm) -> None:
        await start(swarm, hidden)
        await swarm.until_round(3)
        await asyncio.sleep(1.05)  # in the middle of a sync
        await swarm.kill_organiser()
        if not hidden:
            await swarm.until_round(swarm.up[0].round + 3)
        else:
            await asyncio.sleep(3.0)
        await swarm.start_organiser()
        await swarm.until_round(max(life.round for life in swarm.up) + 4)
        await until(lambda: server_round(swarm) >= swarm.up[0].round - 1)
        newest = commits(swarm)[-1].manifest
        check_never_trains(newest)
        assert {entry.peer for entry in newest.roster} == set(HOMES)
        check_agreement(swarm)
        check_leases(swarm)
        check_server(swarm)

    in_swarm(folder, play, SERVED, serve=True)


def test_homes_that_hear_nobody_wait_until_it_is_back(folder: Path) -> None:

    async def play(swarm: MemorySwarm) -> None:
        await start(swarm)
        await swarm.until_round(3)
        await swarm.kill_organiser()
        await asyncio.sleep(5.0)
        stood = [life.round for life in swarm.up]
        await asyncio.sleep(200.0)
        assert [life.round for life in swarm.up] == stood
        assert all("waiting" in [notice.kind for notice in life.notices] for life in swarm.up)
        await swarm.start_organiser()
        await until(lambda: all(counts(swarm, name)() for name in HOMES), 100.0)
        check_agreement(swarm)
        check_leases(swarm)
        check_server(swarm)

    in_swarm(folder, play, small_config("swarm.heartbeat_seconds=0.2", peers=2), serve=True)


def test_over_night_it_keeps_the_state_and_makes_no_rounds(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await start(swarm, hidden=False)
        await swarm.until_round(4)
        for name in HOMES:
            with contextlib.suppress(TimeoutError):  # the last one may go before a manifest leaves it out
                await swarm.peers[PeerId(name)].leave()
        await asyncio.sleep(100.0)
        evening = server_round(swarm)
        await asyncio.sleep(600.0)
        assert server_round(swarm) == evening
        await swarm.add("c")
        await swarm.until_round(evening + 4)
        check_never_trains(commits(swarm)[-1].manifest)
        assert {entry.peer for entry in commits(swarm)[-1].manifest.roster} == {"c"}
        check_agreement(swarm)
        check_leases(swarm)

    in_swarm(folder, play, SERVED, serve=True)


def test_all_others_die_and_new_peers_go_on_from_what_it_holds(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await start(swarm, hidden=False)
        await swarm.until_round(4)
        for name in HOMES:
            await swarm.peers[PeerId(name)].kill()
        await asyncio.sleep(100.0)
        evening = server_round(swarm)
        await swarm.add("c")
        await swarm.until_round(evening + 3)
        check_agreement(swarm)
        check_leases(swarm)

    in_swarm(folder, play, SERVED, serve=True)


def test_without_a_vote_it_renews_the_run_for_those_who_come(folder: Path) -> None:
    """It had left; meanwhile the others made rounds and died with their disks."""

    async def play(swarm: MemorySwarm) -> None:
        await start(swarm, hidden=False)
        await swarm.until_round(4)
        await swarm.seat.leave(8.0)
        await swarm.kill_organiser()
        evening = commits(swarm)[-1].manifest.round
        await swarm.until_round(evening + 2)
        for name in HOMES:
            await swarm.peers[PeerId(name)].kill()
        await swarm.start_organiser()
        await swarm.add("c")
        await swarm.add("d")
        await swarm.until_round(evening + 4)
        await until(lambda: server_round(swarm) >= evening + 3)
        found = commits(swarm)
        renewal = next(commit for commit in found if commit.certificate.kind == "renewal")
        check_never_trains(renewal.manifest)
        await until(lambda: {entry.peer for entry in commits(swarm)[-1].manifest.roster} == {"c", "d"})
        check_agreement(swarm)
        check_server(swarm)

    in_swarm(folder, play, SERVED, serve=True)


def test_it_leaves_when_it_is_told_to(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await start(swarm, hidden=False)
        await swarm.until_round(3)
        await swarm.seat.leave(8.0)
        newest = swarm.organiser.chain.commit(swarm.organiser.chain.length - 1)  # the others may not have it yet
        named = {member.peer for member in newest.manifest.members}
        await swarm.kill_organiser()
        assert named == set(HOMES)
        await swarm.until_round(swarm.up[0].round + 3)
        check_agreement(swarm)
        await swarm.start_organiser()
        await until(lambda: not trainers_only(swarm), 60.0)
        check_never_trains(commits(swarm)[-1].manifest)

    in_swarm(folder, play, SERVED, serve=True)


def trainers_only(swarm: MemorySwarm) -> bool:
    return all(member.trains for member in commits(swarm)[-1].manifest.members)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_node_that_cannot_take_its_seat_tries_again_or_ends(folder: Path, number: int) -> None:
    async def play(swarm: MemorySwarm) -> None:
        trouble = [OSError(number, os.strerror(number))]

        def make(directory: Path, layout: Layout, *rest: Any) -> Inputs:
            if trouble and ORGANISER in directory.parts:
                raise trouble[-1]
            return Inputs(directory, layout, *rest)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("spes_p2p.sync.surroundings.Inputs", make)
            await start(swarm)
            await until(lambda: swarm.organiser.chain.length > 0)
            await asyncio.sleep(1.0)
            failures = list(swarm.server_failures)
            swarm.server_failures.clear()
            if number == errno.EIO:
                assert failures == trouble  # the node ends with it
                return
            assert not failures
            assert sum("cannot serve yet" in text for text in swarm.organiser_said) == 1
            trouble.clear()
            await until(lambda: swarm.seat.driver is not None)

    in_swarm(folder, play, SERVED, serve=True)

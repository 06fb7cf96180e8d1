"""Coming back: at once with the disk, with one download without it, and however long a peer was away."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from spes_p2p.consensus.messages import QUORUM
from spes_p2p.exchange.requests import ChainRequest, Request, TilesRequest, unpack_request
from spes_p2p.ids import PeerId
from spes_p2p.state.layout import VALUE_BYTES
from spes_p2p.swarm.memory_backend import MemoryTransport
from spes_p2p.wire import pack
from tests.simulation.memory_swarm import ORGANISER as ORGANISER_ID
from tests.simulation.memory_swarm import MemorySwarm
from tests.sync.swarm_cases import check_agreement, check_leases, commits, counts, in_swarm, small_config, until


class Fetched:
    """What one peer asks others for."""

    def __init__(self, patch: pytest.MonkeyPatch, swarm: MemorySwarm, name: str) -> None:
        self.tiles = self.bytes = 0
        self.commits: set[int] = set()
        real = MemoryTransport.fetch

        async def fetch(
            transport: MemoryTransport, peer: PeerId, request: bytes, *others: Any
        ) -> tuple[bytes, memoryview]:
            header, data = await real(transport, peer, request, *others)
            if transport.peer_id == name:
                self._note(unpack_request(request), data)
            return header, data

        patch.setattr(MemoryTransport, "fetch", fetch)

    def _note(self, asked: Request, data: memoryview) -> None:
        if isinstance(asked, TilesRequest):
            self.tiles += len(asked.hashes)
            self.bytes += len(data)
        elif isinstance(asked, ChainRequest):
            self.commits.add(asked.first)


def test_who_was_away_for_a_hundred_rounds_fetches_one_state(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b"])
        await swarm.until_round(1)
        await swarm.peers[PeerId("b")].kill()
        away = swarm.peers[PeerId("b")].round
        await swarm.until_round(away + 100, ["a"])
        with pytest.MonkeyPatch.context() as patch:
            fetched = Fetched(patch, swarm, "b")
            back = await swarm.add("b")
            await until(lambda: back.round > away + 90)
            caught_up = fetched.tiles, fetched.bytes
        await until(back.driver.core.state.is_member)
        state_bytes = VALUE_BYTES * sum(tile.size for tile in swarm.layout.tiles)
        assert caught_up[0] <= len(swarm.layout.tiles)
        assert caught_up[1] <= state_bytes
        assert len(fetched.commits) <= 6  # headers come by the dozen
        assert len(back.applied_events) == 1 or back.applied_events[0].caught_up
        headers = sum(len(pack(commit)) for commit in commits(swarm, "b")[away + 1 :])
        assert headers < 100 * 8192
        check_agreement(swarm)

    in_swarm(folder, play, small_config("sync.steps_per_round=2", "swarm.heartbeat_seconds=0.2", peers=2))


def test_a_killed_peer_trains_again_within_one_round(folder: Path) -> None:
    """From the moment at which it is up: named by the next commit at the latest, counted by the one after it."""

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(2)
        await swarm.peers[PeerId("b")].kill()
        stood = swarm.peers[PeerId("a")].round
        await swarm.add("b")
        await until(counts(swarm, "b"))
        assert swarm.peers[PeerId("a")].round <= stood + 2
        check_agreement(swarm)
        check_leases(swarm)

    in_swarm(folder, play)


def test_with_its_disk_lost_it_takes_one_download(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(4)
        await swarm.peers[PeerId("b")].kill()
        swarm.lose_disk("b")
        with pytest.MonkeyPatch.context() as patch:
            fetched = Fetched(patch, swarm, "b")
            back = await swarm.add("b")
            await until(lambda: bool(back.applied_events))
            caught_up = fetched.tiles
        assert caught_up <= len(swarm.layout.tiles)
        await until(counts(swarm, "b"))
        check_agreement(swarm)

    in_swarm(folder, play)


def test_where_the_organiser_was_wrong_the_majority_goes_on(folder: Path) -> None:
    """It was cut off from a swarm that lived, and named those who waited on its side. Then both meet again."""

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(2)
        await until(lambda: swarm.seat.kept == swarm.peers[PeerId("a")].driver.core.tip)
        swarm.network.partition(["a", "b", "c"], [ORGANISER_ID, "d", "e"])
        await asyncio.gather(swarm.add("d"), swarm.add("e"))
        parted = swarm.organiser.chain.length - 1
        await swarm.until_round(parted + 2, ["d", "e"])
        assert commits(swarm, "d")[parted + 1].certificate.kind == "renewal"
        await swarm.until_round(parted + 2, ["a", "b", "c"])
        ours = commits(swarm, "a")[parted + 1]
        assert ours.certificate.kind == QUORUM
        swarm.network.heal()
        chains = [swarm.organiser.chain, *(swarm.peers[PeerId(name)].chain for name in "de")]
        await until(lambda: all(chain.commit(parted + 1).manifest == ours.manifest for chain in chains), 300.0)
        await until(lambda: len(swarm.peers[PeerId("a")].driver.core.tip.members) == 5)
        await until(lambda: swarm.seat.kept == swarm.peers[PeerId("a")].driver.core.tip)
        check_agreement(swarm)

    in_swarm(folder, play, small_config("swarm.heartbeat_seconds=0.2"), archive=True)

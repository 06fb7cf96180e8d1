"""The organiser lets the learning rate fall: one manifest takes it up, and everybody has the same from there on."""

from __future__ import annotations

import asyncio
from pathlib import Path

from spes_p2p.ids import PeerId
from spes_p2p.swarm.records import words_key
from spes_p2p.sync.organiser_words import TTL_SECONDS, decay
from spes_p2p.sync.sealing import KeySealer
from spes_p2p.wire import pack
from tests.simulation.memory_swarm import MemorySwarm
from tests.simulation.pretend_peer import PretendWork
from tests.sync.around import Surroundings
from tests.sync.chains import ORGANISER
from tests.sync.swarm_cases import in_swarm, small_config


def test_all_peers_have_it_from_the_same_step_on_also_who_comes_later(tmp_path: Path) -> None:
    async def main(swarm: MemorySwarm) -> None:
        around = Surroundings(swarm)
        await swarm.start("abc", PretendWork(step_seconds=0.1))
        for name in (*"abc", ORGANISER):
            await around.add(name)
        await swarm.until_round(2)
        key = words_key(swarm.info.run_id)
        directory = swarm.network.peer("somebody").directory
        word = decay(swarm.info, 40, KeySealer(swarm.network.keys.signer(PeerId(ORGANISER))))
        await directory.publish(key, pack(word), TTL_SECONDS)
        chain = swarm.peers[PeerId("a")].chain
        async with asyncio.timeout(120.0):
            while chain.newest is None or chain.newest.manifest.decay is None:
                await asyncio.sleep(0.1)
        taken = chain.newest.manifest
        assert taken.decay is not None
        assert (taken.decay.begin_step, taken.decay.steps) == (taken.step, 40)
        await swarm.add("d", PretendWork(step_seconds=0.1))
        await swarm.until_round(taken.round + 4)
        for life in swarm.up:
            decays = [life.chain.commit(round).manifest.decay for round in range(taken.round + 4)]
            assert decays == [None] * taken.round + [taken.decay] * 4
        await around.stop()

    in_swarm(tmp_path, main, small_config())

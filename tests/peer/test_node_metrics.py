"""What a bootstrap node tells Prometheus of a swarm in memory, and what becomes of a look that fails."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from spes_p2p.errors import ConfigError
from spes_p2p.ids import PeerId
from spes_p2p.observe.prometheus import LOCALHOST
from spes_p2p.peer.node_metrics import NodeState, measuring, state_of_run
from spes_p2p.swarm.records import PeerRecord
from spes_p2p.sync.announce import Announcer
from tests.simulation.memory_swarm import ORGANISER, MemorySwarm
from tests.sync.swarm_cases import in_swarm, small_config, until


def record(name: str) -> PeerRecord:
    return PeerRecord("tiny", PeerId(name), (), "0.1.0", 0, 0, 0, 0.0, (), "peer", False, 0)


def test_a_node_tells_what_it_knows_of_its_run(tmp_path: Path) -> None:
    def look(swarm: MemorySwarm) -> NodeState:
        net = swarm.network.peer(ORGANISER)
        announcer = Announcer(nobody, swarm.info, net, failed.append)
        announcer.known = {PeerId(name): record(name) for name in "ab"}
        return state_of_run(net.transport, swarm.organiser.chain, announcer, swarm.organiser, 5)

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start_organiser()
        waiting = look(swarm)
        assert (waiting.round, waiting.members, waiting.peers_waiting, waiting.archive_round) == (None, None, 0, None)
        await asyncio.gather(*(swarm.add(name) for name in "abc"))
        await swarm.until_round(2)
        await until(lambda: (look(swarm).archive_round or 0) >= 2)
        state = look(swarm)
        assert state.round is not None
        assert state.round >= 2
        assert (state.members, state.peers_seen, state.data_pieces, state.renewal) == (3, 2, 5, False)
        assert state.columns_without_owner == 0
        assert state.bytes_sent > 0
        assert state.bytes_received > waiting.bytes_received
        assert abs(time.time() - (state.round_timestamp_seconds or 0)) < 600

    nobody: Any = None
    failed: list[BaseException] = []
    in_swarm(tmp_path, play, small_config("swarm.heartbeat_seconds=0.2"), archive=True)


def test_a_look_that_fails_ends_the_metrics_alone() -> None:
    said: list[str] = []

    def look() -> NodeState:
        raise OSError("gone")

    async def main() -> None:
        async with measuring(0, LOCALHOST, "tiny", "a", look, said.append):
            while len(said) < 2:
                await asyncio.sleep(0.01)

    asyncio.run(main())
    assert said[0].startswith("metrics: http://127.0.0.1:")
    assert said[1] == "the metrics have stopped: OSError('gone')"


def test_a_port_of_nobody_is_refused() -> None:
    async def main() -> None:
        async with measuring(0, "192.0.2.1", "tiny", "a", lambda: NodeState(0, 0), print):
            raise AssertionError("it was served")

    with pytest.raises(ConfigError, match=r"--metrics-port 0 cannot be opened at 192\.0\.2\.1"):
        asyncio.run(main())

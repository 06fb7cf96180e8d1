"""Slices are dealt by uplinks that were measured, within what peers were told to use."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from spes_p2p.consensus.events import UplinkMeasured
from spes_p2p.consensus.messages import Intent
from spes_p2p.ids import PeerId
from spes_p2p.swarm import pacing
from spes_p2p.swarm.stream_server import StreamLimits
from spes_p2p.sync.recorder import NEWEST, FlightRecorder, load_recording, replay
from tests.simulation.memory_swarm import MemorySwarm
from tests.sync.swarm_cases import check_agreement, commits, in_swarm, small_config

RATES = {"a": 400_000.0, "b": 100_000.0, "c": 100_000.0}
CONFIG = small_config(
    "model.vocab_size=4096", "model.embedding_rows=4096", "sync.tile_values=1024", "sync.slice_tiles=1"
)


async def start(swarm: MemorySwarm, told: dict[str, int]) -> None:
    for name, rate in RATES.items():
        swarm.network.peer(name, StreamLimits(upload_bytes_per_second=rate))
    await swarm.start_organiser()
    await asyncio.gather(
        *(
            swarm.add(name, intent=Intent(joining=True, max_columns=2, uplink_bytes_per_second=told.get(name, 0)))
            for name in RATES
        )
    )


def shares(swarm: MemorySwarm, round: int) -> Counter[PeerId]:
    """How many slices of the shared parameters each peer reduced."""
    slices = commits(swarm)[round].manifest.slices
    return Counter(piece.reducer for piece in slices if piece.block == 0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("told", [{}, {"a": 200_000}], ids=["untold", "told less"])
def test_slices_go_where_the_measured_uplinks_are(
    folder: Path, told: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pacing, "STRETCH_SECONDS", 1.0)
    monkeypatch.setattr(pacing, "STRETCH_BYTES", 20_000)

    async def play(swarm: MemorySwarm) -> None:
        await start(swarm, told)
        await swarm.until_round(8)
        measured = {name: peer.driver.core.state.own.uplink_bytes_per_second for name, peer in swarm.peers.items()}
        for name, rate in RATES.items():
            assert 0.8 * rate < measured[PeerId(name)] < 1.2 * rate, measured
        found = shares(swarm, 8)
        fast = 2.0 if told else 4.0
        assert fast * 0.75 < found[PeerId("a")] / found[PeerId("b")] < fast * 1.3, found
        check_agreement(swarm)

    in_swarm(folder, play, CONFIG)


def test_a_replay_knows_what_was_measured(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "STRETCH_SECONDS", 1.0)
    monkeypatch.setattr(pacing, "STRETCH_BYTES", 20_000)
    seen: list[MemorySwarm] = []

    async def play(swarm: MemorySwarm) -> None:
        seen.append(swarm)
        await start(swarm, {})
        FlightRecorder(tmp_path, swarm.info).attach(swarm.peers[PeerId("a")].driver.core)
        await swarm.until_round(5)

    in_swarm(folder, play, CONFIG)
    played = list(replay(load_recording(tmp_path / NEWEST), seen[0].rules))
    assert any(e.bytes_per_second for e in (step.frame.event for step in played) if isinstance(e, UplinkMeasured))
    assert [step.frame.event for step in played if not step.same] == []

"""Runs with strangers, by real drivers: rounds are what the formulas give, and a turned sign counts for nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from spes_p2p.consensus.manifest import SHARE, Manifest
from spes_p2p.ids import PeerId
from spes_p2p.state.layout import Values
from tests.simulation.memory_swarm import ORGANISER, MemorySwarm
from tests.simulation.pretend_peer import PretendWork
from tests.sync.around import Surroundings
from tests.sync.swarm_cases import Recorder, check_agreement, commits, in_swarm, small_config
from tests.sync.test_vouching import Organising

TRUSTED, STRANGERS = "abc", "de"
SETTINGS = {
    "plain": (),
    "turns": ("sync.expert_rounds=3",),
    "overlap": ("sync.overlap=true",),
    "nesterov": ("sync.outer=nesterov",),
    "int8": ("sync.codec=int8",),
    "ternary": ("sync.codec=ternary",),
}


def alike(round: int, block: int, values: Values) -> Values:
    """What honest peers learn all, on top of what each learns alone."""
    return values + np.float32(0.5) * np.random.default_rng(block).standard_normal(values.shape, np.float32)


def turned(round: int, block: int, values: Values) -> Values:
    return -alike(round, block, values)


async def begun(swarm: MemorySwarm, works: dict[str, PretendWork]) -> Surroundings:
    """A run of trusted peers and strangers."""
    around, desk = Surroundings(swarm), Organising(swarm)
    await swarm.start_organiser()
    await around.add(ORGANISER)
    await desk.says(vouched=TRUSTED)
    await asyncio.gather(*(swarm.add(name, work) for name, work in works.items()))
    for name in works:
        await around.add(name)
    return around


def check_owners(manifest: Manifest) -> None:
    assert all({*owners} & {*TRUSTED} for owners in manifest.ownership)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("setting", ["plain", "turns", "overlap", "nesterov"])
def test_every_round_is_what_the_formulas_give(folder: Path, setting: str) -> None:
    """Shared weights of five, columns of two trusted owners and two strangers, one peer five times as fast."""
    config = small_config(
        "swarm.trusted=vouched", "sync.merge_alpha=0", "swarm.target_replicas=2", "swarm.experts_per_peer=3",
        *SETTINGS[setting], peers=5,
    )  # fmt: skip

    async def play(swarm: MemorySwarm) -> None:
        recorder = Recorder(swarm)
        speeds = dict(zip(TRUSTED + STRANGERS, (0.1, 0.13, 0.5, 0.1, 0.2), strict=True))
        around = await begun(swarm, {name: PretendWork(seconds, alter=alike) for name, seconds in speeds.items()})
        await swarm.until_round(6)
        recorder.check(commits(swarm))
        manifests = [commit.manifest for commit in commits(swarm)]
        for manifest in manifests:
            check_owners(manifest)
        assert any({*owners} & {*STRANGERS} for owners in manifests[-1].ownership)
        assert {credit.peer for credit in manifests[-1].strangers} == {*STRANGERS}
        check_agreement(swarm)
        await around.stop()

    in_swarm(folder, play, config)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("setting", SETTINGS)
def test_who_turns_its_sign_counts_for_nothing_and_an_honest_stranger_for_most(folder: Path, setting: str) -> None:
    config = small_config(
        "swarm.trusted=vouched", "sync.merge_alpha=0", "swarm.target_replicas=2", "swarm.experts_per_peer=3",
        *SETTINGS[setting], peers=5,
    )  # fmt: skip

    async def play(swarm: MemorySwarm) -> None:
        works = {name: PretendWork(alter=turned if name == "e" else alike) for name in TRUSTED + STRANGERS}
        around = await begun(swarm, works)
        await swarm.until_round(6)
        check_agreement(swarm)
        averages = {credit.peer: credit.average / SHARE for credit in commits(swarm)[-1].manifest.strangers}
        assert averages[PeerId("e")] < 0.1
        assert averages[PeerId("d")] > 0.6
        await around.stop()

    in_swarm(folder, play, config)

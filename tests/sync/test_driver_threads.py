"""What runs in threads beside the loop: the state machine is asked on the loop alone, no vote goes under in a gap."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from spes_p2p.consensus.machine import Consensus
from spes_p2p.consensus.parts import PartClasses
from spes_p2p.ids import Hash, PeerId
from spes_p2p.sync.tasks import Tasks
from tests.simulation.memory_swarm import ORGANISER, MemorySwarm, PretendPeer, PretendWork
from tests.sync.swarm_cases import commits, in_swarm, small_config

T = TypeVar("T")
WORK = PretendWork(step_seconds=0.8)
LONG_SECONDS = 85.0
"""Longer than the wait after which a minority goes on alone, and a few of its rounds."""


def peer(swarm: MemorySwarm, name: str) -> PretendPeer:
    return swarm.peers[PeerId(name)]


async def switch_of(swarm: MemorySwarm, name: str) -> None:
    """One of four is cut off with the node, goes on by a renewal, and comes over to the history of the others."""
    await swarm.start("abcd", WORK)
    await swarm.until_round(2)
    swarm.network.partition([other for other in "abcd" if other != name], [name, ORGANISER])
    await asyncio.sleep(LONG_SECONDS)
    swarm.network.heal()
    async with asyncio.timeout(300.0):
        while not any(event.switched for event in peer(swarm, name).applied_events):
            await asyncio.sleep(0.1)


def watch_threads(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the state machine's methods that were called by work that belongs into a thread."""
    inside, called = [0], set[str]()
    in_thread = Tasks.in_thread

    async def marked(self: Tasks, work: Callable[[], T]) -> T:
        def marking() -> T:
            inside[0] += 1
            try:
                return work()
            finally:
                inside[0] -= 1

        return await in_thread(self, marking)

    def watched(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def watching(*arguments: Any, **named: Any) -> Any:
            if inside[0]:
                called.add(name)
            return method(*arguments, **named)

        return watching

    monkeypatch.setattr(Tasks, "in_thread", marked)
    for cls in (Consensus, *(part.default for part in fields(PartClasses))):
        for name, method in list(vars(cls).items()):
            if inspect.isfunction(method):
                monkeypatch.setattr(cls, name, watched(name, method))
    return called


def test_the_state_machine_is_asked_on_the_loop_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds, catching up and going over to another history: what it knows changes while a thread would look."""
    called = watch_threads(monkeypatch)

    async def play(swarm: MemorySwarm) -> None:
        await switch_of(swarm, "d")
        await peer(swarm, "a").kill()
        await swarm.until_round(max(life.round for life in swarm.up) + 2)
        await swarm.add("a", WORK)
        await swarm.until_round(max(life.round for life in swarm.up) + 1)

    in_swarm(folder, play, small_config(peers=4))
    assert called == set()


def test_who_hands_in_again_in_another_life_is_not_counted_with_its_old_work(folder: Path) -> None:
    """It has other values by then than those that the plan counts: they are left out, and it keeps them."""

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start("abc", WORK)
        await swarm.until_round(2)
        life = peer(swarm, "a")
        fetch, heads = life.driver.answers.on_fetch, list[Hash]()

        async def on_fetch(caller: PeerId, request: bytes) -> Any:
            """Just before the first values go out the peer is another one, that made one step less."""
            core, inputs = life.driver.core, life.inputs
            if not heads and core.state.round.work.ready and b"values" in request:
                heads.append(core.tip_hash)
                values = {block: np.array(inputs.snapshot.block(block)) + 1 for block in inputs.snapshot.blocks}
                inputs.take(core.tip_hash, tuple(values), values.__getitem__)
                work, batch = core.state.round.work, swarm.config.optimizer.batch_sequences
                tokens = batch * swarm.config.data.sequence_length
                less = replace(
                    work, steps=work.steps - 1, sequences=work.sequences - batch, tokens=work.tokens - tokens
                )
                life.driver.progressed(less)
            return await fetch(caller, request)

        life.driver.answers.on_fetch = on_fetch  # type: ignore[method-assign]
        await swarm.until_round(life.round + 2)
        child = next(c.manifest for c in commits(swarm) if heads and c.manifest.parent == heads[0])
        others = [piece for piece in child.slices if piece.reducer != life.name]
        assert others
        assert not any(life.name in piece.contributors for piece in others)

    in_swarm(folder, play)

"""Floods of well-signed messages, from strangers with many keys and from a member: rounds go on, little is checked."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from spes_p2p.consensus.content import Envelope
from spes_p2p.consensus.messages import Ballots, Intent, Signed, Status, Work
from spes_p2p.errors import NetworkError, RemoteProtocolError
from spes_p2p.ids import NO_HASH, PeerId
from spes_p2p.swarm.door import Rate
from spes_p2p.sync import sealing
from spes_p2p.sync.sealing import SIGNATURES, EnvelopeChecker, KeySealer
from spes_p2p.wire import pack
from tests.simulation.memory_swarm import MemorySwarm
from tests.sync.swarm_cases import check_agreement, in_swarm, small_config

EACH = 100
"""Statuses in one call."""
CALLS = 60
PAUSE_SECONDS = 0.05


def made_up(swarm: MemorySwarm, sender: PeerId) -> Iterator[bytes]:
    """Calls of `sender`, each with statuses of keys that nobody has seen."""
    numbers = itertools.count()

    def status(number: int) -> Signed[Status]:
        name = PeerId(f"{sender} makes {number}")
        said = Status(swarm.info.fingerprint, name, 1, number, -1, NO_HASH, Work(), Intent(joining=True), Ballots())
        return KeySealer(swarm.network.keys.signer(name)).seal(said)

    while True:
        yield pack(Envelope(sender, tuple(status(next(numbers)) for _ in range(EACH))))


async def flood(swarm: MemorySwarm, senders: Iterable[str], target: str) -> list[str]:
    """Why calls were refused."""
    refusals = list[str]()

    async def send(name: str) -> None:
        transport, calls = swarm.network.peer(name).transport, made_up(swarm, PeerId(name))
        for _ in range(CALLS):
            try:
                await transport.call(PeerId(target), next(calls), 5.0)
            except (RemoteProtocolError, NetworkError) as error:
                refusals.append(str(error))
            await asyncio.sleep(PAUSE_SECONDS)

    await asyncio.gather(*(send(name) for name in senders))
    return refusals


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many signatures of each flooding sender's making were checked, by all peers."""
    found: Counter[str] = Counter()
    real = EnvelopeChecker.check

    def check(self: EnvelopeChecker, peer: PeerId, *rest: Any) -> bool:
        found[peer.split(" makes ")[0]] += " makes " in peer
        return real(self, peer, *rest)

    monkeypatch.setattr(EnvelopeChecker, "check", check)
    return found


def most(rate: Rate, seconds: float) -> float:
    return rate.burst + seconds * rate.per_second


def test_one_stranger_floods_and_others_join_and_train_as_before(folder: Path, checked: Counter[str]) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(1)
        began = swarm.clock.now()
        flooding = asyncio.create_task(flood(swarm, ["stranger"], "a"))
        async with asyncio.timeout(60.0):
            await swarm.add("d")
            await swarm.until_round(swarm.peers[PeerId("a")].round + 4, "abcd")
        refusals = await flooding
        assert any("too many signatures" in words for words in refusals)
        assert 0 < checked["stranger"] <= most(SIGNATURES.stranger, swarm.clock.now() - began)
        check_agreement(swarm)

    in_swarm(folder, play, small_config())


def test_many_keys_have_no_more_than_strangers_together(folder: Path, checked: Counter[str]) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(1)
        began = swarm.clock.now()
        flooding = asyncio.create_task(flood(swarm, [f"key {number}" for number in range(5)], "a"))
        async with asyncio.timeout(60.0):
            await swarm.until_round(swarm.peers[PeerId("a")].round + 4, "abc")
        await flooding
        assert sum(checked.values()) <= most(SIGNATURES.strangers, swarm.clock.now() - began)
        assert sum(checked.values()) < 5 * CALLS * EACH / 2
        check_agreement(swarm)

    in_swarm(folder, play, small_config())


def test_a_member_that_floods_is_bounded_and_its_rounds_go_on(
    folder: Path, checked: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tight = sealing.DoorLimits(Rate(100.0, 1000.0), SIGNATURES.stranger, SIGNATURES.strangers)
    monkeypatch.setattr("spes_p2p.sync.driver.SIGNATURES", tight)  # or it takes 20,000 signatures

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(1)
        began = swarm.clock.now()
        flooding = asyncio.create_task(flood(swarm, ["c"], "a"))
        async with asyncio.timeout(60.0):
            await swarm.until_round(swarm.peers[PeerId("a")].round + 4, "abc")
        refusals = await flooding
        assert any("too many signatures" in words for words in refusals)
        assert checked["c"] <= most(tight.member, swarm.clock.now() - began)
        check_agreement(swarm)

    in_swarm(folder, play, small_config())

"""Strangers whose statuses are as large as they may be, and larger: rounds go on, with twenty keys and with a thousand.

What travels beside a manifest is small by construction, so no crowd makes it too large for one call.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from spes_p2p.consensus.bounds import MAX_COUNT, MAX_TRAINED_SECONDS, MAX_UPLINK
from spes_p2p.consensus.content import Content, Envelope
from spes_p2p.consensus.manifest import Manifest
from spes_p2p.consensus.membership import LINK_PRIVATE, Member
from spes_p2p.consensus.messages import Ballots, Intent, Signed, Status, Work
from spes_p2p.consensus.rules import RunRules, genesis_manifest
from spes_p2p.consensus.sizes import MAX_CONTENT_BYTES, most_members
from spes_p2p.consensus.state import MAX_NEWCOMERS
from spes_p2p.consensus.statuses import MOST_LACKED
from spes_p2p.consensus.voting import Voting
from spes_p2p.errors import NetworkError, RemoteProtocolError
from spes_p2p.ids import Hash, PeerId, sha256
from spes_p2p.swarm.calls import MAX_CALL_BYTES
from spes_p2p.swarm.keys import MAX_KEY_BYTES, MAX_SIGNATURE_BYTES
from spes_p2p.swarm.memory_backend import FakeSigner
from spes_p2p.sync.organising import organiser
from spes_p2p.sync.sealing import KeySealer
from spes_p2p.wire import pack
from tests.simulation.memory_swarm import ORGANISER, MemorySwarm
from tests.sync.around import Surroundings
from tests.sync.swarm_cases import check_agreement, in_swarm, small_config
from tests.sync.test_vouching import FAST, Organising, newest, until

HONEST = "abc"
HEAD_BYTES = 1024
"""At most, of a call beside the statuses in it."""
LARGEST = 2**63 - 1
INCARNATION = 2**60


class LargeSigner(FakeSigner):
    """With keys and signatures as long as real ones."""

    @property
    def public_key(self) -> bytes:
        return super().public_key.ljust(MAX_KEY_BYTES, b"k")

    def sign(self, data: bytes) -> bytes:
        return super().sign(data).ljust(MAX_SIGNATURE_BYTES, b"s")


@pytest.fixture(autouse=True)
def _large_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spes_p2p.swarm.memory_backend.FakeSigner", LargeSigner)


@pytest.fixture
def contents(monkeypatch: pytest.MonkeyPatch) -> list[Content]:
    """All that leaders have made."""
    made = list[Content]()
    real = Voting.built

    def built(self: Voting, now: float) -> Content | None:
        content = real(self, now)
        made.extend([content] if content is not None else [])
        return content

    monkeypatch.setattr(Voting, "built", built)
    return made


@dataclass
class Crowd:
    """Keys that say with each beat to everybody that they would take part, and as much besides as they may.

    `work`: what they say of their work. `more`: what else; other peers may refuse it. They say that nobody can dial
    them and that they have no room for columns, so they never reduce: silent reducers are another story.
    """

    swarm: MemorySwarm
    names: list[PeerId]
    work: Work
    more: dict[str, Any] = field(default_factory=dict)
    beat_seconds: float = 1.0
    at_once: int = 250
    """Statuses in one call, if as many fit."""
    sequence: int = 0

    def statuses(self) -> Iterable[Signed[Status]]:
        """As they stand on the tip of `a`."""
        core = self.swarm.peers[PeerId(HONEST[0])].driver.core
        columns, tiles = self.swarm.rules.num_columns, sum(self.swarm.rules.block_tiles)
        plan = core.state.round.plan
        slices = len(plan.value.slices) if plan is not None else tiles
        intent = Intent(
            joining=True, max_columns=-LARGEST, claims=tuple(range(columns)), link_class=LINK_PRIVATE,
            uplink_bytes_per_second=MAX_UPLINK,
        )  # fmt: skip
        said = Status(
            self.swarm.info.fingerprint, PeerId("replaced"), INCARNATION, self.sequence, core.tip.round,
            core.tip_hash, self.work, intent,
            Ballots(LARGEST, LARGEST, LARGEST, LARGEST),
            plan=sha256(b"another plan"), reports=bytes(slices), staged=bytes(slices), proposal=LARGEST,
            lacks=tuple(sha256(bytes([at])) for at in range(MOST_LACKED)),
            unheard=tuple(sorted(core.state.electors)), moved=LARGEST, life=LARGEST, counted=LARGEST, roll=LARGEST,
            silent=tuple(sorted(member.peer for member in core.tip.members)),
        )  # fmt: skip
        for name in self.names:
            yield KeySealer(self.swarm.network.keys.signer(name)).seal(replace(said, peer=name, **self.more))

    async def speak(self, to: Iterable[str], at_once: int = 0) -> None:
        """To all at once, and as an answer to whoever has just started and asks all members what became of the run."""
        self.sequence += 1
        statuses = list(self.statuses())
        fits = (MAX_CALL_BYTES - HEAD_BYTES) // max(len(pack(said)) for said in statuses)
        size = min(at_once or self.at_once, fits)
        chunks = [tuple(statuses[start : start + size]) for start in range(0, len(statuses), size)]
        lives = {PeerId(name): self.swarm.peers[PeerId(name)].driver.core.state.own.life for name in to}
        await asyncio.gather(*(self._call(chunk, peer, life) for chunk in chunks for peer, life in lives.items()))

    async def _call(self, said: tuple[Signed[Status], ...], to: PeerId, life: int) -> None:
        caller = said[self.sequence % len(said)].author
        data = pack(Envelope(caller, said, answers=life))
        assert len(data) <= MAX_CALL_BYTES
        with suppress(RemoteProtocolError, NetworkError):  # the largest ones are refused
            await self.swarm.network.peer(caller).transport.call(to, data, 5.0)

    @asynccontextmanager
    async def speaking(self, to: Iterable[str]) -> AsyncIterator[None]:
        async def go_on() -> None:
            while True:
                await self.speak(to)
                await asyncio.sleep(self.beat_seconds)

        talking = asyncio.create_task(go_on())
        try:
            yield
        finally:
            talking.cancel()
            with suppress(asyncio.CancelledError):
                await talking


def keys(number: int) -> list[PeerId]:
    """Names as long as real ones."""
    return [PeerId(f"key {at:04}".ljust(46, ".")) for at in range(number)]


AT_WORK = Work(expected_tokens=MAX_COUNT - 1)
READY = Work(True, MAX_COUNT - 1, MAX_COUNT - 1, MAX_COUNT - 1, MAX_TRAINED_SECONDS, expected_tokens=MAX_COUNT - 1)


async def begun(swarm: MemorySwarm, around: Surroundings) -> None:
    """A run of which `a`, `b` and `c` are the electors."""
    desk = Organising(swarm)
    await swarm.start_organiser()
    await around.add(ORGANISER)
    await desk.says(vouched=HONEST)
    await asyncio.gather(*(swarm.add(name, FAST) for name in HONEST))
    for name in HONEST:
        await around.add(name)


@pytest.mark.parametrize("work", [AT_WORK, READY], ids=["at work", "ready"])
def test_twenty_keys_with_the_largest_statuses_and_larger_ones_stop_no_round(
    folder: Path, work: Work, contents: list[Content]
) -> None:
    async def play(swarm: MemorySwarm) -> None:
        around = Surroundings(swarm)
        crowd = Crowd(swarm, keys(20), work)
        await begun(swarm, around)
        names = tuple(PeerId(f"{at:04}".ljust(128, "x")) for at in range(1024))
        larger = Crowd(swarm, keys(20), work, {"silent": names, "unheard": names}, at_once=5)
        async with crowd.speaking(HONEST), larger.speaking(HONEST):
            await until(lambda: {*crowd.names} <= {member.peer for member in newest(swarm, "a").members})
            stood = newest(swarm, "a").round
            await swarm.until_round(stood + 5, HONEST)
        assert max(len(pack(content)) for content in contents) <= MAX_CONTENT_BYTES // 8
        check_agreement(swarm)
        await around.stop()

    in_swarm(folder, play, small_config("swarm.trusted=vouched"))


@pytest.mark.thorough
@pytest.mark.timeout(1200)
def test_a_thousand_members_with_the_largest_statuses_stop_no_round(
    folder: Path, contents: list[Content], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are here from genesis on; all say that they have trained, and none hands it in."""
    names = keys(1000 - len(HONEST))
    crowd_of_genesis = [Member(name, INCARNATION, False, LINK_PRIVATE) for name in names]

    def crowded(rules: RunRules, root: Hash, members: list[Member], *more: Any) -> Manifest:
        return genesis_manifest(rules, root, [*members, *crowd_of_genesis], *more)

    monkeypatch.setattr(organiser, "genesis_manifest", crowded)

    async def play(swarm: MemorySwarm) -> None:
        around, crowd = Surroundings(swarm), Crowd(swarm, names, READY, beat_seconds=3.0)
        assert most_members(swarm.rules) >= 1000
        await begun(swarm, around)
        await crowd.speak(HONEST, at_once=1)
        async with crowd.speaking(HONEST):
            await swarm.until_round(2, HONEST)
        assert len(newest(swarm, "a").members) == 1000
        assert {*HONEST} <= {entry.peer for entry in newest(swarm, "a").roster}
        assert MAX_CONTENT_BYTES // 3 < max(len(pack(content)) for content in contents) <= MAX_CONTENT_BYTES
        check_agreement(swarm)
        await around.stop()

    in_swarm(folder, play, small_config("swarm.trusted=vouched"))


@pytest.mark.parametrize("electors", ["all", "vouched"])
def test_silent_keys_beside_it_do_not_keep_an_elector_out_that_restarts(folder: Path, electors: str) -> None:
    """As many as there is room for, who were there first, and who say that they live once a second."""

    async def play(swarm: MemorySwarm) -> None:
        around = Surroundings(swarm)
        await begun(swarm, around)
        lookers_on = Crowd(swarm, keys(MAX_NEWCOMERS), AT_WORK, {"intent": Intent()})
        remote, stays = PeerId("c"), "ab"
        await swarm.until_round(3, HONEST)
        await around.remove(remote)
        await swarm.peers[remote].kill()
        async with lookers_on.speaking(stays):
            await until(lambda: all(remote not in {m.peer for m in newest(swarm, name).members} for name in stays))
            await until(lambda: all({*lookers_on.names} <= contacts_of(swarm, name) for name in stays))
            stood = newest(swarm, "a").round
            await swarm.add(remote, FAST)
            await until(lambda: remote in {member.peer for member in newest(swarm, "a").members})
            assert newest(swarm, "a").round <= stood + 3
        check_agreement(swarm)
        await around.stop()

    in_swarm(folder, play, small_config(f"swarm.trusted={electors}"))


def contacts_of(swarm: MemorySwarm, name: str) -> set[PeerId]:
    return {*swarm.peers[PeerId(name)].driver.core.state.others.contacts}

"""How a run begins: when enough have come, once, and for good."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from spes_p2p.consensus.content import Envelope
from spes_p2p.consensus.messages import Ballots, Commit, Intent, Status, Work
from spes_p2p.errors import RemoteProtocolError, StorageFull
from spes_p2p.exchange.requests import ChainPart
from spes_p2p.exchange.transfers import Transfers
from spes_p2p.ids import NO_HASH, PeerId
from spes_p2p.swarm.ports import Blob
from spes_p2p.sync.catch_up import commits_from
from spes_p2p.sync.organising.organiser import WAITING_BEATS
from spes_p2p.sync.sealing import EnvelopeChecker, KeySealer
from spes_p2p.wire import pack
from tests.simulation.memory_swarm import ORGANISER, MemorySwarm
from tests.sync.swarm_cases import check_agreement, commits, in_swarm, small_config, until


class Newcomer:
    """Says that it wants to take part, as `Joining` does."""

    def __init__(self, swarm: MemorySwarm, name: str, intent: Intent | None = None, round: int = -1) -> None:
        self.net = swarm.network.peer(name)
        self.name, self.swarm = PeerId(name), swarm
        self.intent = intent or Intent(joining=True, max_columns=2)
        self.sequence, self.round = 0, round

    async def speak(self) -> Envelope:
        self.sequence += 1
        status = Status(
            self.swarm.info.fingerprint, self.name, 1, self.sequence, self.round, NO_HASH, Work(), self.intent,
            Ballots(),
        )  # fmt: skip
        sealed = KeySealer(self.net.signer).seal(status)
        answer = await self.net.transport.call(ORGANISER, pack(Envelope(self.name, (sealed,))), 5.0)
        return EnvelopeChecker(self.net.verifier).open(ORGANISER, answer)

    async def asks_for_genesis(self) -> Commit:
        """Of a run that has begun."""
        await self.speak()
        transfers = Transfers(self.net.transport, self.swarm.layout, lambda: 5.0)
        return (await commits_from(transfers, ORGANISER, 0))[0]


def test_the_run_begins_when_enough_have_come(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start_organiser()
        a, b, c = (Newcomer(swarm, name) for name in "abc")
        assert (await a.speak()).commit is None
        assert (await a.speak()).commit is None  # the same again is still one
        assert (await b.speak()).commit is None
        assert swarm.organiser.waiting == ("a", "b")
        genesis = (await c.speak()).commit
        assert genesis is not None
        assert [member.peer for member in genesis.manifest.members] == ["a", "b", "c"]
        assert all(member.elector for member in genesis.manifest.members)
        assert all(genesis.manifest.ownership)
        assert await a.asks_for_genesis() == genesis
        assert not swarm.organiser.waiting

    in_swarm(folder, play)


def test_who_leaves_or_falls_silent_does_not_count(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start_organiser()
        a, b, c = (Newcomer(swarm, name) for name in "abc")
        await a.speak()
        await b.speak()
        b.intent = Intent(leaving=True)
        await b.speak()
        assert swarm.organiser.waiting == ("a",)
        b.intent = Intent()  # looks on, and does not want to take part
        await b.speak()
        await asyncio.sleep(WAITING_BEATS * swarm.config.swarm.heartbeat_seconds + 1)
        assert (await c.speak()).commit is None
        assert swarm.organiser.waiting == ("c",)

    in_swarm(folder, play)


def test_genesis_is_the_same_after_a_restart(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start_organiser()
        a, b, c = (Newcomer(swarm, name) for name in "abc")
        for peer in (a, b, c):
            genesis = (await peer.speak()).commit
        assert genesis is not None
        await swarm.kill_organiser()
        await swarm.start_organiser()
        assert await Newcomer(swarm, "d").asks_for_genesis() == genesis
        assert await a.asks_for_genesis() == genesis

    in_swarm(folder, play)


def test_a_node_that_has_lost_its_folder_begins_no_second_run_beside_the_one_that_goes_on(folder: Path) -> None:
    """By now the members are others than those with whom it began, so genesis would be another one."""

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start("abc")
        genesis = commits(swarm)[0]
        late = await swarm.add("d")
        await until(late.driver.core.state.is_member)
        await swarm.peers[PeerId("a")].kill()
        await swarm.kill_organiser()
        shutil.rmtree(folder / ORGANISER)
        await swarm.start_organiser()
        await until(lambda: swarm.organiser.chain.length > late.round)
        assert swarm.organiser.chain.commit(0) == genesis
        assert not swarm.organiser.waiting

    in_swarm(folder, play)


class Holder:
    """Gives a genesis, once it may."""

    def __init__(self, genesis: Commit) -> None:
        self.genesis, self.may = genesis, asyncio.Event()

    async def on_call(self, caller: PeerId, request: bytes) -> bytes:
        raise RemoteProtocolError("no calls here")

    async def on_fetch(self, caller: PeerId, request: bytes) -> Blob:
        await self.may.wait()
        return Blob(pack(ChainPart((pack(self.genesis),))))


def test_a_stranger_that_never_answers_does_not_keep_a_node_from_the_genesis_that_it_lost(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start_organiser()
        for name in "abc":
            genesis = (await Newcomer(swarm, name).speak()).commit
        assert genesis is not None
        await swarm.kill_organiser()
        shutil.rmtree(folder / ORGANISER)
        await swarm.start_organiser()
        silent, holder = Holder(genesis), Holder(genesis)
        holder.may.set()
        for name, handler in (("stranger", silent), ("d", holder)):
            peer = Newcomer(swarm, name, round=7)
            await peer.net.transport.serve(handler)
            await peer.speak()
        await asyncio.sleep(1.0)
        assert swarm.organiser.chain.find(0) == genesis
        silent.may.set()
        await asyncio.sleep(1.0)

    in_swarm(folder, play)


def test_who_only_says_that_the_run_has_begun_does_not_keep_it_from_beginning(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start_organiser()
        liar = Newcomer(swarm, "liar", round=7)
        assert (await liar.speak()).commit is None
        a, b, c = (Newcomer(swarm, name) for name in "abc")
        for peer in (a, liar, b, c):
            genesis = (await peer.speak()).commit
        assert genesis is not None
        assert [member.peer for member in genesis.manifest.members] == ["a", "b", "c"]

    in_swarm(folder, play)


def test_genesis_is_on_disk_before_anybody_sees_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start_organiser()
        a, b, c = (Newcomer(swarm, name) for name in "abc")

        def fail(commit: object) -> None:
            raise StorageFull("no room for genesis")

        with monkeypatch.context() as patch:
            patch.setattr(swarm.organiser.chain, "append", fail)
            for peer in (a, b, c):
                assert (await peer.speak()).commit is None
        assert any("no room for genesis" in text for text in swarm.organiser_said)
        assert (await c.speak()).commit is not None

    in_swarm(folder, play)


def test_it_follows_the_chain_and_a_newcomer_gets_it_whole(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(3)
        await until(lambda: swarm.organiser.chain.length >= 3)
        length = swarm.organiser.chain.length
        followed = [swarm.organiser.chain.commit(round).manifest for round in range(length)]
        assert followed == [commit.manifest for commit in commits(swarm)[:length]]
        late = await swarm.add("late")
        await until(lambda: late.driver.core.state.is_member())
        check_agreement(swarm)

    in_swarm(folder, play)


def test_it_takes_up_the_chain_after_a_restart(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(1)
        await swarm.kill_organiser()
        await swarm.until_round(4)
        await swarm.start_organiser()
        await until(lambda: swarm.organiser.chain.length > 4)

    in_swarm(folder, play)


def test_waiting_peers_are_told_about(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start_organiser()
        await Newcomer(swarm, "a").speak()
        assert swarm.organiser_said == ["peer a has joined, 1 of 3"]

    in_swarm(folder, play, small_config())

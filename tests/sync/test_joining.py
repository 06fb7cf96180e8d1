"""From an address to a place in the run, whatever this machine's disk and the others are like."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from spes_p2p.consensus.manifest import WIRE_VERSION, Manifest, manifest_hash
from spes_p2p.consensus.membership import electors
from spes_p2p.consensus.messages import QUORUM, Certificate, Commit, Precommit, Seal
from spes_p2p.consensus.rules import Outcome, derived
from spes_p2p.errors import NetworkError, RemoteProtocolError, StateError
from spes_p2p.exchange.requests import ChainPart, ChainRequest, unpack_request
from spes_p2p.ids import Hash, PeerId, sha256
from spes_p2p.state.initial import InitialState
from spes_p2p.state.layout import Tile, Values
from spes_p2p.state.store import StateStore
from spes_p2p.swarm.memory_backend import FakeKeys
from spes_p2p.swarm.ports import Blob
from spes_p2p.swarm.records import RunGroup, RunRecord
from spes_p2p.sync import catch_up, joining
from spes_p2p.sync.finding import load_run
from spes_p2p.sync.genesis import describe_run
from spes_p2p.sync.node import Run
from spes_p2p.sync.sealing import KeySealer
from spes_p2p.wire import pack
from tests.simulation.memory_swarm import ORGANISER, MemorySwarm
from tests.sync.chains import MadeRun
from tests.sync.swarm_cases import Recorder, check_agreement, commits, counts, in_swarm, small_config, until


class OtherArithmetic(InitialState):
    """A machine whose initial values differ in some tiles."""

    def __call__(self, tile: Tile) -> Values:
        values = super().__call__(tile)
        return np.nextafter(values, np.float32(1)) if tile.id % 3 == 0 else values


def test_an_initial_state_that_comes_out_differently_is_fetched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start_organiser()
        monkeypatch.setattr(joining, "InitialState", OtherArithmetic)
        first = await asyncio.gather(*(swarm.add(name) for name in "abc"))
        root = swarm.organiser.chain.commit(0).manifest.state_root
        for peer in first:
            assert peer.chain.commit(0).manifest.state_root == root
            assert any("differs from the run's" in text for text in peer.said)
        await swarm.until_round(2)
        check_agreement(swarm)

    in_swarm(folder, play)


def test_a_newcomer_with_other_arithmetic_gets_a_newer_state_when_the_organiser_is_gone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(swarm: MemorySwarm) -> None:
        recorder = Recorder(swarm)
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(3)
        await swarm.kill_organiser()
        monkeypatch.setattr(joining, "InitialState", OtherArithmetic)
        late = await swarm.add("late")
        assert late.round >= 3
        await until(counts(swarm, "late"))
        recorder.check(commits(swarm))
        check_agreement(swarm)
        await swarm.start_organiser()

    in_swarm(folder, play)


class FormerElectors:
    """Has rounds that nobody else has, signed by those whom genesis names, and none of their states."""

    def __init__(self, swarm: MemorySwarm, genesis: Commit, child: Commit, rounds: int) -> None:
        self.rules = swarm.rules
        self.signers = [member.peer for member in electors(genesis.manifest.members)]
        self.line = [genesis, self.signed(replace(child.manifest, state_root=sha256(b"nowhere")))]
        self.rounds = rounds

    def signed(self, manifest: Manifest) -> Commit:
        name, parent, run = manifest_hash(manifest), manifest.parent, manifest.fingerprint
        word = Precommit(run, parent, 0, name)
        seals = [KeySealer(FakeKeys().signer(peer)).seal(word) for peer in self.signers]
        whole = tuple(Seal(seal.author, seal.public_key, seal.signature) for seal in seals)
        return Commit(Certificate(parent, QUORUM, 0, name, whole), manifest)

    def goes_on(self) -> None:
        parent = self.line[-1].manifest
        outcome = Outcome((), (), sha256(b""), parent.state_root, None)
        child = derived(self.rules, parent, outcome, parent.members, parent.ownership)
        self.line.append(self.signed(child))

    async def on_call(self, caller: PeerId, request: bytes) -> bytes:
        raise RemoteProtocolError("no calls here")

    async def on_fetch(self, caller: PeerId, request: bytes) -> Blob:
        asked = unpack_request(request)
        if not isinstance(asked, ChainRequest):
            raise RemoteProtocolError("nothing here")
        while len(self.line) < min(asked.first + 2, self.rounds):
            self.goes_on()
        return Blob(pack(ChainPart(tuple(pack(commit) for commit in self.line[asked.first : asked.first + 2]))))


@pytest.mark.parametrize("rounds", [2, 50, 10**9])
def test_rounds_that_former_electors_sign_keep_no_newcomer_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch, rounds: int
) -> None:
    """One without a state asks them first."""

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start("abc")
        await swarm.until_round(5)
        await swarm.kill_organiser()
        genesis, child = commits(swarm)[:2]
        liar = FormerElectors(swarm, genesis, child, rounds)
        await swarm.network.peer("liar").transport.serve(liar)
        ghost: Any = SimpleNamespace(is_up=True, joined=False, name=PeerId("liar"))
        swarm.peers = {ghost.name: ghost, **swarm.peers}
        monkeypatch.setattr(joining.Settling, "_is_stranger", lambda settling, peer: peer != ghost.name)
        monkeypatch.setattr(joining, "InitialState", OtherArithmetic)
        for module in (joining, catch_up):
            monkeypatch.setattr(module, "MOST_BEYOND", 4)
        await swarm.add("late")
        await until(counts(swarm, "late"))
        del swarm.peers[ghost.name]
        check_agreement(swarm)
        await swarm.start_organiser()

    in_swarm(folder, play)


def test_nobody_has_the_initial_state(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start_organiser()
        a, b = (asyncio.create_task(swarm.add(name)) for name in "ab")
        monkeypatch.setattr(joining, "InitialState", OtherArithmetic)
        c = asyncio.create_task(swarm.add("c"))
        await until(lambda: swarm.organiser.chain.length > 0)
        for name in (ORGANISER, "a", "b"):
            swarm.network.kill(name)
        with pytest.raises(NetworkError, match="could not be fetched") as caught:
            await c
        assert "bootstrap node" in caught.value.fix
        for task in (a, b):
            task.cancel()
        await asyncio.wait([a, b])
        StateStore(folder / "c" / "state", swarm.layout).close()  # the lock was given back
        for peer in list(swarm.peers.values()):
            peer.is_up = False

    in_swarm(folder, play)


def test_genesis_signed_by_a_stranger_is_refused(folder: Path) -> None:
    """A node under the organiser's address, with another key."""

    async def play(swarm: MemorySwarm) -> None:
        other = describe_run(swarm.config, swarm.info.dataset, PeerId("the real organiser"))
        swarm.run = Run(other, swarm.config, swarm.layout)
        await swarm.start_organiser()
        swarm.seat.has_key = True  # it signs all the same
        joins = [asyncio.create_task(swarm.add(name)) for name in "abc"]
        await asyncio.sleep(30.1)  # between two heartbeats
        assert not any(join.done() for join in joins)
        for peer in swarm.peers.values():
            assert any("not signed by the organiser" in text for text in peer.said)
            assert len(peer.said) == len(set(peer.said))  # said once, not with every heartbeat
        for join in joins:
            join.cancel()
        await asyncio.wait(joins)

    in_swarm(folder, play)


@pytest.mark.parametrize("names", [1, 40])
def test_strangers_fill_no_log_of_who_waits_for_the_run_to_begin(folder: Path, names: int) -> None:
    class Talker:
        words = 0

        async def on_call(self, caller: PeerId, request: bytes) -> bytes:
            self.words += 1
            raise RemoteProtocolError(f"word {self.words}")

        async def on_fetch(self, caller: PeerId, request: bytes) -> Blob:
            raise RemoteProtocolError("nothing here")

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start_organiser()
        talker = Talker()
        talkers = [PeerId(f"talker {number}") for number in range(names)]
        for name in talkers:
            await swarm.network.peer(name).transport.serve(talker)
            ghost: Any = SimpleNamespace(is_up=True, joined=False, name=name)
            swarm.peers[name] = ghost
        join = asyncio.create_task(swarm.add("a"))
        await until(lambda: talker.words > 10 * names)
        said = swarm.peers[PeerId("a")].said
        assert sum("could not provide genesis" in text for text in said) == min(names, joining.MOST_TOLD_OF)
        join.cancel()
        await asyncio.wait([join])
        for name in talkers:
            del swarm.peers[name]

    in_swarm(folder, play)


def test_dead_addresses_do_not_keep_a_run_from_beginning(folder: Path) -> None:
    """Each newcomer asks all at once: one that answers nothing holds up nobody."""

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start_organiser()
        for name in ("x", "y", "z"):
            swarm.network.kill(name, silent=True)
            ghost = type("Ghost", (), {"is_up": True, "joined": False, "name": PeerId(name)})()
            swarm.peers[PeerId(name)] = ghost
        joins = [asyncio.create_task(swarm.add(name)) for name in "abc"]
        async with asyncio.timeout(30):
            await asyncio.gather(*joins)
        for name in ("x", "y", "z"):
            del swarm.peers[PeerId(name)]
        await swarm.until_round(1)

    in_swarm(folder, play)


def test_a_folder_of_another_state_is_refused(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(2)
        peer = swarm.peers[PeerId("b")]
        await peer.kill()
        store = StateStore(folder / "b" / "state", swarm.layout)
        newest = store.rounds()[-1]
        store.drop(newest)
        store.stage(newest, newest - 1).finish()
        staged = store.staged(newest)
        assert staged is not None
        staged.publish()
        for older in store.rounds()[:-1]:  # else it goes on from that one
            store.drop(older)
        store.close()
        with pytest.raises(StateError, match="is not the one that was committed") as caught:
            await swarm.add("b")
        assert "join again" in caught.value.fix
        swarm.peers[PeerId("b")].is_up = False
        swarm.lose_disk("b")
        await swarm.add("b")
        await until(counts(swarm, "b"))

    in_swarm(folder, play)


# ---- finding out what the run is ----


def group(swarm: MemorySwarm, fingerprint: Hash | None = None) -> RunGroup:
    info, addresses = swarm.info, swarm.network.peer(ORGANISER).transport.addresses
    record = RunRecord(info.run_id, fingerprint or info.fingerprint, ORGANISER, WIRE_VERSION, 0, b"", addresses)
    return RunGroup(info.run_id, fingerprint or info.fingerprint, {ORGANISER: record})


def test_the_config_comes_from_the_swarm(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start_organiser()
        transport = swarm.network.peer("a").transport
        info, config = await load_run(transport, group(swarm), 5.0)
        assert info == swarm.info
        assert config.model == swarm.config.model

    in_swarm(folder, play)


def test_a_wrong_fingerprint_is_refused_with_the_fix(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start_organiser()
        transport = swarm.network.peer("a").transport
        with pytest.raises(RemoteProtocolError, match="the served run has fingerprint") as caught:
            await load_run(transport, group(swarm, sha256(b"another")), 5.0)
        assert "organiser" in caught.value.fix
        swarm.network.kill(ORGANISER)
        with pytest.raises(NetworkError, match="no node could serve the config") as gone:
            await load_run(transport, group(swarm), 5.0)
        assert "still alive" in gone.value.fix

    in_swarm(folder, play)


def test_the_rules_follow_from_the_config() -> None:
    made = MadeRun(small_config("sync.merge_interval=7", "sync.merge_alpha=0.5", "sync.merge_decay_steps=100"))
    assert sum(made.rules.block_tiles) == len(made.layout.tiles)
    assert made.rules.merge_alpha(0) == 0.5
    assert made.rules.merge_alpha(50) == 0.25
    assert made.rules.merge_alpha(100) == 0.0
    assert made.rules.leased
    assert made.rules.sequence_tokens == made.config.data.sequence_length
